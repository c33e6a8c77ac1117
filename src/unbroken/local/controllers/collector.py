"""The garbage collector: looks at what changed, and deletes objects whose owners are gone or going.

Its rules are pure functions, after kube-controller-manager v1.33, pkg/controller/garbagecollector.
An object goes when all its owners are gone. An owner that is deleted in the foreground waits for
the dependents that block it. An owner that is deleted with orphans releases its dependents first.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from unbroken.errors import WorldError
from unbroken.kube.cache import Key, changed
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.errors import NotFound
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log

from .inventory import Inventory, Item, Owner

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


log = Log(__name__)

WORKERS = 8
REMEMBERED = 10_000
"""Owners known to be missing; each is asked for once, not once a dependent."""

UNSEEN_SECONDS = 2.0
"""An owner that exists but was not seen yet is asked for again after this time: it may go without
ever having been seen."""


class GarbageCollector:
    """Deletes what lost its owners.  Wait for `inventory.ready` before `run`."""

    def __init__(self, client: KubeClient, inventory: Inventory) -> None:
        self._client = client
        self._inventory = inventory
        self._graph = Graph()
        self._missing: OrderedDict[tuple[str, str, Owner], None] = OrderedDict()
        self._queue = WorkQueue("garbage", self._look, workers=WORKERS)

    async def run(self) -> None:
        """Collect until cancelled."""
        for item in self._inventory.items():
            self._on_item(None, item)
        self._inventory.subscribe(self._on_item)
        await self._queue.run()

    def _on_item(self, old: Item | None, new: Item | None) -> None:
        if old is not None and (new is None or new.uid != old.uid):
            self._add(self._graph.change(old, None))
        if new is not None:
            self._add(self._graph.change(old if old and old.uid == new.uid else None, new))

    def _add(self, uids: set[str]) -> None:
        for uid in uids:
            self._queue.add(uid)

    async def _look(self, uid: str) -> float | None:
        item = self._graph.get(uid)
        if item is None:
            return None
        exists: set[str] = set()
        verdict = judge(item, self._graph, self._missing, exists)
        while isinstance(verdict, Ask):
            for owner in verdict.owners:
                if await self._is_there(item, owner):
                    exists.add(owner.uid)
                else:
                    self._remember(owner, item)
            verdict = judge(item, self._graph, self._missing, exists)
        try:
            await self._act(item, verdict)
        except NotFound:
            return None  # The inventory will learn that the object is gone.
        return UNSEEN_SECONDS if exists else None

    def _remember(self, owner: Owner, item: Item) -> None:
        self._missing[owner.uid, item.key.namespace, owner] = None
        if len(self._missing) > REMEMBERED:
            self._missing.popitem(last=False)

    async def _is_there(self, item: Item, owner: Owner) -> bool:
        kind = self._inventory.find(owner.group, owner.kind)
        if kind is None:
            # Perhaps its definition is just being made; a deletion would be final.
            raise WorldError(f"owner of {item.key} has the unknown kind {owner.kind}", 1.0)
        if kind.namespaced and not item.key.namespace:
            return True  # not known; see garbage._is
        place = item.key.namespace if kind.namespaced else ""
        result = await self._client.get_or_none(kind.path(Key(place, owner.name)), Object)
        return result is not None and result["metadata"].get("uid") == owner.uid

    async def _act(self, item: Item, verdict: Verdict) -> None:
        match verdict:
            case Delete(policy):
                log.info("garbage collected", kind=item.kind.kind, object=item.key, policy=policy)
                await self._delete(item, policy)
            case Unblock():
                await self._write_owners(
                    item,
                    [
                        msgspec.structs.replace(owner, blockOwnerDeletion=False)
                        for owner in item.owners
                    ],
                )
                await self._delete(item, "Foreground")
            case Release(uids):
                await self._write_owners(
                    item, [owner for owner in item.owners if owner.uid not in uids]
                )
            case Finish(finalizer):
                await self._finish(item, finalizer)
            case Orphan(dependents):
                for dependent in dependents:
                    await self._release_from(dependent, item)
                await self._finish(item, ORPHAN)
            case Await(dependents):
                self._add({dependent.uid for dependent in dependents})
            case Ask() | None:
                return

    async def _release_from(self, dependent: Item, owner: Item) -> None:
        kept = [one for one in dependent.owners if one.uid != owner.uid]
        with suppress(NotFound):
            await self._write_owners(dependent, kept)

    async def _delete(self, item: Item, policy: str) -> None:
        body: Object = {"propagationPolicy": policy, "preconditions": {"uid": item.uid}}
        await self._client.raw("DELETE", item.kind.path(item.key), body=body)

    async def _write_owners(self, item: Item, owners: list[Owner]) -> None:
        await self._patch(item, {"ownerReferences": owners or None})

    async def _finish(self, item: Item, finalizer: str) -> None:
        assert finalizer in (FOREGROUND, ORPHAN)
        left = [one for one in item.finalizers if one != finalizer]
        await self._patch(item, {"finalizers": left or None})

    async def _patch(self, item: Item, change: Object) -> None:
        # With its version: another writer's references or finalizers must not be lost.
        path = item.kind.path(item.key)
        await self._client.merge(path, {"metadata": change}, uid=item.uid, version=item.version)
