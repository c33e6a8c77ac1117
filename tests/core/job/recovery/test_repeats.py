"""Repeated errors: their origin, and the reaction to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script, spec
from unbroken.core.job.events import DeletePod, JobSeen, RecordEvent
from unbroken.core.job.recovery.decision import FIRST_SECONDS, find_repeat
from unbroken.core.job.recovery.incidents import RESTART_REQUESTED
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.job.types import CleanPodPolicy, JobOptions, RestartPolicy, RunPolicy, SameError


def raised(
    node: str,
    step: int | None = 9,
    fault: str = "PythonException",
    error: str = "e",
    text: str = "x",
) -> Symptom:
    """Return a rank's exception."""
    is_raised = fault in ("PythonException", "OutOfMemory")
    return Symptom(1, fault, text, node=node, fingerprint=error if is_raised else "", step=step)


def rule(name: str, violation: str) -> Symptom:
    """Return the symptom of a broken log rule."""
    return replace(raised("a", fault="LogRule"), rule=name, violation=violation)


def history(*symptoms: Symptom, apart: float = 100.0) -> list[Incident]:
    """Return incidents with these culprits, one after the other, the last 100 s before now."""
    count = len(symptoms)
    return [
        Incident(
            number, number, symptom, (symptom,), Remedy.PROCESS, "why",
            detected_at=1000 - apart * (count - number),
            started_at=1000 - apart * (count - number) + 1,
            outcome="recovered",
        )
        for number, symptom in enumerate(symptoms)
    ]  # fmt: skip


A, B = raised("a"), raised("b")
USERS, NODE, TOLD, NEW = "users", "node", "told", "new"


def verdict(found: Symptom, before: list[Incident], elsewhere: str = "") -> str:
    """Return the origin of an error."""
    repeat = find_repeat([found], None, before, 1000, elsewhere)
    if repeat is None:
        return NEW
    return USERS if repeat.is_users else f"{NODE} {repeat.suspect}" if repeat.suspect else TOLD


@pytest.mark.parametrize(
    ("found", "before", "expected"),
    [
        (A, [], NEW),
        (A, [B], USERS),
        (A, [A], "node a"),
        (A, [A, A], USERS),
        (A, [raised("b", 8)], NEW),
        (A, [raised("b", error="other")], NEW),
        (A, [B, raised("b", 5, error="other")], USERS),
        # Another fault has shown that step 9 had been left behind.
        (A, [B, raised("b", 12, error="other")], NEW),
        (A, [B, raised("b", 12, fault="NodeLost")], NEW),
        (A, [B, Symptom(1, RESTART_REQUESTED, "x")], NEW),
        # Two ranks may each have missed somebody else; a third time is no accident.
        (raised("a", None), [raised("b", None)], TOLD),
        (raised("a", None), [raised("a", None)], "node a"),
        (raised("a", None), [raised("b", None), raised("c", None)], USERS),
        (raised("a", None), [B], NEW),
        # Storage or the name service, not the script.
        (raised("a", text="TimeoutError: read timed out"), [raised("b")], TOLD),
        (raised("a", fault="PeerLost"), [raised("b", fault="PeerLost")], NEW),
        (raised("a", fault="Signal"), [raised("b", fault="Signal")], NEW),
        (raised("a", fault="OutOfMemory"), [raised("b", fault="OutOfMemory")], USERS),
        (raised("a", fault="OutOfMemory", error=""), [raised("b", fault="OutOfMemory", error="")],
         TOLD),
        # All ranks have the same NaN: a report from only one node means nothing.
        (raised("a", fault="BadMetric"), [raised("a", fault="BadMetric")], USERS),
        (raised("a", None, fault="BadMetric"), [raised("a", None, fault="BadMetric")], NEW),
        (rule("nan", "Fault"), [rule("nan", "Fault")], USERS),
        (rule("nan", "Fault"), [rule("spike", "Fault")], NEW),
        (rule("x", "Hang"), [rule("x", "Hang")], NEW),
        (rule("x", "Fault"), [rule("x", "Slow")], NEW),
        (raised("a", fault="LogRule", text="LogFault_nan: x"),
         [raised("a", fault="LogRule", text="LogFault_nan: x")], NEW),
    ],
)  # fmt: skip
def test_whose_it_is(found: Symptom, before: list[Symptom], expected: str) -> None:
    assert verdict(found, history(*before), "ab") == expected


def test_where_there_is_no_other_node_the_third_time_says_it() -> None:
    assert verdict(A, history(A), "a") == TOLD
    assert verdict(A, history(A, A), "a") == USERS


def test_without_steps_only_what_comes_soon_is_the_same() -> None:
    late = history(raised("b", None), apart=0)
    late[0] = replace(late[0], detected_at=1.0, started_at=1000 - FIRST_SECONDS - 1)
    assert verdict(raised("a", None), late) == NEW
    late[0] = replace(late[0], started_at=1000 - FIRST_SECONDS + 1)
    assert verdict(raised("a", None), late) == TOLD


