"""Faults of one job: what is stopped, replaced, fenced, charged, and said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import restart, running
from unbroken.core.job.recovery.recovery import story
from unbroken.core.job.recovery.symptoms import reason_of
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.job.types import RestartPolicy, RunPolicy


@pytest.mark.parametrize(
    ("fault", "code", "word"),
    [
        ("Signal", 137, "SIGKILL"),
        ("Signal", 128 + 35, "signal35"),
        ("Signal", None, "Signal"),
        ("OutOfMemory", 137, "OutOfMemory"),
        ("ExitCode", 137, "ExitCode"),
    ],
)
def test_a_condition_names_the_signal_that_killed(fault: str, code: int | None, word: str) -> None:
    assert reason_of(Symptom(1.0, fault, "killed", exit_code=code)) == word


@pytest.mark.parametrize(
    "sign",
    ["pod w-1 deleting", "pod w-1 phase=Failed", "gone w-1", "shutdown w-1 0", "ready w-1 0",
     "stopping w-1 0", "failed w-1 0"],
)  # fmt: skip
def test_every_sign_stops_the_others(sign: str) -> None:
    script = running()
    effects = len(script.effects)
    script.run(f"10 {sign}")
    stopped = [e for e in script.effects[effects:] if type(e).__name__ == "StopWorkers"]
    assert "w-0.0" in [e.pod for e in stopped]
    assert script.job.attempt == 1


@pytest.mark.parametrize("news", ["runs w-1 0", "ready w-1", "boots w-1", "lost w-9", "gone w-9"])
def test_old_news_and_strangers_change_nothing(news: str) -> None:
    running().run(f"10 {news} ->")


def test_budget_is_full_again_in_the_next_period() -> None:
    script = running(policy=RunPolicy(restart_policy=RestartPolicy(3600, 3, 0)))
    for attempt in range(9):
        restart(script, 10.0 + 1500 * attempt, attempt)
    assert script.job.attempt == 9
    assert script.status.restart_status is not None
    assert script.status.restart_status.current_eval_period == 3


@pytest.mark.parametrize("late", ["node n1 fenced", "node-gone n1"])
def test_late_news_of_a_fence_is_no_proof_for_a_pod_placed_after_it(late: str) -> None:
    script = running()
    script.run(f"""
        10 gone w-1                    -> stop w-0 in 0 keep, create w-1, status Faulted 1,
            event Faulted, incident 1 open
        10.1 ready w-0 0               -> incident 1 open
        10.2 pod w-1 uid=w-1.1 node=n1 ->
        10.3 ready w-1 agent=b         -> start w-0=0 w-1.1=1 in 1, status Faulted 1,
            incident 1 open
        10.4 runs w-0 1                ->
        10.5 runs w-1 1 agent=b        -> status Running 1, event Running, incident 1 open
        11 {late}                      -> prove n1 w-1.1
        15.9 tick                      ->
        16 tick                        -> prove n1 w-1.1
        16.1 node n1 ready             ->
        22 tick                        ->
        30 lost w-1                    -> stop w-0 w-1.1 in 1, status Faulted 2, event Faulted,
            incident 1 failed again, incident 2 open
        30.1 ready w-0 1               ->
    """)
    assert script.job.state.gang.unclear.keys() == {"w-1.1"}


@pytest.mark.parametrize(
    ("text", "lines", "expected"),
    [
        ("ValueError: bad batch", ("Traceback ...", "ValueError: bad batch"), ""),
        (
            "exit code 2",
            ("usage: train.py", "error: no --lr\n", " "),
            "; last output: error: no --lr",
        ),
        ("exit code 2", ("x" * 500,), f"; last output: {'x' * 200}"),
        ("killed by SIGKILL", (), ""),
    ],
)
def test_a_condition_tells_of_the_evidence_only_the_last_line(
    text: str, lines: tuple[str, ...], expected: str
) -> None:
    culprit = Symptom(1.0, "ExitCode", text, pod="w-0", rank=0, evidence=lines)
    incident = Incident(1, 0, culprit, (culprit,), Remedy.PROCESS, "it is well", 1.0)
    first = f"rank 0, pod w-0: ExitCode: {text}; process: it is well"
    assert story(incident) == first + expected


def test_a_condition_does_not_take_a_stack_for_words() -> None:
    stack = ("get (queue.py:9)", "<module> (train.py:40)")
    silent = Symptom(1.0, "Stalled", "no rank got on", evidence=stack)
    found = Incident(1, 0, silent, (silent,), Remedy.PROCESS, "it is well", 1.0, examined_at=2.0)
    assert "it said" not in story(found)
    told = replace(silent, evidence=(*stack, "last output: epoch 3"))
    assert story(replace(found, culprit=told)).endswith("; last output: epoch 3")
