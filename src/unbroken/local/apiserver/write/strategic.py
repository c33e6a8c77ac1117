"""Strategic merge patch: the merge by field that `kubectl apply` and `kubectl patch` send.

Lists with `merge` in their schema are merged by their merge key (or as sets of scalars), everything
else is replaced. Directives in the patch delete items and set the order of lists. The rules are
those of k8s.io/apimachinery v0.33, pkg/util/strategicpatch. Where that server answers a malformed
patch with a bare 500, this one answers 400 with the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from unbroken.local.apiserver.http.status import Object, bad_request
from unbroken.local.apiserver.schema.schemas import Schema

from .patch import copy_json

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
