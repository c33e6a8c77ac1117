"""The agent's socket: who may write to it, who survives a stop, and the records in `/status`.

The workers are raw clients by the protocol's description: no code of unbroken reads or writes for
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.agent.ipc_clients import OURS, RAW, THEIRS
from tests.agent.running import Operator, Running, linked, program, running, start, stop
from unbroken.wire.agent import AgentState, FaultKind, HistoryCommand, PastIncident

pytestmark = pytest.mark.slow
KEEP = {"restart_mode": "in_process_restart"}


@contextlib.asynccontextmanager
async def agent_with(
    directory: Path, text: str, *options: str, **environ: str
) -> AsyncIterator[tuple[Running, Operator]]:
    """Start an agent whose workers run this script, and connect its operator."""
    with running(directory, *options, program(directory, text), **environ) as agent:
        async with linked(agent) as operator:
            yield agent, operator


def told(agent: Running, local_rank: int, count: int = 1) -> list[dict[str, Any]]:
    """Wait for `count` lines that workers of the local rank wrote with `tell`; return them."""
    line = rf"\[default{local_rank}\]:[^\n]*\n"
    seen = agent.stdout.wait_for(rf"(?s)(?:{line}.*?){{{count}}}")[0].decode()
    return [json.loads(one.partition(":")[2]) for one in re.findall(line, seen)]


async def test_the_survivor_of_a_kill_keeps_its_process_and_gets_the_next_attempts_variables(
    tmp_path: Path,
) -> None:
    async with agent_with(tmp_path, OURS) as (agent, operator):
        operator.send(start())
        before = await operator.workers(0)
        os.kill(before.workers[0].pid, signal.SIGKILL)
        faulted = await operator.state(AgentState.FAULTED, 0)
        assert [worker.state for worker in faulted.workers] == ["failed", "running"]
        operator.send(stop(0, **KEEP))
        assert (await operator.state(AgentState.READY)).kept == (1,)
        operator.send(start(1))
        after = await operator.workers(1)
        assert after.workers[1].pid == before.workers[1].pid
        assert after.workers[0].pid != before.workers[0].pid
        assert after.workers[1].started_at > before.workers[1].started_at
        assert told(agent, 1, 2)[1:] == [
            {
                "rank": "1",
                "attempt": "1",
                "port": "29401",
                "restart_count": 0,
                "pid": before.workers[1].pid,
                "local_rank": 1,
            }
        ]
        assert told(agent, 0, 2)[1]["attempt"] == "1"
        operator.send(stop(1))
        assert (await operator.state(AgentState.READY)).kept == ()
        assert agent.status()["restartMode"] == "process_level_restart"
        operator.send(start(2))
        last = await operator.workers(2)
        pids = {worker.pid for worker in (*before.workers, *after.workers)}
        assert pids.isdisjoint(worker.pid for worker in last.workers)


DEAF = (
    RAW
    + """
client = Client()
client.introduce()
child = os.fork()
if not child:
    os.setsid()
tell(rank=os.environ["RANK"], child=child)
if LOCAL == 0 or not child:
    signal.pause()
