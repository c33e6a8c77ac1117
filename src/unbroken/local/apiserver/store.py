"""Objects and their history, in SQLite, with everything that is read often in memory.

The one table is a log: each write adds a row, and the newest row of a key is the object. So a write
is one INSERT. A watcher that lost its connection resumes from any version that the log still holds.
A list at an older version is the present with later changes undone. Versions that the log no longer
holds are refused (`Expired`), never guessed.

A write returns after SQLite has committed it (WAL, synchronous=NORMAL): it survives the death of
this process at any moment. After a power cut the last moments may be missing, never half written.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from unbroken.errors import WorldError
from unbroken.local.apiserver.http.status import ApiError, Object
from unbroken.local.apiserver.validation.selectors import field_value

HISTORY_EVENTS = 10_000
"""Changes of one resource that are kept for watchers and for lists at an older version."""
COMPACT_EVERY = 1_000
"""Changes between two clean-ups of one resource's rows."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS log (
    version INTEGER PRIMARY KEY, resource TEXT NOT NULL, namespace TEXT NOT NULL,
    name TEXT NOT NULL, deleted INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS compacted (resource TEXT PRIMARY KEY, version INTEGER NOT NULL);
"""

Key = tuple[str, str]
"""(namespace, name); namespace is empty for cluster-scoped objects."""


class Entry:
    """One object at one version, as the JSON that was stored."""

    __slots__ = ("_fields", "_labels", "body", "key", "version")

    def __init__(self, key: Key, version: int, body: bytes) -> None:
        self.key = key
        self.version = version
        self.body = body
        self._labels: Mapping[str, str] | None = None
        self._fields: dict[str, str] | None = None

    def decode(self) -> Object:
        """A fresh copy that the caller may change."""
        decoded: Object = msgspec.json.decode(self.body)
        return decoded

    @property
    def labels(self) -> Mapping[str, str]:
        """The object's labels."""
        if self._labels is None:
            self._labels = self.decode()["metadata"].get("labels") or {}
        return self._labels

    def fields(self, paths: tuple[str, ...]) -> Mapping[str, str]:
        """Values of selectable fields; empty text for what is absent."""
        if self._fields is None or any(path not in self._fields for path in paths):
            content = self.decode()
            self._fields = {path: field_value(content, path) for path in paths}
        return self._fields


@dataclass(frozen=True, slots=True)
class Change:
    """One write: `entry` is the new state, or the last state when `is_deleted`."""

    entry: Entry
    previous: Entry | None
    is_deleted: bool


@dataclass(slots=True)
class Collection:
    """All objects of one resource and their recent changes."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    changes: deque[Change] = field(default_factory=deque)
    compacted: int = 2
    """Changes up to this version are gone; a version that was never handed out is too old too."""
    dropped: int = 0
    """Changes ever removed from `changes`: changes[0] is number `dropped`."""
    unswept: int = 0
    """Changes removed from `changes` whose rows are still in the log."""
    waiters: set[asyncio.Future[None]] = field(default_factory=set)

    def at(self, version: int) -> dict[Key, Entry]:
        """Entries as they were at `version`; ApiError 410 when that is no longer known."""
        if version < self.compacted:
            raise expired(version, self.compacted)
        entries = dict(self.entries)
        for change in reversed(self.changes):
            if change.entry.version <= version:
                break
            if change.previous is None:
                entries.pop(change.entry.key, None)
            else:
                entries[change.entry.key] = change.previous
        return entries

    def position(self, version: int) -> int:
        """Number of the first change after `version`; ApiError 410 when it may be gone."""
        if version < self.compacted:
            raise expired(version, self.compacted)
        later = 0
        for change in reversed(self.changes):
            if change.entry.version <= version:
                break
            later += 1
        return self.dropped + len(self.changes) - later

    def since(self, position: int) -> list[Change]:
        """Changes from number `position` on; ApiError 410 when some of them are gone."""
        start = position - self.dropped
        if start < 0:
            raise expired(position, self.compacted)
        count = len(self.changes)
        if count - start > count // 2:
            return list(self.changes)[start:]
        return [self.changes[index] for index in range(start, count)]

    async def changed(self) -> None:
        """Wait for the next change."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.add(waiter)
        try:
            await waiter
        finally:
            self.waiters.discard(waiter)

    def record(self, change: Change) -> None:
        """Add a change, drop the oldest beyond the limit, wake all waiting tasks."""
        self.changes.append(change)
        if len(self.changes) > HISTORY_EVENTS:
            self.compacted = self.changes.popleft().entry.version
            self.dropped += 1
            self.unswept += 1
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


