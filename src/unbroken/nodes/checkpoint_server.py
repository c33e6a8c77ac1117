"""One member of the checkpoint memory: the memory tier of HyperPod's tiered checkpointing, by HTTP.

Any member answers each request of the documented protocol, and asks the members that hold the
shard. AWS's package `amzn-sagemaker-checkpointing` is the client. The protocol has no
authentication: whoever reaches the port may read and write. Members speak the same protocol with
each other; the header `Unbroken-Stamp` marks a request that a member answers from its own memory.

A shard is copied when it comes. After a member was lost or has joined, the others copy the shards
that are missing (`repairs`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from unbroken.agent_http.sessions import plain_session
from unbroken.core.checkpoint_memory import (
    CONFIG_RANK,
    COPIES,
    PORT,
    RANKS_MAX,
    SERVICE,
    STEPS_RETAINED,
    STEPS_RETAINED_MAX,
    NamespaceSettings,
    Shard,
    ShardKey,
    is_namespace,
    is_stale_metadata,
    repairs,
    whole_steps,
)
from unbroken.errors import SpecError, WorldError
from unbroken.foreign_numbers import INT64_MAX
from unbroken.kube.clock import wall
from unbroken.listener import Limits, bound, serving
from unbroken.log_lines import LastProblem, Log

from .checkpoint_files import CheckpointFiles, IncomingShard
from .checkpoint_peers import (
    CONTENTS_PATH,
    PIECE_BYTES,
    Contents,
    FindMembers,
    HeldShard,
    Namespace,
    Peers,
    address_of,
    own_host,
)
from .checkpoint_requests import (
    META_HEADER,
    answered,
    fill,
    key_in,
    meta_of,
    namespace_of,
    number_of,
    stamp_of,
    unless_refused,
)

log = Log(__name__)

LIMITS = Limits(1024)
"""Connections: the ranks that save at once, and the other members."""
LATEST, LATEST_MAX = 5, 1000
"""Steps in a list of the newest: by default, and at most."""
MEMBERS_SECONDS = 2.0
"""Seconds between two looks at the list of members, and at the capacity."""
ASKED = 2 * COPIES
"""Members that are asked for a shard: its holders, and those before two of them came."""
_NAMESPACE_PATH = "/v1/cp/namespaces/{namespace}"
_SHARD_PATH = "/v1/cp/checkpoints/{namespace}/{rank}/{step}"
JOINED_PATH = "/v1/members/joined"


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Options of a member."""

    folder: Path
    host: str
    """Address that it listens on, and by which other members know it."""
    capacity: Callable[[], int]
    """Returns the bytes of all shards, as they are to be now. Raises SpecError."""
    find: FindMembers
    port: int = PORT
    look_seconds: float = MEMBERS_SECONDS
    service: str = SERVICE
    """Name by which clients may call it, besides its addresses and the documented name."""


