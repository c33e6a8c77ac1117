"""The runner of a job: it carries out orders and writes, on both API servers.

The job's machine is a script here: it returns the orders of the test, and keeps the events that it
gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.apiservers import embedded_cluster
from tests.event_loops import HeldLoop, PauseLoop, run_on
from tests.job_keys import MASTER
from tests.operator.conftest import Place, job
from tests.watching import Watcher, running
from unbroken.core.job.events import (
    AgentReported,
    CreatePod,
    DeleteIncident,
    DeleteJob,
    DeletePod,
    FenceNode,
    FenceProven,
    JobEffect,
    JobEvent,
    JobSeen,
    LedgerWritten,
    NodeName,
    NodeSeen,
    NodeView,
    PodGone,
    PodName,
    PodPhase,
    PodRefused,
    PodSeen,
    PodUid,
    ProveFence,
    RecordEvent,
    WriteIncident,
    WriteLedger,
    WriteStatus,
)
from unbroken.core.tick import Tick
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.clock import pause, steady_clock
from unbroken.kube.events import EventRecorder
from unbroken.operator import definitions
from unbroken.operator.jobs.pods import PREFERRED, job_identity
from unbroken.operator.jobs.runner import (
    EVENTS_AFTER_SECONDS,
    SECRET_SECONDS,
    JobResources,
    JobRunner,
)
from unbroken.operator.jobs.writer import JobRequests, JobWriter, status_patch
from unbroken.spec.job.codec import incident_from
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.job.ledger import Ledger, read_ledger
from unbroken.spec.job.parse import parse_job
from unbroken.spec.job.types import Condition, FaultyPods, JobStatus
from unbroken.spec.keys import LEDGER, OUT_OF_SERVICE
from unbroken.wire.agent import AgentReport, AgentState

Object = dict[str, Any]
JOBS = "hyperpodpytorchjobs"


class Script:
    """Returns the newest orders of the test, and keeps the events that it gets."""

    def __init__(self) -> None:
        self.told: Watcher[JobEvent] = Watcher()
        self.orders: list[JobEffect] = []
        self.runner: JobRunner
        self.order: list[type[JobEvent]] = []
        """Types of all events, ticks too, in order."""
        self.together: list[int] = []
        """Number of events in each call."""
        self.due: float | None = None
        self.clock: Callable[[], float] = steady_clock()
        self.status = JobStatus()

    def steps(self, events: Sequence[JobEvent], now: float) -> list[JobEffect]:
        """Keep the events; return the orders."""
        self.order += map(type, events)
        self.together.append(len(events))
        for event in events:
            if not isinstance(event, Tick):
                self.told(event)
        orders, self.orders = self.orders, []
        return orders

    def deadline(self) -> float | None:
        """Return now, since the test may have new orders, unless `due` is set."""
        return self.due or 0.05 + self.clock()

    async def until(self, kind: type[JobEvent]) -> Any:
        """Wait for the first event of a kind; return it."""
        await self.told.until(lambda told: any(isinstance(one, kind) for one in told))
        return next(one for one in self.told.seen if isinstance(one, kind))


@asynccontextmanager
async def surroundings(
    client: KubeClient, clock: Callable[[], float] | None = None
) -> AsyncIterator[JobResources]:
    """Run the resources that runners share."""
    recorder = EventRecorder(client, "test")
    async with aiohttp.ClientSession() as session, running(recorder.run()):
        slots = asyncio.Semaphore(4)
        yield JobResources(client, recorder, session, clock or steady_clock(), MASTER, slots)


@pytest.fixture
def scripted(place: Any) -> Callable[..., Any]:
    """Provide a runner of a job in a namespace of its own, with its script."""

    @asynccontextmanager
    async def opened(
        given: Object | None = None, clock: Callable[[], float] | None = None
    ) -> AsyncIterator[tuple[Place, Script]]:
        async with place() as here:
            await definitions.install(here.client)
            made = await here.post(JOBS, given or job())
            async with surroundings(here.client, clock) as around:
                script = Script()
                script.clock = around.clock
                script.runner = runner = JobRunner(around, job_identity(made), script)
                runner.receive(JobSeen(parse_job(made).spec))
                async with running(runner.run()):
                    await script.until(JobSeen)
                    yield here, script

    return opened


CREATE = CreatePod(PodName("lm-pods-0"), "pods", 0)


async def test_a_pod_ordered_twice_is_there_once_and_is_told_of(scripted: Any) -> None:
    async with scripted() as (here, script):
        script.orders = [CREATE, CREATE]
        seen = await script.until(PodSeen)
        script.orders = [CREATE]
        found = await here.get("pods")
        assert [pod["metadata"]["uid"] for pod in found["items"]] == [seen.pod.uid]
        assert not any(isinstance(event, PodRefused) for event in script.told.seen)


async def test_the_pods_of_one_decision_are_one_line_of_the_log(
    scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with scripted() as (_, script):
        names = [PodName(f"lm-pods-{index}") for index in range(3)]
        script.orders = [CreatePod(name, "pods", index) for index, name in enumerate(names)]
        await script.told.until(lambda told: sum(isinstance(one, PodSeen) for one in told) == 3)
        script.orders = [DeletePod(name, PodUid(f"u-{name}"), "old") for name in names]
        await script.told.until(lambda told: sum(isinstance(one, PodGone) for one in told) == 3)
    lines = [one.getMessage() for one in caplog.records if " pods job=" in one.getMessage()]
    together = "count=3 pod=lm-pods-0,lm-pods-1,lm-pods-2"
    assert [line.split()[0] for line in lines] == ["create", "delete"]
    assert all(together in line for line in lines)


async def test_a_pod_prefers_places_by_the_labels_that_nodes_have(scripted: Any) -> None:
    rack = "unbroken.dev/rack"
    async with scripted() as (here, script):
        script.runner.receive(NodeSeen(NodeView(NodeName("n1"), True, topology_keys=("", rack))))
        await script.until(NodeSeen)
        script.orders = [CREATE]
        await script.until(PodSeen)
        [pod] = (await here.get("pods"))["items"]
        wishes = pod["spec"]["affinity"]["podAffinity"][PREFERRED]
        assert [one["podAffinityTerm"]["topologyKey"] for one in wishes] == [rack]


def test_what_was_said_while_it_stood_still_comes_before_what_is_due(scripted: Any) -> None:
    loop = HeldLoop()

    async def check() -> None:
        async with scripted(clock=loop.time) as (_, script):
            script.due = loop.time() + 60.0
            gone = PodGone(PodName("lm-pods-0"), PodUid("u"))
            script.runner.receive(gone)
            await script.until(PodGone)
            script.order.clear()
            await pause(0)  # it now waits for what is due
            # As if the process had been stopped: messages are read only after the timers.
            loop.hold(ahead=61.0)
            loop.call_soon(loop.call_soon, loop.call_soon, script.runner.receive, gone)
            await script.told.until(lambda told: told.count(gone) == 2)
            assert script.order == [PodGone]
            loop.release()

    run_on(loop, check())


async def test_reports_that_wait_are_taken_together_with_what_follows_them(scripted: Any) -> None:
    async with scripted() as (_, script):
        await script.until(JobSeen)
        script.order.clear()
        script.together.clear()
        script.due = steady_clock()() + 60.0
        said = AgentReported(PodUid("u"), AgentReport("agent", AgentState.READY))
        gone = PodGone(PodName("lm-pods-0"), PodUid("u"))
        for event in (said, said, gone, gone, said):
            script.runner.receive(event)
        await script.told.until(lambda told: script.runner.is_done and told[-1] == said)
        assert script.order == [AgentReported, AgentReported, PodGone, PodGone, AgentReported]
        assert script.together == [3, 1, 1]


async def test_a_pod_may_run_before_anything_is_read_about_it(scripted: Any) -> None:
    async with scripted() as (_, script):
        await script.until(JobSeen)
        script.orders = [CREATE]
        script.runner.receive(PodGone(PodName("lm-pods-8"), PodUid("u8")))
        pod = replace((await script.until(PodSeen)).pod, node=NodeName("n1"))
        for phase in (PodPhase.PENDING, PodPhase.RUNNING):
            script.runner.receive(PodSeen(replace(pod, phase=phase)))
        gone = PodGone(PodName("lm-pods-9"), PodUid("u9"))
        await script.told.until(lambda told: len(told) > 3)
        script.runner.receive(gone)
        await script.told.until(lambda told: told[-1] == gone)


def test_only_pods_that_wait_for_a_node_wake_their_job(scripted: Any) -> None:
    loop = PauseLoop()

    async def check() -> None:
        now = steady_clock()()
        async with scripted(clock=lambda: now) as (_, script):
            script.due = now + 1000
            script.runner.receive(PodGone(PodName("lm-pods-7"), PodUid("u")))
            await script.until(PodGone)
            assert not {EVENTS_AFTER_SECONDS, SECRET_SECONDS} & set(loop.pauses)
            script.due, script.orders = None, [CREATE]
            script.runner.receive(PodGone(PodName("lm-pods-8"), PodUid("u8")))
            seen = await script.until(PodSeen)
            placed = replace(seen.pod, node=NodeName("n1"))
            script.runner.receive(PodSeen(placed))
            await script.told.until(lambda told: PodSeen(placed) in told)
            await pause(0)
            assert {EVENTS_AFTER_SECONDS, SECRET_SECONDS} <= set(loop.pauses)

    run_on(loop, check())


async def test_a_pod_that_can_never_be_is_refused_for_good(scripted: Any) -> None:
    bad = job()
    bad["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]["name"] = "No_Name"
    async with scripted(bad) as (_, script):
        script.orders = [CREATE]
        refused = await script.until(PodRefused)
        assert refused.is_final
        assert "No_Name" in refused.reason


async def test_a_name_that_is_taken_is_refused_for_now(scripted: Any) -> None:
    async with scripted() as (here, script):
        spec = {"containers": [{"name": "c", "image": "any"}]}
        await here.post("pods", {"metadata": {"name": "lm-pods-0"}, "spec": spec})
        script.orders = [CREATE]
        refused = await script.until(PodRefused)
        assert not refused.is_final


async def test_only_the_very_pod_is_deleted_and_one_that_is_gone_is_told_of(scripted: Any) -> None:
    async with scripted() as (here, script):
        script.orders = [CREATE]
        seen = await script.until(PodSeen)
        other = PodUid("00000000-0000-0000-0000-000000000000")
        script.orders = [DeletePod(seen.pod.name, other, "old")]
        assert await script.until(PodGone) == PodGone(seen.pod.name, other)
        assert await here.get("pods/lm-pods-0") is not None
        script.orders = [DeletePod(seen.pod.name, seen.pod.uid, "lost", force=True)]
        gone = PodGone(seen.pod.name, seen.pod.uid)
        await here.absent("pods/lm-pods-0")
        script.orders = [DeletePod(seen.pod.name, seen.pod.uid, "again", force=True)]
        await script.told.until(lambda told: gone in told)


async def test_pods_of_an_ended_job_are_deleted_once_its_end_is_stored(scripted: Any) -> None:
    ended = JobStatus(restart_count=7, conditions=(Condition("Completed", "True"),))
    async with scripted() as (here, script):
        script.orders = [CREATE]
        pod = (await script.until(PodSeen)).pod
        script.orders = [WriteStatus(ended), DeletePod(pod.name, pod.uid, "it has ended")]
        await here.absent("pods/lm-pods-0")
        found = await here.get(f"{JOBS}/lm")
        assert found["status"]["restartCount"] == 7


async def test_a_fence_is_asked_for_and_a_job_deleted(scripted: Any) -> None:
    async with scripted() as (here, script):
        name, back = f"node-of-{here.namespace}", f"back-of-{here.namespace}"
        for one, ready in ((name, "Unknown"), (back, "True")):
            made = {
                "metadata": {"name": one},
                "status": {"conditions": [{"type": "Ready", "status": ready}]},
            }
            await here.client.raw("POST", "api/v1/nodes", body=made)
        asked = [FenceNode(NodeName(one), PodUid("u0"), "lost") for one in (back, "none", name)]
        script.orders = list(asked)
        node = await here.until(f"nodes/{name}", lambda found: found["metadata"].get("annotations"))
        assert node["metadata"]["annotations"]["unbroken.dev/fence"] == "lost"
        # A node that is gone runs nothing.
        assert (await script.until(FenceProven)).pod == "u0"
        # It has come back since it was found lost.
        assert not (await here.get(f"nodes/{back}"))["metadata"].get("annotations")
        script.orders = [DeleteJob("its time is over")]
        await here.absent(f"{JOBS}/lm")


async def test_a_fence_is_proven_by_the_node_as_it_is_now(scripted: Any) -> None:
    async with scripted() as (here, script):
        back, fenced = f"back-of-{here.namespace}", f"fenced-of-{here.namespace}"
        taint = {"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"}
        for name, taints in ((back, []), (fenced, [taint])):
            made = {"metadata": {"name": name}, "spec": {"taints": taints}}
            await here.client.raw("POST", "api/v1/nodes", body=made)
        requests = JobRequests(here.client, script.runner.job)
        found = [await requests.is_fenced(name) for name in (back, fenced, "none")]
        assert found == [False, True, True]
        script.orders = [ProveFence(NodeName(fenced), PodUid("uid-1"))]
        assert (await script.until(FenceProven)).pod == "uid-1"


def incident(number: int, outcome: str = "") -> Incident:
    """Return a small incident."""
    symptom = Symptom(1.0, "Signal", "killed")
    return Incident(
        number, 0, symptom, (symptom,), Remedy.PROCESS, "why", detected_at=1.0, outcome=outcome
    )


async def test_an_incident_is_deleted_once_the_ledger_has_it(scripted: Any) -> None:
    ledger = Ledger(incidents=1, seconds={"Signal": 2.5})
    async with scripted() as (here, script):
        script.orders = [WriteIncident(incident(1, "recovered")), WriteIncident(incident(2))]
        await here.until("incidents/lm-2", lambda one: one["spec"])
        script.orders = [DeleteIncident(7), DeleteIncident(1), WriteLedger(ledger)]
        await here.absent("incidents/lm-1")
        kept = (await here.get(f"{JOBS}/lm"))["metadata"]["annotations"][LEDGER]
        assert read_ledger(kept) == ledger
        assert await here.get("incidents/lm-2") is not None


async def test_a_ledger_that_a_start_waits_for_is_answered_once_it_is_stored(scripted: Any) -> None:
    first, second = Ledger(nnodes=2, lease_seconds=8.0), Ledger(nnodes=3)
    async with scripted() as (here, script):
        script.orders = [WriteLedger(first, is_awaited=True)]
        assert await script.until(LedgerWritten) == LedgerWritten(first)
        kept = (await here.get(f"{JOBS}/lm"))["metadata"]["annotations"][LEDGER]
        assert read_ledger(kept) == first
        script.orders = [WriteLedger(second)]
        await here.until(
            f"{JOBS}/lm",
            lambda one: read_ledger(one["metadata"]["annotations"][LEDGER]) == second,
        )
        assert LedgerWritten(second) not in script.told.seen


async def test_the_echo_of_the_ledger_wakes_no_machine(scripted: Any) -> None:
    async with scripted() as (_, script):
        seen = await script.until(JobSeen)
        script.runner.receive(replace(seen, ledger=Ledger(incidents=1)))
        asked = replace(seen, options=replace(seen.options, restart=5.0))
        script.runner.receive(asked)
        await script.told.until(lambda told: told[-1] != seen)
        told = [one for one in script.told.seen if isinstance(one, JobSeen)]
        assert told == [seen, asked]


async def test_news_waits_for_more_until_somebody_waits_for_it(place: Any) -> None:
    async with place() as here:
        await definitions.install(here.client)
        identity = job_identity(await here.post(JOBS, job()))
        requests = JobRequests(here.client, identity)
        async with surroundings(here.client) as around:
            writer = JobWriter(requests, around.recorder, identity, gather_seconds=3600.0)
            async with running(writer.run()):
                writer.status(JobStatus(restart_count=1))
                for _ in range(3):
                    assert "status" not in await here.get(f"{JOBS}/lm")
                writer.status(JobStatus(restart_count=2))
                await writer.status_stored()
                assert (await here.get(f"{JOBS}/lm"))["status"]["restartCount"] == 2


@pytest.mark.slow
async def test_what_happens_while_the_api_server_is_away_is_written_when_it_is_back(
    tmp_path: Path,
) -> None:
    async def check(here: Place, kill: Callable[[], int]) -> None:
        await definitions.install(here.client)
        identity = job_identity(await here.post(JOBS, job()))
        async with surroundings(here.client) as around:
            writer = JobWriter(JobRequests(here.client, identity), around.recorder, identity)
            async with running(writer.run()):
                writer.status(JobStatus(restart_count=1))
                await here.until(f"{JOBS}/lm", lambda found: found.get("status"))
                await writer.status_stored()
                port = kill()
                for count in (2, 3):
                    writer.status(JobStatus(restart_count=count, master_addr="10.0.0.1"))
                    writer.event(RecordEvent("Restarted", f"attempt {count}"))
                    writer.incident(incident(1, "recovered" if count == 3 else ""))
                stored = asyncio.ensure_future(writer.status_stored())
                with embedded_cluster(tmp_path / "server", port):
                    assert not stored.done()
                    await stored
                    found = await here.until("incidents/lm-1", lambda one: one["spec"])
                    assert incident_from(found)[0].outcome == "recovered"
                    assert found["metadata"]["ownerReferences"][0]["uid"] == identity.uid
                    status = (await here.get(f"{JOBS}/lm"))["status"]
                    assert (status["restartCount"], status["masterAddr"]) == (3, "10.0.0.1")
                    await here.until("events", lambda listed: len(listed["items"]) == 2)
                    writer.status(JobStatus(restart_count=4))
                    await here.until(f"{JOBS}/lm", lambda one: "masterAddr" not in one["status"])

    with embedded_cluster(tmp_path / "server") as cluster:

        def kill() -> int:
            cluster.process.kill()
            cluster.process.wait()
            return int(cluster.url.rpartition(":")[2])

        async def story() -> None:
            async with connect(cluster.kubeconfig) as client:
                await check(Place(client, "default"), kill)

        await story()


def test_a_status_patch_takes_stale_parts_out_and_leaves_those_of_others() -> None:
    faulty = FaultyPods("PLR", faulty_rank_list=("3",))
    status = JobStatus(
        conditions=(Condition("Created", "True"),),
        latest_faulty=faulty,
        other={"podSetInfos": [{"annotations": {"a": "b"}}]},
    )
    patch = status_patch(status)
    assert patch["masterAddr"] is None
    assert patch["startTime"] is None
    assert patch["restartCount"] == 0
    assert patch["latestFaultyPodInstanceList"] == {
        "restartType": "PLR",
        "faultyRankList": ["3"],
        "faultyPodList": None,
        "faultyInstanceIdList": None,
    }
    assert "podSetInfos" not in patch
    assert status_patch(replace(status, latest_faulty=None))["latestFaultyPodInstanceList"] is None
