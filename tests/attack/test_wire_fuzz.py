"""Every decoder of `wire` under garbage and mutated messages of real programs.

Only the documented error may be raised, within bounds of time and memory. Any other exception of a
decoder would end a link, an agent or the operator.
"""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.errors import PeerError
from unbroken.wire import ipc, snapshot, worker
from unbroken.wire.agent import (
    AgentReport,
    AgentState,
    FaultKind,
    HistoryCommand,
    PastIncident,
    Receipt,
    RuleState,
    RuleView,
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
from unbroken.wire.agent_bodies import (
    Status,
    parse_json,
    report_of_status,
    start_body,
    start_command,
    status_body,
    stop_command,
)
from unbroken.wire.agent_codec import (
    LINK_BYTES_MAX,
    decode_answer,
    decode_command,
    decode_evidence,
    decode_imports,
    decode_report,
    encode_command,
    encode_evidence,
    encode_report,
    report_bytes_max,
)
from unbroken.wire.observation import (
    Alarm,
    CollectCommand,
    Collective,
    Evidence,
    RankEvidence,
    RankWatch,
    ThreadStack,
)

SECONDS_MAX = 2.0
"""Processor seconds for one message; the slowest takes 0.3 s."""
MEMORY_MAX = 120 * 1024 * 1024
"""Bytes of memory while one message is read."""
LINES = tuple(f'  File "train.py", line {i}, in step: loss.backward()  # müde' for i in range(24))


def a_report(nproc: int) -> AgentReport:
    """Return the report of an agent with `nproc` workers after one of them has died."""
    metrics = {f"metric_of_the_training_script_{i}": 0.1 + i for i in range(16)}
    ranks = range(nproc)
    return AgentReport(
        "0123456789abcdef0123456789abcdef", AgentState.FAULTED, 3, 3, 7, "10.0.0.1", 29400, nproc,
        17, 20000,
        workers=tuple(WorkerReport(i, i, 100 + i, "failed", 1.7e9, 1.7e9, 1.7e9) for i in ranks),
        faults=tuple(
            WorkerFault(
                FaultKind.EXCEPTION, i, i, 100 + i, 1.7e9, 1, None, "ValueError: " + "x" * 400,
                "f" * 32, LINES, 120,
            )
            for i in ranks
        ),
        log_rules=(RuleView("loss", RuleState.HEALTHY, "some", 5, last_line="loss=3.5"),),
        watch=tuple(
            RankWatch(i, "train", 120, 1.7e9, 0.5, 1.7e9, 30.0, 100, metrics,
                      (Alarm("Silent", 1.7e9, 1.7e9, "no step"),), 1)
            for i in ranks
        ),
        reason="WorkerCrash", message="m" * 4000, agent_version="0.1.0",
        progress={"ckpt": {"progressData": "/fsx/step-100", "progressCount": 100}},
        receipts=tuple(Receipt(i, 3, 100, "memory", 0.2, "c" * 16, 2, "s", "0-7") for i in ranks),
        copies=(1, 2), history=0,
    )  # fmt: skip


def evidence(nproc: int) -> Evidence:
    """Return the answer of an agent with `nproc` workers to a collect command."""
    frames = tuple(f"step_{i} (/opt/train/model.py:{i})" for i in range(30))
    threads = tuple(ThreadStack(f"t{i}", i == 0, frames) for i in range(10))
    ranks = tuple(
        RankEvidence(i, 100 + i, "S", "futex_wait", 5.0, 0.1, 0.2, 10, True, 1.7e9, "loss=3.5",
                     "train", 3, 1.7e9, threads, (Collective("0", 5, "all_reduce", "started"),))
        for i in range(nproc)
    )  # fmt: skip
    return Evidence(1, 3, "a", 1.7e9, ranks)


START = StartCommand(
    3, 0, 4, "10.0.0.1", 29400, ({"name": "loss", "logPattern": "loss=(.*)"},), {"Silent": "Act"},
    False, "IPv4", ((0, "10.0.0.1"), (1, "10.0.0.2")),
    {"ckpt": {"progressData": "/fsx/a", "progressCount": 1}}, [{"rank": 0, "data": "x"}],
    "10.0.0.2:8080", ("10.0.0.3:8080",),
)  # fmt: skip
HISTORY = HistoryCommand(9, (PastIncident(1, 0, "Signal", "rank 1", "process"),), 1, 2.5, 3)
REPORT = a_report(2)
MESSAGES: tuple[bytes, ...] = tuple(
    one.encode()
    for one in (
        encode_report(REPORT),
        encode_report(replace(REPORT, state=AgentState.RUNNING, faults=(), log_rules=())),
        encode_evidence(evidence(2)),
        encode_command(START),
        encode_command(StopCommand(3, "ipr", True, 5.0)),
        encode_command(CollectCommand(1, 3, 4.0)),
        encode_command(WarmCommand(("10.0.0.1:8080",))),
        encode_command(HISTORY),
        json.dumps(start_body(START)),
        json.dumps(status_body(REPORT, Status(transitions={AgentState.INIT: 1.7e9}))),
        json.dumps({"modules": ["os", "torch"]}),
        json.dumps({"type": "init", "local_rank": 0, "client_id": "c", "restartable": True}),
    )
)


def body_of(read: Callable[[object], object]) -> Callable[[bytes], object]:
    """Return a reader of bytes from one of decoded bodies."""
    return lambda data: read(parse_json(data))


DECODERS: dict[str, Callable[[bytes], object]] = {
    "report": decode_report,
    "answer": decode_answer,
    "command": decode_command,
    "evidence": decode_evidence,
    "imports": decode_imports,
    "start": body_of(start_command),
    "stop": body_of(stop_command),
    "status": body_of(report_of_status),
}
"""Decoders that may raise PeerError."""
ODD = st.sampled_from(
    [
        None, True, -1, 0, 2**53, 2**64, 10**400, -(10**400), 1e308, float("nan"), float("inf"),
        "", "\0", "\ud800", "x" * 100_000, "\U0001f600" * 5000, [], {}, [[]] * 20_000,
        [{}] * 3000, {"\0": 1}, {str(i): i for i in range(3000)}, [None] * 3000, ["a" * 300] * 300,
    ]
)  # fmt: skip


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths in a value at which a value can be replaced."""
    yield here
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value[:2]) if isinstance(value, list) else items
    for key, inner in items:
        yield from paths(inner, (*here, key))


PATHS = [(i, one) for i, data in enumerate(MESSAGES) for one in paths(json.loads(data))]


def mutated(place: tuple[int, tuple[Any, ...]], odd: Any) -> bytes:
    """Return a real message with another value in one place."""
    number, path = place
    value = json.loads(MESSAGES[number])
    if not path:
        return json.dumps(odd).encode()
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return json.dumps(value, separators=(",", ":")).encode()


@st.composite
def cut(draw: st.DrawFn) -> bytes:
    """Return a real message with a part removed, doubled or overwritten."""
    data = bytearray(draw(st.sampled_from(MESSAGES)))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.integers(0, 40)))
        data[begin:end] = draw(st.sampled_from([b"", bytes(data[begin:end]) * 2, b"9" * 5000]) |
                               st.binary(max_size=20))  # fmt: skip
    return bytes(data)


def check(decode: Callable[[bytes], object], data: bytes) -> None:
    """Check that it raises only PeerError, and in time, and that its result can be stored."""
    began = time.process_time()
    with contextlib.suppress(PeerError):
        found = decode(data)
        assert time.process_time() - began < SECONDS_MAX
        repr(found).encode()
        if isinstance(found, AgentReport):
            encode_report(found)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_garbage_and_mutated_messages_raise_peer_errors(name: str, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["bytes", "cut", "odd"]))
    if kind == "bytes":
        message = data.draw(st.binary(max_size=300))
    elif kind == "cut":
        message = data.draw(cut())
    else:
        message = mutated(data.draw(st.sampled_from(PATHS)), data.draw(ODD))
    check(DECODERS[name], message)


def outcome(decode: Callable[[Any], object], frame: bytes | str) -> str:
    """Return the value that a reader makes of a frame, or its error."""
    try:
        return repr(decode(frame))
    except PeerError as error:
        return f"{type(error).__name__}: {error}"


LEAVES: tuple[object, ...] = (
    None, True, -1, -0.5, 0.5, 2**53 - 1, 2**53, 2**53 + 1, 10**400, 1e300, "", "x" * 200, "nan",
    [], [0] * 1025, [-1], ["a"] * 65, [{}], {}, {str(i): i for i in range(65)}, {"a": {"b": {}}},
    "x" * 20_000, "a\0b", "\ud800", "ü", 'a"b', {"loss": "nan"}, float("nan"), [{}] * 3,
)  # fmt: skip


def test_both_readers_agree_on_every_field_of_a_report() -> None:
    """Check that both readers agree on each field.

    The fast one has each limit in msgspec's terms: a new field without one fails here.
    """
    fault = WorkerFault(FaultKind.SIGNAL, 0, 0, 9, 1.5, 1, 9, "killed", "f", ("a", "b"), 7)
    fault = replace(fault, rule="loss", violation=Violation.HANG)
    alarms = (Alarm("Silent", 1.7e9, 1.7e9, "no step", 7),)
    times = (1.7e9, 0.5, 1.7e9, 30.0)
    watch = RankWatch(
        *(0, "train", 120, *times, 100, {"loss": 0.5}, alarms),
        *(1, 1.7e9, "steps", 5.0, 9.0, 1.7e9),
    )
    rule = RuleView("loss", RuleState.SLOW, "some", 5, 1, 1, 1.7e9, 2, "stderr", "loss=3", "3")
    worker = WorkerReport(0, 0, 100, "failed", 1.7e9, 1.7e9, 1.7e9, "warm", 1.7e9)
    state = SnapshotState(0, "training", 7, 1000, 0.5, 6, 6, "0-1")
    report = replace(
        a_report(1), snapshots=SnapshotReport((state,), "10.0.0.2:8080", 1.5e9, 4000, 1, 2),
        workers=(worker,), faults=(fault,), log_rules=(rule,), watch=(watch,),
        message="m", kept=(1, 2), restart_mode="ipr", imports=3, lease_seconds=8.0, unvouched=4,
        unreached="10.0.0.1:8080", has_ended=True,
        warm=WarmReport("why", 3, 1.5, ("a: why",)),
    )  # fmt: skip
    whole = json.loads(encode_report(report))
    assert {"type", *asdict(report)} == whole.keys(), "a field is not tried"
    for part in ("workers", "faults", "log_rules", "watch", "receipts"):
        assert asdict(getattr(report, part)[0]).keys() == whole[part][0].keys(), part
    assert asdict(state).keys() == whole["snapshots"]["ranks"][0].keys()
    assert decode_answer(encode_report(report).encode()) == replace(report, progress={})
    for path in (path for path in paths(whole) if path and path != ("type",)):
        for leaf in LEAVES:
            value = json.loads(encode_report(report))
            inner = value
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = leaf
            frame = json.dumps(value, separators=(",", ":")).encode()
            assert outcome(decode_answer, frame) == outcome(decode_answer, frame.decode()), frame


HUGE = {
    "lists": b'{"type":"report","agent_id":"a","state":"ready","progress":{"a":['
    + b"[]," * 200_000 + b"0]}}",
    "objects": b'{"type":"report","agent_id":"a","state":"ready","x":[' + b"{}," * 200_000 + b"0]}",
    "threads": b'{"type":"evidence","request":1,"attempt":0,"agent_id":"a","ranks":['
     b'{"rank":0,"pid":1,"threads":[' + b"{}," * 200_000 + b"{}]}]}",
    "depth": b'{"type":"report","progress":' + b"[" * 300_000 + b"]" * 300_000 + b"}",
    "objects in objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "digits": b'{"type":"report","attempt":' + b"9" * 600_000 + b"}",
    "digits behind a point": b'{"type":"report","attempt":1.' + b"9" * 600_000 + b"}",
    "exponent": b'{"type":"report","agent_id":"a","state":"ready","attempt":1e999999}',
    "keys": b"{" + b",".join(b'"%d":0' % i for i in range(50_000)) + b"}",
    "watch": b'{"type":"report","agent_id":"a","state":"ready","watch":['
    + b",".join(b'{"rank":%d}' % i for i in range(40_000)) + b"]}",
    "lines": b'{"type":"report","agent_id":"a","state":"ready","faults":[{"kind":"x",'
     b'"local_rank":0,"rank":0,"pid":1,"lines":[' + b"[[[[]]]]," * 60_000 + b'""]}]}',
    "utf-16": b"\xff\xfe" + '{"type":"report"}'.encode("utf-16-le") * 20_000,
    "text": b'"' + b"\\ud800" * 100_000 + b'"',
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("huge", HUGE)
def test_huge_messages_take_bounded_time_and_memory(name: str, huge: str) -> None:
    data = HUGE[huge]
    check(DECODERS[name], data)
    tracemalloc.start()
    try:
        with contextlib.suppress(PeerError):
            DECODERS[name](data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("nproc", [1, 8, 16, 64])
def test_what_an_honest_agent_sends_is_read_unchanged(nproc: int) -> None:
    report = a_report(nproc)
    frame = encode_report(report)
    assert len(frame) <= report_bytes_max(nproc)
    if nproc <= 16:
        assert decode_report(frame) == report
    assert decode_answer(frame.encode()) == replace(decode_report(frame), progress={})
    frame = encode_evidence(evidence(nproc), LINK_BYTES_MAX)
    assert len(frame) <= LINK_BYTES_MAX
    found = decode_answer(frame.encode())
    assert isinstance(found, Evidence)
    assert nproc > 16 or found == evidence(nproc)


def test_the_longest_report_of_an_agent_is_cut_to_what_is_read() -> None:
    for nproc in (8, 64, 256):
        report = a_report(nproc)
        frame = encode_report(replace(report, progress={"a": "b" * 10**6}))
        assert len(frame) <= report_bytes_max(nproc), nproc
        found = decode_answer(frame.encode())
        assert isinstance(found, AgentReport)
        assert (found.state, len(found.workers)) == (AgentState.FAULTED, nproc)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60) | st.sampled_from(MESSAGES) | cut(), max_size=5))
def test_frames_of_the_workers_socket_raise_value_errors(parts: list[bytes]) -> None:
    for stream in (b"".join(parts), b"".join(ipc.HEADER.pack(len(one)) + one for one in parts)):
        frames = ipc.Frames()
        with contextlib.suppress(ValueError):
            for begin in range(0, len(stream), 100):
                for message in frames.feed(stream[begin : begin + 100]):
                    assert isinstance(message, dict)


def test_deep_and_long_frames_of_a_worker_are_no_messages() -> None:
    for body in (b'{"a":' * 100_000, b"[" * 10**6, b'{"a":' + b"9" * 10**6 + b"}"):
        assert ipc.Frames().feed(ipc.HEADER.pack(len(body)) + body) == []


HEADER = snapshot.Header(b"j" * 16, "model", 3, 100, 0, 8, b"l" * 16, 1 << 20, 1000, 50, 7)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=1200) | st.just(b""), st.integers(0, 1100), st.integers(0, 1 << 40))
def test_a_slot_with_garbage_in_it_holds_nothing_or_a_header(
    garbage: bytes, at: int, size: int
) -> None:
    whole = bytearray(snapshot.write(HEADER).ljust(snapshot.SEALED_AT, b"\0"))
    whole += snapshot.write(replace(HEADER, table_checksum=9)).ljust(snapshot.SEALED_AT, b"\0")
    whole[at : at + len(garbage)] = garbage
    for data in (bytes(whole[: snapshot.HEADERS_BYTES]), garbage):
        found = snapshot.read(data, size)
        assert found is None or snapshot.slot_bytes(found.capacity) <= size
        snapshot.version(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, worker.PAGE_BYTES))
def test_a_page_with_garbage_in_it_is_no_page_or_one(garbage: bytes, at: int) -> None:
    page = bytearray(worker.empty())
    page[at : at + len(garbage)] = garbage
    for data in (bytes(page[: worker.PAGE_BYTES]), garbage):
        found = worker.read(data)
        assert found is None or isinstance(found[1], worker.Page)
        worker.version(data)
