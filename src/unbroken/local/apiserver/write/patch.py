"""Patches: JSON patches, merge patches and strategic merge patches. Pure.

A patch is applied to a copy; the result shares no part with the input. It departs from RFC 6902
where the real server does (json-patch v4). `test` for null passes when the key is missing, `add`
without a value adds null, and negative list indexes count from the end.

A strategic merge patch merges by field, as `kubectl apply` and `kubectl patch` send it. Lists with
`merge` in their schema are merged by their merge key (or as sets of scalars), everything else is
replaced. Directives in the patch delete items and set the order of lists. The rules are those of
k8s.io/apimachinery v0.33, pkg/util/strategicpatch. Where that server answers a malformed patch with
a bare 500, this one answers 400 with the same words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NoReturn

import msgspec

from unbroken.local.apiserver.http.status import ApiError, Cause, Object, bad_request
from unbroken.local.apiserver.schema.schemas import Schema

MAX_OPERATIONS = 10_000
"""kube-apiserver v1.33, endpoints/handlers/patch.go: maxJSONPatchOperations."""
MAX_COPIED_BYTES = 3 * 1024 * 1024
"""kube-apiserver v1.33, server/config.go: JSONPatchMaxCopyBytes; all copies of one patch."""
MAX_DEPTH = 200
"""Nesting that an operation may reach; operations can build far more of it than a body holds."""
MAX_COPY_DEPTH = MAX_DEPTH + 10
"""Nesting of whole objects: their managedFields repeat it a few levels down."""

_INDEX = re.compile(r"-?(0|[1-9][0-9]*)")
_TOO_DEEP = "the document is nested too deeply"
_REJECTED = "the server rejected our request due to an error in our request"


def copy_json(value: Any, depth: int = 0) -> Any:
    """Copy decoded JSON; raises ApiError 422 when it is nested too deeply.

    `depth` is how far below the root of its document `value` is.
    """
    kind = type(value)
    if kind is dict:
        if depth >= MAX_COPY_DEPTH:
            _reject(_TOO_DEEP)
        depth += 1
        return {key: copy_json(item, depth) for key, item in value.items()}
    if kind is list:
        if depth >= MAX_COPY_DEPTH:
            _reject(_TOO_DEEP)
        depth += 1
        return [copy_json(item, depth) for item in value]
    return value


def same_json(left: Any, right: Any) -> bool:
    """True if two values are the same JSON; unlike `==`, true is not 1."""
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(same_json(item, right[key]) for key, item in left.items())
        )
    if isinstance(left, list):
        return (
            isinstance(right, list) and len(left) == len(right) and all(map(same_json, left, right))
        )
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right)


def merge_patch(target: Object, patch: object) -> Object:
    """Merge `patch` into a copy of `target`: null deletes, lists are replaced."""
    if not isinstance(patch, dict):
        raise bad_request(f"a merge patch must be an object, not {_json_type(patch)}")
    merged: Object = _merge(copy_json(target), patch, 0)
    return merged


def _merge(target: Any, patch: Any, depth: int) -> Any:
    if not isinstance(patch, dict):
        return copy_json(patch, depth)
    if depth >= MAX_DEPTH:
        _reject(_TOO_DEEP)
    merged = target if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value, depth + 1)
    return merged


def json_patch(target: Object, operations: object) -> Object:
    """Apply the operations in order to a copy of `target`; all of them or none.

    Raises ApiError 400 for anything but a list of objects, and 413 for too many operations. Raises
    422 for an operation that cannot be applied: a missing path, a failed test, an unknown
    operation.
    """
    if not isinstance(operations, list):
        raise bad_request(f"a JSON patch must be an array, not {_json_type(operations)}")
    for operation in operations:
        if not isinstance(operation, dict):
            raise bad_request(
                f"an operation of a JSON patch must be an object, not {_json_type(operation)}"
            )
    if len(operations) > MAX_OPERATIONS:
        raise ApiError(
            413,
            "RequestEntityTooLarge",
            "Request entity too large: The allowed maximum operations in a JSON patch is "
            f"{MAX_OPERATIONS}, got {len(operations)}",
        )
    document = _Document(copy_json(target))
    for operation in operations:
        document.apply(operation)
    # Moves nest without copying; this walk finds what they have built.
    patched = copy_json(document.root)
    if not isinstance(patched, dict):
        _reject("the patched document is no object")
    return patched


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _reject(why: str) -> NoReturn:
    raise ApiError(422, "Invalid", _REJECTED, causes=[Cause("UnexpectedServerResponse", "", why)])


def _pointer(operation: Object, key: str) -> list[str]:
    """The reference tokens of a JSON pointer (RFC 6901); the empty pointer is the document."""
    text = operation.get(key)
    if not isinstance(text, str):
        _reject(f'operation {operation.get("op")!r} needs the string "{key}"')
    if text and not text.startswith("/"):
        _reject(f'"{key}" must start with "/": {text!r}')
    tokens = [token.replace("~1", "/").replace("~0", "~") for token in text.split("/")[1:]]
    if len(tokens) > MAX_DEPTH:
        _reject(_TOO_DEEP)
    return tokens


def _position(items: list[Any], token: str, path: list[str], *, end: int) -> int:
    """Index in `items` that `token` names; `end` is the first index not allowed."""
    if not _INDEX.fullmatch(token) or len(token) > 10:
        _reject(f"no index of a list: {'/' + '/'.join(path)}")
    index = int(token)
    if index < 0:
        index += end
    if not 0 <= index < end:
        _reject(f"index out of bounds: {'/' + '/'.join(path)}")
    return index


class _Document:
    """The document while its patch is applied."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._copied_bytes = 0

    def apply(self, operation: Object) -> None:
        """Carry out one operation."""
        name = operation.get("op")
        handler = _HANDLERS.get(name) if isinstance(name, str) else None
        if handler is None:
            _reject(f"unexpected kind of operation: {name!r}")
        handler(self, operation, _pointer(operation, "path"))

    def _get(self, path: list[str]) -> Any:
        value = self.root
        for token in path:
            if isinstance(value, dict):
                if token not in value:
                    _reject(f"missing path: {'/' + '/'.join(path)}")
                value = value[token]
            elif isinstance(value, list):
                value = value[_position(value, token, path, end=len(value))]
            else:
                _reject(f"missing path: {'/' + '/'.join(path)}")
        return value

    def _put(self, path: list[str], value: Any) -> None:
        if not path:
            self.root = value
            return
        parent, token = self._get(path[:-1]), path[-1]
        if isinstance(parent, dict):
            parent[token] = value
        elif isinstance(parent, list):
            size = len(parent)
            index = size if token == "-" else _position(parent, token, path, end=size + 1)
            parent.insert(index, value)
        else:
            _reject(f"missing path: {'/' + '/'.join(path)}")

    def _take(self, path: list[str]) -> Any:
        if not path:
            _reject("the whole document cannot be removed")
        parent, token = self._get(path[:-1]), path[-1]
        if isinstance(parent, dict) and token in parent:
            return parent.pop(token)
        if isinstance(parent, list):
            return parent.pop(_position(parent, token, path, end=len(parent)))
        _reject(f"missing path: {'/' + '/'.join(path)}")

    def add(self, operation: Object, path: list[str]) -> None:
        """Insert into a list or set a key."""
        self._put(path, copy_json(operation.get("value"), len(path)))

    def remove(self, operation: Object, path: list[str]) -> None:
        """Take out what is there."""
        del operation
        self._take(path)

    def replace(self, operation: Object, path: list[str]) -> None:
        """Set what is there to another value; a missing key is added, as kube-apiserver does."""
        value = copy_json(operation.get("value"), len(path))
        if not path:
            self.root = value
            return
        parent, token = self._get(path[:-1]), path[-1]
        if isinstance(parent, dict):
            parent[token] = value
        elif isinstance(parent, list):
            parent[_position(parent, token, path, end=len(parent))] = value
        else:
            _reject(f"missing path: {'/' + '/'.join(path)}")

    def move(self, operation: Object, path: list[str]) -> None:
        """Take out a value and add it elsewhere."""
        source = _pointer(operation, "from")
        if path[: len(source)] == source and len(path) > len(source):
            _reject("a value cannot be moved into itself")
        self._put(path, self._take(source))

    def copy(self, operation: Object, path: list[str]) -> None:
        """Add a copy of a value elsewhere."""
        value = copy_json(self._get(_pointer(operation, "from")), len(path))
        self._copied_bytes += len(msgspec.json.encode(value))
        if self._copied_bytes > MAX_COPIED_BYTES:
            _reject(f"copies of more than {MAX_COPIED_BYTES} bytes in one patch")
        self._put(path, value)

    def test(self, operation: Object, path: list[str]) -> None:
        """Fail unless the value is the given one."""
        expected = operation.get("value")
        if expected is None and path:
            parent = self._get(path[:-1])
            if isinstance(parent, dict) and parent.get(path[-1]) is None:
                return
        if not same_json(self._get(path), expected):
            _reject(f"testing value {'/' + '/'.join(path)} failed")


