"""Values as bytes and back: a tagged encoding of a closed set of types.

Reading never imports a module, looks up a name, or calls anything but the constructors in the
tables below, even if the bytes are untrusted. The encoding holds None, bool, int, float, complex,
str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice, and the containers of
`collections`. It also holds dates and times, torch's Size, device and dtype, and numpy's dtypes and
scalars. Tensors and arrays stay outside: the caller gives each a number. A `Form` adds one class.

A container that occurs twice in a value occurs twice, as one object, in the value that is read
back.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from functools import cache, lru_cache
from importlib import import_module
from itertools import chain
from typing import Any, Optional, TypeVar

from unbroken.errors import SpecError
from unbroken.wire.compat import zip_equal

DEPTH_MAX = 100
"""Levels of nesting; a reader recurses once for each."""
BYTES_MAX = 1 << 30
"""Bytes of one encoded value, tensors not counted."""
REPEATED_MAX = 20_000_000
"""Values that repeated containers may add when a value is walked as a tree."""
PACKED_MIN = 8
"""Items from which on a list of numbers or strings is written as one block."""
_SIZE, _WORD, _DOUBLE = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")
_SIMPLE = {None: b"N", True: b"T", False: b"F"}
_DTYPE = re.compile(r"[<>|=][biufcSUMmV]\d{0,9}(\[[0-9A-Za-z]{1,9}\])?")
_TEXT = ("utf-8", "surrogatepass")
Hole = Callable[[Any], Optional[int]]
"""Returns the number of a tensor or an array; None: the value is neither."""


class NotEncodable(SpecError):
    """A value has a type that the encoding does not hold."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason, self.path = reason, ""

    def below(self, step: str) -> NotEncodable:
        """Return the same error, seen from one container further out."""
        self.path = step + self.path
        return self


@dataclass(frozen=True)
class Form:
    """The encoding of one class: its parts, and how they make the object again."""

    kind: type
    name: str
    split: Callable[[Any], Iterable[Any]]
    join: Callable[[Sequence[Any]], Any]


def record(kind: type, *names: str) -> Form:
    """Return the form of a dataclass: its fields in order, or the named ones."""
    wanted = names or tuple(field.name for field in fields(kind))
    return Form(
        kind,
        f"{kind.__module__}.{kind.__qualname__}",
        lambda value: [getattr(value, name) for name in wanted],
        lambda parts: kind(**dict(zip_equal(wanted, parts))),
    )


EXCHANGED: dict[type, Form] = {}
"""Dataclasses of this package that ranks send each other."""
_Class = TypeVar("_Class", bound=type)


def exchanged(kind: _Class) -> _Class:
    """Decorate a dataclass that ranks send each other."""
    EXCHANGED[kind] = record(kind)
    return kind


def choice(kind: type[Enum]) -> Form:
    """Return the form of an enum: the member's name."""
    return Form(
        *(kind, f"{kind.__module__}.{kind.__qualname__}"),
        lambda value: (value.name,),
        lambda parts: kind[parts[0]],
    )


