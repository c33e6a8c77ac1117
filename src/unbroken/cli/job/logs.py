"""`unbroken logs`: the output of the workers, of all ranks or of one rank, from logs of pods."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Annotated, Any

import typer

from unbroken.cli.completion import JobName
from unbroken.cli.connection import PODS, Cluster, Object
from unbroken.cli.options import CommonOptions
from unbroken.cli.show import note
from unbroken.cli.terminal import worker_line
from unbroken.core.logs.origins import DROPPED_LINES
from unbroken.errors import SpecError, UnbrokenError, WorldError
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.kube.clock import pause
from unbroken.spec.job.launch import training_container
from unbroken.spec.times import time_text

from .agents import reports
from .views import ENDED, state, world_size

PREFIX = re.compile(r"\[[^\]\s]{0,200}?(\d{1,9})\]:")
"""Prefix of every line of a worker: role and local rank, as torchrun writes them.  A line without
it is of the agent."""
LAST_SECONDS = 3.0
"""Time without a new line after which the logs of an ended job count as read."""

REST_SECONDS = 20.0
"""Time to read the rest of the logs after the connection was lost."""
RETRY_SECONDS = 1.0
"""Pause between attempts to read a log."""


def split(line: str) -> tuple[int | None, str]:
    """The local rank that wrote a line (None: the agent), and the line without its prefix."""
    found = PREFIX.match(line)
    return (whole_number(found[1]), line[found.end() :]) if found else (None, line)


def pod_lines(
    cluster: Cluster,
    pod: Object,
    *,
    follow: bool = False,
    previous: bool = False,
    stream: str = "",
    since: float | None = None,
    longest: int | None = None,
    idle_seconds: float | None = None,
) -> AsyncIterator[str]:
    """Lines of the log of a pod's training container; `stream`: one of its two, `Stdout` or
    `Stderr`.

    `since`: begin at this second, and write its time before each line; None: the whole log, without
    times.  `longest`: bytes of a line that are kept; None: all of them.  `idle_seconds`: seconds
    without a byte after which reading fails; None: it waits for any time.
    """
    query = {"container": training_container(pod["spec"])}
    query |= {"stream": stream} if stream else {}
    query |= {key: "true" for key, on in (("follow", follow), ("previous", previous)) if on}
    query |= {} if since is None else {"sinceTime": time_text(since), "timestamps": "true"}
    path = f"{cluster.path(PODS, pod['metadata']['name'])}/log"
    return cluster.client.text_lines(path, query, longest, idle_seconds)


class PodRanks:
    """Ranks of the workers of pods.  A pod keeps its node rank."""

    def __init__(self, cluster: Cluster, job: Object) -> None:
        self._cluster = cluster
        self._name: str = job["metadata"]["name"]
        self._known: dict[str, tuple[int, int]] = {}

    async def of(self, pod: Object, local_rank: int) -> int | None:
        """The rank of a worker; None if it is not known."""
        found = await self.all_of(pod)
        return None if found is None else found.start + local_rank

    async def all_of(self, pod: Object) -> range | None:
        """The ranks of a pod; None if they are not known."""
        uid = pod["metadata"]["uid"]
        if uid not in self._known:
            found = await self._ask(pod)
            if found is None:
                return None
            self._known[uid] = found
        node_rank, count = self._known[uid]
        return range(node_rank * count, (node_rank + 1) * count)

    async def _ask(self, pod: Object) -> tuple[int, int] | None:
        name = pod["metadata"]["name"]
        report = (await reports(self._cluster, [pod])).get(name)
        if report is not None and report.rank is not None and report.nproc:
            return report.rank, report.nproc
        job = await self._cluster.job(self._name)
        address = (job.get("status") or {}).get("masterAddr")
        count = whole_number(str(job["spec"]["nprocPerNode"]), 0, INT32_MAX)
        is_first = bool(address) and (pod.get("status") or {}).get("podIP") == address
        return (0, count) if is_first and count is not None else None


class LogReaders:
    """Follows the log of each container once, in the caller's task group."""

    def __init__(
        self,
        cluster: Cluster,
        tasks: asyncio.TaskGroup,
        on_line: Callable[[Object, str], Awaitable[None]],
        on_problem: Callable[[str], None] = note,
        stream: str = "",
    ) -> None:
        self._cluster = cluster
        self._tasks = tasks
        self._on_line = on_line
        self._on_problem = on_problem
        self._stream = stream
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._seen: dict[str, int] = {}
        """Lines passed on, by container."""
        self._broken: dict[str, Object] = {}
        """Pods, by container, whose reader lost its connection and may be behind."""

    def read(self, pods: Iterable[Object]) -> None:
        """Start to follow the containers of these pods that have started."""
        for pod in pods:
            for one in (pod.get("status") or {}).get("containerStatuses") or ():
                has_started = "running" in one["state"] or "terminated" in one["state"]
                if has_started and one["containerID"] not in self._readers:
                    task = self._tasks.create_task(self._read(pod, one["containerID"]))
                    self._readers[one["containerID"]] = task

    async def finish(self) -> None:
        """Return when all logs are read to their end, or when no line comes any more."""
        late, seen = set(self._readers.values()), -1
        while late and seen != (seen := sum(self._seen.values())):
            _, late = await asyncio.wait(late, timeout=LAST_SECONDS)
        for reader in late:
            reader.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        try:
            async with asyncio.timeout(REST_SECONDS):
                for container, pod in self._broken.items():
                    await self._read(pod, container, follow=False)
        except TimeoutError:
            self._on_problem("the last output could not be read; see: unbroken logs")

    async def _read(self, pod: Object, container: str, *, follow: bool = True) -> None:
        """Read a log to its end, with a new attempt after each lost connection."""
        problem = ""
        while True:
            try:
                number = 0
                async for line in pod_lines(self._cluster, pod, follow=follow, stream=self._stream):
                    number += 1
                    if found := DROPPED_LINES.match(line):
                        number += int(found[1]) - 1
                    if number > self._seen.get(container, 0):
                        self._seen[container] = number
                        await self._on_line(pod, line)
                return
            except UnbrokenError as error:
                is_lost = isinstance(error, WorldError)
                if (text := _problem(pod, error, is_lost=is_lost)) != problem:
                    problem = text
                    self._on_problem(text)
                if not is_lost:
                    return
                self._broken[container] = pod
            await pause(RETRY_SECONDS)