async def serve_member(options: MemberOptions, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until cancelled. Raises WorldError, or SpecError for a host that is no IP address."""
    own = address_of(own_host(options.host), options.port)
    files = CheckpointFiles(options.folder, options.capacity())
    files.open()
    async with plain_session() as session:
        peers = Peers(own, session)
        member = Member(files, peers, options)
        # Alone it would list only the steps of its own shards.
        await member.look()
        async with _listening(member.application(), options):
            log.info("checkpoint memory", address=peers.own, bytes=files.memory.capacity)
            ready()
            await member.run()


@contextlib.asynccontextmanager
async def _listening(app: web.Application, options: MemberOptions) -> AsyncIterator[None]:
    try:
        # All ranks save at once, and AWS's client does not try again.
        sockets = await bound(options.host, options.port, LIMITS.connections)
    except OSError as error:
        text = f"cannot serve checkpoints at {options.host}:{options.port}: {error.strerror}"
        raise WorldError(text) from error
    async with serving(app, sockets, LIMITS, handler_cancellation=True, shutdown_seconds=1.0):
        yield


Held = dict[tuple[int, int], int]
"""Stamps of the newest shards of a namespace, by rank and step."""


@dataclass(slots=True)
class _Flights:
    """Questions under way; callers with the same question share one answer."""

    tasks: dict[str, asyncio.Task[Held]] = field(default_factory=dict)

    async def join(self, name: str, ask: Callable[[], Awaitable[Held]]) -> Held:
        task = self.tasks.get(name)
        if task is None:
            task = self.tasks[name] = asyncio.ensure_future(ask())
            task.add_done_callback(lambda _: self.tasks.pop(name, None))
        return await asyncio.shield(task)


class Member:
    """Answers requests; `run` keeps the copies of shards complete."""

    def __init__(self, files: CheckpointFiles, peers: Peers, options: MemberOptions) -> None:
        self._files = files
        self._memory = files.memory
        self._peers = peers
        self._options = options
        self._held_asked = _Flights()
        self._is_incomplete = True
        """Some shard may lack a copy."""
        self._members_problem = LastProblem()
        self._capacity_problem = LastProblem()
        self._look_now = asyncio.Event()

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application(middlewares=[answered(self._options.service)])
        routes: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/health", self._health),
            ("GET", _NAMESPACE_PATH, self._get_namespace),
            ("POST", _NAMESPACE_PATH, self._create_namespace),
            ("DELETE", _NAMESPACE_PATH, self._delete_namespace),
            ("GET", "/v1/cp/checkpoints/{namespace}/latest", self._latest),
            ("POST", _SHARD_PATH, self._put),
            ("GET", _SHARD_PATH, self._get),
            ("DELETE", _SHARD_PATH, self._delete),
            ("POST", "/v1/cp/cluster/reset", self._reset),
            ("GET", CONTENTS_PATH, self._contents),
            ("POST", JOINED_PATH, self._joined),
        )
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
        return app

    # --- namespaces

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _get_namespace(self, request: web.Request) -> web.Response:
        settings = await self._settings(namespace_of(request), is_own=stamp_of(request) is not None)
        body = Namespace(settings.num_ranks, settings.steps_retained, settings.stamp)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _settings(self, namespace: str, *, is_own: bool = False) -> NamespaceSettings:
        """Return the settings of a namespace. Raises HTTPNotFound."""
        self._memory.use(namespace, wall())
        settings = self._memory.settings(namespace)
        if settings is not None:
            return settings
        if not is_own:
            for member in self._peers.order(namespace, CONFIG_RANK)[:ASKED]:
                found = await self._settings_of(member, namespace)
                if found is not None:
                    self._files.configure(namespace, found)
                    return found
        raise web.HTTPNotFound(
            text=f"namespace {namespace!r} is unknown; create it with POST "
            f"/v1/cp/namespaces/{namespace}?num_ranks=N"
        )

    async def _settings_of(self, member: str, namespace: str) -> NamespaceSettings | None:
        if member == self._peers.own:
            return None
        path = _NAMESPACE_PATH.format(namespace=namespace)
        with contextlib.suppress(WorldError, msgspec.MsgspecError):
            async with self._peers.ask(member, "GET", path, 0) as answer:
                if answer.status == 200:
                    found = msgspec.json.decode(await answer.read(), type=Namespace)
                    steps = found.steps_to_retain_per_rank
                    return NamespaceSettings(found.num_ranks, steps, found.stamp)
        return None

    async def _create_namespace(self, request: web.Request) -> web.Response:
        namespace, own_stamp = namespace_of(request), stamp_of(request)
        settings = NamespaceSettings(
            number_of(request, "num_ranks", None, RANKS_MAX + 1),
            number_of(request, "steps_retained", STEPS_RETAINED, STEPS_RETAINED_MAX),
            wall_stamp() if own_stamp is None else own_stamp,
        )
        if own_stamp is None and await self._is_known(namespace):
            raise web.HTTPConflict(text=f"namespace {namespace!r} exists already")
        unless_refused(self._files.configure(namespace, settings))
        if own_stamp is None:
            path = _NAMESPACE_PATH.format(namespace=namespace)
            query = {
                "num_ranks": str(settings.num_ranks),
                "steps_retained": str(settings.steps_retained),
            }
            members = self._peers.members
            await self._statuses(members, "POST", path, settings.stamp, params=query)
        return web.json_response({"status": "created"})

    async def _is_known(self, namespace: str) -> bool:
        try:
            await self._settings(namespace)
        except web.HTTPNotFound:
            return False
        return True

    async def _delete_namespace(self, request: web.Request) -> web.Response:
        namespace, own_stamp = namespace_of(request), stamp_of(request)
        is_known = await self._is_known(namespace) if own_stamp is None else False
        is_known = self._files.forget(namespace) or is_known
        if own_stamp is None:
            path = _NAMESPACE_PATH.format(namespace=namespace)
            found = await self._statuses(self._peers.members, "DELETE", path, wall_stamp())
            is_known = is_known or 200 in found.values()
            silent = sorted(member for member, status in found.items() if status == 0)
            if silent:
                raise web.HTTPServiceUnavailable(
                    text=f"{', '.join(silent)} did not answer and may still have the namespace; "
                    "delete it again"
                )
        if not is_known:
            raise web.HTTPNotFound(text=f"namespace {namespace!r} is unknown")
        return web.json_response({"status": "deleted"})

    async def _statuses(
        self, members: Iterable[str], method: str, path: str, stamp: int, **more: Any
    ) -> dict[str, int]:
        """Ask members other than this one; returns the status of each answer."""
        others = [member for member in members if member != self._peers.own]
        asked = (self._peers.status(member, method, path, stamp, **more) for member in others)
        return dict(zip(others, await asyncio.gather(*asked), strict=True))

    async def _reset(self, _: web.Request) -> web.Response:
        raise web.HTTPForbidden(
            text="a reset would delete the checkpoints of all jobs: delete namespaces instead"
        )

    # --- shards

    async def _latest(self, request: web.Request) -> web.Response:
        namespace = namespace_of(request)
        limit = number_of(request, "limit", LATEST, LATEST_MAX)
        # A job begins anew if it finds no step: rather wait for a member that was silent.
        self._peers.ask_all_again()
        await self._settings(namespace)
        held = await self._held_asked.join(namespace, lambda: self._held(namespace))
        return web.json_response(whole_steps(held, limit))

    async def _held(self, namespace: str) -> Held:
        held = {(one.key.rank, one.key.step): one.stamp for one in self._memory.shards(namespace)}
        for contents in (await self._peers.contents(namespace)).values():
            for one in contents.shards.get(namespace, ()):
                place = (one.rank, one.step)
                held[place] = max(one.stamp, held.get(place, 0))
        return held

    async def _put(self, request: web.Request) -> web.Response:
        key, own_stamp = key_in(request), stamp_of(request)
        size = request.content_length
        if size is None:
            raise web.HTTPLengthRequired(text="a shard needs its Content-Length")
        shard = Shard(key, size, wall_stamp() if own_stamp is None else own_stamp, meta_of(request))
        if own_stamp is not None:
            retained = number_of(request, "steps_retained", STEPS_RETAINED, STEPS_RETAINED_MAX)
            with unless_refused(self._files.receive(shard)) as incoming:
                await fill(incoming, request)
                self._files.keep(incoming, retained)
            holders = self._peers.order(key.namespace, key.rank)[:COPIES]
            # A shard that is here in place of another member goes there once that answers.
            self._is_incomplete = self._is_incomplete or self._peers.own not in holders
            return web.json_response({"status": "ok"})
        settings = await self._settings(key.namespace)
        if key.rank >= settings.num_ranks - 1:
            shard = await self._after_others(shard)
        with unless_refused(self._files.receive(shard)) as incoming:
            await fill(incoming, request)
            await self._store(incoming, settings.steps_retained)
        return web.json_response({"status": "ok"})

    async def _after_others(self, shard: Shard) -> Shard:
        """Return the metadata of a save with a stamp above those of its ranks.

        It is written once they are, but the clocks of the members that took them may be ahead.
        """
        held = await self._held(shard.key.namespace)
        others = (stamp for (_, step), stamp in held.items() if step == shard.key.step)
        stamp = max([shard.stamp, *(one + 1 for one in others)])
        return replace(shard, stamp=min(stamp, INT64_MAX))

    async def _is_stale(self, key: ShardKey) -> bool:
        """True for the metadata of an earlier save of a step: it describes other shards.

        The other members are asked only about a rank that may be the metadata.
        """
        settings = self._memory.settings(key.namespace)
        if settings is None or key.rank < settings.num_ranks - 1:
            return False
        held = await self._held_asked.join(key.namespace, lambda: self._held(key.namespace))
        return is_stale_metadata(key, held)

    async def _store(self, incoming: IncomingShard, retained: int) -> None:
        """Keep a shard that has come whole at the first `COPIES` members of its rank that take it.

        One that does not answer is replaced by the next in the order, until it is there again.
        """
        key = incoming.shard.key
        order = self._peers.order(key.namespace, key.rank)[:ASKED]
        if len(self._peers.answering(order)) < COPIES:
            # Rather wait for one that was silent than keep a single copy.
            self._peers.ask_all_again()
        is_kept, count, asked = False, 0, 0
        while count < COPIES and asked < len(order):
            members = order[asked : asked + COPIES - count]
            asked += len(members)
            others = [member for member in members if member != self._peers.own]
            statuses = await asyncio.gather(
                *(self._send(incoming.shard, incoming.path, member, retained) for member in others)
            )
            is_kept = is_kept or self._peers.own in members
            count += statuses.count(200) + len(members) - len(others)
        self._is_incomplete = self._is_incomplete or asked > COPIES or count < COPIES
        # Rather one copy here than none.
        if is_kept or count == 0:
            self._files.keep(incoming, retained)

    async def _send(self, shard: Shard, path: Path, member: str, retained: int) -> int:
        """Copy a shard to another member; returns the status of its answer."""
        with path.open("rb") as file:
            status = await self._peers.status(
                *(member, "POST", _path_of(shard.key), shard.stamp),
                size=shard.size,
                data=file,
                params={"steps_retained": str(retained)},
                headers={META_HEADER: shard.meta, "Content-Type": "application/octet-stream"},
            )
        if status not in (0, 200, 409):
            log.warning("checkpoint not copied", address=member, status=status)
        # A member that has a newer save needs none.
        return 200 if status == 409 else status

    async def _get(self, request: web.Request) -> web.StreamResponse:
        key = key_in(request)
        is_asked_by_client = stamp_of(request) is None
        if is_asked_by_client and await self._is_stale(key):
            raise web.HTTPNotFound(
                text=f"step {key.step} is being saved again; its metadata is of an earlier save"
            )
        shard = self._files.find(key)
        if shard is not None:
            self._memory.use(key.namespace, wall())
            return web.FileResponse(self._files.path(shard), headers={META_HEADER: shard.meta})
        if is_asked_by_client:
            for member in self._peers.order(key.namespace, key.rank)[:ASKED]:
                answer = await self._pass_on(request, member, key)
                if answer is not None:
                    return answer
        raise web.HTTPNotFound(
            text=f"namespace {key.namespace!r} has no step {key.step} of rank {key.rank}"
        )

    async def _pass_on(
        self, request: web.Request, member: str, key: ShardKey
    ) -> web.StreamResponse | None:
        """Pass on a shard from another member; None: it is not there."""
        if member == self._peers.own:
            return None
        response = None
        try:
            async with self._peers.ask(
                member, "GET", _path_of(key), 0, size=self._memory.capacity
            ) as answer:
                if answer.status != 200 or answer.content_length is None:
                    return None
                meta = answer.headers.get(META_HEADER, "")
                response = web.StreamResponse(headers={META_HEADER: meta})
                response.content_length = answer.content_length
                response.content_type = "application/octet-stream"
                # A client that has gone is no fault of the member.
                with contextlib.suppress(ConnectionError):
                    await response.prepare(request)
                    async for data in answer.content.iter_chunked(PIECE_BYTES):
                        await response.write(data)
                    await response.write_eof()
        except WorldError:
            if response is not None:
                # The client sees that bytes are missing.
                response.force_close()
                if request.transport is not None:
                    request.transport.abort()
        return response

    async def _delete(self, request: web.Request) -> web.Response:
        key, own_stamp = key_in(request), stamp_of(request)
        is_removed = self._files.remove(key)
        if own_stamp is None:
            members = self._peers.order(key.namespace, key.rank)[:ASKED]
            found = await self._statuses(members, "DELETE", _path_of(key), 0)
            is_removed = is_removed or 200 in found.values()
        if not is_removed:
            raise web.HTTPNotFound(
                text=f"namespace {key.namespace!r} has no step {key.step} of rank {key.rank}"
            )
        return web.json_response({"status": "deleted"})

    # --- members

    async def _contents(self, request: web.Request) -> web.Response:
        namespace = request.query.get("namespace")
        shards: dict[str, list[HeldShard]] = {}
        for one in self._memory.shards(namespace):
            held = HeldShard(one.key.rank, one.key.step, one.stamp)
            shards.setdefault(one.key.namespace, []).append(held)
        settings = {
            name: (one.num_ranks, one.steps_retained, one.stamp)
            for name, one in self._memory.all_settings().items()
        }
        count = len(self._peers.members)
        body = Contents(self._memory.capacity, self._memory.used(), count, settings, shards)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _joined(self, _: web.Request) -> web.Response:
        """Look for missing copies: a member has started, perhaps with an empty memory."""
        self._peers.ask_all_again()
        self._is_incomplete = True
        self._look_now.set()
        return web.json_response({"status": "ok"})

    async def run(self) -> None:
        """Follow the list of members, and copy the shards that a member lacks."""
        unaware = self._peers.members
        while True:
            told = await self._statuses(unaware & self._peers.members, "POST", JOINED_PATH, 0)
            unaware = frozenset(member for member, status in told.items() if status == 0)
            self._follow_capacity()
            if self._is_incomplete:
                await self._repair()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.look_seconds):
                    await self._look_now.wait()
            self._look_now.clear()
            await self.look()

    async def look(self) -> None:
        """Take over the list of members; the known ones remain if it cannot be read."""
        try:
            members = frozenset(await self._options.find()) | {self._peers.own}
        except OSError as error:
            if self._members_problem.note(str(error)):
                log.warning("members of the checkpoint memory unknown", error=error)
            return
        self._members_problem.note("")
        if members != self._peers.members:
            log.info("members of the checkpoint memory", count=len(members))
            self._peers.members = members
            self._is_incomplete = True

    def _follow_capacity(self) -> None:
        before = self._memory.capacity
        try:
            capacity = self._options.capacity()
            if capacity != before:
                self._files.resize(capacity)
        except (SpecError, OSError) as error:
            # The known capacity remains.
            if self._capacity_problem.note(str(error)):
                log.warning("checkpoint memory not resized", error=error)
            return
        self._capacity_problem.note("")
        if capacity == before:
            return
        # A larger memory takes the copies that it has refused.
        self._is_incomplete = True
        log.info("checkpoint memory", address=self._peers.own, bytes=capacity)

    async def _repair(self) -> None:
        self._is_incomplete = False
        held = await self._peers.contents()
        known = {
            member: {
                ShardKey(name, one.rank, one.step): one.stamp
                for name, shards in contents.shards.items()
                for one in shards
            }
            for member, contents in held.items()
        }
        missing = self._peers.members - known.keys() - {self._peers.own}
        self._is_incomplete = self._is_incomplete or bool(missing)
        for contents in held.values():
            for name, (ranks, steps, stamp) in contents.settings.items():
                if is_namespace(name):
                    with self._noted():
                        given = NamespaceSettings(ranks, steps, stamp)
                        self._files.configure(name, given, makes_room=False)
        shards = list(self._memory.shards())
        copies, surplus = repairs(self._peers.own, self._peers.members, shards, known)
        for shard, member in copies:
            with self._noted():
                # The next look drops those that are here in place of another member.
                self._is_incomplete = await self._copy(shard, member) or self._is_incomplete
        for shard in surplus:
            with self._noted():
                self._files.remove(shard.key, shard.stamp + 1)
        if copies or surplus:
            log.info("checkpoints copied", count=len(copies))

    async def _copy(self, shard: Shard, member: str) -> bool:
        """Copy a shard to another member, if it is still here. Raises OSError.

        Returns True if another look is due: it was copied, or the member did not answer.
        """
        settings = self._memory.settings(shard.key.namespace)
        retained = STEPS_RETAINED if settings is None else settings.steps_retained
        if self._files.find(shard.key) != shard:
            return False
        status = await self._send(shard, self._files.path(shard), member, retained)
        return status in (0, 200)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Go on after an error of one file; the next repair tries again."""
        try:
            yield
        except OSError as error:
            log.warning("checkpoint not repaired", error=error)
            self._is_incomplete = True


def wall_stamp() -> int:
    """Return the time in nanoseconds since the epoch."""
    return int(wall() * 1e9)


def _path_of(key: ShardKey) -> str:
    return _SHARD_PATH.format(namespace=key.namespace, rank=key.rank, step=key.step)
