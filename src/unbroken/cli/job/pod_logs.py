"""The logs of a job's pods: which lines are whose, and following them as containers come and go."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from unbroken.cli.connection import PODS, Cluster, Object
from unbroken.cli.show import note
from unbroken.errors import UnbrokenError, WorldError
from unbroken.kube.clock import pause

from .agents import reports

PREFIX = re.compile(r"\[[^\]\s]{0,200}?(\d{1,9})\]:")
"""Of every line of a worker: its role and local rank, as torchrun writes them.  What has none is
the agent's own."""
LAST_SECONDS = 3.0
"""What the containers of a job that has ended may take to hand over their last lines."""

REST_SECONDS = 20.0
"""What reading the rest may take where a cluster that was away has come back."""
RETRY_SECONDS = 1.0
"""Between two tries where the cluster does not answer."""


def split(line: str) -> tuple[int | None, str]:
    """The local rank that wrote a line, and the line without it; None: the agent wrote it."""
    found = PREFIX.match(line)
    return (int(found[1]), line[found.end() :]) if found else (None, line)


def pod_lines(
    cluster: Cluster, pod: Object, *, follow: bool = False, previous: bool = False
) -> AsyncIterator[str]:
    """The log of a pod's training container."""
    from unbroken.operator.jobs.pods import training_container  # slow to load

    query = {"container": training_container(pod["spec"])}
    query |= {key: "true" for key, on in (("follow", follow), ("previous", previous)) if on}
    return cluster.client.text_lines(f"{cluster.path(PODS, pod['metadata']['name'])}/log", query)


class Ranks:
    """Which ranks the workers of a pod are; a pod that has been given a place keeps it."""

    def __init__(self, cluster: Cluster, job: Object) -> None:
        self._cluster = cluster
        self._name: str = job["metadata"]["name"]
        self._known: dict[str, tuple[int, int]] = {}

    async def of(self, pod: Object, local_rank: int) -> int | None:
        """The rank of a worker; None: nobody says it."""
        uid = pod["metadata"]["uid"]
        if uid not in self._known:
            found = await self._ask(pod)
            if found is None:
                return None
            self._known[uid] = found
        node_rank, count = self._known[uid]
        return node_rank * count + local_rank

    async def _ask(self, pod: Object) -> tuple[int, int] | None:
        name = pod["metadata"]["name"]
        report = (await reports(self._cluster, [pod])).get(name)
        if report is not None and report.rank is not None and report.nproc:
            return report.rank, report.nproc
        job = await self._cluster.job(self._name)
        address, count = (job.get("status") or {}).get("masterAddr"), job["spec"]["nprocPerNode"]
        is_first = bool(address) and (pod.get("status") or {}).get("podIP") == address
        return (0, int(count)) if is_first and str(count).isdecimal() else None


class LogReaders:
    """Follows the log of each container once, in tasks of the caller's."""

    def __init__(
        self,
        cluster: Cluster,
        tasks: asyncio.TaskGroup,
        on_line: Callable[[Object, str], Awaitable[None]],
        on_problem: Callable[[str], None] = note,
    ) -> None:
        self._cluster = cluster
        self._tasks = tasks
        self._on_line = on_line
        self._on_problem = on_problem
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._seen: dict[str, int] = {}
        """Lines told of each container."""
        self._broken: dict[str, Object] = {}
        """Pods by container, where a reader was cut off and may be behind."""

    def read(self, pods: Iterable[Object]) -> None:
        """Follow the containers of these pods that have started and are not followed yet."""
        for pod in pods:
            for one in (pod.get("status") or {}).get("containerStatuses") or ():
                has_started = "running" in one["state"] or "terminated" in one["state"]
                if has_started and one["containerID"] not in self._readers:
                    task = self._tasks.create_task(self._read(pod, one["containerID"]))
                    self._readers[one["containerID"]] = task

    async def finish(self) -> None:
        """Return when all have been read to their end, or enough time has passed."""
        readers = set(self._readers.values())
        if readers:
            _, late = await asyncio.wait(readers, timeout=LAST_SECONDS)
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
        """To the log's end, however often the way to it breaks."""
        while True:
            try:
                number = 0
                async for line in pod_lines(self._cluster, pod, follow=follow):
                    number += 1
                    if number > self._seen.get(container, 0):
                        self._seen[container] = number
                        await self._on_line(pod, line)
                return
            except UnbrokenError as error:
                self._on_problem(f"output of {pod['metadata']['name']}: {error}")
                if not isinstance(error, WorldError):
                    return
                self._broken[container] = pod
            await pause(RETRY_SECONDS)
