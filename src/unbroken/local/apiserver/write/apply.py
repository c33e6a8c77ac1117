"""Managers of fields, and server-side apply.

`track_update` keeps metadata.managedFields correct after an ordinary write. `server_side_apply`
merges an applier's configuration with the existing object, reports conflicts, and drops fields that
the applier no longer has. Rules and wording are those of apimachinery v0.33,
pkg/util/managedfields, and structured-merge-diff v4. An entry of another API version is assumed to
have the same paths.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from unbroken.local.apiserver.http.status import ApiError, Cause, Object, bad_request
from unbroken.local.apiserver.schema.schemas import Schema

from .fieldsets import (
    OWNED_BY_SERVER,
    Changes,
    FieldSet,
    Shape,
    by_fields,
    by_items,
    by_key,
    compare,
    difference,
    field_set,
    intersection,
    is_field_set,
    item_key,
    leaves,
    paths,
    problems,
    remove,
    shape_of,
    union,
    with_structs,
)
from .patch import copy_json, same_json

APPLY = "Apply"
UPDATE = "Update"
MAX_UPDATE_MANAGERS = 10
"""managedfields/fieldmanager.go: DefaultMaxUpdateManagers."""
ANCIENT = "ancient-changes"
BEFORE_FIRST_APPLY = "before-first-apply"
KUBECTL = "kubectl"
"""The manager whose applies build on what client-side `kubectl apply` has written down."""
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
MAX_ANNOTATIONS_BYTES = 256 * 1024
"""apimachinery validation: TotalAnnotationSizeLimitB."""

_Identity = tuple[str, str, str, str]


# --- Entries ------------------------------------------------------------------------------------


def _entry(identity: _Identity, api_version: str, now: str, fields: FieldSet) -> Object:
    manager, operation, _, subresource = identity
    return {
        "manager": manager,
        "operation": operation,
        "apiVersion": api_version,
        "time": now,
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
        **({"subresource": subresource} if subresource else {}),
    }


def _identity(entry: Object) -> _Identity:
    """Return the identity of an entry: an applier keeps its entry over versions."""
    operation = entry["operation"]
    api_version = entry["apiVersion"] if operation == UPDATE else ""
    return entry.get("manager", ""), operation, api_version, entry.get("subresource", "")


def _is_usable(entries: object) -> bool:
    return isinstance(entries, list) and all(
        isinstance(entry, dict)
        and entry.get("operation") in (APPLY, UPDATE)
        and entry.get("fieldsType") == "FieldsV1"
        and isinstance(entry.get("apiVersion"), str)
        and all(isinstance(entry.get(k, ""), str) for k in ("manager", "subresource", "time"))
        and is_field_set(entry.get("fieldsV1"))
        for entry in entries
    )


def _sorted(entries: Sequence[Object]) -> list[Object]:
    """Return the entries as the real server sorts them: appliers first, the oldest first."""
    return sorted(
        entries,
        key=lambda e: (
            e["operation"],
            e.get("time", ""),
            e.get("manager", ""),
            e["apiVersion"],
            e.get("subresource", ""),
        ),
    )


def _capped(entries: list[Object]) -> list[Object]:
    """Merge the oldest updaters when there are too many, one entry for each API version."""
    excess = sum(entry["operation"] == UPDATE for entry in entries) - MAX_UPDATE_MANAGERS
    if excess <= 0:
        return entries
    kept = {_identity(entry): entry for entry in entries}
    first: dict[str, _Identity] = {}
    updates = [entry for entry in entries if entry["operation"] == UPDATE]
    for entry in sorted(updates, key=lambda e: (e.get("time", ""), _identity(e))):
        if excess <= 0:
            break
        version = entry["apiVersion"]
        if version not in first:
            first[version] = _identity(entry)
            continue
        bucket = (ANCIENT, UPDATE, version, "")
        older = kept.get(bucket) or kept.pop(first[version])
        del kept[_identity(entry)]
        fields = union(entry["fieldsV1"], older["fieldsV1"])
        kept[bucket] = _entry(bucket, version, entry.get("time", ""), fields)
        excess -= 1
    return list(kept.values())


def _without_lost(entries: list[Object], own: _Identity, changes: Changes) -> list[Object]:
    """The others' entries without what was taken from them or is gone; emptied ones are dropped."""
    written, removed = changes.written, changes.removed
    kept = []
    for entry in entries:
        if _identity(entry) != own:
            rest = difference(difference(entry["fieldsV1"], written), removed)
            if rest:
                kept.append({**entry, "fieldsV1": rest})
    return kept


