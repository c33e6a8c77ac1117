"""Sets of fields of objects, in the form of `FieldsV1`, and differences of objects by field.

A set is a nested dict as managedFields writes it: `{"f:spec": {"f:replicas": {}}}`. A key names a
field (`f:name`), or an item of a list. Items are named by their keys (`k:{"name":"a"}`), by value
(`v:"x"`) or by index (`i:0`). `"."` means that the path itself belongs to the set, and so does an
empty dict below the root. Sets are values: nothing here changes one, and results share parts with
their sources.

The rules are those of sigs.k8s.io/structured-merge-diff v4: maps and structs by field, lists as
declared in the schema, atomic values whole. Without a declaration, maps are by field and lists
atomic.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import msgspec

from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.schema.schemas import Schema, builtin, builtin_definitions

from .patch import MAX_COPY_DEPTH, same_json

FieldSet = dict[str, Any]
"""A FieldsV1 node."""

SELF = "."
OWNED_BY_SERVER = frozenset(
    [
        "name",
        "namespace",
        "creationTimestamp",
        "selfLink",
        "uid",
        "generation",
        "managedFields",
        "resourceVersion",
    ]
)
"""Fields of metadata that belong to no manager (apimachinery v0.33, managedfields/stripmeta.go)."""
STRUCTS = frozenset(
    [
        "metadata",
        "spec",
        "status",
        "template",
        "jobTemplate",
        "strategy",
        "updateStrategy",
        "resources",
        "source",
        "nodeInfo",
        "daemonEndpoints",
        "loadBalancer",
        "names",
    ]
)
"""Fields that are structs, not pointers, in the Go types of built-in kinds (k8s.io/api v0.33).

Go's JSON never leaves them out, so that setting something inside is not also setting them.
"""
DEFAULT_KEYS = {"protocol": "TCP"}
"""Keys of built-in list items that have a default which the published schema does not state."""

_MISSING: Any = object()


class Shape:
    """Merge rules of one schema node; children are made on demand."""

    def __init__(self, schema: Schema | None, *, is_builtin: bool) -> None:
        self.is_atomic_map = schema is not None and schema.is_atomic_map
        self.list_type = schema.list_type if schema is not None else "atomic"
        self._schema = schema
        self._is_builtin = is_builtin
        self._fields: dict[str, Shape] = {}
        self._items: Shape | None = None
        self.declared = frozenset(schema.properties if schema is not None else ())
        self.is_closed = (
            schema is not None
            and bool(self.declared)
            and schema.additional is None
            and not schema.preserves_unknown
        )
        self.present = self._always_present() if is_builtin and schema is not None else {}
        self.keys = self._keys() if self.list_type == "map" else ()

    def _always_present(self) -> dict[str, Any]:
        """Return the fields of a built-in struct that are present even if nobody writes them, with
        their values."""
        assert self._schema is not None
        present: dict[str, Any] = {}
        for name, field in self._schema.properties.items():
            if name in STRUCTS and field.properties:
                present[name] = {}
            elif name in self._schema.required and field.type in ("array", "object"):
                present[name] = None
        return present

    def _keys(self) -> tuple[tuple[str, Any], ...]:
        """Names of the fields that identify an item, sorted, with their defaults."""
        assert self._schema is not None
        items = self._schema.items
        fields = items.properties if items is not None else {}
        result = []
        for name in sorted(self._schema.list_map_keys):
            default = fields[name].raw.get("default") if name in fields else None
            if default is None and self._is_builtin:
                default = DEFAULT_KEYS.get(name)
            result.append((name, default))
        return tuple(result)

    def field(self, name: str) -> Shape:
        """Shape of the value at key `name`."""
        shape = self._fields.get(name)
        if shape is None:
            schema = self._schema.field(name) if self._schema is not None else None
            shape = Shape(schema, is_builtin=self._is_builtin)
            self._fields[name] = shape
        return shape

    @property
    def items(self) -> Shape:
        """Shape of a list's items."""
        if self._items is None:
            schema = self._schema.items if self._schema is not None else None
            self._items = Shape(schema, is_builtin=self._is_builtin)
        return self._items


@cache
def _builtin_nodes() -> frozenset[int]:
    return frozenset(map(id, builtin_definitions().values()))


@lru_cache(maxsize=1024)
def shape_of(schema: Schema) -> Shape:
    """The shape of whole objects with this schema."""
    shape = Shape(schema, is_builtin=id(schema.raw) in _builtin_nodes())
    meta = schema.field("metadata")
    if meta is None or not meta.properties:
        meta = builtin("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")
    shape._fields["metadata"] = Shape(meta, is_builtin=False)
    shape.declared |= {"apiVersion", "kind", "metadata"}
    return shape