client.hear("job_fault")
client.say("at_rcb_barrier")
client.hear("job_start")
client.say("past_rcb_barrier")
signal.pause()
"""
)


async def test_one_that_does_not_leave_is_killed_in_time_with_all_that_it_has_started(
    tmp_path: Path,
) -> None:
    deaf = agent_with(tmp_path, DEAF, UNBROKEN_ARRIVE_SECONDS="1")
    async with deaf as (agent, operator):
        operator.send(start())
        before = await operator.workers(0)
        stopped = asyncio.get_running_loop().time()
        operator.send(stop(0, **KEEP))
        assert (await operator.state(AgentState.READY)).kept == (1,)
        assert asyncio.get_running_loop().time() - stopped >= 1
        survivors = set(agent.processes())
        assert before.workers[1].pid in survivors
        assert before.workers[0].pid not in survivors
        operator.send(start(1))
        after = await operator.workers(1)
        assert after.workers[1].pid == before.workers[1].pid
        assert after.workers[0].pid not in survivors


async def test_one_that_dies_at_the_barrier_is_replaced(tmp_path: Path) -> None:
    async with agent_with(tmp_path, OURS) as (_, operator):
        operator.send(start())
        before = await operator.workers(0)
        operator.send(stop(0, **KEEP))
        assert (await operator.state(AgentState.READY)).kept == (0, 1)
        os.kill(before.workers[0].pid, signal.SIGKILL)
        await operator.report(lambda report: report.kept == (1,))
        operator.send(start(1))
        after = await operator.workers(1)
        assert after.workers[0].pid != before.workers[0].pid
        assert after.workers[1].pid == before.workers[1].pid


async def test_theirs_wait_for_their_ranks_and_keep_their_processes(tmp_path: Path) -> None:
    theirs = agent_with(tmp_path, THEIRS, "--inprocess-restart")
    async with theirs as (agent, operator):
        await operator.state(AgentState.READY)
        status = agent.status()
        assert (status["restartMode"], status["rank_labels"]) == ("in_process_restart", {})
        operator.send(start(0, rank=1, nnodes=2, rank_ips=((0, "10.0.0.1"),)))
        before = await operator.workers(0)
        agent.request("POST", "/stop", {})
        assert (await operator.state(AgentState.READY)).kept == (2, 3)
        operator.send(start(1, rank=1, nnodes=2))
        faulted = await operator.state(AgentState.FAULTED, 1)
        assert (faulted.reason, faulted.message.splitlines()[-1].split(": ")[-1]) == (
            *("MyReason", "my message"),
        )
        assert faulted.faults[0].kind is FaultKind.REPORTED
        assert [w.pid for w in faulted.workers] == [w.pid for w in before.workers]
        check_theirs(agent)
        operator.send(stop(1))
        await operator.state(AgentState.INIT)
        await operator.state(AgentState.READY)


def check_theirs(agent: Running) -> None:
    """Check what the workers received, and what the status reports about them."""
    first, *_ = told(agent, 1, 2)
    assert first["before"] == "-1"
    keys = ("RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_PORT", "JOB_RESTART_COUNT", "SPARE")
    assert [first[key] for key in keys] == ["3", "1", "4", "29400", "0", "False"]
    assert first["more"]["rank_ips"] == [{"rank": 0, "ip": "10.0.0.1"}]
    status = agent.status()
    assert status["rank_labels"] == {"pp": "0"}
    assert {one["rank"]: one["data"] for one in status["worker_data"]} == {
        2: "data of 2",
        3: "data of 3",
    }


RESTARTABLE = (
    RAW
    + """
sys.modules["torch"] = None  # only to start sooner
from unbroken import worker

@worker.restartable
def train():
    where = worker.context()
    tell(rank=where.rank, attempt=where.attempt, world=where.world_size)
    time.sleep(1000)