def _find(entries: list[Object], identity: _Identity) -> Object | None:
    return next((entry for entry in entries if _identity(entry) == identity), None)


# --- Ordinary writes ----------------------------------------------------------------------------


def track_update(
    old: Object | None,
    new: Object,
    schema: Schema,
    *,
    manager: str,
    api_version: str,
    now: str,
    subresource: str = "",
) -> list[Object]:
    """Return metadata.managedFields of `new`, with which `manager` replaces `old` (None: created).

    `new` is the object to be stored, defaults included. Its own managedFields count: `[]` and
    `[{}]` drop all records. A usable list is taken as the state before this write. A missing or
    unusable list leaves that of `old`. An object without records stays without until it is applied,
    as on the real server.
    """
    entries = _recorded(old) if old is not None else []
    given = new.get("metadata", {}).get("managedFields")
    if given is not None and given != entries and not subresource:
        if given in ([], [{}]):
            entries = []
        elif _is_usable(given):
            entries = given
    if old is not None and not entries:
        return []
    changes = compare(old, new, schema)
    written = changes.written
    if not written and not changes.removed:
        return entries
    own = (manager, UPDATE, api_version, subresource)
    kept = _without_lost(entries, own, changes)
    before = _find(entries, own)
    fields = difference(before["fieldsV1"], changes.removed) if before is not None else {}
    if written:
        kept.append(_entry(own, api_version, now, union(fields, written)))
    elif before is not None and fields:
        kept.append({**before, "fieldsV1": fields})
    return _sorted(_capped(kept))


def _recorded(value: Object) -> list[Object]:
    """The entries of a stored object; they were checked when they were written."""
    return value.get("metadata", {}).get("managedFields") or []


# --- Server-side apply --------------------------------------------------------------------------


def server_side_apply(  # noqa: PLR0913  (what a request says, each once)
    live: Object | None,
    applied: Object,
    schema: Schema,
    *,
    manager: str,
    api_version: str,
    now: str,
    force: bool,
    subresource: str = "",
) -> Object:
    """The object that `manager` gets by applying `applied` to `live` (None: creates it).

    `applied` must be free of what this endpoint does not write (status, where that is a
    subresource).  Raises ApiError 409 when others manage what it would change and `force` is not
    set; 400 when it cannot be understood.  Equal to `live`, times included, if nothing changes.
    """
    _check_applied(applied, schema, api_version)
    config = _configuration(applied)
    entries = _recorded(live) if live is not None else []
    if live is not None and not entries:
        everything = compare(None, live, schema).written
        first = (BEFORE_FIRST_APPLY, UPDATE, api_version, "")
        entries = [_entry(first, api_version, now, everything)] if everything else []
    own = (manager, APPLY, "", subresource)
    before = _find(entries, own)
    fields = _claims(config, schema)
    merged = merge(_base(live, applied), config, schema)
    if before is not None:
        others = [entry["fieldsV1"] for entry in entries if entry is not before]
        merged = _pruned(merged, before["fieldsV1"], [*others, fields], schema)
    changes = compare(live, merged, schema)
    if not force:
        _check_conflicts(entries, own, changes, live, schema)
    if live is not None and before is not None and fields == before["fieldsV1"]:
        stored = {**live["metadata"], "managedFields": None}
        if same_json({**live, "metadata": stored}, _with_records(merged, None)):
            return _with_last_applied(copy_json(live), applied, manager)
    kept = _without_lost(entries, own, changes)
    if fields:
        kept.append(_entry(own, api_version, now, fields))
    result = _with_records(merged, _sorted(_capped(kept)))
    return _with_last_applied(copy_json(result), applied, manager)


