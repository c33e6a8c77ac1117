"""Runs tests, each in a process of its own: one that hangs or dies takes no other with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from threading import Event
from time import monotonic

import msgspec

from unbroken.errors import UnbrokenError
from unbroken.log_lines import Log
from unbroken.spec.nodes.kinds import CheckKind, CheckResult

from . import basic, cores, dcgm, devices, disk, efa, gpu, memory, nvlink, pairs, training
from .findings import VARIABLE, CheckSettings, Finding, Test, unknown

log = Log(__name__)

ENDS = (signal.SIGTERM, signal.SIGINT)
"""Signals by which a person or a node ends this process."""
TESTS: Mapping[CheckKind, tuple[Test, ...]] = {
    CheckKind.BASIC: basic.TESTS,
    CheckKind.STRESS: (
        *cores.TESTS,
        *memory.TESTS,
        *disk.TESTS,
        *gpu.TESTS,
        *devices.TESTS,
        *nvlink.TESTS,
        *dcgm.TESTS,
        *efa.TESTS,
    ),
    CheckKind.CONNECTIVITY: pairs.TESTS,
    CheckKind.TRAINING: training.TESTS,
}
"""Tests of each kind, in order."""
FINDING_BYTES_MAX = 16 << 20
"""Bytes of one finding as JSON."""


def run_tests(
    kinds: Iterable[CheckKind], settings: CheckSettings, node: str = "", only: Collection[str] = ()
) -> Iterator[CheckResult]:
    """The results of the tests of these kinds (`only`: of those named so), each as it comes."""
    for kind in kinds:
        for test in TESTS[kind]:
            if only and test.name not in only:
                continue
            for finding, seconds in _run(test, settings):
                yield _result(finding, seconds, kind, settings, node)


def _result(
    finding: Finding, seconds: float, kind: CheckKind, settings: CheckSettings, node: str
) -> CheckResult:
    planted = f"{VARIABLE}={settings.plants}" if settings.plants else ""
    pair = settings.pair
    return CheckResult(
        node=node,
        kind=kind,
        test=finding.test,
        outcome=finding.outcome,
        seconds=round(seconds, 3),
        message="; ".join(filter(None, (finding.message, planted and f"planted: {planted}"))),
        measured=finding.measured,
        expected=finding.expected,
        unit=finding.unit,
        peer=pair.peer if pair else "",
        backend=finding.backend,
    )


def _run(test: Test, settings: CheckSettings) -> Iterator[tuple[Finding, float]]:
    """Findings of the test, with the seconds that each took."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(test, settings, send))
    began = monotonic()
    end = began + test.limit_seconds + 2 * settings.seconds
    # Whoever ends us in the middle of this would leave a process that nobody knows.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    process.start()
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        send.close()
        while True:
            if not receive.poll(max(0.0, end - monotonic())):
                text = f"it did not end in {end - began:.0f} s: something hangs"
                yield unknown(test.name, text), monotonic() - began
                return
            finding = _received(receive)
            if finding is None:
                break
            yield finding, monotonic() - began
            began = monotonic()
        process.join(max(1.0, end - monotonic()))
        if process.exitcode != 0:
            yield unknown(test.name, _ending(process)), monotonic() - began
    finally:
        _end(process)
        receive.close()


def _received(receive: Connection) -> Finding | None:
    """The next finding; None: there are no more."""
    try:
        data = receive.recv_bytes(FINDING_BYTES_MAX)
    except EOFError:
        return None
    return msgspec.json.decode(data, type=Finding)


def _ending(process: ForkProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with {code}; what it said is on standard error"


def _child(test: Test, settings: CheckSettings, send: Connection) -> None:
    # A group of its own, so that all that it starts ends with it.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    if settings.plants.text("crash") == test.name:
        os.kill(os.getpid(), signal.SIGKILL)
    if settings.plants.text("hang") == test.name:
        Event().wait()
    try:
        for finding in test.run(settings):
            _send(send, finding)
    except UnbrokenError as error:
        _send(send, unknown(test.name, str(error)))
    except Exception as error:
        # A bug of ours must not be a fault of the node.
        log.exception("test failed to run", test=test.name)
        _send(send, unknown(test.name, f"{type(error).__name__}: {error}"))
    send.close()


def _send(send: Connection, finding: Finding) -> None:
    send.send_bytes(msgspec.json.encode(finding))


def _end(process: ForkProcess) -> None:
    # It may have no group yet; then it has started nothing.
    process.kill()
    if process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