def _problem(pod: Object, error: UnbrokenError, *, is_lost: bool) -> str:
    """Say why the output of a pod is not read: one sentence for all signs of a lost connection."""
    name = pod["metadata"]["name"]
    if is_lost:
        node = pod["spec"].get("nodeName", "")
        return f"the connection to the output of {name} on {node} is lost, and is tried again"
    return f"cannot read the output of {name}: {error}"


OnLine = Callable[[Object, str], Awaitable[None]]


def command(
    job: JobName,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Print only lines of this rank.", show_default="all")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Follow the logs until the job ends or is suspended."),
    ] = False,
    previous: Annotated[
        bool,
        typer.Option("--previous", help="Print logs of the containers before their last restart."),
    ] = False,
    *,
    options: CommonOptions,
) -> None:
    """Print the output of the job's workers, each line with its rank.

    Lines of an agent have the name of its pod instead; --rank leaves them out.

    Example: `unbroken logs train --rank 3 -f`
    """
    lines: list[dict[str, Any]] = []

    async def act(cluster: Cluster) -> None:
        found_job = await cluster.job(job)
        if rank is not None:
            await _require_rank(cluster, found_job, rank)
        ranks = PodRanks(cluster, found_job)

        async def show(pod: Object, line: str) -> None:
            local_rank, text = split(line)
            found = None if local_rank is None else await ranks.of(pod, local_rank)
            if rank is not None and found != rank:
                return
            name = pod["metadata"]["name"]
            if options.output.is_data:
                lines.append({"pod": name, "rank": found, "text": text})
            elif rank is not None:
                print(worker_line(text, sys.stdout), flush=follow)
            else:
                known = local_rank is None or found is None
                shown = worker_line(text, sys.stdout)
                print(f"[{name if known else found}]: {shown}", flush=follow)

        await (_follow(cluster, job, show) if follow else _print(cluster, job, show, previous))

    options.run(act)
    if options.output.is_data:
        options.output.print({"job": job, "lines": lines})


async def _require_rank(cluster: Cluster, job: Object, rank: int) -> None:
    name = job["metadata"]["name"]
    answers = await reports(cluster, await cluster.pods(name))
    world = world_size(job, (one.nproc for one in answers.values()))
    if world is not None and rank >= world:
        raise SpecError(f"job {name} has " + (f"ranks 0..{world - 1}" if world > 1 else "rank 0"))


async def _print(cluster: Cluster, job: str, show: OnLine, previous: bool) -> None:
    pods = await cluster.pods(job)
    if not pods:
        raise SpecError(f"job {job} has no pods now; logs are deleted with the pods")
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        try:
            async for line in pod_lines(cluster, pod, previous=previous):
                await show(pod, line)
        except UnbrokenError as error:
            note(f"{pod['metadata']['name']}: {error}")


async def _follow(cluster: Cluster, name: str, show: OnLine) -> None:
    """Follow all pods, including pods that start later."""
    from unbroken.cli.watch import WatchedJob  # slow to load

    async with WatchedJob(cluster, name) as watched, asyncio.TaskGroup() as tasks:
        readers = LogReaders(cluster, tasks, show)

        def has_ended() -> bool:
            readers.read(watched.pods())
            job = watched.job()
            return job is None or state(job) in (*ENDED, "Suspended")

        await watched.until(has_ended)
        await readers.finish()
