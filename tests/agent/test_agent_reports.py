"""What an operator reads quickly is what the checked way reads."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.agent_http.reports import read_answer
from unbroken.errors import PeerError
from unbroken.wire.agent_codec import decode_answer

WORKER = {"local_rank": 0, "rank": 8, "pid": 100, "state": "running", "started_at": 1.5}
WATCH = {"rank": 8, "phase": "train", "step": 7, "step_at": 2.5, "metrics": {"loss": 0.5}}
REPORT = {
    "type": "report", "agent_id": "a", "state": "running", "newest_attempt": 1, "attempt": 1,
    "rank": 1, "master_addr": "10.0.0.1", "master_port": 20_000, "nproc": 1, "pid": 17,
    "workers": [WORKER], "watch": [WATCH], "progress": {"checkpoint": 3},
}  # fmt: skip
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 2**53, 2**53 + 1, 1.0, 1.5, -1.5, 1e300, "nan", "READY", "ready", ""]),
    st.just("x" * 20_000),
    st.sampled_from(["a\0b", "\ud800", "ü", 'a"b']),
    st.just([{}] * 3),
    st.just([-1]),
    st.just({"loss": "nan"}),
    st.just([{"detector": "Stuck", "since": 1.0, "at": 2.0, "why": "no step"}]),
    st.just([1] * 2000),
)
"""What may be wrong, or unusual, in some field or other."""
FIELDS = (
    *(("", name) for name in (*REPORT, "kept", "copies", "faults", "receipts", "log_rules")),
    *(("workers", name) for name in (*WORKER, "ended_at", "first_output_at", "start", "new")),
    *(("watch", name) for name in (*WATCH, "alarms", "allowed_seconds", "first_step", "new")),
)


def read(way: Any, frame: bytes) -> object:
    """What is read, or how it is refused."""
    try:
        return way(frame)
    except PeerError as error:
        return str(error)


@given(st.lists(st.tuples(st.sampled_from(FIELDS), ODD), max_size=2))
def test_both_ways_read_the_same(changes: list[tuple[tuple[str, str], Any]]) -> None:
    report = {**REPORT, "workers": [dict(WORKER)], "watch": [dict(WATCH)]}
    for (part, name), value in changes:
        place: Any = report[part] if part else report
        if isinstance(place, list) and place and isinstance(place[0], dict):
            place[0][name] = copy.deepcopy(value)
        elif not part:
            report[name] = copy.deepcopy(value)
    frame = json.dumps(report, separators=(",", ":")).encode()
    assert read(read_answer, frame) == read(decode_answer, frame)


@pytest.mark.parametrize(
    "frame", [b"", b"{", b"[]", b'{"type":"report",', b'{"type":"report","a":\x00}', b"\xff"]
)
def test_rubbish_is_refused_in_the_same_words(frame: bytes) -> None:
    assert read(read_answer, frame) == read(decode_answer, frame)


def test_the_texts_and_lists_of_one_report_are_cut_alike() -> None:
    long = {**REPORT, "workers": [WORKER] * 1100, "reason": "r" * 17_000}
    many = {**REPORT, "watch": [{"rank": 1}] * 1100}
    for report in (long, many):
        frame = json.dumps(report, separators=(",", ":")).encode()
        assert read(read_answer, frame) == read(decode_answer, frame)