def _pairs(parts: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip_equal(parts[::2], parts[1::2])


def _flat(value: Mapping[Any, Any]) -> Iterable[Any]:
    return chain.from_iterable(value.items())


def _split_ordered(value: Any) -> Iterable[Any]:
    others = vars(value).keys() - {"_metadata"}
    if others:
        raise NotEncodable(f"an OrderedDict with the attributes {sorted(others)}")
    return (vars(value).get("_metadata"), *_flat(value))


def _join_ordered(parts: Sequence[Any]) -> Any:
    result: Any = OrderedDict(_pairs(parts[1:]))
    if parts[0] is not None:
        # Versions of modules, which load_state_dict of torch needs.
        result._metadata = parts[0]
    return result


def _join_default(parts: Sequence[Any]) -> Any:
    if parts[0] is not None and parts[0] not in _TYPES.values():
        raise ValueError("the factory of a defaultdict is no plain type")
    return defaultdict(parts[0], _pairs(parts[1:]))


def _split_datetime(value: datetime) -> Iterable[Any]:
    return (*value.timetuple()[:6], value.microsecond, value.fold, value.tzinfo)


def _join_datetime(parts: Sequence[Any]) -> datetime:
    year, month, day, hour, minute, second, micro, fold, zone = parts
    return datetime(year, month, day, hour, minute, second, micro, zone, fold=fold)


def _join_timezone(parts: Sequence[Any]) -> timezone:
    offset, name = parts
    return timezone(offset, name) if name is not None else timezone(offset)


def _split_timezone(value: timezone) -> Iterable[Any]:
    offset = value.utcoffset(None)
    name = value.tzname(None)
    return offset, None if name == timezone(offset).tzname(None) else name


_TYPES = {
    f"{item.__module__}.{item.__qualname__}": item
    for item in (
        *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice),
        *(str, tuple, OrderedDict, defaultdict, deque, Counter, date, datetime, timedelta),
        timezone,
    )
}
"""Classes that may be values themselves, such as the factory of a defaultdict."""
_FORMS = [
    Form(complex, "complex", lambda v: (v.real, v.imag), lambda p: complex(*p)),
    Form(set, "set", list, set),
    Form(frozenset, "frozenset", list, frozenset),
    Form(range, "range", lambda v: (v.start, v.stop, v.step), lambda p: range(*p)),
    Form(slice, "slice", lambda v: (v.start, v.stop, v.step), lambda p: slice(*p)),
    Form(deque, "deque", lambda v: (v.maxlen, *v), lambda p: deque(p[1:], p[0])),
    Form(Counter, "Counter", _flat, lambda p: Counter(dict(_pairs(p)))),
    Form(OrderedDict, "OrderedDict", _split_ordered, _join_ordered),
    Form(defaultdict, "defaultdict", lambda v: (v.default_factory, *_flat(v)), _join_default),
    Form(date, "date", lambda v: (v.year, v.month, v.day), lambda p: date(*p)),
    Form(datetime, "datetime", _split_datetime, _join_datetime),
    Form(
        *(timedelta, "timedelta", lambda v: (v.days, v.seconds, v.microseconds)),
        lambda p: timedelta(*p),
    ),
    Form(timezone, "timezone", _split_timezone, _join_timezone),
    Form(type, "type", lambda v: (_type_name(v),), lambda p: _TYPES[p[0]]),
]
_SHARED = (dict, list, bytearray, set, deque, Counter, OrderedDict, defaultdict)
"""Classes whose objects are written once, even if they occur twice."""