_HANDLERS = {
    "add": _Document.add,
    "remove": _Document.remove,
    "replace": _Document.replace,
    "move": _Document.move,
    "copy": _Document.copy,
    "test": _Document.test,
}


DIRECTIVE = "$patch"
RETAIN_KEYS = "$retainKeys"
DELETE_PRIMITIVES = "$deleteFromPrimitiveList/"
ELEMENT_ORDER = "$setElementOrder/"

_Identity = Callable[[Any], Hashable]
_MISSING: Any = object()


def strategic_merge_patch(target: Object, patch: object, schema: Schema) -> Object:
    """Merge `patch` into a copy of `target`; raises ApiError 400 for a malformed patch."""
    if not isinstance(patch, dict):
        raise bad_request("a strategic merge patch must be an object")
    return _merge_map(copy_json(target), patch, schema)


def _merge_map(original: Object, patch: Object, schema: Schema | None) -> Object:
    """Merge into `original`, which is ours to change, and return the result."""
    directive = patch.get(DIRECTIVE, _MISSING)
    if directive is not _MISSING:
        return _directed(directive, patch)
    _retain_keys(original, patch)
    ordered = _merge_ordered(original, patch, schema)
    for key, value in patch.items():
        if key.startswith(DELETE_PRIMITIVES):
            _delete_primitives(original, key.removeprefix(DELETE_PRIMITIVES), value)
        elif key in ordered or key == RETAIN_KEYS or key.startswith(ELEMENT_ORDER):
            continue
        elif value is None:
            original.pop(key, None)
        else:
            _merge_key(original, key, value, schema.field(key) if schema else None)
    return original


