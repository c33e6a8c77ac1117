"""Get, list and watch: bytes out of the store, in the form that the client asked for.

Nothing is decoded unless a selector, a table or a conversion needs it. Objects are sent as they
were stored, so a list of thousands is a join and a watch event is a copy.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec

from unbroken.local.apiserver.kinds.kinds import from_storage
from unbroken.local.apiserver.store import Change, Collection, Entry, Store, encode, reframe
from unbroken.local.apiserver.tables.columns import partial_metadata, table
from unbroken.local.apiserver.validation.selectors import (
    FieldSelector,
    LabelSelector,
    parse_fields,
    parse_labels,
)

from .requests import Form, ListOptions, Target
from .status import ApiError, Object, bad_request, not_found


@dataclass(frozen=True, slots=True)
class Scope:
    """Which objects of a collection a list or a watch is about."""

    namespace: str
    name: str
    labels: LabelSelector | None
    fields: FieldSelector | None
    paths: tuple[str, ...]

    @property
    def is_selective(self) -> bool:
        """An object may enter or leave it by being changed."""
        return self.labels is not None or self.fields is not None

    def holds(self, entry: Entry) -> bool:
        """True if the object, as it is in `entry`, is asked for."""
        namespace, name = entry.key
        if (self.namespace and namespace != self.namespace) or (self.name and name != self.name):
            return False
        if self.labels is not None and not self.labels.matches(entry.labels):
            return False
        return self.fields is None or self.fields.matches(entry.fields(self.paths))


def scope_of(target: Target, options: ListOptions) -> Scope:
    """ApiError 400 for selectors that cannot be read."""
    paths = target.version.selectable_fields
    return Scope(
        target.namespace,
        target.name,
        parse_labels(options.labels) if options.labels else None,
        parse_fields(options.fields, paths) if options.fields else None,
        paths,
    )


class Presenter:
    """Shapes stored objects for one request: version, table, metadata only."""

    def __init__(self, target: Target, form: Form, clock: Callable[[], float]) -> None:
        self._target = target
        self._form = form
        self._clock = clock
        self._has_columns = True

    @property
    def _is_plain(self) -> bool:
        return not self._form.shape and self._target.kind.stored_as is None

    def object(self, entry: Entry) -> bytes:
        """One object as the answer to a get or a write."""
        if self._is_plain:
            return reframe(entry.body, self._target.api_version)
        return encode(self._shaped(entry))

    def watched(self, entry: Entry) -> bytes:
        """One object inside a watch event; a table's columns are sent only once."""
        if self._form.shape != "Table":
            return self.object(entry)
        rows = self._table([self._content(entry)], {})
        rows["metadata"] = {"resourceVersion": str(entry.version)}
        if not self._has_columns:
            rows["columnDefinitions"] = None
        self._has_columns = False
        return encode(rows)

    def _content(self, entry: Entry) -> Object:
        content = from_storage(self._target.kind, entry.decode())
        content["apiVersion"] = self._target.api_version
        return content

    def _shaped(self, entry: Entry) -> Object:
        content = self._content(entry)
        if self._form.shape == "PartialObjectMetadata":
            return partial_metadata(content)
        if self._form.shape == "Table":
            meta = {"resourceVersion": content["metadata"].get("resourceVersion", "")}
            return self._table([content], meta)
        return content

    def _table(self, contents: list[Object], meta: Object) -> Object:
        kind, version = self._target.kind, self._target.version
        return table(kind, version, contents, self._clock(), self._form.include_object, meta)

    def list(self, entries: Iterable[Entry], meta: Object) -> bytes:
        """A whole list."""
        kind, api_version = self._target.kind, self._target.api_version
        if self._form.shape == "Table":
            return encode(self._table([self._content(entry) for entry in entries], meta))
        if self._form.shape == "PartialObjectMetadata":
            list_kind, api_version = "PartialObjectMetadataList", "meta.k8s.io/v1"
        else:
            list_kind = kind.list_kind or f"{kind.kind}List"
        head = {"kind": list_kind, "apiVersion": api_version, "metadata": meta}
        items = self._items(entries)
        return msgspec.json.encode(head)[:-1] + b',"items":[' + b",".join(items) + b"]}\n"

    def _items(self, entries: Iterable[Entry]) -> Iterator[bytes]:
        if not self._is_plain:
            return (encode(self._shaped(entry)) for entry in entries)
        kind = self._target.kind
        inner = self._target.api_version if kind.is_custom else None
        return (reframe(entry.body, inner) for entry in entries)


def get(store: Store, target: Target) -> Entry:
    """ApiError 404 when there is no such object."""
    entry = store.collection(target.kind.storage).entries.get(target.key)
    if entry is None:
        raise not_found(target.kind.group, target.kind.plural, target.name)
    return entry