def _with_records(value: Object, entries: list[Object] | None) -> Object:
    return {**value, "metadata": {**value["metadata"], "managedFields": entries}}


def _check_applied(applied: Object, schema: Schema, api_version: str) -> None:
    meta = applied.get("metadata", {})
    if meta.get("managedFields") is not None:
        raise bad_request("metadata.managedFields must be nil")
    wrong = problems(applied, schema)
    if wrong:
        place = "/".join(str(meta[part]) for part in ("namespace", "name") if meta.get(part))
        text = wrong[0] if len(wrong) == 1 else "errors:\n  " + "\n  ".join(wrong)
        raise bad_request(
            f"failed to create typed patch object ({place}; {api_version}, "
            f"Kind={applied.get('kind', '')}): {text}"
        )


def _configuration(applied: Object) -> Object:
    """Return the applied configuration, without the metadata that no manager has."""
    meta = applied.get("metadata", {})
    claimed = {name: item for name, item in meta.items() if name not in OWNED_BY_SERVER}
    return {**applied, "metadata": claimed}


def _base(live: Object | None, applied: Object) -> Object:
    """Return the object to merge the configuration into: the live one, or the name of a new one."""
    if live is not None:
        return live
    meta = applied.get("metadata", {})
    return {"metadata": {name: meta[name] for name in OWNED_BY_SERVER & meta.keys()}}


def _claims(config: Object, schema: Schema) -> FieldSet:
    fields = field_set(config, schema)
    return difference(fields, {"f:apiVersion": {}, "f:kind": {}, "f:metadata": {}})


def _pruned(merged: Object, last: FieldSet, owned: list[FieldSet], schema: Schema) -> Object:
    """Return `merged` without fields that this applier had claimed, claims no more, and no other
    manager has."""
    # Only parts of metadata can go: the rest belongs to the server.
    last = difference(with_structs(last, schema), {"f:metadata": {}})
    pruned = remove(merged, last, schema)
    everything = with_structs(field_set(merged, schema), schema)
    kept = with_structs(field_set(pruned, schema), schema)
    for fields in owned:
        kept = union(kept, with_structs(fields, schema))
    pruned = remove(merged, difference(everything, kept), schema)
    # Parts of removed fields (a list item, say) that it never claimed come back.
    kept = with_structs(field_set(pruned, schema), schema)
    return remove(merged, intersection(difference(everything, kept), last), schema)


# --- Conflicts ----------------------------------------------------------------------------------


def _check_conflicts(
    entries: list[Object],
    own: _Identity,
    changes: Changes,
    live: Object | None,
    schema: Schema,
) -> None:
    result: list[tuple[str, str]] = []
    written = changes.written
    if own[0] == KUBECTL and live is not None:
        written = difference(written, _applied_before(live, schema))
    for entry in entries:
        if _identity(entry) != own:
            common = intersection(entry["fieldsV1"], written)
            result += [(_manager_text(entry), path) for path in paths(leaves(common))]
    if result:
        result.sort()
        causes = [Cause("FieldManagerConflict", path, f"conflict with {m}") for m, path in result]
        raise ApiError(409, "Conflict", _conflict_text(result), causes=causes)


def _manager_text(entry: Object) -> str:
    text = json.dumps(entry.get("manager", ""), ensure_ascii=False)
    if entry.get("subresource"):
        text += f" with subresource {json.dumps(entry['subresource'])}"
    return f"{text} using {entry['apiVersion']}" if entry["operation"] == UPDATE else text