train()
"""
)


async def test_a_restartable_function_waits_for_its_rank_where_there_is_none(
    tmp_path: Path,
) -> None:
    ours = agent_with(tmp_path, RESTARTABLE, "--inprocess-restart")
    async with ours as (agent, operator):
        await operator.state(AgentState.READY)
        operator.send(start(0, rank=1, nnodes=2))
        before = await operator.workers(0)
        (first,) = told(agent, 1)
        assert (first["rank"], first["attempt"], first["world"]) == (3, 0, 4)
        operator.send(stop(0, **KEEP))
        assert (await operator.state(AgentState.READY)).kept == (2, 3)
        operator.send(start(1, rank=0, nnodes=2))
        after = await operator.workers(1)
        assert [one.pid for one in after.workers] == [one.pid for one in before.workers]
        second = told(agent, 1, 2)[1]
        assert (second["rank"], second["attempt"], second["pid"]) == (1, 1, first["pid"])


@pytest.mark.parametrize("text", [OURS, RESTARTABLE])
async def test_an_agent_that_is_killed_takes_restartable_workers_and_its_socket_along(
    tmp_path: Path, text: str
) -> None:
    short = tempfile.mkdtemp(prefix="ipc")
    async with agent_with(tmp_path, text, TMPDIR=short) as (agent, operator):
        operator.send(start())
        workers = (await operator.workers(0)).workers
        assert [told(agent, local_rank)[0]["pid"] for local_rank in (0, 1)] == [
            worker.pid for worker in workers
        ]
        (directory,) = os.listdir(short)
        assert os.listdir(f"{short}/{directory}")
        os.kill(agent.report().pid or 0, signal.SIGKILL)
        assert agent.wait() == 137
        assert agent.processes() == []
        assert os.listdir(short) == []
    shutil.rmtree(short)


async def test_one_of_theirs_is_started_anew_alone(tmp_path: Path) -> None:
    theirs = agent_with(tmp_path, THEIRS, "--inprocess-restart")
    async with theirs as (_, operator):
        await operator.state(AgentState.READY)
        operator.send(start())
        before = await operator.workers(0)
        os.kill(before.workers[0].pid, signal.SIGKILL)
        await operator.state(AgentState.FAULTED, 0)
        operator.send(stop(0, **KEEP))
        await operator.state(AgentState.READY)
        operator.send(start(1))
        after = await operator.workers(1)
        assert after.workers[0].pid != before.workers[0].pid
        assert after.workers[1].pid == before.workers[1].pid


STEPS = (
    RAW
    + """
from unbroken import worker
client = Client()
client.introduce()
steps = range(8)
while True:
    for step in steps:
        worker.progress(step)
        os.write(1, f"mark={step}\\n".encode())
    client.hear("job_fault")
    client.say("at_rcb_barrier")
    client.hear("job_start")
    client.say("past_rcb_barrier")
    steps = range(5, 7)
"""
)


async def test_steps_and_lines_of_a_kept_worker_count_for_the_attempt_in_which_they_came(
    tmp_path: Path,
) -> None:
    rule = {"name": "mark", "logPattern": r"mark=(\d+)"}
    async with agent_with(tmp_path, STEPS) as (_, operator):

        async def seen(attempt: int, step: int, matches: int) -> None:
            operator.send(start(attempt, log_rules=(rule,)))
            report = await operator.report(
                lambda r: (
                    r.attempt == attempt
                    and [one.step for one in r.watch] == [step, step]
                    and [view.matches for view in r.log_rules] == [matches]
                )
            )
            first = 5 * (attempt > 0)
            assert [one.first_step for one in report.watch] == [first, first]
            mine = [r for r in operator.reports if r.attempt == attempt]
            assert {one.step for r in mine for one in r.watch} <= {
                None,
                *range(first, step + 1),
            }

        await seen(0, 7, 16)
        operator.send(stop(0, **KEEP))
        assert (await operator.state(AgentState.READY)).kept == (0, 1)
        await seen(1, 6, 4)


CHECKPOINTS = (
    RAW
    + """
client = Client()
client.say("ckpt_init", prefix="model", checkpoint_types={"model_checkpoint": 2})
client.say("ckpt_info_get")
tell(path=client.hear("ckpt_info_get")["path"])
for step in (10, 20):
    client.say("ckpt_info_update", step=step, path=f"/c/{step}", checkpoint_type="model_checkpoint")
signal.pause()
"""
)


async def test_a_checkpoint_is_known_when_all_have_told_of_it(tmp_path: Path) -> None:
    async with agent_with(tmp_path, CHECKPOINTS) as (agent, operator):

        async def known(attempt: int, progress: dict[str, Any]) -> None:
            """Wait until the agent answers a request with this progress; its link leaves it out."""

            def holds() -> bool:
                report = agent.report()
                return (report.attempt, report.progress) == (attempt, progress)

            await operator.until(holds)

        operator.send(start())
        await operator.workers(0)
        both = {"model": {"progressData": "/c/20", "progressCount": 20}}
        await known(0, both)
        assert agent.status()["progress"] == both
        operator.send(stop())
        await operator.state(AgentState.READY)
        chosen = {"model": {"progressData": "/c/10", "progressCount": 10}}
        operator.send(start(1, progress=chosen))
        await known(1, both)
        assert [line["path"] for line in told(agent, 0, 2)] == [None, "/c/10"]
        assert all(report.progress == {} for report in operator.reports)


WRONG = (
    RAW
    + """