def _directed(directive: object, patch: Object) -> Object:
    if directive == "replace":
        rest = {key: value for key, value in patch.items() if key != DIRECTIVE}
        replaced: Object = _plain(rest)
        return replaced
    if directive == "delete":
        return {}
    raise bad_request(f"unknown patch type: {directive} in map")


def _retain_keys(original: Object, patch: Object) -> None:
    """Drop from `original` what the patch does not list as kept."""
    if RETAIN_KEYS not in patch:
        return
    kept = patch[RETAIN_KEYS]
    if not isinstance(kept, list) or not all(isinstance(key, str) for key in kept):
        raise bad_request("invalid patch format of retainKeys")
    for key, value in patch.items():
        if key not in kept and value is not None and not _is_directive(key):
            raise bad_request("invalid patch format of retainKeys")
    for key in [key for key in original if key not in kept]:
        del original[key]


def _is_directive(key: str) -> bool:
    return key in (DIRECTIVE, RETAIN_KEYS) or key.startswith((DELETE_PRIMITIVES, ELEMENT_ORDER))


def _merge_key(original: Object, key: str, value: Any, schema: Schema | None) -> None:
    old = original.get(key, _MISSING)
    if isinstance(old, dict) and isinstance(value, dict):
        original[key] = _merge_map(old, value, schema)
    elif isinstance(old, list) and isinstance(value, list):
        original[key] = _merge_list(old, value, schema)
    elif (plain := _plain(value)) is _MISSING:
        original.pop(key, None)
    else:
        original[key] = plain


def _plain(value: Any) -> Any:
    """Copy of a patch value taken whole: no nulls, no directives; `_MISSING` for a deletion."""
    if isinstance(value, dict):
        if DIRECTIVE in value:
            return _MISSING
        items = ((key, _plain(item)) for key, item in value.items() if not _is_directive(key))
        return {key: item for key, item in items if item is not None and item is not _MISSING}
    if isinstance(value, list):
        return [item for item in map(_plain, value) if item is not _MISSING]
    return value


def _delete_primitives(original: Object, key: str, unwanted: object) -> None:
    if not isinstance(unwanted, list):
        raise bad_request("invalid patch format of primitive list")
    old = original.get(key)
    if isinstance(old, list):
        gone = {_scalar(item) for item in unwanted}
        original[key] = [item for item in old if _scalar(item) not in gone]


def _merge_ordered(original: Object, patch: Object, schema: Schema | None) -> set[str]:
    """Merge the lists whose final order the patch gives; returns their names."""
    done = set()
    for directive, order in patch.items():
        if not directive.startswith(ELEMENT_ORDER):
            continue
        key = directive.removeprefix(ELEMENT_ORDER)
        field = schema.field(key) if schema else None
        if field is None:
            raise bad_request(f'unable to find api field for the json field "{key}"')
        old, new = original.get(key), patch.get(key)
        if not all(part is None or isinstance(part, list) for part in (old, new)):
            raise bad_request("invalid patch format of setElementOrder list")
        if not isinstance(order, list):
            raise bad_request("invalid patch format of setElementOrder list")
        deletes = key in patch and new is None
        if not deletes and (old is not None or new is not None):
            done.add(key)
            original[key] = _merge_in_order(old, new, order, field)
    return done


