"""Pickles that torch has written, read as data: an interpreter of its own for the few opcodes.

Python's `pickle` executes code that a pickle names. This module does not use it: a name in a pickle
is only looked up in a table that the caller gives, and without one each name is refused. It is the
only place of the project that reads pickles, and nothing here writes them.

An `Unpickler` whose `find_class` refuses all names is not enough. On Python 3.11, 4 MB of nested
tuples as a key end its process by SIGSEGV, and 9 bytes (`LONG_BINPUT` of 2**31) ask for gigabytes.
It would need a process of its own in each worker that restores, and a second encoding for the way
back.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.wire.compat import zip_equal

OPCODES_MAX = 5_000_000
"""Opcodes of one pickle: about five seconds of a core."""
_FORMATS = {
    b"J": struct.Struct("<i"), b"K": struct.Struct("<B"), b"M": struct.Struct("<H"),
    b"G": struct.Struct(">d"),
}  # fmt: skip
_TEXTS = {b"X": 4, b"\x8c": 1, b"\x8d": 8}
LONG1 = b"\x8a"
_BYTES = {b"B": 4, b"C": 1, b"\x8e": 8, LONG1: 1}
"""Opcodes followed by data, and the number of bytes of their length."""
_SKIPPED = {b"\x80": 1, b"\x95": 8}
"""PROTO and FRAME, with the bytes of their argument."""
_PUTS, _GETS = {b"q": 1, b"r": 4}, {b"h": 1, b"j": 4}
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False, b")": ()}
_EMPTY: dict[bytes, type] = {b"]": list, b"}": dict, b"\x8f": set}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}

# Tokens differ in their first byte and are possessive, so that nothing is tried twice. Python 3.11
# brought that: older ones read such a dict opcode by opcode.
_ATOM = rb"(?:[hK].|[N\x88\x89]|M..|[jJ].{4}|G.{8}|\x8a\x08.{8})"
_KEY = rb"(?:h.|j.{4})"
_ATOMS = rb"\](?:\(" + _ATOM + rb"*+e)?+"
_ATOM_DICT = rb"\}(?:\((?:" + _KEY + _ATOM + rb")*+u)?+"
_PARTS = rb"\](?:\((?:" + _ATOM + rb"|" + _ATOMS + rb"|" + _ATOM_DICT + rb")*+e)?+"
_VALUE = rb"(?>" + _ATOM + _ATOM + rb"\x86|" + _ATOM + rb"|" + _PARTS + rb")"
_HAS_FLAT = sys.version_info >= (3, 11)
_FLAT = re.compile(rb"\}\((?:" + _KEY + _VALUE + rb")++u" if _HAS_FLAT else rb"(?!)", re.DOTALL)
"""A dict whose keys were memoized before, of atoms, pairs of atoms, and lists of those."""
_PAIR = re.compile(rb"(" + _KEY + rb")(" + (_VALUE if _HAS_FLAT else rb"") + rb")", re.DOTALL)
_SIGNED, _UNSIGNED = b"J\x8a", b"KM"


@dataclass(frozen=True)
class Known:
    """Meaning of a name in a pickle, if it is a class or a function."""

    make: Callable[..., Any]
    """Called with the arguments in the pickle."""
    kind: type | None = None
    """The class of the object, if the pickle fills it afterwards."""
    fill: Callable[[Any, Any], None] | None = None
    """Sets the state of such an object."""


class Flat:
    """A dict of plain values that are decoded on access."""

    __slots__ = ("_raw", "_reader")

    def __init__(self, raw: dict[bytes, bytes], reader: _Reader) -> None:
        self._raw, self._reader = raw, reader

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, as a dict does."""
        keys = self._reader.keys
        raw = self._raw.get(keys.get(name, b""))
        if raw is None:
            keys.update({self._reader.decoded(key): key for key in self._raw})
            raw = self._raw.get(keys.get(name, b""))
        return default if raw is None else self._reader.decoded(raw)