def ends(data):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(PATH)
    try:
        sock.sendall(data)
        return sock.recv(1) == b""
    except (BrokenPipeError, ConnectionResetError):
        return True

deep = b"[" * 100000
found = [ends(struct.pack(">I", 1 << 31))]
client = Client()
for _ in range(3):
    client.sock.sendall(struct.pack(">I", len(deep)) + deep)
    client.sock.sendall(struct.pack(">I", 2) + b"{}")
    client.sock.sendall(struct.pack(">I", 4) + b"nope")
client.say("ckpt_init", prefix="x" * 4000, checkpoint_types={"a": 1})
client.say("ckpt_info_update", step=1, path="p" * 4000, checkpoint_type="a")
deaf = Client()
deaf.say("ckpt_init", prefix="x", checkpoint_types={"a": 1})
deaf.say("ckpt_info_update", step=1, path="p" * 4000, checkpoint_type="a")
try:
    while True:
        deaf.say("ckpt_info_get")
except (BrokenPipeError, ConnectionResetError):
    found.append(True)
crowd = [socket.socket(socket.AF_UNIX) for _ in range(20)]
for one in crowd:
    one.connect(PATH)
refused = sum(one.recv(1) == b"" for one in crowd[10:])
client.say("ckpt_info_get")
tell(found=found, refused=refused, path=len(client.hear("ckpt_info_get")["path"]))
signal.pause()
"""
)


ASKS = (
    RAW
    + """
client = Client()
version = -1
while version != 7:
    client.say("history")
    told = client.hear("history")
    if told["version"] != version:
        version = told["version"]
        tell(told=told)
signal.pause()
"""
)


async def test_a_worker_that_asks_gets_the_history_that_the_operator_sends(tmp_path: Path) -> None:
    incident = PastIncident(1, 0, "Signal", "rank 1: killed", "process", 1.5, 2)
    async with agent_with(tmp_path, ASKS) as (agent, operator):
        operator.send(start())
        asking = await operator.report(lambda report: report.history is not None)
        assert asking.history == 0
        assert told(agent, 0)[0]["told"] == {
            "type": "history",
            "client_id": "client-0",
            "version": 0,
        }
        operator.send(HistoryCommand(7, (incident,), 1, 1.5, 2, 0.5))
        assert (await operator.report(lambda report: report.history == 7)).history == 7
        known = told(agent, 0, 2)[1]["told"]
        assert (known["restarts"], known["goodput"]) == (1, 0.5)
        assert known["incidents"] == [asdict(incident)]


async def test_who_speaks_badly_or_never_reads_loses_its_connection_and_nothing_else(
    tmp_path: Path,
) -> None:
    async with agent_with(tmp_path, WRONG, "--nproc-per-node", "1") as (agent, operator):
        operator.send(start())
        await operator.workers(0)
        (line,) = told(agent, 0)
        assert (line["found"], line["refused"], line["path"]) == ([True] * 2, 10, 4000)
        assert b"reads nothing" in agent.stderr.wait_for("reads nothing.*")[0]


def socket_path(agent: Running) -> Path:
    """Return the socket path of an agent with a living worker."""
    for pid in agent.processes():
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == b"HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH":
                return Path(value.decode())
    raise AssertionError("no worker has the variable")


async def test_strangers_are_refused_and_nothing_is_left_behind(tmp_path: Path) -> None:
    async def story() -> Path:
        async with agent_with(tmp_path, OURS, TMPDIR=str(long_directory(tmp_path))) as found:
            agent, operator = found
            operator.send(start())
            await operator.workers(0)
            path = socket_path(agent)
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(path))
                assert stranger.recv(1) == b""
            agent.stderr.wait_for("is no worker's")
            return path

    path = await story()
    assert not path.exists()
    assert not path.parent.exists()


def long_directory(directory: Path) -> Path:
    """Return a directory whose name is too long for the address of a socket."""
    found = directory / ("x" * 100)
    found.mkdir()
    return found
