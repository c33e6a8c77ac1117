"""Copies of a kind's objects, kept current by list and watch, and shared by the programs of one
process.

`Informer.run` never ends by itself. It lists, and watches from the list's version. After a break it
resumes from the last version it saw, and lists again when the server has forgotten that version.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Generic, TypeVar, cast

import msgspec
from lightkube.core.decoders import decode_object
from lightkube.core.resource import Resource

from unbroken.errors import SpecError, UnbrokenError
from unbroken.log_lines import Log

from .backoff import Backoff
from .bounds import FREE_SECONDS, Postponed, excess
from .cache import Cache, Change, HasMetadata, Key, changed, key_of
from .client import KubeClient, ListScope
from .clock import entropy, monotonic, pause, processor
from .errors import Expired
from .events import EventRecorder
from .observed import observed
from .refusals import REASON, REMEMBERED, ObjectIdentity, Refusals, RefusedObject, head_of

log = Log(__name__)

PAGE = 500
"""Objects a page, as client-go's pager asks for."""

SERVER_SECONDS = (240, 360)
"""Bounds of a watch's life in seconds, chosen at random, so that a server's watches do not all end
at once."""

IDLE_SECONDS = 100.0
"""Seconds without a byte after which a watch counts as dead.

kube-apiserver sends a bookmark about every minute (storage/cacher, bookmarkFrequency); a server
that sends none costs a reconnect.
"""

SETTLED_SECONDS = 1.0
"""Seconds that a watch must last, or else bring an event, to end a run of failures."""


T = TypeVar("T", bound=HasMetadata)
OnChange = Callable[[T | None, T | None], None]


TURN_SECONDS = 0.02
"""Work in one turn of the loop on objects of a list."""

COMPONENT = "unbroken"
"""Reporter of the events of refused objects."""

LOUD_FAILURES = 5
"""Failures in a row after which a warning is logged; a restarting server causes fewer."""


class _Meta(msgspec.Struct):
    resourceVersion: str = ""


class _Bookmark(msgspec.Struct):
    metadata: _Meta