def expired(version: int, oldest: int) -> ApiError:
    """410: the client must list again."""
    return ApiError(410, "Expired", f"too old resource version: {version} ({oldest})")


class Store:
    """All collections of one API server.  Not for use from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self._collections: dict[str, Collection] = {}
        self.version = 2
        """Version of the newest write; grows by one with each."""

    def open(self) -> None:
        """Read everything; WorldError if the file cannot be used."""
        try:
            self._database = sqlite3.connect(self._path, isolation_level=None)
            self._path.chmod(0o600)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(SCHEMA)
            self._load(self._database)
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise WorldError(f"cannot open the store {self._path}: {error}") from error

    def close(self) -> None:
        """Close the file; what was written stays."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _load(self, database: sqlite3.Connection) -> None:
        for resource, version in database.execute("SELECT resource, version FROM compacted"):
            self.collection(resource).compacted = version
            self.version = max(self.version, version)
        rows = database.execute(
            "SELECT version, resource, namespace, name, deleted, body FROM log ORDER BY version"
        )
        for version, resource, namespace, name, deleted, body in rows:
            collection = self.collection(resource)
            entry = Entry((namespace, name), version, body)
            change = Change(entry, collection.entries.get(entry.key), bool(deleted))
            self._keep(collection, change)
            if version > collection.compacted:
                collection.record(change)
            self.version = max(self.version, version)

    def collection(self, resource: str) -> Collection:
        """The objects of one resource; an empty collection for a new name."""
        return self._collections.setdefault(resource, Collection())

    def resources(self) -> Iterator[str]:
        """Names of the resources that hold objects."""
        return (name for name, collection in self._collections.items() if collection.entries)

    def write(self, resource: str, key: Key, content: Object, *, delete: bool = False) -> Entry:
        """Store `content` (or its deletion) durably under the next version.

        `content` gets the version as its resourceVersion.  ApiError 500 when the disk refuses;
        then nothing has changed.
        """
        assert self._database is not None
        version = self.version + 1
        content["metadata"]["resourceVersion"] = str(version)
        body = encode(content)
        try:
            self._database.execute(
                "INSERT INTO log VALUES (?, ?, ?, ?, ?, ?)", (version, resource, *key, delete, body)
            )
        except sqlite3.Error as error:
            raise ApiError(
                500, "InternalError", f"the store could not write the object: {error}"
            ) from error
        self.version = version
        collection = self.collection(resource)
        change = Change(Entry(key, version, body), collection.entries.get(key), delete)
        self._keep(collection, change)
        collection.record(change)
        if collection.unswept >= COMPACT_EVERY:
            self._sweep(resource, collection)
        return change.entry

    @staticmethod
    def _keep(collection: Collection, change: Change) -> None:
        if change.is_deleted:
            collection.entries.pop(change.entry.key, None)
        else:
            collection.entries[change.entry.key] = change.entry

    def _sweep(self, resource: str, collection: Collection) -> None:
        """Remove the rows that neither the present nor a kept change needs."""
        assert self._database is not None
        needed = {
            change.previous.version for change in collection.changes if change.previous is not None
        }
        needed.update(entry.version for entry in collection.entries.values())
        old = self._database.execute(
            "SELECT version FROM log WHERE resource = ? AND version <= ?",
            (resource, collection.compacted),
        ).fetchall()
        gone = [(version,) for (version,) in old if version not in needed]
        self._database.execute("BEGIN")
        self._database.executemany("DELETE FROM log WHERE version = ?", gone)
        self._database.execute(
            "INSERT OR REPLACE INTO compacted VALUES (?, ?)", (resource, collection.compacted)
        )
        self._database.execute("COMMIT")
        collection.unswept = 0


_encoder = msgspec.json.Encoder()


def encode(content: Object) -> bytes:
    """JSON of an object, apiVersion and kind first (`reframe` relies on that)."""
    head = {"apiVersion": content.get("apiVersion"), "kind": content.get("kind")}
    return _encoder.encode({**head, **content})


def reframe(body: bytes, api_version: str | None) -> bytes:
    """`body` under another apiVersion, or with neither apiVersion nor kind for None.

    Only the first bytes are touched, so that lists and watches never decode what they send.
    """
    assert body.startswith(b'{"apiVersion":"')
    end = body.index(b'"', 15)
    if api_version is not None:
        return b'{"apiVersion":"' + api_version.encode() + body[end:]
    return b"{" + body[body.index(b'"', end + 10) + 2 :]
