"""The garbage collector at work: looks at what changed, and does what `garbage` decides."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress

import msgspec

from unbroken.errors import WorldError
from unbroken.kube.cache import Key
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.errors import NotFound
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log

from .garbage import (
    FOREGROUND,
    ORPHAN,
    Ask,
    Await,
    Delete,
    Finish,
    Graph,
    Orphan,
    Release,
    Unblock,
    Verdict,
    judge,
)
from .inventory import Inventory, Item, Owner

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