class Informer(Generic[T]):
    """A copy of the objects in one scope, and a callback for each change to it.

    `namespace` None: all of them. `labels`, `fields`: selectors as the API writes them.
    `on_change(old, new)` is called synchronously and in order; old None: new here, new None: gone.
    Changes of a namespace that cost too much come later, the newest of each object (`bounds`).
    Errors of one object, in its decoding or in a handler, are noted in `refusals` and affect no
    other object. An object that cannot be decoded is kept as it was before, and new ones are left
    out. `tells`: write an event on each such object.
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
        tells: bool = True,
    ) -> None:
        self.synced = asyncio.Event()
        """Set once the first list is in the copy and its callbacks have been called."""
        self.refusals = Refusals(resource_type, client.objects)
        """Objects that could not be decoded, or that a handler could not take."""
        self.lists = self.failures = 0
        """Number of complete reads, and of failures to read or watch."""
        self.received_at: float | None = None
        """Time of the server's last message, by `clock.monotonic`."""
        self.idle_seconds = IDLE_SECONDS
        """Seconds without a byte after which a watch is opened again."""
        self._client = client
        self._type = resource_type
        self._scope = ListScope(cast(type[Resource], resource_type), namespace, labels, fields)
        self._is_open = dict in resource_type.__mro__
        """Objects are dicts of anything, not structs of known fields."""
        self._handlers: list[OnChange[T]] = [on_change] if on_change else []
        self._cache: Cache[T] = Cache()
        self._version: str | None = None
        self._has_moved = False
        self._notifies = tells
        self._left_out: OrderedDict[Key, RefusedObject] = OrderedDict()
        """Objects that cannot be read now; the oldest are forgotten beyond REMEMBERED."""
        self._on_refusal: list[Callable[[RefusedObject], None]] = []
        self._postponed = Postponed(client.objects)
        self._existing = Postponed(client.objects)
        """Calls of new callbacks for existing objects."""
        self._events: EventRecorder | None = None
        self._random: Random = entropy()

    def get(self, name: str, namespace: str | None = None) -> T | None:
        """Return the object as last seen, or None; do not change it."""
        return self._cache.get(Key(namespace or "", name))

    def items(self) -> Iterator[T]:
        """Return every object as last seen; do not change them."""
        return iter(self._cache)

    def __len__(self) -> int:
        return len(self._cache)

    def subscribe(self, on_change: OnChange[T]) -> None:
        """Add a callback; it is called at once for existing objects."""
        self._handlers.append(on_change)
        for item in list(self._cache):
            self._call(on_change, None, item)

    def subscribe_in_turn(self, on_change: OnChange[T]) -> None:
        """Add a callback; it is called for existing objects within the budgets of their namespaces,
        perhaps after a later change of the same object."""
        self._handlers.append(on_change)
        for key in [key_of(item) for item in self._cache]:
            call = partial(self._call_existing, on_change, key)
            self._existing.take(key.namespace, (on_change, key), call)

    def _call_existing(self, handler: OnChange[T], key: Key) -> None:
        item = self._cache.get(key)
        if item is not None:
            self._call(handler, None, item)

    def on_refusal(self, handler: Callable[[RefusedObject], None]) -> None:
        """Add a callback for objects that cannot be decoded; it is called at once for known
        ones."""
        self._on_refusal.append(handler)
        for refusal in list(self._left_out.values()):
            handler(refusal)

    @property
    def resource(self) -> str:
        """Return the path of the collection that is watched."""
        return self._scope.path()

    @observed
    async def run(self) -> None:
        """Keep the copy fresh until cancelled."""
        try:
            if not self._notifies:
                await self._follow()
                return
            self._events = EventRecorder(self._client, COMPONENT)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._events.run())
                await self._follow()
        finally:
            self._postponed.clear()
            self._existing.clear()

    async def _follow(self) -> None:
        backoff, failures = Backoff(), 0
        while True:
            started, self._has_moved = monotonic(), False
            resumes = self._version is not None
            try:
                if not resumes:
                    await self._list()
                await self._watch()
                reason = "the server ended the watch"
            except UnbrokenError as error:
                self.failures += 1
                reason = str(error)
                if isinstance(error, Expired):
                    self._version = None
                    if resumes:
                        # The server answers, and has forgotten the version: list at once.
                        log.debug("watch lists again", path=self._scope.path(), reason=reason)
                        continue
            except Exception:
                # No task waits for this one: an error would end the program.
                self.failures += 1
                self._version, reason = None, "an error of this program"
                log.exception("watch failed", path=self._scope.path())
            settled = monotonic() - started >= SETTLED_SECONDS
            failures = 0 if self._has_moved or settled else failures + 1
            self._log_failures(failures, reason)
            if failures:
                await self._client.pause(backoff.delay(failures, self._random))

    def _log_failures(self, failures: int, reason: str) -> None:
        level = logging.WARNING if failures == LOUD_FAILURES else logging.DEBUG
        log.log(level, "watch failed", path=self._scope.path(), failures=failures, error=reason)

    async def _list(self) -> None:
        self._left_out.clear()
        page = await self._client.list_page(self._scope, PAGE)
        items = await self._listed(page.items)
        while page.next:
            page = await self._client.list_page(self._scope, PAGE, page.next)
            items += await self._listed(page.items)
        self._version = page.version
        self.lists, self.received_at = self.lists + 1, monotonic()
        self._postponed.clear()
        self._notify(self._cache.replace(items))
        self.synced.set()

    async def _watch(self) -> None:
        assert self._version is not None
        events = self._client.watch_events(
            self._scope, self._version, self._random.randint(*SERVER_SECONDS), self.idle_seconds
        )
        async with aclosing(events):
            async for kind, raw in events:
                self.received_at, self._has_moved = monotonic(), True
                if kind == "BOOKMARK":
                    mark = msgspec.json.decode(raw, type=_Bookmark).metadata.resourceVersion
                    self._version = mark or self._version
                    continue
                head = head_of(raw)
                self._version = head.version or self._version
                change = partial(self._apply, kind, raw)
                work = self._postponed.take(head.key.namespace, head.key.name, change)
                if work > FREE_SECONDS:
                    await pause(0)  # Events that have come together are no single turn.

    def _apply(self, kind: str, raw: msgspec.Raw) -> None:
        """Take one event of a watch."""
        item = self._decoded(raw)
        if isinstance(item, RefusedObject):
            if kind == "DELETED" and (held := self._held(item.head)) is not None:
                self._notify(self._cache.apply(kind, held))
            self._leave_out(replace(item, is_gone=kind == "DELETED"))
            return
        if self._left_out:
            self._left_out.pop(key_of(item), None)
        self._notify(self._cache.apply(kind, item))

    async def _listed(self, raws: list[msgspec.Raw]) -> list[T]:
        """Return the objects of a list; an unreadable one counts as unchanged, not as deleted."""
        found: list[T] = []
        began = processor()
        for raw in raws:
            item: T | RefusedObject | None = self._decoded(raw)
            if isinstance(item, RefusedObject):
                self._leave_out(item)
                item = self._held(item.head)
            if item is not None:
                found.append(item)
            if processor() > began + TURN_SECONDS:
                await pause(0)
                began = processor()
        return found

    def _held(self, head: ObjectIdentity) -> T | None:
        """Return the kept copy of this very object."""
        held = self._cache.get(head.key)
        metadata = held.metadata if held is not None else None
        return held if metadata is not None and metadata.uid == head.uid else None

    def _decoded(self, raw: msgspec.Raw) -> T | RefusedObject:
        """Return the object, or why it is left out."""
        content = bytes(raw)
        try:
            if self._is_open and (why := excess(content)):
                raise SpecError(why)
            item: T = decode_object(raw, self._type)
            _require_named(item)
            _forget_managers(item)
        except Exception as error:
            log.debug("object cannot be decoded", path=self._scope.path(), exc_info=True)
            return self.refusals.unreadable(head_of(content), error)
        return item

    def _leave_out(self, refusal: RefusedObject) -> None:
        self._left_out.pop(refusal.head.key, None)
        if not refusal.is_gone:
            self._left_out[refusal.head.key] = refusal
            if len(self._left_out) > REMEMBERED:
                self._left_out.popitem(last=False)
            self._record()
        for handler in self._on_refusal:
            handler(refusal)

    def _notify(self, changes: list[Change[T]]) -> None:
        for old, new in changes:
            for handler in self._handlers:
                self._call(handler, old, new)

    def _call(self, handler: OnChange[T], old: T | None, new: T | None) -> None:
        try:
            handler(old, new)
        except Exception as error:
            log.debug("handler failed", path=self._scope.path(), exc_info=True)
            self.refusals.unhandled(changed(old, new), error)
            self._record()

    def _record(self) -> None:
        untold, self.refusals.unrecorded = self.refusals.unrecorded, []
        if self._events is not None:
            for reference, message in untold:
                self._events.record(reference, "Warning", REASON, message)


