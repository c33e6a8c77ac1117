"""Ends of workers and the agent's reports of them, with real programs that really fail."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.agent.running import KEY, SLEEPER, linked, program, running, start, stop
from tests.agent.test_agent_output import run_to_end
from tests.agent_requests import AgentRequests
from tests.e2e.control import frozen
from tests.e2e.job_events import await_end
from unbroken.wire.agent import AgentState, FaultKind, WorkerFault

pytestmark = pytest.mark.slow


def only_fault(tmp_path: Path, *arguments: str) -> WorkerFault:
    """Return the only fault of a node with one worker, or the first one."""
    with running(tmp_path, *arguments, nproc=1) as agent:
        report = run_to_end(agent)
        assert (report.state, report.reason) == (AgentState.FAULTED, "WorkerCrash")
        return report.faults[0]


@pytest.mark.parametrize(
    ("text", "kind", "exit_code", "number", "message"),
    [
        ("import sys; sys.exit(3)", FaultKind.EXIT_CODE, 3, None, "exit code 3"),
        ("1 / 0", FaultKind.EXCEPTION, 1, None, "ZeroDivisionError: division by zero"),
        ("def (", FaultKind.EXCEPTION, 1, None, "SyntaxError: invalid syntax"),
        ("import os; os.abort()", FaultKind.SIGNAL, None, 6, "killed by SIGABRT"),
        (
            "import ctypes; ctypes.string_at(0)",
            FaultKind.SEGMENTATION_FAULT, None, 11, "killed by SIGSEGV",
        ),
        ("raise MemoryError", FaultKind.OUT_OF_MEMORY, 1, None, "MemoryError"),
    ],
)  # fmt: skip
def test_ends_are_named(
    tmp_path: Path,
    text: str,
    kind: FaultKind,
    exit_code: int | None,
    number: int | None,
    message: str,
) -> None:
    found = only_fault(tmp_path, program(tmp_path, text))
    assert (found.kind, found.exit_code, found.signal) == (kind, exit_code, number)
    assert found.message == message
    assert bool(found.fingerprint) == (exit_code == 1)


def test_a_python_error_comes_with_its_lines(tmp_path: Path) -> None:
    text = "def step(batch):\n    raise ValueError(f'bad batch {batch}')\n\nstep(17)\n"
    found = only_fault(tmp_path, program(tmp_path, text))
    assert found.lines[0] == "Traceback (most recent call last):"
    assert found.lines[-1] == "ValueError: bad batch 17"
    assert any("train.py" in line and "in step" in line for line in found.lines)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("missing.py",), FaultKind.EXIT_CODE, "exit code 2"),
        (("--no-python", "./missing"), FaultKind.NOT_STARTED, "cannot start './missing': No such"),
        (("--no-python", "./key"), FaultKind.NOT_STARTED, "cannot start './key': Permission"),
        (("-m", "no_such_module"), FaultKind.EXIT_CODE, "exit code 1"),
    ],
)
def test_what_cannot_start_is_told(
    tmp_path: Path, arguments: tuple[str, ...], kind: FaultKind, text: str
) -> None:
    found = only_fault(tmp_path, *arguments)
    assert (found.kind, found.message.startswith(text)) == (kind, True), found
    if kind is FaultKind.EXIT_CODE:
        assert "missing.py" in found.lines[-1] or "no_such_module" in found.lines[-1]


def test_the_first_of_several_failures_is_named_and_the_killed_are_not(tmp_path: Path) -> None:
    text = """
import os, signal, sys
if os.environ["RANK"] == "2":
    sys.exit(9)
signal.pause()
"""
    with running(tmp_path, program(tmp_path, text), nproc=4) as agent:
        report = run_to_end(agent)
        assert [(fault.local_rank, fault.exit_code) for fault in report.faults] == [(2, 9)]
        states = [worker.state for worker in report.workers]
        assert states == ["stopped", "stopped", "failed", "stopped"]
        assert "local rank 2 (exit code 9): exit code 9" in report.message


@pytest.mark.parametrize("is_told_first", [False, True])
async def test_who_died_before_the_stop_is_named_though_the_agent_hears_of_both_at_once(
    tmp_path: Path, is_told_first: bool
) -> None:
    """Name the worker that died, though peers and the stop may be reported first.

    On a busy node, peers on other nodes may report first, and the whole job may be stopped for
    that. Without this sign one of them would be blamed.
    """
    with running(tmp_path, program(tmp_path, SLEEPER)) as agent:
        asked = AgentRequests("127.0.0.1", agent.port, KEY)
        async with linked(agent) as operator:
            with contextlib.closing(asked):
                operator.send(start(0))
                report = await operator.workers(0)
                asked.request("GET", "/status", None, {})
                stop = asked.tagged("POST", "/stop", None, {})
                with frozen(report.pid or 0):
                    if is_told_first:
                        asked.connection.request("POST", "/stop", headers=stop)
                    os.kill(report.workers[1].pid, signal.SIGKILL)
                    await_end(report.workers[1].pid)
                    if not is_told_first:
                        asked.connection.request("POST", "/stop", headers=stop)
                assert asked.connection.getresponse().status == 200
            await operator.state(AgentState.READY)
        told = [one.faults for one in operator.reports if one.faults]
        assert [(f.rank, f.kind, f.signal) for f in told[-1]] == [(1, FaultKind.SIGNAL, 9)]


@pytest.mark.parametrize("failing", ["none", "pre", "train", "post"])
def test_scripts_run_before_and_after_training(tmp_path: Path, failing: str) -> None:
    text = """
