"""Rules for objects whose owners are gone or going. Pure.

After kube-controller-manager v1.33, pkg/controller/garbagecollector. An object goes when all its
owners are gone. An owner that is deleted in the foreground waits for the dependents that block it.
An owner that is deleted with orphans releases its dependents first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass

from unbroken.kube.cache import changed

from .inventory import Item, Owner

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object; its own dependents follow `policy`."""

    policy: str


@dataclass(frozen=True, slots=True)
class Release:
    """Take owners out of the object's references."""

    uids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Unblock:
    """Delete in the foreground an object that must no longer block its owner (a circle)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The graph does not show these owners: ask the API whether they exist."""

    owners: tuple[Owner, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Take the finalizer off the owner; nothing holds it any more."""

    finalizer: str


@dataclass(frozen=True, slots=True)
class Orphan:
    """Release the dependents, then `Finish`."""

    dependents: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Await:
    """The owner waits; look at these dependents."""

    dependents: tuple[Item, ...]


Verdict = Delete | Release | Unblock | Ask | Finish | Orphan | Await | None


def is_foreground(item: Item) -> bool:
    """The object is being deleted and waits for its dependents."""
    return item.is_deleting and FOREGROUND in item.finalizers


class Graph:
    """Objects and their owners, by uid."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._dependents: defaultdict[str, set[str]] = defaultdict(set)

    def get(self, uid: str) -> Item | None:
        """The object, or None."""
        return self._items.get(uid)

    def dependents(self, uid: str) -> Iterator[Item]:
        """Objects that name the uid among their owners."""
        return (self._items[dependent] for dependent in self._dependents.get(uid, ()))

    def change(self, old: Item | None, new: Item | None) -> set[str]:
        """Take a change; returns the uids of objects to look at because of it."""
        item = changed(old, new)
        before = self._items.get(item.uid)
        self._replace(before, new)
        owners = {owner.uid for version in (before, new) if version for owner in version.owners}
        touched = {uid for uid in owners if (held := self.get(uid)) and held.is_deleting}
        if new is None or (is_foreground(new) and not (before and is_foreground(before))):
            touched |= self._dependents.get(item.uid, set())
        if new is not None and (new.owners or new.is_deleting):
            touched.add(new.uid)
        return touched

    def _replace(self, before: Item | None, new: Item | None) -> None:
        if before is not None:
            del self._items[before.uid]
            for owner in before.owners:
                self._dependents[owner.uid].discard(before.uid)
                if not self._dependents[owner.uid]:
                    del self._dependents[owner.uid]
        if new is not None:
            self._items[new.uid] = new
            for owner in new.owners:
                self._dependents[owner.uid].add(new.uid)


def judge(
    item: Item, graph: Graph, missing: Container[tuple[str, str, Owner]], exists: Container[str]
) -> Verdict:
    """Return the action for an object.

    `missing`: (uid, namespace, reference) that the API does not have; `exists`: uids of owners that
    it has, whatever the graph shows.
    """
    if item.is_deleting:
        if FOREGROUND in item.finalizers:
            return _judge_foreground(item, graph)
        if ORPHAN in item.finalizers:
            dependents = tuple(graph.dependents(item.uid))
            return Orphan(dependents) if dependents else Finish(ORPHAN)
        return None
    if not item.owners:
        return None
    return _judge_owned(item, graph, missing, exists)


def _judge_foreground(item: Item, graph: Graph) -> Verdict:
    dependents = list(graph.dependents(item.uid))
    blocking = [
        dependent
        for dependent in dependents
        if any(owner.uid == item.uid and owner.blockOwnerDeletion for owner in dependent.owners)
    ]
    if not blocking:
        return Finish(FOREGROUND)
    return Await(tuple(dependent for dependent in dependents if not dependent.is_deleting))


def _judge_owned(
    item: Item, graph: Graph, missing: Container[tuple[str, str, Owner]], exists: Container[str]
) -> Verdict:
    solid: list[Owner] = []
    gone: list[Owner] = []
    waiting: list[Owner] = []
    unknown: list[Owner] = []
    for owner in item.owners:
        held = graph.get(owner.uid)
        if held is not None and _is(held, owner, item):
            (waiting if is_foreground(held) else solid).append(owner)
        elif (owner.uid, item.key.namespace, owner) in missing:
            gone.append(owner)
        elif owner.uid in exists:
            solid.append(owner)
        else:
            unknown.append(owner)
    if unknown:
        return Ask(tuple(unknown))
    if solid:
        lost = frozenset(owner.uid for owner in (*gone, *waiting))
        return Release(lost) if lost else None
    if waiting and any(True for _ in graph.dependents(item.uid)):
        if any(is_foreground(dependent) for dependent in graph.dependents(item.uid)):
            return Unblock()
        return Delete("Foreground")
    return Delete(_policy(item))


def _is(held: Item, owner: Owner, item: Item) -> bool:
    """The object with the owner's uid is the one that the reference describes."""
    same_place = not held.kind.namespaced or held.key.namespace == item.key.namespace
    # An object outside of all namespaces cannot name its owner's namespace; it is kept.
    return (same_place or not item.key.namespace) and (
        (held.kind.group, held.kind.kind, held.key.name) == (owner.group, owner.kind, owner.name)
    )


def _policy(item: Item) -> str:
    if ORPHAN in item.finalizers:
        return "Orphan"
    return "Foreground" if FOREGROUND in item.finalizers else "Background"
