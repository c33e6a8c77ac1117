"""Every object of the cluster, as metadata: what garbage collection and namespaces work from.

Kinds come from discovery, those of custom resources from their definitions as these come and go.
Kinds that a shared informer follows anyway are taken from there, so that nothing is watched twice.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
from lightkube.core.resource import (
    ApiInfo,
    GlobalResource,
    NamespacedResourceG,
    ResourceDef,
    api_info,
)
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition

from unbroken.errors import UnbrokenError
from unbroken.kube.backoff import Backoff
from unbroken.kube.cache import HasMetadata, Key, changed, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import entropy, pause
from unbroken.kube.errors import ApiRefusal
from unbroken.kube.informer import Informer, Informers
from unbroken.log_lines import Log

log = Log(__name__)

IGNORED = {("", "events"), ("events.k8s.io", "events"), ("extensions", "ingresses")}
"""Events have no owners and expire; the last is networking.k8s.io's under its old name."""

START_SECONDS = 15.0
"""Seconds for the first lists. Users of the inventory ask the API before they do harm."""

NEEDED_VERBS = {"delete", "list", "watch"}


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """Location of the objects of one kind."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool

    @property
    def id(self) -> tuple[str, str]:
        """Return an id that is the same for all versions."""
        return self.group, self.plural

    def collection(self, namespace: str = "") -> str:
        """Path of the collection, below the server's root."""
        root = f"apis/{self.group}" if self.group else "api"
        inner = f"namespaces/{namespace}/" if namespace else ""
        return f"{root}/{self.version}/{inner}{self.plural}"

    def path(self, key: Key) -> str:
        """Path of an object."""
        return f"{self.collection(key.namespace)}/{key.name}"


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """`metav1.OwnerReference`."""

    apiVersion: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None
    blockOwnerDeletion: bool | None = None

    @property
    def group(self) -> str:
        """Group of the owner's kind."""
        return self.apiVersion.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Item:
    """One object's metadata."""

    kind: ResourceKind
    key: Key
    uid: str
    version: str
    owners: tuple[Owner, ...] = ()
    finalizers: tuple[str, ...] = ()
    is_deleting: bool = False


class _Metadata(msgspec.Struct):
    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resourceVersion: str | None = None
    ownerReferences: list[Owner] | None = None
    finalizers: list[str] | None = None
    deletionTimestamp: str | None = None


class _Partial(msgspec.Struct):
    """Any object; the rest of it is never decoded."""

    metadata: _Metadata


OnItem = Callable[[Item | None, Item | None], None]


class Inventory:
    """All objects of all kinds; `run` it; `ready` returns once it knows them."""

    def __init__(
        self, client: KubeClient, informers: Informers, shared: Sequence[type[Any]]
    ) -> None:
        self.ready = asyncio.Event()
        self.kinds: dict[tuple[str, str], ResourceKind] = {}
        self._client = client
        self._informers = informers
        self._shared = {_identity(one): one for one in shared}
        self._handlers: list[OnItem] = []
        self._items: dict[tuple[tuple[str, str], Key], Item] = {}
        self._by_namespace: defaultdict[str, dict[str, Item]] = defaultdict(dict)
        self._runs: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._custom: dict[str, ResourceKind] = {}

    def subscribe(self, handler: OnItem) -> None:
        """Call `handler(old, new)` for every change from now on."""
        self._handlers.append(handler)

    def items(self) -> Iterator[Item]:
        """Everything there is."""
        return iter(list(self._items.values()))

    def in_namespace(self, namespace: str) -> Iterator[Item]:
        """Everything in a namespace."""
        return iter(list(self._by_namespace.get(namespace, {}).values()))

    def is_empty(self, namespace: str) -> bool:
        """True if the namespace is empty."""
        return namespace not in self._by_namespace

    def find(self, group: str, kind: str) -> ResourceKind | None:
        """The kind by its name, in whatever version it is followed."""
        for known in self.kinds.values():
            if (known.group, known.kind) == (group, kind):
                return known
        return None

    async def run(self) -> None:
        """Follow all kinds until cancelled."""
        resource_kinds = await self._discover()
        async with asyncio.TaskGroup() as tasks:
            started = [self._follow(kind, tasks) for kind in resource_kinds]
            await self._wait(started)
            self.ready.set()
            definitions = self._informers.of(CustomResourceDefinition)
            definitions.subscribe(partial(self._on_definition, tasks))
            await asyncio.Event().wait()

    async def _wait(self, started: list[asyncio.Event]) -> None:
        """Wait for the first lists, but not for ever for one that cannot be had."""
        try:
            async with asyncio.timeout(START_SECONDS):
                for synced in started:
                    await synced.wait()
        except TimeoutError:
            missing = sum(not synced.is_set() for synced in started)
            log.warning("kinds not listed in time", count=missing)

    async def _discover(self) -> list[ResourceKind]:
        backoff, random, failures = Backoff(), entropy(), 0
        while True:
            try:
                return await discover(self._client)
            except UnbrokenError as error:
                failures += 1
                log.warning("kinds not discovered", failures=failures, error=error)
                await pause(backoff.delay(failures, random))

    def _follow(self, kind: ResourceKind, tasks: asyncio.TaskGroup) -> asyncio.Event:
        self.kinds[kind.id] = kind
        shared = self._shared.get((kind.group, kind.version, kind.plural))
        handler = partial(self._on_object, kind)
        if shared is not None:
            informer = self._informers.of(shared)
            informer.subscribe(handler)
            return informer.synced
        own: Informer[_Partial] = Informer(self._client, _class_for(kind), on_change=handler)
        self._runs[kind.id] = tasks.create_task(own.run())
        return own.synced

    def _on_definition(
        self,
        tasks: asyncio.TaskGroup,
        old: CustomResourceDefinition | None,
        new: CustomResourceDefinition | None,
    ) -> None:
        name = key_of(changed(old, new)).name
        wanted = custom_kind(new) if new is not None else None
        known = self._custom.pop(name, None)
        if wanted is not None:
            self._custom[name] = wanted
        if wanted == known:
            return
        if known is None and wanted is not None and self._is_followed(wanted):
            return  # discovery found it first
        if known is not None:
            self._abandon(known)
        if wanted is not None:
            self._follow(wanted, tasks)

    def _is_followed(self, wanted: ResourceKind) -> bool:
        known = self.kinds.get(wanted.id)
        return known is not None and (known.kind, known.namespaced) == (
            wanted.kind,
            wanted.namespaced,
        )

    def _abandon(self, kind: ResourceKind) -> None:
        task = self._runs.pop(kind.id, None)
        if task is not None:
            task.cancel()
        self.kinds.pop(kind.id, None)
        for (owner, key), item in list(self._items.items()):
            if owner == kind.id:
                self._put(kind, key, None)
                log.debug("object forgotten with its kind", kind=kind.kind, object=item.key)

    def _on_object(self, kind: ResourceKind, old: Any, new: Any) -> None:
        key = key_of(new if new is not None else old)
        self._put(kind, key, None if new is None else item_of(kind, new))

    def _put(self, kind: ResourceKind, key: Key, new: Item | None) -> None:
        place = (kind.id, key)
        old = self._items.get(place)
        if old is not None:
            self._by_namespace[key.namespace].pop(old.uid, None)
        if new is None:
            self._items.pop(place, None)
        else:
            self._items[place] = new
            self._by_namespace[key.namespace][new.uid] = new
        if not self._by_namespace[key.namespace]:
            del self._by_namespace[key.namespace]
        if old is not None or new is not None:
            for handler in self._handlers:
                handler(old, new)


