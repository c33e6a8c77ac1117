"""The agent's machine and what workers that live on say: of which attempt, and of what fault."""

from __future__ import annotations

import pytest

from tests.core.agent.drive_workers import AGAIN, DONE, FAULTED, RUNNING, check, ended, keep
from unbroken.core.agent.events import (
    Arrived,
    FaultReported,
    NothingLives,
    Passed,
    ProgramStage,
    Registered,
    WorkerEnded,
)
from unbroken.core.agent.faults import WorkerEnd
from unbroken.wire.agent import FaultKind


@pytest.mark.parametrize(
    ("code", "state", "faults"),
    [(75, "stopped", [FaultKind.SIGNAL]), (1, "failed", [FaultKind.SIGNAL, FaultKind.EXIT_CODE])],
)
def test_one_that_cannot_leave_and_ends_itself_has_no_fault(
    code: int, state: str, faults: list[FaultKind]
) -> None:
    end = WorkerEnded(0, ProgramStage.TRAIN, 1, WorkerEnd(code), is_signalled=False, pid=101)
    machine = check(
        *FAULTED,
        (keep(), "recall 1 of 0, kill but 1, stopping"),
        (end, "kill, stopping"),
    )
    assert machine.report().workers[1].state == state
    assert [fault.kind for fault in machine.report().faults] == faults


def test_what_is_late_of_an_older_attempt_counts_for_no_newer() -> None:
    machine = check(
        *AGAIN,
        (Registered(0, 102, attempt=0), "running"),
        (Passed(1, 101, attempt=0), "running"),
        (keep(1), "recall 1 of 1, kill but 1, stopping"),
        (ended(0, 102, attempt=1), "stopping"),
        (NothingLives((1,)), "stopping"),
        (Arrived(1, 101, attempt=0), "stopping"),
        (Arrived(1, 101, attempt=1), "stopping"),
        (Passed(1, 101, attempt=1), "stopping"),
        (Arrived(1, 101, attempt=0), "stopping"),
        (Arrived(1, 101, attempt=1), "ready"),
    )
    assert machine.report().kept == (1,)


GLOO = """Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:9
"""
DATA = """Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
    raise ValueError("shard 3 is empty")  # if its request timed out
ValueError: shard 3 is empty
"""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (GLOO, FaultKind.PEER_LOST),
        (GLOO.splitlines()[-1], FaultKind.PEER_LOST),
        (DATA, FaultKind.REPORTED),
        ("link 3 is down", FaultKind.REPORTED),
    ],
)
def test_who_reports_that_a_peer_is_gone_is_no_first_cause(text: str, kind: FaultKind) -> None:
    report = FaultReported(0, 100, message=text)
    (fault,) = check(*RUNNING, (report, "faulted")).report().faults
    assert (fault.kind, fault.pid) == (kind, 100)
    assert fault.message in text.splitlines()[-1]
    done = (ended(1, 101, DONE), "running")
    faults = check(*RUNNING, done, (report, "faulted")).report().faults
    left = [FaultKind.EARLY_EXIT] if kind is FaultKind.PEER_LOST else []
    assert [fault.kind for fault in faults] == [*left, kind], "who left is named first"
