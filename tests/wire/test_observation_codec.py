"""Evidence, its request, and metrics survive the wire as JSON that anybody can read."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import PeerError
from unbroken.wire.agent import AgentReport, AgentState
from unbroken.wire.agent_codec import (
    EvidenceError,
    decode_answer,
    decode_command,
    decode_evidence,
    decode_report,
    encode_command,
    encode_evidence,
    encode_report,
)
from unbroken.wire.observation import (
    FRAME_CHARACTERS,
    FRAMES_MAX,
    THREADS_MAX,
    Activity,
    Alarm,
    CollectCommand,
    Collective,
    Evidence,
    RankEvidence,
    RankWatch,
    ThreadStack,
)

COUNTS = st.integers(0, 2**40)
TIMES = st.floats(0, 1e10)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50)
ALARMS = st.builds(
    Alarm,
    st.text("abC1", min_size=1, max_size=9),
    TIMES,
    TIMES,
    TEXTS,
    st.none() | st.integers(0, 10**9),
)
WATCHES = st.builds(
    RankWatch,
    rank=COUNTS,
    phase=TEXTS,
    step=st.none() | COUNTS,
    first_step=st.none() | COUNTS,
    first_step_at=st.none() | TIMES,
    step_at=st.none() | TIMES,
    step_seconds=st.none() | TIMES,
    sign_at=st.none() | TIMES,
    allowed_seconds=st.none() | TIMES,
    checkpoint_step=st.none() | COUNTS,
    metrics=st.dictionaries(TEXTS, st.floats(allow_nan=False), max_size=3),
    alarms=st.lists(ALARMS, max_size=3).map(tuple),
)
THREADS = st.builds(ThreadStack, TEXTS, st.booleans(), st.lists(TEXTS, max_size=4).map(tuple))
COLLECTIVES = st.builds(Collective, TEXTS, COUNTS, TEXTS, TEXTS)
ACTIVITIES = st.none() | st.builds(Activity, TIMES, TIMES, COUNTS, TIMES, COUNTS)
RANKS = st.builds(
    RankEvidence,
    rank=COUNTS,
    pid=COUNTS,
    state=TEXTS,
    waits_in=TEXTS,
    cpu_seconds=TIMES,
    cpu_share=st.none() | TIMES,
    waited_share=st.none() | TIMES,
    io_bytes=st.none() | COUNTS,
    is_same=st.none() | st.booleans(),
    last_output_at=st.none() | TIMES,
    last_line=TEXTS,
    phase=TEXTS,
    step=st.none() | COUNTS,
    step_at=st.none() | TIMES,
    threads=st.lists(THREADS, max_size=3).map(tuple),
    collectives=st.lists(COLLECTIVES, max_size=3).map(tuple),
    note=TEXTS,
    activity_before=ACTIVITIES,
    activity_after=ACTIVITIES,
)
EVIDENCE = st.builds(Evidence, COUNTS, COUNTS, TEXTS, TIMES, st.lists(RANKS, max_size=3).map(tuple))


def strict(frame: str) -> object:
    """Decode JSON as strictly as programs in other languages do."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(frame, parse_constant=refuse)


@given(EVIDENCE)
def test_evidence_survives_the_wire(evidence: Evidence) -> None:
    frame = encode_evidence(evidence)
    strict(frame)
    assert decode_evidence(frame) == decode_answer(frame) == evidence


@given(st.builds(CollectCommand, COUNTS, COUNTS, st.floats(0, 60)))
def test_a_request_for_evidence_survives_the_wire(command: CollectCommand) -> None:
    assert decode_command(encode_command(command)) == command


@given(st.lists(WATCHES, max_size=3).map(tuple))
def test_a_watch_survives_the_wire(watch: tuple[RankWatch, ...]) -> None:
    report = AgentReport("a", AgentState.RUNNING, watch=watch)
    frame = encode_report(report)
    strict(frame)
    assert decode_report(frame) == decode_answer(frame) == report


