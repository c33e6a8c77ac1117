"""Reports and commands survive the wire; rubbish is refused, and news passed over."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import PeerError
from unbroken.wire.agent import (
    IMPORTS_MAX,
    WARM_PEERS_MAX,
    AgentReport,
    AgentState,
    Command,
    FaultKind,
    HistoryCommand,
    PastIncident,
    Receipt,
    RuleState,
    RuleView,
    ShutdownCommand,
    SnapshotReport,
    SnapshotState,
    StartCommand,
    StopCommand,
    Violation,
    WarmCommand,
    WarmReport,
    WorkerFault,
    WorkerReport,
)
from unbroken.wire.agent_codec import (
    decode_command,
    decode_imports,
    decode_report,
    encode_command,
    encode_report,
)
from unbroken.wire.codec import FRAME_BYTES_MAX

COUNTS = st.integers(0, 2**40)
TIMES = st.floats(0, 1e10)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50)
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
JSON = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)
PROGRESS = st.dictionaries(TEXTS, VALUES | st.dictionaries(TEXTS, VALUES, max_size=3), max_size=3)
WORKERS = st.builds(
    WorkerReport,
    *(COUNTS, COUNTS, COUNTS, TEXTS, TIMES, st.none() | TIMES, st.none() | TIMES),
    recurring_line_at=st.none() | TIMES,
)
FAULTS = st.builds(
    WorkerFault,
    kind=st.sampled_from(FaultKind),
    local_rank=COUNTS,
    rank=COUNTS,
    pid=COUNTS,
    at=TIMES,
    exit_code=st.none() | COUNTS,
    signal=st.none() | COUNTS,
    message=TEXTS,
    fingerprint=TEXTS,
    lines=st.lists(TEXTS, max_size=4).map(tuple),
    rule=TEXTS,
    violation=st.none() | st.sampled_from(Violation),
)
RULES = st.builds(
    RuleView,
    name=TEXTS,
    state=st.sampled_from(RuleState),
    ranks=TEXTS,
    matches=COUNTS,
    last_match_at=st.none() | st.floats(0, 1e10),
    last_rank=st.none() | COUNTS,
    last_line=TEXTS,
)
WARMTHS = st.builds(
    WarmReport,
    cold_because=TEXTS,
    modules=COUNTS,
    seconds=st.floats(0, 1e6),
    left_out=st.lists(TEXTS, max_size=3).map(tuple),
)
RECEIPTS = st.builds(
    Receipt,
    rank=COUNTS,
    attempt=COUNTS,
    step=COUNTS,
    source=st.text("ab 0", min_size=1, max_size=20),
    seconds=TIMES,
    checksum=TEXTS,
    saved_attempt=st.none() | COUNTS,
    name=TEXTS,
    replicas=TEXTS,
)
AMOUNTS = st.none() | st.floats(0, 1e12)
SNAPSHOT_STATES = st.builds(
    SnapshotState,
    rank=COUNTS,
    name=st.text("ab 0", min_size=1, max_size=20),
    step=COUNTS,
    state_bytes=COUNTS,
    save_seconds=AMOUNTS,
    buddy_step=st.none() | COUNTS,
    common_step=st.none() | COUNTS,
    replicas=TEXTS,
)
SNAPSHOTS = st.builds(
    SnapshotReport,
    ranks=st.lists(SNAPSHOT_STATES, max_size=3).map(tuple),
    buddy=TEXTS,
    bytes_per_second=AMOUNTS,
    memory_bytes=COUNTS,
)
REPORTS = st.builds(
    AgentReport,
    agent_id=TEXTS,
    state=st.sampled_from(AgentState),
    newest_attempt=st.none() | COUNTS,
    attempt=st.none() | COUNTS,
    rank=st.none() | COUNTS,
    master_addr=st.none() | st.text("ab0.:é", min_size=1, max_size=20),
    master_port=st.none() | COUNTS,
    nproc=st.none() | COUNTS,
    pid=st.none() | COUNTS,
    offered_port=st.none() | COUNTS,
    workers=st.lists(WORKERS, max_size=3).map(tuple),
    faults=st.lists(FAULTS, max_size=3).map(tuple),
    log_rules=st.lists(RULES, max_size=3).map(tuple),
    reason=TEXTS,
    message=TEXTS,
    agent_version=TEXTS,
    progress=PROGRESS,
    kept=st.lists(COUNTS, max_size=3).map(tuple),
    restart_mode=TEXTS,
    is_unstarted=st.booleans(),
    receipts=st.lists(RECEIPTS, max_size=3).map(tuple),
    copies=st.lists(COUNTS, max_size=3).map(tuple),
    snapshots=st.none() | SNAPSHOTS,
    imports=st.none() | COUNTS,
    warm=st.none() | WARMTHS,
    history=st.none() | COUNTS,
)
STARTS = st.builds(
    StartCommand,
    attempt=COUNTS,
    rank=st.integers(0, 9),
    nnodes=st.integers(10, 20),
    master_addr=st.from_regex(r"[a-z0-9.:]{1,30}", fullmatch=True),
    master_port=st.integers(0, 65535),
    log_rules=st.lists(st.dictionaries(TEXTS, JSON, max_size=3), max_size=3).map(tuple),
    spare=st.booleans(),
    ip_version=st.none() | TEXTS,
    rank_ips=st.none() | st.lists(st.tuples(st.integers(0, 9), TEXTS), max_size=3).map(tuple),
    progress=PROGRESS,
    buddy=TEXTS,
    holders=st.lists(TEXTS, max_size=3).map(tuple),
)
STOPS = st.builds(
    StopCommand,
    attempt=st.none() | COUNTS,
    restart_mode=TEXTS,
    is_graceful=st.booleans(),
    timeout_seconds=st.none() | st.floats(0.001, 1e6),
)


@given(REPORTS)
def test_reports_survive_the_wire(report: AgentReport) -> None:
    assert decode_report(encode_report(report)) == report


PEERS = st.lists(TEXTS, max_size=WARM_PEERS_MAX).map(tuple)


HISTORIES = st.builds(
    HistoryCommand,
    version=COUNTS,
    incidents=st.lists(
        st.builds(
            PastIncident,
            number=COUNTS,
            attempt=COUNTS,
            fault=TEXTS,
            culprit=TEXTS,
            remedy=TEXTS,
            seconds=st.none() | TIMES,
            steps_lost=st.none() | COUNTS,
        ),
        max_size=3,
    ).map(tuple),
    restarts=COUNTS,
    seconds_lost=TIMES,
    steps_lost=COUNTS,
    goodput=st.none() | st.floats(0, 1),
)


@given(STARTS | STOPS | st.just(ShutdownCommand()) | PEERS.map(WarmCommand) | HISTORIES)
def test_commands_survive_the_wire(command: Command | WarmCommand | HistoryCommand) -> None:
    assert decode_command(encode_command(command)) == command


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"modules": {}}', b'{"modules": [1]}', b'{"modules": [""]}']
)
def test_what_is_no_list_of_modules_is_refused(body: bytes) -> None:
    assert decode_imports(b'{"modules": ["os", "os.path"]}') == ("os", "os.path")
    with pytest.raises(PeerError):
        decode_imports(body)
    with pytest.raises(PeerError):
        decode_imports(json.dumps({"modules": ["a"] * (IMPORTS_MAX + 1)}).encode())


def test_a_start_frame_has_the_keys_of_the_documented_request() -> None:
    frame = json.loads(encode_command(StartCommand(3, 1, 2, "10.0.0.1", 2000)))
    assert frame == {
        "type": "start",
        "rank": 1,
        "nnodes": 2,
        "faultCount": 3,
        "master_addr": "10.0.0.1",
        "master_port": 2000,
        "spare": False,
        "progress": {},
    }


@given(REPORTS, st.data())
def test_a_field_of_the_wrong_kind_is_refused_or_passed_over(
    report: AgentReport, data: st.DataObject
) -> None:
    value = json.loads(encode_report(report))
    name = data.draw(st.sampled_from(sorted(asdict(report))))
    value[name] = data.draw(JSON)
    try:
        decode_report(json.dumps(value))
    except PeerError as error:
        assert re.search(rf"report(\.|.*`){name}", str(error))


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_rubbish_is_refused(frame: bytes) -> None:
    with pytest.raises(PeerError):
        decode_report(frame)
    with pytest.raises(PeerError):
        decode_command(frame)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"state": "sleeping"}, "report.state: Invalid enum value 'sleeping'"),
        ({"agent_id": None}, "report: Object missing required field `agent_id`"),
        ({"attempt": True}, "report.attempt: Expected `int.*`, got `bool`"),
        ({"kept": [0, True]}, r"report.kept\[1\]: Expected `int`, got `bool`"),
        ({"attempt": -1}, "report.attempt: Expected `int` >= 0"),
        ({"attempt": 10**30}, "report.attempt: Expected `int` <= 9007199254740992"),
        ({"workers": {}}, "report.workers: Expected `array`, got `object`"),
        ({"workers": [3]}, r"report.workers\[0\]: Expected `object`, got `int`"),
        (
            {"faults": [{"kind": "New"}]},
            r"report.faults\[0\]: Object missing required field `local_rank`",
        ),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], text: str) -> None:
    value = {"agent_id": "a", "state": "ready"} | change
    with pytest.raises(PeerError, match=text):
        decode_report(json.dumps(value))


def test_a_newer_peer_is_understood() -> None:
    fault = {"kind": "CosmicRay", "local_rank": 0, "rank": 0, "pid": 1, "at": 1.0, "colour": "red"}
    fault |= {"rule": "loss", "violation": "Odd"}
    value = {"agent_id": "a", "state": "faulted", "faults": [fault], "mood": "good"}
    report = decode_report(json.dumps(value))
    assert report.faults[0].kind is FaultKind.EXIT_CODE
    assert report.faults[0].violation is Violation.FAULT, "it is acted on at once"


def test_sizes_are_bounded() -> None:
    with pytest.raises(PeerError, match="bytes"):
        decode_report(b" " * (FRAME_BYTES_MAX + 1))
    value = {"agent_id": "a", "state": "ready", "message": "x" * 100_000}
    assert len(decode_report(json.dumps(value)).message) < 20_000
    deep = "[" * 100_000
    with pytest.raises(PeerError, match="not JSON"):
        decode_report(deep)