def list_page(store: Store, target: Target, options: ListOptions, presenter: Presenter) -> bytes:
    """One page, or all, of a list; ApiError 400, 410 or 504 where its version forbids it."""
    scope = scope_of(target, options)
    collection = store.collection(target.kind.storage)
    version, start = store.version, ("", "")
    if options.continue_token:
        version, start = _decode_token(options.continue_token)
    elif _is_exact(options):
        version = int(options.version)
    _refuse_future(store, options.version)
    present = collection.entries if version == store.version else collection.at(version)
    keys = sorted(key for key in present if key > start) if start[1] else sorted(present)
    entries = [present[key] for key in keys if scope.holds(present[key])]
    meta: Object = {"resourceVersion": str(version)}
    if options.limit and len(entries) > options.limit:
        meta["continue"] = _encode_token(version, entries[options.limit - 1].key)
        if not scope.is_selective:
            meta["remainingItemCount"] = len(entries) - options.limit
        del entries[options.limit :]
    return presenter.list(entries, meta)


def _is_exact(options: ListOptions) -> bool:
    if not options.version or options.version == "0":
        return False
    # A limit with a version but no rule means exactly that version (API concepts, "list").
    return options.version_match == "Exact" or (options.limit > 0 and not options.version_match)


def _refuse_future(store: Store, version: str) -> None:
    if version and int(version) > store.version:
        message = f"Too large resource version: {version}, current: {store.version}"
        cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
        details = {"causes": [cause], "retryAfterSeconds": 1}
        raise ApiError(504, "Timeout", f"Timeout: {message}", details=details)


def _encode_token(version: int, last: tuple[str, str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode([version, *last])).decode()


def _decode_token(token: str) -> tuple[int, tuple[str, str]]:
    try:
        raw = base64.urlsafe_b64decode(token)
        version, namespace, name = msgspec.json.decode(raw, type=tuple[int, str, str])
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise bad_request("continue key is not valid: it was not made by this server") from None
    return version, (namespace, name)


class Watch:
    """One client's watch: a place in the history of a collection."""

    def __init__(
        self, store: Store, target: Target, options: ListOptions, presenter: Presenter
    ) -> None:
        self._store = store
        self._target = target
        self._options = options
        self._presenter = presenter
        self._scope = scope_of(target, options)
        self._collection: Collection = store.collection(target.kind.storage)
        self._position = 0

    def begin(self) -> bytes:
        """Return the events that are sent at once. Raises ApiError 410 if the version is gone."""
        version = self._options.version
        if version not in ("", "0") and not self._options.sends_initial:
            self._position = self._collection.position(int(version))
            return self.news()
        _refuse_future(self._store, version)
        self._position = self._collection.position(self._store.version)
        present = self._collection.entries
        entries = [present[key] for key in sorted(present) if self._scope.holds(present[key])]
        events = b"".join(self._event(b"ADDED", entry) for entry in entries)
        if self._options.sends_initial and self._options.has_bookmarks:
            events += self.bookmark({"k8s.io/initial-events-end": "true"})
        return events

    def news(self) -> bytes:
        """Events since the last call; ApiError 410 when this client was too slow."""
        changes = self._collection.since(self._position)
        self._position += len(changes)
        return b"".join(filter(None, map(self._shown, changes)))

    async def wait(self) -> None:
        """Until the collection changes."""
        await self._collection.changed()

    def bookmark(self, annotations: dict[str, str] | None = None) -> bytes:
        """An event that says how far the client has come."""
        meta: Object = {"resourceVersion": str(self._store.version), "creationTimestamp": None}
        if annotations:
            meta["annotations"] = annotations
        kind = self._target.kind.kind
        content = {"kind": kind, "apiVersion": self._target.api_version, "metadata": meta}
        return b'{"type":"BOOKMARK","object":' + msgspec.json.encode(content) + b"}\n"

    def _event(self, type_: bytes, entry: Entry) -> bytes:
        return b'{"type":"' + type_ + b'","object":' + self._presenter.watched(entry) + b"}\n"

    def _shown(self, change: Change) -> bytes:
        """The event as this client sees it: leaving its scope is a deletion to it."""
        scope, entry, previous = self._scope, change.entry, change.previous
        if not scope.is_selective:
            if not scope.holds(entry):
                return b""
            if change.is_deleted:
                return self._event(b"DELETED", entry)
            return self._event(b"MODIFIED" if previous is not None else b"ADDED", entry)
        was = previous is not None and scope.holds(previous)
        if change.is_deleted:
            return self._event(b"DELETED", entry) if was else b""
        if scope.holds(entry):
            return self._event(b"MODIFIED" if was else b"ADDED", entry)
        if previous is None or not was:
            return b""
        # The client learns the last state that it could see, under the version of the change.
        content = previous.decode()
        content["metadata"]["resourceVersion"] = str(entry.version)
        return self._event(b"DELETED", Entry(previous.key, entry.version, encode(content)))


def with_form(form: Form, include_object: str) -> Form:
    """The form with the query's includeObject (None, Metadata or Object)."""
    return replace(form, include_object=include_object or "Metadata")
