"""Runs the live page: socket, clocks, samples of running jobs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unbroken.cli.connection import JOBS, Cluster
from unbroken.cli.place import ClusterPlace
from unbroken.core.page.history import MetricHistory
from unbroken.core.page.node_history import look
from unbroken.errors import SpecError, UnbrokenError, WorldError
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.kube.client import KubeClient, TokenClients
from unbroken.kube.clock import monotonic, pause, processor, wall
from unbroken.listener import Limits, bound, serving
from unbroken.local.state import Paths, running
from unbroken.log_lines import LastProblem, Log
from unbroken.operator.reports import ReportSource

from . import actions, node_values, values
from .access import KEY_BYTES, Access, read_page_file, write_page_file
from .account import Account
from .accounts import Accounts
from .dashboards import Dashboards
from .entrance import LinkEntrance, Source
from .logs import LogQuery, log_page
from .node_metrics import read_metrics
from .orders import Order
from .past_file import SAVE_SECONDS, PastFile, past_file
from .reports import OperatorPlace, OwnReports, asking_operator
from .server import Bounds, PageServer
from .signin import SignIn
from .turns import Clock, Turns

log = Log(__name__)

HOST = "127.0.0.1"
LIMITS = Limits(64)
MANY_LIMITS = Limits(1024)
"""Limits of connections of a page that many people share: each open tab holds one."""
MANY_PEOPLE = Bounds(streams=800, streams_each=32, pages=1000, kept_seconds=60.0)
"""Rights that were taken away, and sessions that have ended, count after a minute at most."""
MANY_COST_FACTOR = 2.0
"""The page that many people share is a process of its own, and may take half a core: each person's
contents are computed with the person's own rights."""
CLOCK = Clock(wall, monotonic, pause, processor)
KEPT_SECONDS = 60.0
"""Age up to which a page shows reports of agents: so a page is there at once, and then has new ones
when the agents' turn has come."""
CLOSING_SECONDS = 0.5
"""Seconds for streams to end when the cluster stops; browsers connect again."""


@dataclass(slots=True)
class Seen:
    """The past of jobs, which all people share: each sees that of jobs that the person may read."""

    pasts: values.Pasts = field(default_factory=dict)
    nodes: node_values.NodePasts = field(default_factory=node_values.NodePasts)
    looked_at: float = float("-inf")
    """Time of the monotonic clock at which a page was read last."""