def test_many_ranks_of_one_attempt_are_one_occurrence() -> None:
    assert find_repeat([A, B, raised("c")], None, [], 1000) is None
    (before,) = history(A)
    fanned = [replace(before, signals=(A, B))]
    repeat = find_repeat([A], None, fanned, 1000, "abc")
    assert repeat is not None
    assert repeat.is_users
    assert "on nodes a, b:" in repeat.text


def test_the_step_of_the_job_counts_where_the_rank_told_none() -> None:
    (before,) = history(raised("b", None))
    assert find_repeat([raised("a", None)], 9, [replace(before, step=9)], 1000) is not None
    assert find_repeat([raised("a", None)], 9, [replace(before, step=8)], 1000) is None


ERROR = "kind=PythonException print=e step=9 lines=Traceback|ValueError:bad text=ValueError:bad"


def running() -> Script:
    """Return a job of two pods on two nodes of three, with a large budget."""
    script = Script(spec(2, policy=RunPolicy(job_max_retry_count=9)))
    script.run("0 node n0 ready\n0 node n1 ready\n0 node n9 ready")
    script.up()
    return script


def fail(script: Script, at: float, attempt: int, pod: str, error: str = ERROR) -> None:
    """Let a pod fail, and the next attempt run if there is one."""
    script.run(f"{at} failed {pod} {attempt} rank={pod[2:]} {error}")
    for name in ("w-0", "w-1"):
        script.run(f"{at + 0.1} ready {name} {attempt}")
    if script.job.phase.value == "Training":
        script.run_ordered(at + 0.2)


def test_the_same_error_on_another_node_ends_the_job_with_its_traceback() -> None:
    script = running()
    fail(script, 10, 0, "w-0")
    fail(script, 20, 1, "w-1")
    (failed,) = [c for c in script.status.conditions if c.status == "True"][-1:]
    assert (failed.type, failed.reason) == ("Failed", "SameErrorSameStep")
    assert "the same error at step 9 for the second time, on nodes n0, n1" in failed.message
    assert failed.message.endswith("Traceback\nValueError:bad")
    assert script.status.restart_count == 1
    assert (script.incidents[2].remedy, script.incidents[2].outcome) == (
        Remedy.FAIL,
        "SameErrorSameStep",
    )


def test_reports_that_come_together_are_judged_together() -> None:
    """Judge them together: by the first report alone, a healthy pod would be deleted.

    Or all pods would be deleted for a full restart.
    """
    script = running()
    fail(script, 10, 0, "w-1")
    other = ERROR.replace("bad", "other").replace("print=e", "print=o")
    seen = len(script.effects)
    script.together(f"failed w-1 1 rank=1 {ERROR} at=19\nfailed w-0 1 rank=0 {other} at=18", 20)
    assert script.incidents[2].remedy is Remedy.PROCESS
    assert script.incidents[2].culprit.pod == "j-w-0"
    assert not any(isinstance(effect, DeletePod) for effect in script.effects[seen:])
    told = [e.message for e in script.effects[seen:] if isinstance(e, RecordEvent)]
    assert len(told) == 1
    assert "j-w-0" in told[0]


def test_the_annotation_lets_the_budget_decide() -> None:
    script = running()
    script.give(JobSeen(script.spec, JobOptions(same_error=SameError.RESTART)), 5)
    fail(script, 10, 0, "w-0")
    fail(script, 20, 1, "w-1")
    fail(script, 30, 2, "w-0")
    assert script.job.phase.value == "Training"
    assert "for the third time" in script.incidents[3].reason


def test_a_first_cause_that_is_heard_with_the_others_leaves_the_pods_to_the_clean_up_policy() -> (
    None
):
    script = Script(
        spec(2, policy=RunPolicy(CleanPodPolicy.NONE, restart_policy=RestartPolicy(100, 1, 9)))
    )
    script.run("0 node n0 ready\n0 node n1 ready\n0 node n9 ready")
    script.up()
    fail(script, 10, 0, "w-0")
    victim = script.event("failed w-0 1 rank=0 kind=PeerLost")
    first = script.event(f"failed w-1 1 rank=1 {ERROR}")
    script.effects += script.job.steps([victim, first], 20)
    script.run("""
        20.3 ready w-0 1
        20.4 ready w-1 1 -> status Failed 1, event Failed, incident 2 SameErrorSameStep
    """)
    assert script.incidents[2].remedy is Remedy.FAIL
    assert not any(isinstance(effect, DeletePod) for effect in script.effects)


def test_an_operator_that_comes_later_remembers() -> None:
    script = running()
    fail(script, 10, 0, "w-0")
    script.run("11 runs w-0 1 output=11\n11 runs w-1 1 output=11")
    new = script.successor(100)
    new.run("""
        100 synced
        100 runs w-0 1 rank=0 master=a port=1
        100 runs w-1 1 rank=1 master=a port=1
    """)
    fail(new, 120, 1, "w-1")
    assert new.incidents[2].remedy is Remedy.FAIL
    assert new.status.conditions[-1].reason == "SameErrorSameStep"
