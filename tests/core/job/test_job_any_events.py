"""Whatever the world says, the job's machine keeps its word: no assertion, no going back, rest."""

from __future__ import annotations

from itertools import product

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.job.drive_job import Script, running, spec
from unbroken.core.job.events import StartWorkers, WriteIncident, WriteStatus
from unbroken.core.job.gang import GangStage
from unbroken.core.job.transitions import Phase
from unbroken.spec.job.incident import Remedy
from unbroken.spec.job.types import CleanPodPolicy, RestartPolicy, RunPolicy

PODS = ["w-0", "w-1", "w-2"]
STATES = ["boots", "ready", "runs", "completed", "failed", "stopping", "shutdown"]
ATTEMPTS = ["", " 0", " 1", " 2", " 7"]
DETAILS = [
    "",
    "",
    " agent=b",
    " agent=c",
    " rank=1",
    " rank=99",
    " master=z port=1",
    " output=3",
    " trains=3",
    " imports=0",
    " imports=9",
]
VIEWS = [
    "", " deleting", " phase=Running", " phase=Failed", " phase=Unknown", " why=Backoff",
    " node=n0", " node=n1", " uid=x", " uid=y node=n1",
]  # fmt: skip
NODES = [
    *("ready", "not-ready", "fenced", "unhealthy"),
    *("ready notice=Cordon", "ready notice=AwsSpot leaves=30"),
    "ready notice=OrderedRepair leaves=30 order",
]
OTHER = ["job suspend=yes", "job suspend=no", "job restart=50", "tick", "synced", "node-gone n0"]


def lines_of(*parts: list[str]) -> st.SearchStrategy[str]:
    """Return a strategy of lines with one word of each list."""
    return st.sampled_from(["".join(words) for words in product(*parts)])


LINES = st.lists(
    st.one_of(
        lines_of(STATES, [" "], PODS, ATTEMPTS, DETAILS),
        lines_of(["ready ", "runs ", "completed "], PODS, ATTEMPTS),
        lines_of(["pod "], PODS, VIEWS),
        lines_of(["node n0 ", "node n1 "], NODES),
        lines_of(["gone ", "lost ", "proven "], PODS),
        lines_of(["refused w-1 why=quota"], ["", " final"]),
        st.sampled_from(OTHER),
    ),
    max_size=40,
)
POLICIES = st.sampled_from(
    [
        RunPolicy(),
        RunPolicy(job_max_retry_count=1, clean_pod_policy=CleanPodPolicy.NONE),
        RunPolicy(restart_policy=RestartPolicy(100, 1, 1, 1), fault_deadline_seconds=40),
        RunPolicy(active_deadline_seconds=90, ttl_seconds_after_finished=5),
    ]
)


def rests(script: Script, now: float) -> None:
    """Check that each tick moves the deadline: the machine never asks for the same moment again."""
    for _ in range(30):
        due = script.job.deadline()
        if due is None:
            return
        now = max(now, due)
        script.run(f"{now} tick")
        again = script.job.deadline()
        assert again is None or again > now, "time stands still"


@settings(max_examples=100, deadline=None)
@given(LINES, POLICIES, st.booleans(), st.floats(0.0, 3.0))
@example(["pod w-2 phase=Running", "lost w-0", "synced"], RunPolicy(), False, 0.0)
def test_no_events_break_the_machine(
    lines: list[str], policy: RunPolicy, is_up: bool, pace: float
) -> None:
    script = Script(spec(2, 1, policy))
    now = 10.0
    if is_up:
        script.up()
    else:
        script.run("0 job")
    attempt = script.job.attempt
    for line in lines:
        now += pace
        script.run(f"{now} {line}")
        assert script.job.attempt >= attempt, "an attempt came again"
        attempt = script.job.attempt
    rests(script, now)


@settings(max_examples=100, deadline=None)
@given(LINES, POLICIES)
def test_what_is_written_is_consistent(lines: list[str], policy: RunPolicy) -> None:
    script = running(2, 1, policy=policy)
    for number, line in enumerate(lines):
        script.run(f"{10 + number} {line}")
    numbers = [e.incident.number for e in script.effects if isinstance(e, WriteIncident)]
    assert numbers == sorted(numbers), "one incident at a time"
    restarts = [i for i in script.incidents.values() if i.remedy is not Remedy.FAIL]
    assert len({i.attempt for i in script.incidents.values()}) == len(script.incidents)
    assert script.job.attempt >= len(restarts)
    for effect in script.effects:
        if isinstance(effect, WriteStatus):
            true = [c.type for c in effect.status.conditions if c.status == "True"]
            assert len(true) <= 2, "Created and where it stands"


@settings(max_examples=100, deadline=None)
@given(LINES, st.integers(0, 40))
def test_successor_of_an_operator_takes_over_anywhere(lines: list[str], cut: int) -> None:
    script = running(2, 1)
    for number, line in enumerate(lines[:cut]):
        script.run(f"{10 + number} {line}")
    new = script.successor(100)
    new.run("100 synced")
    for number, line in enumerate(lines[cut:]):
        new.run(f"{100 + number} {line}")
    assert new.job.attempt >= script.status.restart_count
    rests(new, 150)


@settings(max_examples=100, deadline=None)
@given(LINES)
def test_ranks_of_one_start_are_whole(lines: list[str]) -> None:
    script = running(2, 1)
    for number, line in enumerate(lines):
        before = len(script.effects)
        was_halted = script.job.state.gang.stage is GangStage.HALTED
        script.run(f"{10 + number} {line}")
        starts = [e for e in script.effects[before:] if isinstance(e, StartWorkers)]
        if was_halted and script.job.phase is Phase.TRAINING:
            assert sorted(e.command.rank for e in starts) == [0, 1]
            assert len({(e.command.master_addr, e.command.master_port) for e in starts}) == 1