def test_what_is_no_finite_number_is_json_for_everybody() -> None:
    metrics = {"loss": math.nan, "high": math.inf, "low": -math.inf, "rate": 0.5}
    frame = encode_report(
        AgentReport("a", AgentState.RUNNING, watch=(RankWatch(0, metrics=metrics),))
    )
    value = strict(frame)
    assert isinstance(value, dict)
    assert value["watch"][0]["metrics"] == {
        "loss": "nan",
        "high": "inf",
        "low": "-inf",
        "rate": 0.5,
    }
    found = decode_report(frame).watch[0].metrics
    assert math.isnan(found["loss"])
    assert (found["high"], found["low"], found["rate"]) == (math.inf, -math.inf, 0.5)


def test_metrics_that_are_no_numbers_are_left_out_and_bare_ones_are_read() -> None:
    told = {"a": math.nan, "b": -math.inf, "c": "many", "d": True, "e": None, "f": 10**400}
    value = {"agent_id": "a", "state": "ready", "watch": [{"rank": 0, "metrics": told}]}
    frame = json.dumps(value)
    assert "NaN" in frame
    found = dict(decode_report(frame).watch[0].metrics)
    assert math.isnan(found.pop("a"))
    assert found == {"b": -math.inf, "f": math.inf}


def test_evidence_is_bounded_where_it_is_read() -> None:
    threads = [{"frames": ["f" * 300] * 100}] * 100
    rank = {"rank": 0, "pid": 1, "threads": threads, "last_line": "x" * 100_000}
    value = {"request": 1, "attempt": 0, "agent_id": "a", "ranks": [rank]}
    (found,) = decode_evidence(json.dumps(value)).ranks
    assert (len(found.threads), len(found.threads[0].frames)) == (THREADS_MAX, FRAMES_MAX)
    assert len(found.threads[0].frames[0]) == FRAME_CHARACTERS
    assert len(found.last_line) < 20_000


def test_too_much_evidence_loses_side_threads_and_outer_frames_first() -> None:
    frames = tuple(f"{i}".ljust(FRAME_CHARACTERS, "x") for i in range(FRAMES_MAX))
    threads = tuple(ThreadStack(f"t{i}", i == 0, frames) for i in range(THREADS_MAX))
    for count, kept in ((8, (THREADS_MAX, FRAMES_MAX)), (64, (1, FRAMES_MAX)), (900, (1, 12))):
        ranks = tuple(RankEvidence(rank, 1, threads=threads) for rank in range(count))
        frame = encode_evidence(Evidence(1, 0, "a", 0.0, ranks))
        found = decode_evidence(frame)
        assert len(found.ranks) == count
        shown = found.ranks[-1].threads
        assert (len(shown), len(shown[0].frames)) == kept
        assert shown[0].frames == frames[: kept[1]]


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ('{"type":"collect","attempt":0,"seconds":1}', "collect: .* `request`"),
        ('{"type":"collect","request":1,"attempt":0}', "collect: .* `seconds`"),
        ('{"type":"collect","request":1,"attempt":0,"seconds":-1}', r"collect\.seconds"),
        ('{"type":"collect","request":1,"attempt":0,"seconds":NaN}', r"collect\.seconds"),
    ],
)
def test_a_wrong_request_is_refused(frame: str, text: str) -> None:
    with pytest.raises(PeerError, match=text):
        decode_command(frame)


def test_a_request_is_bounded() -> None:
    command = decode_command('{"type":"collect","request":1,"attempt":0,"seconds":1e9}')
    assert command == CollectCommand(1, 0, 60.0)


def test_wrong_evidence_is_told_from_a_wrong_report_and_news_from_both() -> None:
    with pytest.raises(EvidenceError, match=r"evidence: .* `request`"):
        decode_answer('{"type":"evidence"}')
    with pytest.raises(PeerError, match=r"report: .* `agent_id`") as caught:
        decode_answer('{"type":"report"}')
    assert not isinstance(caught.value, EvidenceError)
    assert decode_answer('{"type":"weather"}') is None
    assert decode_answer('{"agent_id":"a","state":"ready"}') == AgentReport("a", AgentState.READY)
