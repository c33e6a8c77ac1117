"""Deletes what is in a namespace that is being deleted, then lets the namespace go.

After kube-controller-manager v1.33, pkg/controller/namespace/deletion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import msgspec
from lightkube.resources.core_v1 import Namespace

from unbroken.errors import UnbrokenError
from unbroken.kube.cache import changed, key_of
from unbroken.kube.client import STRATEGIC, KubeClient, Object
from unbroken.kube.clock import rfc3339, wall
from unbroken.kube.errors import MethodNotAllowed, NotFound
from unbroken.kube.informer import Informer
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log

from .inventory import Inventory, Item, ResourceKind

log = Log(__name__)

FINALIZER = "kubernetes"
AGAIN_SECONDS = 2.0
"""Seconds until the next look, if something is left that no event reported."""


class NamespaceDeleter:
    """Empties namespaces that are being deleted.  Wait for `inventory.ready` before `run`."""

    def __init__(
        self, client: KubeClient, namespaces: Informer[Namespace], inventory: Inventory
    ) -> None:
        self._client = client
        self._namespaces = namespaces
        self._inventory = inventory
        self._going: set[str] = set()
        self._queue = WorkQueue("namespace", self._empty, workers=2)

    async def run(self) -> None:
        """Empty namespaces until cancelled."""
        self._inventory.subscribe(self._on_item)
        self._namespaces.subscribe(self._on_namespace)
        await self._queue.run()

    def _on_namespace(self, old: Namespace | None, new: Namespace | None) -> None:
        name = key_of(changed(old, new)).name
        if new is None:
            self._going.discard(name)
        elif new.metadata and new.metadata.deletionTimestamp and name not in self._going:
            self._going.add(name)
            self._queue.add(name)

    def _on_item(self, old: Item | None, new: Item | None) -> None:
        namespace = changed(old, new).key.namespace
        # Not for every change: deletions are expected, and only the last one matters.
        if namespace in self._going and (old is None or self._inventory.is_empty(namespace)):
            self._queue.add(namespace)

    async def _empty(self, name: str) -> float | None:
        path = f"api/v1/namespaces/{name}"
        namespace = await self._client.get_or_none(path, Object)
        if namespace is None or "deletionTimestamp" not in namespace["metadata"]:
            return None
        held = list((namespace.get("spec") or {}).get("finalizers") or ())
        if FINALIZER not in held:
            return None
        failures = await self._delete_content(name)
        left = [] if failures else await self._left(name)
        if failures or left or not self._inventory.is_empty(name):
            present = list(self._inventory.in_namespace(name))
            await self._report(name, namespace, present, failures)
            return AGAIN_SECONDS
        namespace["spec"]["finalizers"] = [item for item in held if item != FINALIZER]
        await self._client.raw("PUT", f"{path}/finalize", body=namespace)
        log.info("namespace emptied", namespace=name)
        return None

    async def _delete_content(self, name: str) -> list[str]:
        """Delete what is not going already; returns what went wrong."""
        kinds = {one.kind for one in self._inventory.in_namespace(name) if not one.is_deleting}
        failures = []
        for kind in sorted(kinds, key=lambda resource_kind: resource_kind.id):
            try:
                await self._delete_all(kind, name)
            except UnbrokenError as error:
                failures.append(str(error))
        return failures

    async def _delete_all(self, kind: ResourceKind, name: str) -> None:
        body: Object = {"propagationPolicy": "Background"}
        try:
            await self._client.raw("DELETE", kind.collection(name), body=body)
        except NotFound:
            return
        except MethodNotAllowed:
            for item in self._inventory.in_namespace(name):
                if item.kind == kind and not item.is_deleting:
                    await self._delete_one(item)

    async def _delete_one(self, item: Item) -> None:
        path = item.kind.path(item.key)
        await self._client.delete_if_present(path, propagation="Background")

    async def _left(self, name: str) -> list[str]:
        """Kinds that the API still has objects of, whatever the inventory shows.

        Only the API's own word makes sure that nothing outlives its namespace.
        """
        left = []
        for kind in [
            resource_kind
            for resource_kind in self._inventory.kinds.values()
            if resource_kind.namespaced
        ]:
            try:
                body = await self._client.raw(
                    "GET", kind.collection(name), parameters={"limit": "1"}
                )
            except (NotFound, MethodNotAllowed):
                continue
            listed: Object = msgspec.json.decode(body)
            if listed.get("items"):
                left.append(kind.plural)
                await self._delete_all(kind, name)
        return left

    async def _report(
        self, name: str, namespace: Object, left: list[Item], failures: list[str]
    ) -> None:
        present = {
            item["type"]: (item["status"], item.get("message"))
            for item in (namespace.get("status") or {}).get("conditions") or ()
        }
        wanted = conditions(left, failures)
        if all(present.get(item["type"]) == (item["status"], item["message"]) for item in wanted):
            return
        for item in wanted:
            item["lastTransitionTime"] = rfc3339(wall())
        path, body = f"api/v1/namespaces/{name}/status", {"status": {"conditions": wanted}}
        with suppress(NotFound):
            await self._client.raw("PATCH", path, body=body, headers=STRATEGIC)


def conditions(left: Iterable[Item], failures: list[str]) -> list[Object]:
    """Return the conditions of a namespace that cannot go yet (namespace/deletion,
    status_condition)."""
    kinds: Counter[str] = Counter()
    finalizers: Counter[str] = Counter()
    for item in left:
        title = f"{item.kind.plural}.{item.kind.group}"
        kinds[title] += 1
        finalizers.update(item.finalizers)
    remaining = ", ".join(f"{kind} has {n} resource instances" for kind, n in sorted(kinds.items()))
    holding = ", ".join(
        f"{name} in {n} resource instances" for name, n in sorted(finalizers.items())
    )
    rows = [
        (
            "NamespaceDeletionDiscoveryFailure",
            "",
            "ResourcesDiscovered",
            "All resources successfully discovered",
        ),
        (
            "NamespaceDeletionGroupVersionParsingFailure",
            "",
            "ParsedGroupVersions",
            "All legacy kube types successfully parsed",
        ),
        (
            "NamespaceDeletionContentFailure",
            f"Failed to delete all resource types, {len(failures)} remaining: {', '.join(failures)}"
            if failures
            else "",
            "ContentDeletionFailed" if failures else "ContentDeleted",
            "All content successfully deleted, may be waiting on finalization",
        ),
        (
            "NamespaceContentRemaining",
            f"Some resources are remaining: {remaining}" if remaining else "",
            "SomeResourcesRemain" if remaining else "ContentRemoved",
            "All content successfully removed",
        ),
        (
            "NamespaceFinalizersRemaining",
            f"Some content in the namespace has finalizers remaining: {holding}" if holding else "",
            "SomeFinalizersRemain" if holding else "ContentHasNoFinalizers",
            "All content-preserving finalizers finished",
        ),
    ]
    return [
        {
            "type": type_,
            "status": "True" if trouble else "False",
            "reason": reason,
            "message": trouble or calm,
        }
        for type_, trouble, reason, calm in rows
    ]