class Pages:
    """Reads the contents of pages from a cluster, and carries out orders."""

    def __init__(
        self,
        cluster: Callable[[str], Awaitable[Cluster]],
        person: str,
        turns: Turns,
        seen: Seen | None = None,
        prometheus: str = "",
    ) -> None:
        """`cluster`: connects to the cluster, with the namespace to use and with the rights of the
        person.  `person`: the name for the events about orders.  `turns`: of all work.  `seen`
        None: of its own.  `prometheus`: address of the data of dashboards; empty: there is none."""
        self._cluster = cluster
        self._person = person
        self._turns = turns
        self._seen = seen or Seen()
        self._problem = LastProblem()
        self._dashboards = Dashboards(prometheus)

    @property
    def source(self) -> Source:
        """The pages and actions of the person, for the server."""
        return Source(self.read, self.text, self.logs, self.act)

    async def read(self, path: tuple[str, ...]) -> dict[str, Any]:
        """The contents of a page; SpecError if there is none at this path."""
        self._seen.looked_at = monotonic()
        match path:
            case ("jobs",):
                return await values.jobs_page(await self._cluster(""), self._seen.pasts, wall())
            case ("nodes",):
                cluster = await self._cluster("")
                return await node_values.linked_nodes_page(cluster, wall())
            case ("nodes", name) if name:
                cluster = await self._cluster("")
                return await node_values.node_page(cluster, name, self._seen.nodes, wall())
            case ("dashboards", *rest) if len(rest) <= 2:
                name, span, *_ = [*rest, "", ""]
                return await self._dashboards.page(name, span, wall())
            case ("jobs", namespace, name) if namespace and name:
                inside = await self._cluster(namespace)
                pasts = self._seen.pasts
                return await values.job_page(inside, name, pasts, wall(), KEPT_SECONDS)
            case ("jobs", namespace, name, "incidents", text) if namespace and name:
                number = whole_number(text, 1, INT32_MAX)
                if number is not None:
                    inside = await self._cluster(namespace)
                    return await values.incident_page(inside, name, number, wall())
            case ("actions", "nodes"):
                return await actions.node_actions(await self._cluster(""))
            case ("actions", "jobs", namespace) if namespace:
                return await actions.job_actions(await self._cluster(namespace))
        raise SpecError("there is no such page")

    async def text(self, namespace: str, name: str, number: int) -> str:
        """The story of an incident."""
        return await values.incident_text(await self._cluster(namespace), name, number, wall())

    async def logs(self, namespace: str, name: str, query: LogQuery) -> dict[str, Any]:
        """Lines of the logs of a job."""
        return await log_page(await self._cluster(namespace), name, query, wall())

    async def act(self, order: Order) -> str:
        """Carry out an order."""
        return await actions.carry_out(order, self._cluster, self._person)

    async def sample(self) -> None:
        """Sample the running jobs for ever, and ask the agents of those whose pages are open."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sample_all())
            tasks.create_task(self._ask_open())

    async def keep(self, file: PastFile) -> None:
        """Save the past of all jobs for ever, and at the end."""
        try:
            while True:
                await pause(SAVE_SECONDS)
                file.save(self._histories())
        finally:
            file.save(self._histories())

    def _histories(self) -> dict[str, MetricHistory]:
        return {uid: one.history for uid, one in self._seen.pasts.items()}

    async def _sample_all(self) -> None:
        sampled_at = float("-inf")
        while True:
            began = monotonic()
            if values.is_sample_due(began, sampled_at, self._seen.looked_at):
                sampled_at = began
                await self._tried(self._sample)
                await self._tried(self._sample_nodes)
            await pause(values.SAMPLE_SECONDS)

    async def _ask_open(self) -> None:
        while True:
            for seen in [one for one in self._seen.pasts.values() if one.is_open(wall())]:
                if not seen.is_newer(wall(), values.SAMPLE_SECONDS / 2):
                    await self._tried(partial(self._ask, seen))
            await pause(values.SAMPLE_SECONDS)

    async def _sample(self) -> None:
        cluster, pasts = await self._cluster(""), self._seen.pasts
        jobs = await cluster.select(JOBS, namespace="")
        values.forget_deleted(pasts, jobs)
        for job in values.running_jobs(jobs):
            if not values.past(pasts, job).is_newer(wall(), values.SAMPLE_SECONDS):
                async with self._turns.turn():
                    await values.sample_job(cluster, pasts, wall(), job)

    async def _sample_nodes(self) -> None:
        """Read the metrics of the nodes of a local cluster."""
        paths = (await self._cluster("")).place.paths
        found = None if paths is None else running(paths)
        last = self._seen.nodes.machine.points
        is_new = last and wall() - last[-1].at < node_values.NODE_SECONDS
        if found is None or not found.metrics or is_new:
            return
        async with self._turns.turn():
            samples = await read_metrics(found.metrics)
            self._seen.nodes.add(wall(), look(monotonic(), samples))

    async def _ask(self, seen: values.JobPast) -> None:
        cluster = await self._cluster(seen.job["metadata"]["namespace"])
        async with self._turns.turn():
            await values.ask(cluster, seen, seen.job, seen.pods, wall())

    async def _tried(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
            self._problem.note("")
        except UnbrokenError as error:
            if self._problem.note(str(error)):
                log.warning("jobs not sampled for the page", error=error)
        except Exception as error:  # noqa: BLE001 -- the page must not end its cluster
            log.error("jobs not sampled for the page", error=repr(error))


@asynccontextmanager
async def serving_page(
    paths: Paths,
    client: KubeClient,
    port: int,
    prometheus: str = "",
    reports: ReportSource | None = None,
) -> AsyncIterator[str]:
    """Serve the page of a local cluster during the block; yield its address.

    `port` 0: the port of the last time if it is free, else any.  `prometheus`: address of the data
    of dashboards; empty: none.  `reports`: of the operator in this process; agents are asked while
    it does not lead, or if this is None.  Raises WorldError.
    """
    before = read_page_file(paths.ui)
    sockets = await _bound(port, 0 if before is None else before.port, "--ui-port")
    place = ClusterPlace(str(paths.kubeconfig), None, paths)

    async def cluster(namespace: str) -> Cluster:
        found = Cluster(place, client, namespace)
        if reports is not None and reports.leader() is not None:
            found.operator = OwnReports(reports)
        return found

    access = Access(write_page_file(paths.ui, _port(sockets)).key)
    turns = Turns(CLOCK)
    with past_file(paths.ui_history) as (file, past):
        seen = Seen({uid: values.JobPast(one) for uid, one in past.items()})
        pages = Pages(cluster, actions.person_here(), turns, seen, prometheus)
        async with (
            _serving(_for_one(pages, access, turns, sockets), sockets) as address,
            asyncio.TaskGroup() as tasks,
        ):
            working = [tasks.create_task(pages.sample()), tasks.create_task(pages.keep(file))]
            yield address
            for task in working:
                task.cancel()


@asynccontextmanager
async def serving_account(
    cluster: Cluster, namespaces: Sequence[str], port: int, prometheus: str = ""
) -> AsyncIterator[str]:
    """Serve what an account may read of a Kubernetes cluster during the block; yield a link.

    `namespaces` empty: all that the account may read.  `port` 0: any.  `prometheus`: address of the
    data of dashboards; empty: none.  Raises WorldError, and
    SpecError if the account may list jobs nowhere.
    """
    account = Account(cluster.place, cluster.client, namespaces)
    await account.cluster("")
    access = Access(secrets.token_hex(KEY_BYTES))
    sockets = await _bound(port, 0, "--port")
    turns = Turns(CLOCK)
    pages = Pages(account.cluster, await account.person(), turns, prometheus=prometheus)
    async with _serving(_for_one(pages, access, turns, sockets), sockets) as address:
        yield f"{address}?link={access.link_token(wall())}"


@dataclass(frozen=True, slots=True)
class SharedPage:
    """Options of a page that many people share."""

    host: str = HOST
    port: int = 0
    """0: any that is free."""
    names: tuple[str, ...] = ()
    """Host names by which browsers reach it by TLS, besides those of this machine."""
    operator: OperatorPlace | None = None
    """Address of the operators, which give reports of agents; None: no ranks, steps and curves."""


@asynccontextmanager
async def serving_people(own: KubeClient, options: SharedPage) -> AsyncIterator[str]:
    """Serve the page to people who sign in during the block; yield its address.

    `own`: client of the page's own account, which looks at the running jobs for their past.
    Raises WorldError.
    """
    place, seen, turns = ClusterPlace(), Seen(), Turns(CLOCK, MANY_COST_FACTOR)
    async with AsyncExitStack() as stack:
        operator = None
        if options.operator is not None:
            operator = await stack.enter_async_context(asking_operator(options.operator))
        clients = await stack.enter_async_context(TokenClients(own.config, "unbroken-page"))

        def source_of(account: Account, person: str) -> Source:
            async def cluster(namespace: str) -> Cluster:
                found = await account.cluster(namespace)
                found.operator = operator
                return found

            return Pages(cluster, person, turns, seen).source

        async def own_cluster(namespace: str) -> Cluster:
            found = Cluster(place, own, namespace)
            found.operator = operator
            return found

        accounts = Accounts(own, clients, place, source_of)
        sockets = await _bound(options.port, 0, "--port", options.host)
        server = PageServer(SignIn(accounts, options.names), CLOCK, turns, MANY_PEOPLE)
        address = await stack.enter_async_context(_serving(server, sockets, MANY_LIMITS))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = [
            tasks.create_task(Pages(own_cluster, "", turns, seen).sample()),
            tasks.create_task(accounts.expire()),
        ]
        yield address
        for one in running:
            one.cancel()


def _for_one(pages: Pages, access: Access, turns: Turns, sockets: Any) -> PageServer:
    """The server of a page for one person."""
    entrance = LinkEntrance(pages.source, access, wall, f"unbroken-{_port(sockets)}")
    return PageServer(entrance, CLOCK, turns)


@asynccontextmanager
async def _serving(server: PageServer, sockets: Any, limits: Limits = LIMITS) -> AsyncIterator[str]:
    """Answer browsers during the block; yield the address."""
    # A stream whose browser has left ends at once: nothing else ends it before its next change.
    host, port = sockets[0].getsockname()[:2]
    async with serving(
        server.application(),
        sockets,
        limits,
        shutdown_seconds=CLOSING_SECONDS,
        handler_cancellation=True,
    ):
        yield f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _port(sockets: Any) -> int:
    return int(sockets[0].getsockname()[1])


async def _bound(port: int, last: int, option: str, host: str = HOST) -> Any:
    """Listen on the given port; without one (0), on that of the last time, or else on any.

    Raises WorldError, which names the option for another port.
    """
    tried = (port,) if port else dict.fromkeys((last, 0))
    for one in tried:
        try:
            return await bound(host, one)
        except OSError as error:
            reason = error.strerror
    raise WorldError(f"cannot serve the page at {host}:{port}: {reason}; choose another {option}")
