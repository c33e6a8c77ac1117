"""Losses of jobs that lose workers, agents and nodes: they equal those without a fault.

Each rank reports the loss of each step it makes, bit for bit.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.control import power
from tests.e2e.job_events import Event, places
from tests.e2e.jobs import Job, Object, job
from unbroken.spec.keys import BUDDY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "programs/curve.py"
STEPS = 40
Curve = dict[tuple[int, int], str]
"""Loss by rank and step."""


@pytest.fixture(scope="module")
def whole(machines: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """Return the losses of a run without faults."""
    with job(machines, tmp_path_factory.mktemp("whole"), program=PROGRAM) as one:
        completed(one)
    found = curve(one)
    assert len(found) == len(steps_made(one)) == 4 * STEPS
    return found


def completed(one: Job) -> Object:
    """Wait until all ranks have made their last step; return the job."""
    one.events.until(lambda events: sum(event.what == "end" for event in events) == len(one.ranks))
    return one.until_standing("Completed")


def steps_made(one: Job) -> list[Event]:
    return [event for event in one.events.all if event.what == "step"]


def curve(one: Job) -> Curve:
    """Return all losses; assert that steps made twice have the same loss."""
    found: Curve = {}
    for event in steps_made(one):
        loss = event.more["loss"]
        assert found.setdefault((event.rank, event.more["step"]), loss) == loss, event
    return found


def held(one: Job, attempt: int) -> Event:
    """Return the worker that waits to be killed."""

    def waiting(events: list[Event]) -> Event | None:
        return next((e for e in events if (e.what, e.attempt) == ("held", attempt)), None)

    found: Event = one.events.until(waiting)
    return found


def sources(one: Job, attempt: int) -> dict[int, tuple[int, str]]:
    """Return the step from which each rank has resumed, and the source of its state."""
    told = [e for e in one.events.all if (e.what, e.attempt) == ("restored", attempt)]
    assert len({event.more["checksum"] for event in told}) == 1, "replicas differ"
    return {event.rank: (event.more["step"], event.more["source"]) for event in told}


def assert_nothing_is_lost(one: Job, whole: Curve, attempts: int) -> None:
    """Assert equal losses, and that each fault made a rank repeat at most one step."""
    differing = {key[1] for key, loss in curve(one).items() if whole[key] != loss}
    assert not differing, f"other losses, first in step {min(differing)}"
    assert len(curve(one)) == len(whole)
    again: dict[int, int] = dict.fromkeys(one.ranks, -STEPS)
    for event in steps_made(one):
        again[event.rank] += 1
    assert max(again.values()) <= attempts, again


@pytest.mark.heavy
def test_workers_that_are_killed_leave_no_trace_in_the_losses(
    machines: Cluster, tmp_path: Path, whole: Curve
) -> None:
    plan = [
        {"attempt": 0, "rank": 3, "step": 9, "at": "begin"},
        {"attempt": 1, "rank": 0, "step": 19, "at": "told"},
        {"attempt": 2, "rank": 1, "step": 29, "at": "kept"},
    ]
    with job(machines, tmp_path, *plan, program=PROGRAM) as one:
        for attempt, order in enumerate(plan):
            one.kill(held(one, attempt))
            one.steps(attempt + 1)
            again, before = one.starts(attempt + 1), one.starts(attempt)
            kept = {rank for rank in one.ranks if again[rank].pid == before[rank].pid}
            assert kept
            assert order["rank"] not in kept
        assert completed(one)["status"]["restartCount"] == 3
        incidents = one.incidents(3)
    for incident in incidents:
        assert (incident["remedy"], incident["replicasAgree"]) == ("in-process", True)
        assert incident["stepsLost"] <= 1
    assert sources(one, 1) == dict.fromkeys(one.ranks, (8, "memory"))
    assert_nothing_is_lost(one, whole, 3)


def drawn(seed: int, kills: int) -> list[Object]:
    """Return kills of any rank at any point, some steps apart."""
    chance, step = random.Random(seed), 0
    found = []
    for attempt in range(kills):
        step += chance.randint(2, 4)
        at = chance.choice(["begin", "told", "kept"])
        found.append({"attempt": attempt, "rank": chance.randrange(4), "step": step, "at": at})
    assert step < STEPS
    return found


def assert_kills_leave_no_trace(
    machines: Cluster, place: Path, kills: int, *settings: Object, seed: int = 0
) -> list[Object]:
    """Run a training with and without kills; return the incidents. Losses are the same bit for bit,
    and each rank repeats at most one step a kill."""
    plan = drawn(seed, kills)
    with job(machines, place / "whole", *settings, program=PROGRAM) as one:
        completed(one)
        whole = curve(one)
    with job(machines, place / "hurt", *settings, *plan, program=PROGRAM) as one:
        for attempt in range(kills):
            one.kill(held(one, attempt))
        assert completed(one)["status"]["restartCount"] == kills
        incidents: list[Object] = one.incidents(kills)
        assert_nothing_is_lost(one, whole, kills)
    assert {incident["stepsLost"] for incident in incidents} <= {0, 1}
    return incidents


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_ten_kills_of_any_ranks_leave_no_trace_in_the_losses(
    machines: Cluster, tmp_path: Path, kind: str
) -> None:
    found = assert_kills_leave_no_trace(machines, tmp_path, 10, {"shard": kind})
    assert {incident["remedy"] for incident in found} == {"in-process"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "uses"),
    [
        ("tensor", []),
        ("fsdp2", ["recompute"]),
        ("fsdp2", ["half"]),
        ("fsdp2", ["compile"]),
    ],
)
def test_a_kill_leaves_no_trace_in_the_losses_however_the_model_is_trained(
    machines: Cluster, tmp_path: Path, kind: str, uses: list[str]
) -> None:
    assert_kills_leave_no_trace(machines, tmp_path, 2, {"shard": kind}, {"uses": uses}, seed=5)


@pytest.mark.heavy
def test_an_agent_that_is_killed_leaves_no_trace_in_the_losses(
    machines: Cluster, tmp_path: Path, whole: Curve
) -> None:
    plan = {"attempt": 0, "rank": 3, "step": 9, "at": "told"}
    with job(machines, tmp_path, plan, program=PROGRAM) as one:
        held(one, 0)
        assert one.signal(one.starts(0)[3].more["agent"], signal.SIGKILL)
        assert completed(one)["status"]["restartCount"] == 1
        one.incidents(1)
    assert_restored_from_survivors(one, {2, 3})
    assert_nothing_is_lost(one, whole, 1)


@pytest.mark.heavy
def test_a_node_that_is_lost_leaves_no_trace_in_the_losses(
    nodes: Cluster, tmp_path: Path, whole: Curve
) -> None:
    plan = {"attempt": 0, "rank": 0, "step": 9, "at": "begin"}
    with job(nodes, tmp_path, plan, program=PROGRAM, spares=1) as one:
        held(one, 0)
        where = one.pods()[places(one.starts(0))[0]]["spec"]["nodeName"]
        power(nodes, where, "off")
        assert completed(one)["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert incident["culprit"]["node"] == where
    assert_restored_from_survivors(one, {0, 1})
    assert_nothing_is_lost(one, whole, 1)


@pytest.mark.heavy
def test_shards_of_a_node_that_is_lost_come_from_the_other_replica_without_a_copy(
    nodes: Cluster, tmp_path: Path
) -> None:
    plan = {"attempt": 0, "rank": 0, "step": 9, "at": "begin"}
    kept = {BUDDY: "off"}
    with job(nodes, tmp_path / "whole", {"shard": "hsdp"}, program=PROGRAM) as one:
        completed(one)
        whole = curve(one)
    settings: Object = {"program": PROGRAM, "spares": 1, "annotations": kept}
    with job(nodes, tmp_path / "hurt", {"shard": "hsdp"}, plan, **settings) as one:
        held(one, 0)
        where = one.pods()[places(one.starts(0))[0]]["spec"]["nodeName"]
        assert steps_copied(one, one.starts(0)[2], rank=0) == set()
        power(nodes, where, "off")
        assert completed(one)["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
        told = {e.rank: e.more for e in one.events.all if (e.what, e.attempt) == ("restored", 1)}
    assert incident["culprit"]["node"] == where
    found = {rank: (more["step"], more["source"]) for rank, more in told.items()}
    assert found == {
        0: (8, "replica rank 2"), 1: (8, "replica rank 3"), 2: (8, "memory"), 3: (8, "memory"),
    }  # fmt: skip
    assert_nothing_is_lost(one, whole, 1)


def assert_restored_from_survivors(one: Job, lost: set[int]) -> None:
    """Assert that ranks without memory have the state of those that kept it."""
    for rank, (_, source) in sources(one, 1).items():
        kind, _, giver = source.rpartition(" ")
        if rank in lost:
            assert kind == "buddy" or (kind == "replica rank" and int(giver) not in lost), source
        else:
            assert source == "memory"


@pytest.mark.heavy
@pytest.mark.parametrize("is_sharded", [False, True])
def test_nodes_that_are_drained_in_turn_leave_no_trace_in_the_losses(
    machines: Cluster, tmp_path: Path, is_sharded: bool
) -> None:
    plan, sizes = [{"shard": "fsdp2" if is_sharded else "ddp"}], {"program": PROGRAM, "nproc": 1}
    with job(machines, tmp_path, *plan, {"steps": 0}, **sizes) as one:
        one.until_standing("Running")
        for number in range(3):
            one.steps(number)
            node = f"node-{number}"
            assert node in {pod["spec"].get("nodeName") for pod in one.pods().values()}
            machines.kubectl("drain", node, "--timeout=90s")
            one.steps(number + 1)
            machines.kubectl("uncordon", node)
        made = one.finish()
        faults = [incident["culprit"]["fault"] for incident in one.incidents(3)]
        moved = curve(one)
        assert len(moved) == len(steps_made(one)), "a step was made again"
    assert faults == ["PlannedMove"] * 3
    assert made["status"]["restartCount"] == 3
    steps = {"steps": len(moved) // len(one.ranks)}
    with job(machines, tmp_path / "whole", *plan, steps, **sizes) as one:
        completed(one)
        assert curve(one) == moved


def steps_copied(one: Job, worker: Event, rank: int) -> set[int]:
    """Return the steps of another node's rank that the agent of a worker keeps."""
    listed = one.ask(worker, f"/v1/snapshots/training/{rank}")
    return {found["step"] for found in listed["snapshots"]}


@pytest.mark.heavy
def test_shards_of_a_node_that_is_lost_come_from_its_buddy(nodes: Cluster, tmp_path: Path) -> None:
    # Every step is sent, or every second, ... sixteenth; the newest two are in each rank's memory.
    plan = {"attempt": 0, "rank": 1, "step": 17, "at": "begin"}
    shard = {"shard": "fsdp2"}
    sizes = {"program": PROGRAM, "nproc": 1}
    with job(nodes, tmp_path / "whole", shard, **sizes) as one:
        completed(one)
        whole = curve(one)
    with job(nodes, tmp_path / "hurt", plan, shard, spares=1, **sizes) as one:
        held(one, 0)
        workers = one.starts(0)
        while 16 not in steps_copied(one, workers[0], rank=1):
            pass
        power(nodes, one.pods()[places(workers)[1]]["spec"]["nodeName"], "off")
        assert completed(one)["status"]["restartCount"] == 1
        one.incidents(1)
    told = {e.rank: e.more for e in one.events.all if (e.what, e.attempt) == ("restored", 1)}
    assert {more["step"] for more in told.values()} == {16}
    assert told[1]["source"].startswith("buddy ")
    assert curve(one) == whole
