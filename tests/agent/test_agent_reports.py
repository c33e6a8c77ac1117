"""Frames of bytes, which may be read in one pass, compared with the same frames as text."""

from __future__ import annotations

import json

import pytest

from unbroken.errors import PeerError
from unbroken.wire.agent_codec import decode_answer

WORKER = {"local_rank": 0, "rank": 8, "pid": 100, "state": "running", "started_at": 1.5}
WATCH = {"rank": 8, "phase": "train", "step": 7, "step_at": 2.5, "metrics": {"loss": 0.5}}
REPORT = {
    "type": "report", "agent_id": "a", "state": "running", "newest_attempt": 1, "attempt": 1,
    "rank": 1, "master_addr": "10.0.0.1", "master_port": 20_000, "nproc": 1, "pid": 17,
    "workers": [WORKER], "watch": [WATCH], "progress": {"checkpoint": 3},
}  # fmt: skip


def read(frame: bytes | str) -> object:
    """Return the decoded report, or the text of the refusal."""
    try:
        return decode_answer(frame)
    except PeerError as error:
        return str(error)


@pytest.mark.parametrize(
    "frame", [b"", b"{", b"[]", b'{"type":"report",', b'{"type":"report","a":\x00}', b"\xff"]
)
def test_rubbish_is_refused_in_the_same_words(frame: bytes) -> None:
    assert read(frame) == read(frame.decode(errors="replace"))


def test_the_texts_and_lists_of_one_report_are_cut_alike() -> None:
    long = {**REPORT, "workers": [WORKER] * 1100, "reason": "r" * 17_000}
    many = {**REPORT, "watch": [{"rank": 1}] * 1100}
    for report in (long, many):
        frame = json.dumps(report, separators=(",", ":")).encode()
        assert read(frame) == read(frame.decode(errors="replace"))
