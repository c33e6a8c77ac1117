"""JSON patch (RFC 6902) and JSON merge patch (RFC 7396), with the errors of Kubernetes.

A patch is applied to a copy; the result shares no part with the input. It departs from RFC 6902
where the real server does (json-patch v4). `test` for null passes when the key is missing, `add`
without a value adds null, and negative list indexes count from the end. Strategic merge patches are
in `strategic`.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import msgspec

from unbroken.local.apiserver.http.status import ApiError, Cause, Object, bad_request

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