def _merge_in_order(
    old: list[Any] | None, new: list[Any] | None, order: list[Any], schema: Schema
) -> list[Any]:
    identity = _identity(schema)
    _check_order(new or [], order, identity)
    if new is None:
        merged = old or []
    else:
        merged = _plain(new) if old is None else _merge_list(old, new, schema)
    if "merge" not in schema.patch_strategy:
        return merged
    return _arrange(merged, order, _server_order(old or [], merged, identity), identity)


def _server_order(old: list[Any], merged: list[Any], identity: _Identity) -> list[Any]:
    """Return the order for items that `$setElementOrder` does not name.

    Apimachinery deletes and appends in place, in the very list that it later reads the order from.
    So new items, as many as were deleted, take the freed places at its end.
    """
    left, known = _places(merged, identity), _places(old, identity)
    kept = [item for item in old if identity(item) in left]
    added = [item for item in merged if identity(item) not in known]
    return kept + added[: len(old) - len(kept)]


def _check_order(patch: list[Any], order: list[Any], identity: _Identity) -> None:
    """The patch's items must appear in `order`, in the same order."""
    rest = iter([identity(item) for item in order])
    for item in patch:
        if isinstance(item, dict) and item.get(DIRECTIVE) == "delete":
            continue
        if identity(item) not in rest:
            raise bad_request(
                f"The order in patch list:\n{patch}\n doesn't match $setElementOrder list:\n{order}"
            )


def _merge_list(old: list[Any], patch: list[Any], schema: Schema | None) -> list[Any]:
    if schema is None or "merge" not in schema.patch_strategy:
        taken: list[Any] = _plain(patch)
        return taken
    identity = _identity(schema)
    if not any(isinstance(item, dict) for item in (*old, *patch)):
        unique = {identity(item): item for item in (*old, *patch)}
        return _arrange(list(unique.values()), patch, old, identity)
    old, patch = _apply_item_directives(old, patch, identity)
    merged = list(old)
    places = _places(merged, identity)
    for item in patch:
        place = places.get(identity(item))
        if place is None:
            places[identity(item)] = len(merged)
            merged.append(_plain(item))
        else:
            merged[place] = _merge_map(merged[place], item, schema.items)
    return _arrange(merged, patch, old, identity)


def _apply_item_directives(
    old: list[Any], patch: list[Any], identity: _Identity
) -> tuple[list[Any], list[Any]]:
    """Take the items with `$patch` out of the patch and carry them out."""
    gone = set()
    replaces = False
    rest = []
    for item in patch:
        if not isinstance(item, dict) or DIRECTIVE not in item:
            rest.append(item)
        elif item[DIRECTIVE] == "delete":
            gone.add(identity(item))
        elif item[DIRECTIVE] == "replace":
            replaces = True
        elif item[DIRECTIVE] == "merge":
            raise bad_request("merging lists cannot yet be specified in the patch")
        else:
            raise bad_request(f"unknown patch type: {item[DIRECTIVE]} in map")
    if replaces:
        return [], rest
    return ([item for item in old if identity(item) not in gone] if gone else old), rest


def _identity(schema: Schema) -> _Identity:
    """Return the function that identifies items of this list."""
    key = schema.merge_key
    if key is None:
        return _scalar

    def by_key(item: Any) -> Hashable:
        if not isinstance(item, dict):
            raise bad_request(f"items of a list merged by {key} must be objects")
        if key not in item:
            raise bad_request(f"map: {item} does not contain declared merge key: {key}")
        return _scalar(item[key])

    return by_key


def _scalar(item: Any) -> Hashable:
    if isinstance(item, dict | list):
        raise bad_request("a list is merged by scalars, not by lists or objects")
    return (isinstance(item, bool), item)


def _places(items: Iterable[Any], identity: _Identity) -> dict[Hashable, int]:
    """Index of the first item of each identity."""
    places: dict[Hashable, int] = {}
    for index, item in enumerate(items):
        places.setdefault(identity(item), index)
    return places


def _arrange(
    merged: list[Any], wanted: list[Any], server: list[Any], identity: _Identity
) -> list[Any]:
    """Order `merged`: as `wanted` has it, the others put in where the server's order allows.

    An item that `wanted` does not know goes before the first wanted item that the server has after
    it, and no earlier than the one before.
    """
    wanted_at, server_at = _places(wanted, identity), _places(server, identity)
    known = [item for item in merged if identity(item) in wanted_at]
    known.sort(key=lambda item: wanted_at[identity(item)])
    others = [item for item in merged if identity(item) not in wanted_at]
    others.sort(key=lambda item: server_at.get(identity(item), len(server)))
    arranged: list[Any] = []
    next_known = 0
    for item in others:
        place = server_at.get(identity(item), len(server))
        while next_known < len(known):
            if place < server_at.get(identity(known[next_known]), -1):
                break
            arranged.append(known[next_known])
            next_known += 1
        arranged.append(item)
    return [*arranged, *known[next_known:]]