def item_key(item: Any, shape: Shape) -> str:
    """The path element of an item of a set or map list; an item without its keys is `k:{}`."""
    if shape.list_type != "map":
        return "v:" + _canonical(item)
    result = {}
    for name, default in shape.keys:
        value = item.get(name) if isinstance(item, dict) else None
        if value is None:
            value = default
        if value is not None:
            result[name] = value
    return "k:" + _canonical(result)


def _canonical(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def by_items(value: Any, shape: Shape) -> bool:
    """True if a value is a list that is taken item by item, not whole."""
    return isinstance(value, list) and shape.list_type != "atomic"


def by_fields(value: Any, shape: Shape) -> bool:
    """True if a value is a map or struct that is taken field by field, not whole."""
    return isinstance(value, dict) and not shape.is_atomic_map


def by_key(items: list[Any], shape: Shape) -> dict[str, list[Any]]:
    """The items of a set or map list under their path elements; more than one are duplicates."""
    result: dict[str, list[Any]] = {}
    for item in items:
        result.setdefault(item_key(item, shape), []).append(item)
    return result


# --- Sets of one object -----------------------------------------------------------------------


def field_set(value: Object, schema: Schema) -> FieldSet:
    """The fields an applied configuration claims: leaves, list items and entries of maps."""
    return _fields_below(value, shape_of(schema))


def _fields_below(value: Object, shape: Shape) -> FieldSet:
    result: FieldSet = {}
    for name, item in value.items():
        node = _claimed(item, shape.field(name))
        if name not in shape.declared:
            node = _with_self(node)
        if node is not None:
            result["f:" + name] = node
    return result


def _claimed(value: Any, shape: Shape) -> FieldSet | None:
    """Fields in `value`; None when there are none, which is so of an empty list by item."""
    if by_fields(value, shape):
        return (_fields_below(value, shape) or None) if value else {}
    if not by_items(value, shape):
        return {}
    result: FieldSet = {}
    for key, items in by_key(value, shape).items():
        result[key] = _with_self(_claimed(items[0], shape.items)) if len(items) == 1 else {}
    return result or None


def _with_self(node: FieldSet | None) -> FieldSet:
    return {SELF: {}, **node} if node else {}


def _everything(value: Any, shape: Shape) -> FieldSet:
    """Every path of a value that came or went as a whole, its own included."""
    if by_fields(value, shape):
        result: FieldSet = {
            "f:" + name: _everything(item, shape.field(name)) for name, item in value.items()
        }
    elif by_items(value, shape):
        result = {
            key: _everything(items[0], shape.items) if len(items) == 1 else {}
            for key, items in by_key(value, shape).items()
        }
    else:
        return {}
    return _with_self(result)


def problems(value: Object, schema: Schema) -> list[str]:
    """Return the errors of an applied configuration: unknown fields, doubled or keyless items."""
    return list(_problems(value, shape_of(schema), ""))


def _problems(value: Any, shape: Shape, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            if shape.is_closed and name not in shape.declared:
                yield f"{path}.{name}: field not declared in schema"
            else:
                yield from _problems(item, shape.field(name), f"{path}.{name}")
    elif by_items(value, shape):
        for index, item in enumerate(value):
            if shape.list_type == "map" and item_key(item, shape) == "k:{}":
                names = [name for name, _ in shape.keys]
                yield (
                    f"{path}: element {index}: associative list with keys has an element that "
                    f"omits all key fields {json.dumps(names)} (and doesn't have default values "
                    "for any key fields)"
                )
        for key, items in by_key(value, shape).items():
            if len(items) > 1:
                yield f"{path}: duplicate entries for key {element_text(key)}"
            yield from _problems(items[0], shape.items, path + element_text(key))


# --- Two objects ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences of an object from an earlier one."""

    added: FieldSet
    changed: FieldSet
    removed: FieldSet

    @property
    def written(self) -> FieldSet:
        """Added and changed together: what the writer takes over."""
        return union(self.added, self.changed)


def compare(old: Object | None, new: Object, schema: Schema) -> Changes:
    """Return the paths that differ; `old` is None for a new object. Fields without a manager are
    left out.

    All paths below a removed one count as removed too.
    """
    shape = shape_of(schema)
    was = old or {}
    was_meta, meta = was.get("metadata") or {}, new.get("metadata") or {}
    names = (was.keys() | new.keys()) - {"apiVersion", "kind", "metadata"}
    below = _compare_fields(was, new, names, shape)
    meta_names = (was_meta.keys() | meta.keys()) - OWNED_BY_SERVER
    inside = _compare_fields(was_meta, meta, meta_names, shape.field("metadata"))
    added, changed, removed = _gathered([*below, ("f:metadata", _gathered(inside))]) or _NOTHING
    return Changes(added or {}, changed or {}, removed or {})


_Difference = tuple[FieldSet | None, FieldSet | None, FieldSet | None] | None
"""Added, changed and removed below one node (None: nothing); None when nothing differs."""

_NOTHING = (None, None, None)


def _of(value: Object, name: str, shape: Shape) -> Any:
    result = value.get(name, _MISSING)
    return shape.present.get(name, _MISSING) if result is _MISSING else result


def _gathered(below: list[tuple[str, _Difference]]) -> _Difference:
    """The differences of a node out of those of its children."""
    parts: tuple[FieldSet, FieldSet, FieldSet] = ({}, {}, {})
    for key, difference in below:
        if difference is not None:
            for part, node in zip(parts, difference, strict=True):
                if node is not None:
                    part[key] = node
    added, changed, removed = parts
    if not (added or changed or removed):
        return None
    return added or None, changed or None, removed or None


def _compare_fields(
    old: Object, new: Object, names: Iterable[str], shape: Shape
) -> list[tuple[str, _Difference]]:
    return [
        ("f:" + name, _compare(_of(old, name, shape), _of(new, name, shape), shape.field(name)))
        for name in names
    ]


def _compare(old: Any, new: Any, shape: Shape) -> _Difference:
    """Return the differences at and below one place; equal parts are skipped at the speed of `==`.

    So true and 1 are no difference. That only matters if no schema declares the type.
    """
    if old is new or old == new:
        return None
    if old is _MISSING:
        return _everything(new, shape), None, None
    if new is _MISSING:
        return None, None, _everything(old, shape)
    old_fields, new_fields = by_fields(old, shape), by_fields(new, shape)
    if (old_fields or old is None) and (new_fields or new is None) and (old or new):
        was, now = old or {}, new or {}
        return _gathered(_compare_fields(was, now, {**was, **now}, shape))
    old_items, new_items = by_items(old, shape), by_items(new, shape)
    if (old_items or old is None) and (new_items or new is None) and (old or new):
        return _compare_items(old or [], new or [], shape)
    # A leaf, or a change of type: written as a whole, with everything below on either side.
    added = _inside(_everything(new, shape)) if new_fields or new_items else None
    removed = _inside(_everything(old, shape)) if old_fields or old_items else None
    return added, {}, removed


def _compare_items(old: list[Any], new: list[Any], shape: Shape) -> _Difference:
    old_by, new_by = by_key(old, shape), by_key(new, shape)
    return _gathered(
        [
            (key, _compare_item(old_by.get(key, []), new_by.get(key, []), shape.items))
            for key in {**old_by, **new_by}
        ]
    )


def _compare_item(old: list[Any], new: list[Any], shape: Shape) -> _Difference:
    """One path element; duplicates count as one atomic value."""
    if len(old) > 1 and len(new) > 1:
        return None if same_json(old, new) else (None, {}, None)
    if len(old) > 1:
        return (_everything(new[0], shape) if new else None), None, {}
    if len(new) > 1:
        return {}, None, (_everything(old[0], shape) if old else None)
    return _compare(old[0] if old else _MISSING, new[0] if new else _MISSING, shape)


def _inside(node: FieldSet) -> FieldSet | None:
    return {key: item for key, item in node.items() if key != SELF} or None


# --- Sets ---------------------------------------------------------------------------------------


def is_empty(fields: FieldSet) -> bool:
    """True if the set at a root holds nothing."""
    return not fields


def union(left: FieldSet, right: FieldSet) -> FieldSet:
    """Paths in either of two sets, both at their root."""
    if not left or not right or left is right:
        return left or right
    merged = dict(left)
    for key, node in right.items():
        mine = merged.get(key)
        if mine is None:
            merged[key] = node
        elif mine is not node:
            merged[key] = _united(mine, node)
    return merged


def _united(left: FieldSet, right: FieldSet) -> FieldSet:
    if not left or not right:
        both = left or right
        return both if not both or SELF in both else {SELF: {}, **both}
    return union(left, right)


def difference(left: FieldSet, right: FieldSet) -> FieldSet:
    """Paths of `left` that are not in `right`."""
    if not left or not right:
        return left
    rest: FieldSet = {}
    for key, node in left.items():
        other = right.get(key)
        kept = node if other is None else _without(node, other)
        if kept is not None:
            rest[key] = kept
    return rest


def _without(left: FieldSet, right: FieldSet) -> FieldSet | None:
    if not right or not left:
        # One of the two is a single path: its own.
        if left and right == {}:
            return _inside(left)
        return None if not right or SELF in right else left
    rest = difference(left, right)
    if not rest:
        return None
    # With "." alone left the node is a single path.
    return {} if rest.keys() == {SELF} else rest


def intersection(left: FieldSet, right: FieldSet) -> FieldSet:
    """Paths in both of two sets."""
    common: FieldSet = {}
    for key, node in left.items():
        other = right.get(key)
        if other is not None and (both := _shared(node, other)) is not None:
            common[key] = both
    return common


def _shared(left: FieldSet, right: FieldSet) -> FieldSet | None:
    if not left or not right:
        return {} if _is_member(left) and _is_member(right) else None
    both = intersection(left, right)
    if not both:
        return None
    return {} if both.keys() == {SELF} else both


def _is_member(node: FieldSet) -> bool:
    return not node or SELF in node


def leaves(fields: FieldSet) -> FieldSet:
    """The paths of a set that have no other path of it below them."""
    return {key: leaves(node) for key, node in fields.items() if key != SELF}


def paths(fields: FieldSet) -> list[str]:
    """Every path of a set as messages print it: `.spec.containers[name="a"].image`."""
    return list(_paths(fields, ""))


def _paths(fields: FieldSet, prefix: str) -> Iterator[str]:
    ordered = [(prefix + element_text(k), fields[k]) for k in sorted(fields) if k != SELF]
    for text, node in ordered:
        if _is_member(node):
            yield text
    for text, node in ordered:
        yield from _paths(node, text)


def element_text(key: str) -> str:
    """One path element as messages print it; a malformed one as it is."""
    kind, _, text = key.partition(":")
    if kind == "f":
        return "." + text
    if kind == "i":
        return f"[{text}]"
    if kind == "v":
        return f"[={text}]"
    try:
        result = json.loads(text)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        return f"[{text}]"
    return "[" + ",".join(f"{name}={_canonical(result[name])}" for name in sorted(result)) + "]"


def is_field_set(node: object, depth: int = 0) -> bool:
    """True if decoded JSON is a FieldsV1 of a nesting that can be worked with."""
    if not isinstance(node, dict) or depth > MAX_COPY_DEPTH:
        return False
    return all(
        (key == SELF or key[:2] in ("f:", "k:", "v:", "i:")) and is_field_set(item, depth + 1)
        for key, item in node.items()
    )


def with_structs(fields: FieldSet, schema: Schema) -> FieldSet:
    """The set with every declared field that it holds something of."""
    return _with_structs(fields, shape_of(schema))


def _with_structs(fields: FieldSet, shape: Shape) -> FieldSet:
    result: FieldSet = {}
    for key, node in fields.items():
        if not node:
            result[key] = node
            continue
        if key.startswith("f:"):
            name = key[2:]
            below = _with_structs(node, shape.field(name))
            result[key] = {SELF: {}, **below} if name in shape.declared else below
        else:
            result[key] = _with_structs(node, shape.items)
    return result


def remove(value: Object, fields: FieldSet, schema: Schema) -> Object:
    """A copy of an object without these paths; shares the parts that stay with it.

    A map or list that has lost everything goes too, unless it is the object itself.
    """
    return _removed_fields(value, fields, shape_of(schema))


def _removed(value: Any, fields: FieldSet, shape: Shape) -> Any:
    if by_fields(value, shape):
        return (_removed_fields(value, fields, shape) or _MISSING) if value else value
    if not by_items(value, shape) or not value:
        # Whole or not at all, and its own path is not in the set.
        return value
    rest = []
    for item in value:
        node = fields.get(item_key(item, shape))
        if node is None:
            rest.append(item)
        elif not _is_member(node):
            kept = _removed(item, node, shape.items)
            rest.append({} if kept is _MISSING else kept)
    return rest or _MISSING


def _removed_fields(value: Object, fields: FieldSet, shape: Shape) -> Object:
    rest: Object = {}
    for name, item in value.items():
        node = fields.get("f:" + name)
        if node is None:
            rest[name] = item
        elif not _is_member(node):
            kept = _removed(item, node, shape.field(name))
            if kept is not _MISSING:
                rest[name] = kept
    return rest