import os, sys
stage = sys.argv[1]
print(stage, *sys.argv[2:], os.environ["RANK"], file=open("order", "a"))
sys.exit(4 if stage == sys.argv[-1] else 0)
"""
    script = program(tmp_path, text)
    hook = tmp_path / "hook.sh"
    hook.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    hook.chmod(0o755)
    arguments = (
        *("--pre-train-script", str(hook), "--pre-train-args", f"pre 'a b' {failing}"),
        *("--post-train-script", script, "--post-train-args", f"post {failing}"),
        *(script, "train", failing),
    )
    with running(tmp_path, *arguments, nproc=1) as agent:
        report = run_to_end(agent)
        kinds = {"pre": FaultKind.PRE_TRAIN, "post": FaultKind.POST_TRAIN}
        expected = [(kinds.get(failing, FaultKind.EXIT_CODE), 4)]
        expected = [] if failing == "none" else expected
        assert [(fault.kind, fault.exit_code) for fault in report.faults] == expected
        order = [line.split()[0] for line in (tmp_path / "order").read_text().splitlines()]
        reached = {"pre": 1, "train": 2}.get(failing, 3)
        assert order == ["pre", "train", "post"][:reached]
        assert len(list(agent.log_dir.glob("pre_train_job_*/attempt_0/0/stdout.log"))) == 1


async def test_what_a_script_leaves_running_ends_with_the_attempt(tmp_path: Path) -> None:
    hook = tmp_path / "hook.sh"
    hook.write_text("#!/bin/sh\nsleep 1000 &\n")
    hook.chmod(0o755)
    arguments = ("--pre-train-script", str(hook), program(tmp_path, SLEEPER))
    with running(tmp_path, *arguments, nproc=1) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.report(
                lambda r: bool(r.workers) and bool(r.workers[0].first_output_at)
            )
            assert len(agent.processes()) == 3
            os.kill(report.workers[0].pid, signal.SIGKILL)
            await operator.state(AgentState.FAULTED)
            operator.send(stop(0))
            await operator.state(AgentState.READY)
            assert len(agent.processes()) == 1


def test_run_path_module_and_local_rank_in_arguments(tmp_path: Path) -> None:
    text = "import sys; print(__name__, sys.argv[0].endswith('train.py'), sys.argv[1:])"
    script = program(tmp_path, text)
    ways = (("--run-path", script), ("-m", "train"), (script,))
    for attempt, way in enumerate(ways):
        with running(tmp_path, *way, "--rank=${local_rank}", "--tee", "x") as agent:
            report = run_to_end(agent, attempt)
            assert report.state is AgentState.COMPLETED
            kept = agent.attempt_file(attempt, 1, "stdout.log").read_text()
            assert kept == "__main__ True ['--rank=1', '--tee', 'x']\n"


def test_record_of_torch_is_read(tmp_path: Path) -> None:
    text = """
import sys
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise KeyError("lost")
main()
"""
    with running(tmp_path, program(tmp_path, text), nproc=1) as agent:
        (fault,) = run_to_end(agent).faults
        assert agent.attempt_file(0, 0, "error.json").exists()
    assert (fault.kind, fault.message) == (FaultKind.EXCEPTION, "KeyError: 'lost'")
    assert fault.lines[-1] == "KeyError: 'lost'"


async def test_ranks_that_leave_early_are_blamed_by_those_who_stay(tmp_path: Path) -> None:
    text = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1":
    os._exit(0)
dist.all_reduce(torch.ones(1))
"""
    with running(tmp_path, program(tmp_path, text)) as agent:
        async with linked(agent) as operator:
            first = await operator.state(AgentState.READY)
            operator.send(start(0, master_port=first.offered_port))
            report = await operator.state(AgentState.FAULTED)
            kinds = [(fault.kind, fault.local_rank) for fault in report.faults]
            assert kinds == [(FaultKind.EARLY_EXIT, 1), (FaultKind.PEER_LOST, 0)]


async def test_a_store_port_that_is_taken_is_told(tmp_path: Path) -> None:
    text = "import torch.distributed as dist; dist.init_process_group('gloo')"

    async def story(port: int) -> None:
        with running(tmp_path, program(tmp_path, text), nproc=1) as agent:
            async with linked(agent) as operator:
                operator.send(start(0, master_port=port))
                report = await operator.state(AgentState.FAULTED)
                assert report.faults[0].kind is FaultKind.STORE_PORT_TAKEN

    with socket.create_server(("0.0.0.0", 0)) as taken:
        await story(taken.getsockname()[1])
