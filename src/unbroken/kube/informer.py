"""Keeps a copy of one kind's objects, fresh by list and watch.

`Informer.run` never ends by itself: it lists, watches from the list's version, resumes after a
break from the last version it saw, and lists again when the server has forgotten that version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import aclosing
from random import Random
from typing import Any, Generic, TypeVar, cast

import msgspec
from lightkube.core.decoders import decode_object
from lightkube.core.resource import Resource

from unbroken.errors import UnbrokenError

from .backoff import Backoff
from .cache import Cache, Change, HasMetadata, Key
from .client import ApiRefusal, KubeClient, Scope
from .clock import entropy, monotonic, pause
from .observed import observed

log = logging.getLogger(__name__)

PAGE = 500
"""Objects a page, as client-go's pager asks for."""

SERVER_SECONDS = (240, 360)
"""A watch lives this long, at random, so that a server's watches do not end all at once."""

IDLE_SECONDS = 100.0
"""A watch without a byte for this long is taken for dead.  kube-apiserver sends a bookmark every
minute or so (storage/cacher, bookmarkFrequency); a server that sends none costs a reconnect."""

SETTLED_SECONDS = 1.0
"""A watch that lasted this long, or brought an event, ends a run of failures."""


T = TypeVar("T", bound=HasMetadata)
OnChange = Callable[[T | None, T | None], None]


LOUD_FAILURES = 5
"""That many failures in a row are worth a warning; a restarting server causes fewer."""


class _Meta(msgspec.Struct):
    resourceVersion: str = ""


class _Bookmark(msgspec.Struct):
    metadata: _Meta


class Informer(Generic[T]):
    """A copy of the objects in one scope, and a callback for each change to it.

    `namespace` None: all of them.  `labels`, `fields`: selectors as the API writes them.
    `on_change(old, new)` is called synchronously and in order; old None: new here, new None: gone.
    """

    def __init__(
        self,
        client: KubeClient,
        resource_type: type[T],
        *,
        namespace: str | None = None,
        labels: str | None = None,
        fields: str | None = None,
        on_change: OnChange[T] | None = None,
    ) -> None:
        self.synced = asyncio.Event()
        """Set once the first list is in the copy and its callbacks have been called."""
        self.undecodable = 0
        """Objects that were left out because they do not fit their own schema."""
        self.lists = self.failures = 0
        """How often everything was read, and how often reading or watching failed."""
        self.heard_at: float | None = None
        """When the server said something last, by `clock.monotonic`."""
        self.idle_seconds = IDLE_SECONDS
        """A watch without a byte for so long is opened again."""
        self._client = client
        self._type = resource_type
        self._scope = Scope(cast(type[Resource], resource_type), namespace, labels, fields)
        self._handlers: list[OnChange[T]] = [on_change] if on_change else []
        self._cache: Cache[T] = Cache()
        self._version: str | None = None
        self._has_moved = False
        self._random: Random = entropy()

    def get(self, name: str, namespace: str | None = None) -> T | None:
        """The object as last seen, or None; do not change it."""
        return self._cache.get(Key(namespace or "", name))

    def items(self) -> Iterator[T]:
        """Every object as last seen; do not change them."""
        return iter(self._cache)

    def __len__(self) -> int:
        return len(self._cache)

    def subscribe(self, on_change: OnChange[T]) -> None:
        """Add a callback; it is called at once for what is there already."""
        self._handlers.append(on_change)
        for item in list(self._cache):
            on_change(None, item)

    @property
    def resource(self) -> str:
        """What is watched: the path of its collection."""
        return self._scope.path()

    @observed
    async def run(self) -> None:
        """Keep the copy fresh until cancelled."""
        backoff, failures = Backoff(), 0
        while True:
            started, self._has_moved = monotonic(), False
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
                reason = "the server ended the watch"
            except UnbrokenError as error:
                self.failures += 1
                if isinstance(error, ApiRefusal) and error.code == 410:
                    self._version = None
                reason = str(error)
            settled = monotonic() - started >= SETTLED_SECONDS
            failures = 0 if self._has_moved or settled else failures + 1
            level = logging.WARNING if failures == LOUD_FAILURES else logging.DEBUG
            log.log(
                level, 'informer=%s failures=%d reason="%s"', self._scope.path(), failures, reason
            )
            if failures:
                await pause(backoff.delay(failures, self._random))

    async def _list(self) -> None:
        items: list[T] = []
        page = await self._client.list_page(self._scope, PAGE)
        items += self._decoded(page.items)
        while page.next:
            page = await self._client.list_page(self._scope, PAGE, page.next)
            items += self._decoded(page.items)
        self._version = page.version
        self.lists, self.heard_at = self.lists + 1, monotonic()
        self._tell(self._cache.replace(items))
        self.synced.set()

    async def _watch(self) -> None:
        assert self._version is not None
        events = self._client.watch_events(
            self._scope, self._version, self._random.randint(*SERVER_SECONDS), self.idle_seconds
        )
        async with aclosing(events):
            async for kind, raw in events:
                self.heard_at, self._has_moved = monotonic(), True
                if kind == "BOOKMARK":
                    mark = msgspec.json.decode(raw, type=_Bookmark).metadata.resourceVersion
                    self._version = mark or self._version
                    continue
                for item in self._decoded([raw]):
                    self._tell(self._cache.apply(kind, item))
                    if item.metadata and item.metadata.resourceVersion:
                        self._version = item.metadata.resourceVersion

    def _decoded(self, raws: list[msgspec.Raw]) -> Iterator[T]:
        for raw in raws:
            try:
                item: T = decode_object(raw, self._type)
            except msgspec.ValidationError as error:
                # One odd object must not hide the others.
                self.undecodable += 1
                log.warning('informer=%s left_out="%s"', self._scope.path(), error)
            else:
                _forget_managers(item)
                yield item

    def _tell(self, changes: list[Change[T]]) -> None:
        for old, new in changes:
            for handler in self._handlers:
                handler(old, new)


def _forget_managers(item: HasMetadata) -> None:
    """Drop `managedFields`, which nobody reads here: they are more than half of a pod's memory."""
    metadata: Any = item.metadata
    if hasattr(metadata, "managedFields"):
        metadata.managedFields = None
