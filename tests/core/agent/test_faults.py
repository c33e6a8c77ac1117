"""Causes of a worker's death, found in real endings: texts are torch 2.13's own, shortened."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.agent.faults import (
    LINE_CHARACTERS,
    LINES_MAX,
    WorkerEnd,
    WorkerPlace,
    has_failed,
    judge_stopped,
    name_fault,
    printed_error,
    signal_name,
)
from unbroken.wire.agent import FaultKind, WorkerFault

FRAMES = """\
some output before
Traceback (most recent call last):
  File "/app/train.py", line 7, in <module>
    main()
  File "/app/train.py", line 5, in main
    step({argument})
    ^^^^
"""
GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:27840: Connection reset by peer. This is typically caused by a remote worker "
    "hanging or bugs in the application."
)
STORE_TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
    "network address. port: 29877, useIpv6: false, code: -98, name: EADDRINUSE, message: "
    "address already in use"
)
STORE_GONE = (
    "torch.distributed.DistNetworkError: The client socket has timed out after 1000ms while "
    "trying to connect to (127.0.0.1, 29855)."
)
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process "
    "exited or there was a network error, NCCL version 2.27.3\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer 10.0.0.2<41234>"
)
WATCHDOG = (
    "[rank1]:[E123 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600000 milliseconds\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'"
)


def raised(text: str, argument: str = "3") -> tuple[str, ...]:
    return tuple((FRAMES.format(argument=argument) + text).splitlines())


def fault(rank: int = 1, **end: object) -> WorkerFault:
    return name_fault(WorkerEnd(**end), WorkerPlace(1, rank, 77, 5.0, master_port=29877))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ValueError: bad batch 17", FaultKind.EXCEPTION),
        ("AssertionError", FaultKind.EXCEPTION),
        ("KeyboardInterrupt", FaultKind.EXCEPTION),
        (GLOO, FaultKind.PEER_LOST),
        (STORE_GONE, FaultKind.PEER_LOST),
        (NCCL, FaultKind.PEER_LOST),
        # Not every lost connection is one between workers.
        ("ConnectionResetError: [Errno 104] Connection reset by peer", FaultKind.EXCEPTION),
        ("requests.exceptions.ConnectionError: connection refused", FaultKind.EXCEPTION),
        # Nor is every error of a communication library the loss of a peer.
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, invalid usage",
            FaultKind.EXCEPTION,
        ),
        ("RuntimeError: NCCL Error 2: unhandled cuda error", FaultKind.CUDA_ERROR),
        (
            "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
            FaultKind.CUDA_ERROR,
        ),
        (
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            FaultKind.CUDA_ERROR,
        ),
        ("RuntimeError: CUDA error: device-side assert triggered", FaultKind.EXCEPTION),
        ("RuntimeError: CUDA error: out of memory", FaultKind.OUT_OF_MEMORY),
        ("OSError: [Errno 28] No space left on device: '/data/ckpt.pt'", FaultKind.DISK_FULL),
        ("OSError: [Errno 24] Too many open files", FaultKind.EXCEPTION),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.",
            FaultKind.SHARED_MEMORY_FULL,
        ),
        (
            "RuntimeError: unable to allocate shared memory(shm): No space left on device",
            FaultKind.SHARED_MEMORY_FULL,
        ),
        ("RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly", FaultKind.EXCEPTION),
        (
            "torch.distributed.DistBackendError: NCCL error: unhandled system error",
            FaultKind.PEER_LOST,
        ),
        (
            "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /x",
            FaultKind.PEER_LOST,
        ),
        ("RuntimeError: Rank 1 failed to pass monitoredBarrier in 30000 ms", FaultKind.PEER_LOST),
        (
            "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was",
            FaultKind.PEER_LOST,
        ),
        ("MemoryError", FaultKind.OUT_OF_MEMORY),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried 2.00 GiB.", FaultKind.OUT_OF_MEMORY),
        ("no exception at all", FaultKind.EXIT_CODE),
    ],
)
def test_an_exit_is_named_by_its_exception(text: str, kind: FaultKind) -> None:
    found = fault(exit_code=1, lines=raised(text))
    assert found.kind is kind
    assert (found.local_rank, found.rank, found.pid, found.at) == (1, 1, 77, 5.0)


@pytest.mark.parametrize(
    ("rank", "text", "kind"),
    [
        (0, STORE_TAKEN, FaultKind.STORE_PORT_TAKEN),
        (0, "OSError: [Errno 98] Address already in use", FaultKind.STORE_PORT_TAKEN),
        (0, STORE_TAKEN.replace("29877", "6006"), FaultKind.EXCEPTION),
        (1, STORE_TAKEN, FaultKind.EXCEPTION),
    ],
)
def test_a_taken_port_is_the_stores_only_at_rank_0(rank: int, text: str, kind: FaultKind) -> None:
    assert fault(rank=rank, exit_code=1, lines=raised(text)).kind is kind


@pytest.mark.parametrize(
    ("end", "kind", "message"),
    [
        ({"signal": 9}, FaultKind.SIGNAL, "killed by SIGKILL"),
        (
            {"signal": 9, "is_out_of_memory": True},
            FaultKind.OUT_OF_MEMORY,
            "killed by SIGKILL: the container ran out of memory",
        ),
        (
            {"signal": 11, "is_out_of_memory": True},
            FaultKind.SEGMENTATION_FAULT,
            "killed by SIGSEGV",
        ),
        ({"signal": 7}, FaultKind.SIGNAL, "killed by SIGBUS"),
        (
            {"signal": 7, "is_shared_memory_full": True},
            FaultKind.SHARED_MEMORY_FULL,
            "killed by SIGBUS: /dev/shm is full; mount a larger one",
        ),
        ({"signal": 6}, FaultKind.SIGNAL, "killed by SIGABRT"),
        ({"signal": 40}, FaultKind.SIGNAL, "killed by signal 40"),
        ({"exit_code": 3}, FaultKind.EXIT_CODE, "exit code 3"),
    ],
)
def test_signals_and_codes_are_decoded(
    end: dict[str, object], kind: FaultKind, message: str
) -> None:
    found = fault(**end)
    assert (found.kind, found.message) == (kind, message)
    assert found.fingerprint == ""


def test_an_abort_by_the_watchdog_is_the_loss_of_a_peer() -> None:
    found = fault(signal=6, lines=tuple(WATCHDOG.splitlines()))
    assert found.kind is FaultKind.PEER_LOST
    assert found.lines[-1].startswith("terminate called")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ProcessGroupNCCL's watchdog got stuck for 600 seconds", FaultKind.PEER_LOST),
        ("NCCL WARN NET/IB : Got completion from peer h<5> with status=12", FaultKind.PEER_LOST),
        ("ProcessGroupNCCL: CUDA error: uncorrectable ECC error encountered", FaultKind.CUDA_ERROR),
        ("Fatal Python error: Aborted", FaultKind.SIGNAL),
    ],
)  # fmt: skip
def test_an_abort_is_named_by_what_was_said_before(text: str, kind: FaultKind) -> None:
    assert fault(signal=6, lines=(text, "terminate called")).kind is kind
    assert fault(signal=15, lines=(text,)).kind is FaultKind.SIGNAL


def test_the_fingerprint_is_of_the_error_and_its_place() -> None:
    one = fault(exit_code=1, lines=raised("ValueError: bad batch 17 at 0xdeadbeef"))
    same = fault(exit_code=1, lines=raised("ValueError: bad batch 99 at 0xfeed"))
    other_text = fault(exit_code=1, lines=raised("ValueError: bad label 17"))
    elsewhere = tuple(
        line.replace("line 5", "line 6") for line in raised("ValueError: bad batch 1")
    )
    assert one.fingerprint == same.fingerprint != ""
    prints = {fault(exit_code=1, lines=elsewhere).fingerprint, other_text.fingerprint}
    assert len(prints | {one.fingerprint}) == 3


def test_the_rank_that_torch_writes_before_each_line_is_no_part_of_the_error() -> None:
    plain = raised("ValueError: x")
    prefixed = tuple(f"[rank3]: {line}" for line in plain)
    assert fault(exit_code=1, lines=prefixed) == fault(exit_code=1, lines=plain)


def test_the_last_traceback_counts_and_its_end_is_kept() -> None:
    lines = (*raised("KeyError: 'a'"), "", "During handling of the above exception, another", "")
    found = fault(exit_code=1, lines=(*lines, *raised("ValueError: b"), "resource_tracker: leaked"))
    assert found.message == "ValueError: b"
    assert found.lines[0] == "Traceback (most recent call last):"
    assert "ValueError: b" in found.lines


def test_what_record_wrote_beats_what_was_printed() -> None:
    stack = "\n".join(raised("ZeroDivisionError: division by zero"))
    content = {
        "message": {
            "message": "ZeroDivisionError: division by zero",
            "extraInfo": {"py_callstack": stack, "timestamp": "1"},
        }
    }
    printed = raised("SystemExit: 1")
    found = fault(exit_code=1, lines=printed, error_file=json.dumps(content))
    assert found.message == "ZeroDivisionError: division by zero"
    assert found.fingerprint == fault(exit_code=1, lines=raised(found.message)).fingerprint


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": 3}', '{"message": {"extraInfo": 1}}'])
def test_a_broken_error_file_is_passed_over(text: str) -> None:
    assert (
        fault(exit_code=1, lines=raised("ValueError: b"), error_file=text).message
        == "ValueError: b"
    )


def test_syntax_errors_have_frames_without_functions() -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/app/train.py", line 1',
        "    def (",
        "        ^",
        "SyntaxError: invalid syntax",
    )
    for told in (lines, lines[1:]):
        found = fault(exit_code=1, lines=told)
        assert found.message == "SyntaxError: invalid syntax"
        assert found.lines == told


@given(st.lists(st.text(max_size=80), max_size=40), st.text(), st.integers(0, 255))
def test_no_output_is_too_strange(lines: list[str], recorded: str, code: int) -> None:
    broken = ["Traceback (most recent call last):", *lines]
    end = WorkerEnd(exit_code=code, lines=tuple(broken), error_file=recorded)
    found = name_fault(end, WorkerPlace(0, 0, 1, 0.0))
    assert len(found.lines) <= LINES_MAX
    assert len(found.message) <= LINE_CHARACTERS
    assert has_failed(end) == (code != 0)


def test_text_without_a_traceback_is_no_exception() -> None:
    assert printed_error(("ValueError: only mentioned",)) is None
    assert signal_name(15) == "SIGTERM"


RAISED = (
    "Traceback (most recent call last):",
    '  File "/train.py", line 9, in <module>',
    "    step()",
    "ValueError: bad batch",
)


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (RAISED, FaultKind.EXCEPTION),
        (
            (*RAISED, "[rank0]: Warning: no destroy_process_group()"),
            FaultKind.EXCEPTION,
        ),
        (("step 7 loss 1.2",), None),
        ((*RAISED, *(f"step {i}" for i in range(20))), None),
        ((*RAISED[:3], "RuntimeError: [gloo] Connection closed by peer"), None),
    ],
)
def test_a_stopped_worker_is_blamed_for_what_it_was_dying_of(
    lines: tuple[str, ...], kind: FaultKind | None
) -> None:
    fault = judge_stopped(WorkerEnd(signal=9, lines=lines), WorkerPlace(0, 0, 1, 1.0))
    assert (fault and fault.kind) == kind
    if fault:
        assert (fault.signal, fault.exit_code, fault.message) == (9, None, "ValueError: bad batch")