def _require_named(item: HasMetadata) -> None:
    metadata = item.metadata
    if metadata is None or not metadata.name:
        raise SpecError("has no name")


def _forget_managers(item: HasMetadata) -> None:
    """Drop `managedFields`, which nothing reads here: they are more than half of a pod's memory."""
    metadata: Any = item.metadata
    if hasattr(metadata, "managedFields"):
        metadata.managedFields = None


class Informers:
    """One informer per kind, over all namespaces; made on first use."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._informers: dict[type[Any], Informer[Any]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def of(self, resource_type: type[T]) -> Informer[T]:
        """Return the informer of a kind; it runs while `run` does."""
        informer = self._informers.get(resource_type)
        if informer is None:
            informer = self._informers[resource_type] = Informer(self._client, resource_type)
            if self._tasks is not None:
                self._tasks.create_task(informer.run())
        return informer

    async def synced(self) -> None:
        """Return once all informers requested so far know their objects."""
        await all_synced(*self._informers.values())

    async def run(self) -> None:
        """Run every informer, also those requested later, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for informer in self._informers.values():
                tasks.create_task(informer.run())
            # A group without members would end, and could take no later ones.
            await asyncio.Event().wait()


async def all_synced(*informers: Informer[Any]) -> None:
    """Return once every informer knows the objects of its kind."""
    for informer in informers:
        await informer.synced.wait()