def item_of(kind: ResourceKind, content: HasMetadata) -> Item:
    """The metadata of an object of any class."""
    metadata: Any = content.metadata
    return Item(
        kind,
        key_of(content),
        metadata.uid or "",
        metadata.resourceVersion or "",
        tuple(
            Owner(
                ownerreference.apiVersion,
                ownerreference.kind,
                ownerreference.name,
                ownerreference.uid,
                ownerreference.controller,
                ownerreference.blockOwnerDeletion,
            )
            for ownerreference in metadata.ownerReferences or ()
        ),
        tuple(metadata.finalizers or ()),
        metadata.deletionTimestamp is not None,
    )


async def discover(client: KubeClient) -> list[ResourceKind]:
    """Kinds that can be watched and deleted, each in its group's preferred version.

    Custom resources are among them.  Raises as `api_errors`.
    """
    groups: Object = msgspec.json.decode(await client.raw("GET", "apis"))
    versions = [
        ("", "v1"),
        *(
            (group["name"], group["preferredVersion"]["version"])
            for group in groups.get("groups") or ()
        ),
    ]
    resource_kinds: list[ResourceKind] = []
    for name, version in versions:
        path = f"apis/{name}/{version}" if name else f"api/{version}"
        try:
            listed: Object = msgspec.json.decode(await client.raw("GET", path))
        except ApiRefusal as error:
            # A group that vanished meanwhile must not hide the others.
            log.warning("group not discovered", group=name, error=error)
            continue
        resource_kinds += _kinds_in(name, version, listed)
    return resource_kinds


def _kinds_in(group: str, version: str, listed: Mapping[str, Any]) -> list[ResourceKind]:
    return [
        ResourceKind(group, version, item["kind"], item["name"], bool(item.get("namespaced")))
        for item in listed.get("resources") or ()
        if "/" not in item["name"]
        and (group, item["name"]) not in IGNORED
        and NEEDED_VERBS.issubset(item.get("verbs") or ())
    ]


def custom_kind(definition: CustomResourceDefinition) -> ResourceKind | None:
    """The kind that a definition makes; None while it is not served."""
    spec, status = definition.spec, definition.status
    conditions = (status and status.conditions) or ()
    if not any(
        condition.type == "Established" and condition.status == "True" for condition in conditions
    ):
        return None
    served = [version.name for version in spec.versions if version.served]
    if not served:
        return None
    names = spec.names
    return ResourceKind(spec.group, served[0], names.kind, names.plural, spec.scope == "Namespaced")


def _class_for(kind: ResourceKind) -> type[_Partial]:
    base = NamespacedResourceG if kind.namespaced else GlobalResource

    class Followed(base, _Partial):  # type: ignore[misc, valid-type]
        _api_info: ClassVar[ApiInfo] = ApiInfo(
            resource=ResourceDef(kind.group, kind.version, kind.kind),
            plural=kind.plural,
            verbs=["global_list", "global_watch", "list", "watch"],
        )

    return Followed


def _identity(resource: type[Any]) -> tuple[str, str, str]:
    info = api_info(resource)
    return info.resource.group, info.resource.version, info.plural
