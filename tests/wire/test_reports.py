"""The operator's answer to the live page, as lines."""

from __future__ import annotations

import math

import pytest

from unbroken.errors import PeerError
from unbroken.wire.agent import AgentReport, AgentState, FaultKind, WorkerFault, WorkerReport
from unbroken.wire.agent_codec import LINK_BYTES_MAX, encode_brief
from unbroken.wire.observation import Alarm, RankWatch
from unbroken.wire.reports import decode_lines, encode_line

ALARM = Alarm("silence", 3.0, 9.0, 'no "step" for 9 s\n')
REPORT = AgentReport(
    "agent-1",
    AgentState.RUNNING,
    newest_attempt=2,
    attempt=2,
    rank=1,
    nproc=2,
    pid=7,
    workers=(WorkerReport(0, 2, 11, "running", 5.0), WorkerReport(1, 3, 12, "running", 5.5)),
    watch=(
        RankWatch(2, "train", 40, 9.5, 0.1, 9.5, 30.0, metrics={"loss": 2.5}),
        RankWatch(
            3,
            "é\U0001f600 train",
            None,
            alarms=(Alarm("silence", 3.0, 9.0, 'no "step" for 9 s\n'),),
        ),
    ),
)


def decoded(report: AgentReport) -> AgentReport:
    """The report as the page reads it."""
    (line,) = encode_line("u-1", encode_brief(report)).splitlines()
    found = decode_lines([line])
    assert list(found) == ["u-1"]
    return found["u-1"]


def test_state_workers_and_watch_arrive_as_they_were() -> None:
    assert decoded(REPORT) == REPORT


def test_numbers_that_json_lacks_arrive_too() -> None:
    metrics = {"loss": math.nan, "norm": math.inf, "rate": 0.5}
    watch = (RankWatch(0, metrics=metrics), RankWatch(1, metrics={"loss": 1.0}))
    found = decoded(AgentReport("a", AgentState.RUNNING, watch=watch)).watch
    assert math.isnan(found[0].metrics["loss"])
    assert (found[0].metrics["norm"], found[0].metrics["rate"]) == (math.inf, 0.5)
    assert found[1] == watch[1]


def test_lines_of_faults_stay_in_the_operator() -> None:
    fault = WorkerFault(FaultKind.EXCEPTION, 0, 0, 7, 1.0, lines=("secret of a traceback",))
    report = AgentReport(
        "a", AgentState.FAULTED, faults=(fault,), progress={"checkpoint": "s3://here"}
    )
    line = encode_line("u-1", encode_brief(report))
    assert b"secret" not in line
    assert b"s3" not in line
    assert decoded(report) == AgentReport("a", AgentState.FAULTED)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"u-1",
        b"u-1 ",
        b"u-1 {}",
        b"u-1 []",
        b'u-1 {"type":"beat"}',
        b'u-1 {"type":"report","agent_id":"a","state":"dancing"}',
        b'u-1 {"type":"report","agent_id":7,"state":"ready"}',
        b'u-1 {"agent_id":"a","state":"ready"' + b"," * 9,
        b"u-1 " + b"[" * 100_000,
        b" " + encode_brief(REPORT),
        b"u" * 65 + b" " + encode_brief(REPORT),
        b"u-1 " + encode_brief(REPORT) + b" " * LINK_BYTES_MAX,
        b"\xff\xfe \xff\xfe",
    ],
)
def test_a_line_that_is_no_report_is_refused(line: bytes) -> None:
    with pytest.raises(PeerError):
        decode_lines([line])