def load(
    data: bytes,
    names: Mapping[tuple[str, str], Any] | None = None,
    opcodes: int = OPCODES_MAX,
    *,
    is_lazy: bool = False,
) -> Any:
    """Read a pickle. Each name in it must be in the table, as a `Known` or as a plain value.

    With `is_lazy` a dict of plain values may be a `Flat`, which takes a tenth of the time. Raises
    ValueError if it is malformed, uses another opcode, has an unknown name or is too long.
    """
    reader = _Reader(data, names or {})
    try:
        for _ in range(opcodes):
            code = data[reader.at : reader.at + 1]
            if is_lazy and code == b"}" and reader.flat():
                continue
            reader.at += 1
            if code == b".":
                (result,) = reader.stack
                return result
            reader.step(code)
    except (ArithmeticError, AttributeError, LookupError, TypeError, struct.error) as error:
        raise ValueError(f"malformed before byte {reader.at}: {error!r}"[:300]) from error
    raise ValueError(f"more than {opcodes} opcodes")


class _Reader:
    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        self.at = 0
        self.stack: list[Any] = []
        self._data, self._names = data, names
        self._outer: list[list[Any]] = []
        """The stacks below each mark."""
        self._memo: dict[int, Any] = {}
        self.keys: dict[Any, bytes] = {}
        """Encoded keys of a `Flat`."""
        self._decoded: dict[bytes, Any] = {}
        self._fills = {
            name.kind: name.fill for name in self._names.values()
            if isinstance(name, Known) and name.fill is not None
        }  # fmt: skip

    def step(self, code: bytes) -> None:
        """Carry out one opcode."""
        act = _ACTIONS.get(code)
        if act is not None:
            act(self)
        elif code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code])
        elif code in _GETS:
            self.stack.append(self._memo[self._number(_GETS[code])])
        elif code in _PUTS:
            self._memo[self._number(_PUTS[code])] = self.stack[-1]
        elif code in _EMPTY:
            self.stack.append(_EMPTY[code]())
        elif code in _TUPLES:
            self._gather(_TUPLES[code])
        elif code in _SKIPPED:
            self._taken(_SKIPPED[code])
        else:
            self.stack.append(self._literal(code))

    def flat(self) -> bool:
        """Read a dict in one piece, if possible."""
        match = _FLAT.match(self._data, self.at)
        if match is None:
            return False
        pairs = _PAIR.findall(self._data, self.at + 2, match.end() - 1)
        self.stack.append(Flat(dict(pairs), self))
        self.at = match.end()
        return True

    def decoded(self, raw: bytes) -> Any:
        """Return the value of these bytes; equal bytes make the same object."""
        if raw[0] in _UNSIGNED:
            return int.from_bytes(raw[1:], "little")
        if raw[0] in _SIGNED:
            return int.from_bytes(raw[2 if raw[0] == _SIGNED[1] else 1 :], "little", signed=True)
        if raw not in self._decoded:
            part = _Reader(raw, {})
            part._memo = self._memo
            while part.at < len(raw):
                part.at += 1
                part.step(raw[part.at - 1 : part.at])
            (self._decoded[raw],) = part.stack
        return self._decoded[raw]

    def _literal(self, code: bytes) -> Any:
        """Return a number, text or bytes that follow their opcode."""
        if code in _FORMATS:
            form = _FORMATS[code]
            return form.unpack(self._taken(form.size))[0]
        if code in _TEXTS:
            return self._taken(self._number(_TEXTS[code])).decode(errors="replace")
        if code not in _BYTES:
            raise ValueError(f"opcode {code!r} at byte {self.at - 1}")
        result = self._taken(self._number(_BYTES[code]))
        return int.from_bytes(result, "little", signed=True) if code == LONG1 else result

    def _taken(self, size: int) -> bytes:
        result = self._data[self.at : self.at + size]
        if len(result) != size:
            raise ValueError("it ends too early")
        self.at += size
        return result

    def _number(self, size: int) -> int:
        return int.from_bytes(self._taken(size), "little")

    def _gather(self, count: int) -> None:
        result = tuple(self.stack[-count:])
        if len(result) != count:
            raise ValueError("a tuple without its parts")
        self.stack[-count:] = [result]

    def _since_mark(self) -> list[Any]:
        result, self.stack = self.stack, self._outer.pop()
        return result

    def mark(self) -> None:
        """Begin the parts of a container."""
        self._outer.append(self.stack)
        self.stack = []

    def memoize(self) -> None:
        """Keep the newest value under the next number."""
        self._memo[len(self._memo)] = self.stack[-1]

    def append(self) -> None:
        """Add a value to a list."""
        value = self.stack.pop()
        _of(list, self.stack[-1]).append(value)

    def appends(self) -> None:
        """Add values to a list."""
        result = self._since_mark()
        _of(list, self.stack[-1]).extend(result)

    def add_items(self) -> None:
        """Add values to a set."""
        result = self._since_mark()
        _of(set, self.stack[-1]).update(map(_hashed, result))

    def set_item(self) -> None:
        """Add a key and its value to a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        _of(dict, self.stack[-1])[_hashed(key)] = value

    def set_items(self) -> None:
        """Add keys and their values to a dict."""
        result = self._since_mark()
        _of(dict, self.stack[-1]).update(_pairs(result))

    def end_tuple(self) -> None:
        """Make a tuple."""
        result = self._since_mark()
        self.stack.append(tuple(result))

    def end_list(self) -> None:
        """Make a list."""
        result = self._since_mark()
        self.stack.append(result)

    def end_dict(self) -> None:
        """Make a dict."""
        result = self._since_mark()
        self.stack.append(dict(_pairs(result)))

    def name(self) -> None:
        """Look up a name that is written as two lines."""
        module, _, rest = self._data[self.at : self.at + 400].partition(b"\n")
        name, end, _ = rest.partition(b"\n")
        self.at += len(module) + len(name) + 1 + len(end)
        self._push(module.decode(), name.decode())

    def stacked_name(self) -> None:
        """Look up a name that lies on the stack."""
        name, module = self.stack.pop(), self.stack.pop()
        self._push(module, name)

    def _push(self, module: str, name: str) -> None:
        if (module, name) not in self._names:
            raise ValueError(f"names {module}.{name}"[:100])
        self.stack.append(self._names[module, name])

    def make(self) -> None:
        """Make an object of a known class."""
        given, known = self.stack.pop(), self.stack.pop()
        self.stack.append(_of(Known, known).make(*_of(tuple, given)))

    def fill(self) -> None:
        """Give an object that was made its state."""
        state = self.stack.pop()
        fill = self._fills.get(type(self.stack[-1]))
        if fill is None:
            raise ValueError(f"a state for a {type(self.stack[-1]).__name__}")
        fill(self.stack[-1], state)


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _pairs(found: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip_equal(map(_hashed, found[::2]), found[1::2])


def _hashed(key: Any) -> Any:
    """Return a key of a dict or a set. The hash of deeply nested tuples would end the process."""
    if type(key) is tuple and any(type(item) is tuple for item in key):
        raise ValueError("a key of nested tuples")
    return key


_ACTIONS: dict[bytes, Callable[[_Reader], None]] = {
    b"(": _Reader.mark, b"\x94": _Reader.memoize, b"a": _Reader.append, b"e": _Reader.appends,
    b"\x90": _Reader.add_items, b"s": _Reader.set_item, b"u": _Reader.set_items,
    b"t": _Reader.end_tuple, b"l": _Reader.end_list, b"d": _Reader.end_dict, b"c": _Reader.name,
    b"\x93": _Reader.stacked_name, b"R": _Reader.make, b"\x81": _Reader.make, b"b": _Reader.fill,
}  # fmt: skip