def _type_name(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _TYPES.get(name) is not kind:
        raise NotEncodable(f"a {name} (the class itself)")
    return name


@cache
def _of_torch() -> tuple[Form, ...]:
    torch = import_module("torch")

    def named(kind: type, name: str) -> Form:
        table = {str(var): var for var in vars(torch).values() if type(var) is kind}
        return Form(kind, name, lambda v: (str(v),), lambda p: table[p[0]])

    return (
        Form(torch.Size, "torch.Size", list, torch.Size),
        Form(torch.device, "torch.device", lambda v: (str(v),), lambda p: torch.device(*p)),
        named(torch.dtype, "torch.dtype"),
        named(torch.layout, "torch.layout"),
        named(torch.memory_format, "torch.memory_format"),
    )


@lru_cache(maxsize=128)
def torch_dtype(name: str) -> Any:
    """Return a dtype by its name without `torch.`. Raises ValueError if there is none."""
    torch = import_module("torch")

    var = vars(torch).get(name)
    if not isinstance(var, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return var


def _numpy_dtype(parts: Sequence[Any]) -> Any:
    (name,) = parts
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is no plain dtype of numpy")
    return import_module("numpy").dtype(name)


def _numpy_scalar(parts: Sequence[Any]) -> Any:
    name, data = parts
    (result,) = import_module("numpy").frombuffer(data, _numpy_dtype([name]))
    return result


def _plain_dtype(dtype: Any) -> str:
    # A structured dtype has the name of one that only holds bytes.
    if dtype.names is not None or not _DTYPE.fullmatch(dtype.str):
        raise NotEncodable(f"a numpy dtype {dtype}")
    return str(dtype.str)


_NUMPY = (
    Form(object, "numpy.dtype", lambda v: (_plain_dtype(v),), _numpy_dtype),
    Form(object, "numpy.scalar", lambda v: (_plain_dtype(v.dtype), v.tobytes()), _numpy_scalar),
)


def encode(value: Any, hole: Hole = lambda _: None, forms: Iterable[Form] = ()) -> bytes:
    """Return the bytes of a value. Raises NotEncodable with the `path` of a part that has no
    form."""
    writer = _Writer(hole, forms)
    writer.write(value, 0)
    if len(writer.out) > BYTES_MAX:
        raise NotEncodable(f"{len(writer.out)} bytes beside its tensors, more than {BYTES_MAX}")
    return bytes(writer.out)


def decode(
    data: bytes, fill: Callable[[int], Any] | None = None, forms: Iterable[Form] = ()
) -> Any:
    """Return the value of some bytes, with the result of `fill` in place of each hole's number.

    Raises ValueError if they are no value, or one beyond the bounds.
    """
    if len(data) > BYTES_MAX:
        raise ValueError(f"{len(data)} bytes, more than {BYTES_MAX}")
    reader = _Reader(data, fill or _no_hole, forms)
    try:
        result = reader.read(0)
    except (struct.error, LookupError, TypeError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"malformed at byte {reader.at}: {error!r}"[:300]) from error
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at} bytes are left over")
    return result


def _no_hole(number: int) -> Any:
    raise ValueError(f"tensor {number} where none may be")


class _Writer:
    def __init__(self, hole: Hole, forms: Iterable[Form]) -> None:
        self.out = bytearray()
        self._hole = hole
        self._forms = {form.kind: form for form in (*_FORMS, *forms)}
        self._done: dict[int, int] = {}
        """Numbers of the shared objects that are written, by id; the value keeps them alive."""
        self._open: set[int] = set()
        self._kept: list[Any] = []
        """Temporary objects, whose ids may be in `_done`."""

    def write(self, value: Any, depth: int) -> None:
        """Write one value."""
        out, kind = self.out, type(value)
        if kind is str:
            data = value.encode(*_TEXT)
            out += b"s" + _SIZE.pack(len(data))
            out += data
        elif kind is int:
            self._int(value)
        elif kind is float:
            out += b"d" + _DOUBLE.pack(value)
        elif value is None or kind is bool:
            out += _SIMPLE[value]
        elif kind is bytes:
            out += b"b" + _SIZE.pack(len(value))
            out += value
        elif id(value) in self._done:
            out += b"@" + _SIZE.pack(self._done[id(value)])
        else:
            self._nested(value, kind, depth)

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"j%c" % value
        elif -(1 << 63) <= value < 1 << 63:
            self.out += b"i" + _WORD.pack(value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"I" + _SIZE.pack(len(data)) + data

    def _nested(self, value: Any, kind: type, depth: int) -> None:
        if id(value) in self._open:
            raise NotEncodable("a container that holds itself")
        if depth > DEPTH_MAX or len(self.out) > BYTES_MAX:
            raise NotEncodable(f"more than {DEPTH_MAX} levels of containers, or {BYTES_MAX} bytes")
        self._open.add(id(value))
        is_shared = kind in _SHARED
        if kind is dict:
            self._dict(value, depth)
        elif kind is list:
            self._items(b"l", b"L", value, depth)
        elif kind is tuple:
            self._items(b"t", b"U", value, depth)
        elif kind is bytearray:
            self.out += b"B" + _SIZE.pack(len(value)) + value
        elif (number := self._hole(value)) is not None:
            self.out += b"h" + _SIZE.pack(number)
            is_shared = True
        else:
            self._parts(value, depth)
        self._open.discard(id(value))
        if is_shared:
            self._done[id(value)] = len(self._done)

    def _dict(self, value: dict[Any, Any], depth: int) -> None:
        self.out += b"m" + _SIZE.pack(len(value))
        for key, item in value.items():
            try:
                self.write(key, depth + 1)
                self.write(item, depth + 1)
            except NotEncodable as error:
                raise error.below(f"[{key!r}]"[:80]) from None

    def _items(self, tag: bytes, packed: bytes, value: Sequence[Any], depth: int) -> None:
        if len(value) >= PACKED_MIN and (block := _packed(value)):
            self.out += packed + block
            return
        self.out += tag + _SIZE.pack(len(value))
        at = 0
        try:
            for item in value:
                self.write(item, depth + 1)
                at += 1
        except NotEncodable as error:
            raise error.below(f"[{at}]") from None

    def _parts(self, value: Any, depth: int) -> None:
        form = self._form(value)
        parts = tuple(form.split(value))
        self._kept.append(parts)
        name = form.name.encode()
        self.out += b"R%c" % len(name) + name + _SIZE.pack(len(parts))
        at = 0
        try:
            for part in parts:
                self.write(part, depth + 1)
                at += 1
        except NotEncodable as error:
            raise error.below(_step(value, parts, at)) from None

    def _form(self, value: Any) -> Form:
        kind = type(value)
        form = self._forms.get(kind)
        if form is None and kind.__module__ == "torch":
            self._forms |= {one.kind: one for one in _of_torch()}
            form = self._forms.get(kind)
        numpy = sys.modules.get("numpy")
        if form is None and numpy is not None and isinstance(value, (numpy.dtype, numpy.generic)):
            form = _NUMPY[isinstance(value, numpy.generic)]
        if form is None:
            raise NotEncodable(f"a {kind.__module__}.{kind.__qualname__}")
        return form


def _step(value: Any, parts: Sequence[Any], at: int) -> str:
    """Return the name of one of the parts, for a path."""
    if not isinstance(value, Mapping):
        return f"<{type(value).__name__}>"
    # Keys and values alternate, in some classes after one part that is neither.
    first = len(parts) % 2
    return f"[{parts[max(at - (at - first) % 2, 0)]!r}]"[:80]


def _packed(items: Sequence[Any]) -> bytes:
    """Return a block of numbers or strings of one type; empty: the list is neither."""
    kinds = set(map(type, items))
    kind = kinds.pop()
    if kinds:
        return b""
    count = _SIZE.pack(len(items))
    if kind is str:
        texts = [item.encode(*_TEXT) for item in items]
        return b"s" + count + _little(array("I", map(len, texts))) + b"".join(texts)
    if kind is float:
        return b"d" + count + _little(array("d", items))
    try:
        return b"q" + count + _little(array("q", items)) if kind is int else b""
    except OverflowError:
        return b""


def _little(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


class _Reader:
    def __init__(self, data: bytes, fill: Callable[[int], Any], forms: Iterable[Form]) -> None:
        self.at = 0
        self._data, self._fill = data, fill
        self._forms = {form.name: form for form in (*_FORMS, *_NUMPY, *forms)}
        self._done: list[tuple[Any, int]] = []
        """Shared objects, each with the number of values in it."""
        self._values = self._repeated = 0

    def read(self, depth: int) -> Any:
        """Return one value."""
        if depth > DEPTH_MAX + 1:
            raise ValueError(f"more than {DEPTH_MAX} levels deep")
        tag = self._data[self.at : self.at + 1]
        self.at += 1
        self._values += 1
        simple = _SIMPLY.get(tag)
        if simple is not None:
            return simple(self)
        before = self._values + self._repeated
        result, is_shared = self._nested(tag, depth + 1)
        if is_shared:
            self._done.append((result, self._values + self._repeated - before + 1))
        return result

    def _nested(self, tag: bytes, below: int) -> tuple[Any, bool]:
        """Return a container, and whether it may occur again."""
        if tag == b"m":
            count = self._count(2)
            return {self.read(below): self.read(below) for _ in range(count)}, True
        if tag == b"h":
            return self._fill(self._count(0)), True
        if tag == b"t":
            return tuple([self.read(below) for _ in range(self._count(1))]), False
        if tag == b"l":
            return [self.read(below) for _ in range(self._count(1))], True
        if tag == b"U":
            return tuple(self._block()), False
        if tag == b"L":
            return self._block(), True
        if tag == b"B":
            return bytearray(self.bytes()), True
        if tag == b"R":
            return self._record(below)
        raise ValueError(f"unknown tag {tag!r} at byte {self.at - 1}")

    def _record(self, below: int) -> tuple[Any, bool]:
        name = self._taken(self._taken(1)[0]).decode()
        if name not in self._forms and name.startswith("torch."):
            self._forms |= {one.name: one for one in _of_torch()}
        if name not in self._forms:
            raise ValueError(f"unknown type {name!r}"[:100])
        form = self._forms[name]
        return form.join([self.read(below) for _ in range(self._count(1))]), form.kind in _SHARED

    def _block(self) -> list[Any]:
        tag, count = self._taken(1), self._count(4)
        self._values += count
        if tag == b"s":
            lengths = _numbers("I", self._taken(4 * count))
            return [self._taken(length).decode(*_TEXT) for length in lengths]
        if tag not in (b"d", b"q"):
            raise ValueError(f"unknown block {tag!r}")
        return _numbers(tag.decode(), self._taken(8 * count)).tolist()

    def _count(self, least: int) -> int:
        """Return a number of items, each of which has at least this number of bytes."""
        (count,) = _SIZE.unpack(self._taken(4))
        if count * least > len(self._data) - self.at:
            raise ValueError(f"{count} items in {len(self._data) - self.at} bytes")
        return int(count)

    def _taken(self, size: int) -> bytes:
        result = self._data[self.at : self.at + size]
        if len(result) != size:
            raise ValueError("it ends too early")
        self.at += size
        return result

    def bytes(self) -> bytes:
        """Return bytes after their length."""
        return self._taken(self._count(1))

    def word(self) -> int:
        """Return an integer of 64 bits."""
        return int(_WORD.unpack(self._taken(8))[0])

    def small(self) -> int:
        """Return an integer of one byte."""
        return self._taken(1)[0]

    def double(self) -> float:
        """Return a number of 64 bits."""
        return float(_DOUBLE.unpack(self._taken(8))[0])

    def again(self) -> Any:
        """Return an object that was read before."""
        result, values = self._done[self._count(0)]
        self._repeated += values
        if self._repeated > REPEATED_MAX:
            raise ValueError(f"repeated containers add more than {REPEATED_MAX} values")
        return result


def _numbers(code: str, data: bytes) -> array[Any]:
    result = array(code)
    result.frombytes(data)
    if sys.byteorder == "big":
        result.byteswap()
    return result


_SIMPLY: dict[bytes, Callable[[_Reader], Any]] = {
    b"s": lambda reader: reader.bytes().decode(*_TEXT),
    b"i": _Reader.word,
    b"j": _Reader.small,
    b"d": _Reader.double,
    b"N": lambda _: None,
    b"T": lambda _: True,
    b"F": lambda _: False,
    b"@": _Reader.again,
    b"b": _Reader.bytes,
    b"I": lambda reader: int.from_bytes(reader.bytes(), "little", signed=True),
}