def _conflict_text(found: list[tuple[str, str]]) -> str:
    if len(found) == 1:
        manager, path = found[0]
        return f"Apply failed with 1 conflict: conflict with {manager}: {path}"
    lines = []
    for manager in dict.fromkeys(manager for manager, _ in found):
        lines.append(f"conflicts with {manager}:")
        lines += [f"- {path}" for other, path in found if other == manager]
    return f"Apply failed with {len(found)} conflicts: " + "\n".join(lines)


def _applied_before(live: Object, schema: Schema) -> FieldSet:
    """Fields that client-side `kubectl apply` has set and that still are as it set them."""
    annotations = live["metadata"].get("annotations")
    text = annotations.get(LAST_APPLIED) if isinstance(annotations, dict) else None
    try:
        applied = copy_json(json.loads(text)) if isinstance(text, str) else None
    except (ValueError, RecursionError, ApiError):
        return {}
    if not isinstance(applied, dict) or not isinstance(applied.get("metadata"), dict):
        return {}
    since = compare(live, applied, schema)
    return difference(difference(_claims(applied, schema), since.written), since.removed)


def _with_last_applied(value: Object, applied: Object, manager: str) -> Object:
    """Keep kubectl's annotation in step, so that one may go back to client-side apply."""
    annotations = value["metadata"].get("annotations")
    if manager != KUBECTL or not isinstance(annotations, dict) or LAST_APPLIED not in annotations:
        return value
    meta = dict(applied["metadata"])
    if isinstance(meta.get("annotations"), dict):
        meta["annotations"] = {k: v for k, v in meta["annotations"].items() if k != LAST_APPLIED}
    text = json.dumps({**applied, "metadata": meta}, sort_keys=True, separators=(",", ":"))
    annotations[LAST_APPLIED] = text + "\n"
    if sum(len(k) + len(str(v)) for k, v in annotations.items()) > MAX_ANNOTATIONS_BYTES:
        del annotations[LAST_APPLIED]
    return value


# --- Merging ------------------------------------------------------------------------------------


def merge(live: Object, config: Object, schema: Schema) -> Object:
    """`live` with everything in `config`; shares parts with both."""
    return _merged_fields(live, config, shape_of(schema))


def _merged(old: Any, new: Any, shape: Shape) -> Any:
    if by_fields(old, shape):
        if isinstance(new, dict) and (old or new):
            return _merged_fields(old, new, shape)
        return old if new is None and old else new
    if by_items(old, shape):
        if isinstance(new, list) and (old or new):
            return _merged_items(old, new, shape)
        return old if new is None and old else new
    return new


def _merged_fields(old: Object, new: Object, shape: Shape) -> Object:
    merged = dict(old)
    for name, item in new.items():
        merged[name] = _merged(old[name], item, shape.field(name)) if name in old else item
    return merged


def _merged_items(old: list[Any], new: list[Any], shape: Shape) -> list[Any]:
    """Items of both in an order that keeps to that of `new`, and to that of `old` where it can."""
    old_keys = [item_key(item, shape) for item in old]
    old_by, new_by = by_key(old, shape), by_key(new, shape)
    merged: list[Any] = []
    place = 0
    stops = _next_shared(list(new_by), old_by.keys())
    for (key, items), stop in zip(new_by.items(), stops, strict=True):
        while place < len(old) and old_keys[place] != stop:
            if old_keys[place] not in new_by:
                merged.append(old[place])
            place += 1
        mine = old_by.get(key, [])
        is_pair = len(mine) == 1
        merged.append(_merged(mine[0], items[0], shape.items) if is_pair else items[0])
    rest = zip(old_keys[place:], old[place:], strict=True)
    return [*merged, *(item for key, item in rest if key not in new_by)]


def _next_shared(keys: list[str], others: Any) -> list[str | None]:
    """For each key the first at or after it that is also in `others`."""
    result: list[str | None] = []
    following = None
    for key in reversed(keys):
        following = key if key in others else following
        result.append(following)
    return result[::-1]
