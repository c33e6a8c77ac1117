"""The cache of an informer: the objects of one scope, from lists and watch events.

Pure. Events may be repeated or stale (a watch that is resumed, a server that restarts). So an event
counts only if it is newer than the cached state of the same object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from unbroken.foreign_numbers import whole_number

TOMBSTONES = 4096
"""Deleted uids that are remembered, so that a late event does not bring an object back."""


class Metadata(Protocol):
    """Metadata of an object that are needed to keep it."""

    @property
    def name(self) -> str | None:
        """Unique in its collection."""

    @property
    def namespace(self) -> str | None:
        """None for cluster-wide kinds."""

    @property
    def uid(self) -> str | None:
        """Unique for ever."""

    @property
    def resourceVersion(self) -> str | None:
        """Version of the object's last change."""


class HasMetadata(Protocol):
    """Any Kubernetes object."""

    @property
    def metadata(self) -> Metadata | None:
        """None only in objects that never were at a server."""


T = TypeVar("T", bound=HasMetadata)
Item = TypeVar("Item")


class Key(NamedTuple):
    """Name of an object in its collection; `namespace` is empty for cluster-wide kinds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def key_of(item: HasMetadata) -> Key:
    """Return the key of an object; empty strings for missing parts."""
    metadata = item.metadata
    if metadata is None:
        return Key("", "")
    return Key(metadata.namespace or "", metadata.name or "")


def changed(old: Item | None, new: Item | None) -> Item:
    """Return the object of a change: as it is now or, if it is gone, as it was last."""
    item = new if new is not None else old
    assert item is not None
    return item


class Change(NamedTuple, Generic[T]):
    """One step: created (old None), changed, or gone (new None)."""

    old: T | None
    new: T | None


class Cache(Generic[T]):
    """Objects by key; every method that changes it returns the changes, in order."""

    def __init__(self) -> None:
        self._items: dict[Key, T] = {}
        self._tombstones: OrderedDict[str, None] = OrderedDict()

    def get(self, key: Key) -> T | None:
        """Return the object, or None."""
        return self._items.get(key)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def replace(self, items: Iterable[T]) -> list[Change[T]]:
        """Take a whole list; objects that it lacks are gone."""
        listed = {key_of(item): item for item in items}
        changes: list[Change[T]] = []
        for key in [key for key in self._items if key not in listed]:
            changes += self._remove(key)
        for key, item in listed.items():
            changes += self._put(key, item)
        return changes

    def apply(self, event: str, item: T) -> list[Change[T]]:
        """Take a watch event: ADDED, MODIFIED or DELETED; others are ignored."""
        key = key_of(item)
        if event == "DELETED":
            held = self._items.get(key)
            if held is None or _uid(held) != _uid(item) or _is_older(item, held):
                self._bury(item)
                return []
            # The last state is the event's: it may have changed with the deletion.
            return self._remove(key, item)
        if event not in ("ADDED", "MODIFIED") or _uid(item) in self._tombstones:
            return []
        return self._put(key, item)

    def _put(self, key: Key, item: T) -> list[Change[T]]:
        held = self._items.get(key)
        if held is None:
            self._items[key] = item
            return [Change(None, item)]
        if _uid(held) != _uid(item):
            # Deleted and made again under one name; this must not count as a change.
            gone = self._remove(key)
            self._items[key] = item
            return [*gone, Change(None, item)]
        if _version(held) == _version(item) or _is_older(item, held):
            return []
        self._items[key] = item
        return [Change(held, item)]

    def _remove(self, key: Key, last: T | None = None) -> list[Change[T]]:
        held = self._items.pop(key)
        self._bury(held)
        return [Change(last or held, None)]

    def _bury(self, item: T) -> None:
        uid = _uid(item)
        if uid:
            self._tombstones[uid] = None
            if len(self._tombstones) > TOMBSTONES:
                self._tombstones.popitem(last=False)


def _uid(item: HasMetadata) -> str:
    return (item.metadata.uid if item.metadata else None) or ""


def _version(item: HasMetadata) -> str:
    return (item.metadata.resourceVersion if item.metadata else None) or ""


def _is_older(item: HasMetadata, held: HasMetadata) -> bool:
    # Versions are opaque by contract, but decimal on every existing server (KEP-5504 makes it so).
    new, old = whole_number(_version(item)), whole_number(_version(held))
    return new is not None and old is not None and new < old
