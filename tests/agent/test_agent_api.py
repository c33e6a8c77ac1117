"""The documented HTTP dialogue with a real agent, and where it is more truthful than that."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.agent.running import KEY, SLEEPER, Running, linked, program, running, start, stop
from tests.agent_requests import AgentRequests, raw_link
from unbroken.agent.main import read_key
from unbroken.errors import SpecError
from unbroken.wire.agent import AgentState
from unbroken.wire.proof import TAG_HEADER

pytestmark = pytest.mark.slow

START = {
    "rank": 0,
    "nnodes": 1,
    "faultCount": 0,
    "master_addr": "127.0.0.1",
    "master_port": "29401",
    "ipVersion": "v1",
    "rankIps": [{"rank": 0, "ip": "127.0.0.1"}],
}
PIDFD_GETFD = 438  # asm-generic/unistd.h
STRICT = {"Unbroken-Strict": "1"}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, program(tmp_path, SLEEPER)) as found:
        yield found


def reach(agent: Running, state: AgentState) -> dict[str, Any]:
    """Wait for a state on the link; the status then."""

    async def wait() -> None:
        async with linked(agent) as operator:
            await operator.state(state)

    asyncio.run(wait())
    return agent.status()


def post(agent: Running, path: str, body: object = b"", **headers: str) -> tuple[int, bytes]:
    code, answer, _ = agent.request("POST", path, body, headers)
    return code, answer


def detail(answer: bytes) -> Any:
    return json.loads(answer)["detail"]


def test_the_documented_dialogue(agent: Running, tmp_path: Path) -> None:
    """Reference section 10, line by line."""
    bad_requests(agent)
    update(agent, tmp_path)
    first_attempt(agent)
    next_attempt_and_end(agent)


def bad_requests(agent: Running) -> None:
    status = agent.status()
    assert list(status["transitions"]) == ["INIT", "READY"]
    assert (status["status"], status["restartMode"]) == ("ready", "process_level_restart")
    assert (status["spare"], "reason" in status) == ("True", False)

    code, answer = post(agent, "/start", {})
    assert code == 422
    names = ["rank", "nnodes", "faultCount", "master_addr", "master_port"]
    assert [problem["loc"] for problem in detail(answer)] == [["body", name] for name in names]
    assert {(problem["type"], str(problem["input"])) for problem in detail(answer)} == {
        ("missing", "{}")
    }
    code, answer = post(agent, "/start", START | {"master_addr": ""})
    assert (code, detail(answer)[0]["type"]) == (422, "value_error")
    code, answer = post(agent, "/start", b"not JSON")
    assert (code, detail(answer)[0]["loc"]) == (422, ["body", 0])
    code, answer, headers = agent.request("GET", "/start")
    assert (code, headers["allow"], answer) == (405, "POST", b'{"detail":"Method Not Allowed"}')
    code, answer, headers = agent.request("GET", "/nope")
    assert (code, headers["content-type"]) == (404, "application/json")
    assert answer == b'{"detail":"Not Found"}'
    assert post(agent, "/stop") == (200, b"")
    assert agent.status() == status


def update(agent: Running, tmp_path: Path) -> None:
    code, answer = post(agent, "/update", START)
    updated = json.loads(answer)
    assert (code, updated["status"], updated["ipversion"]) == (200, "ready", "v1")
    written = json.loads((tmp_path / "config" / "pod_resourceconfig.json").read_text())
    assert written == {
        "ips": ["127.0.0.1"],
        "current_pod_ip": "127.0.0.1",
        "ips_timestamp": "v1",
    }


def first_attempt(agent: Running) -> None:
    code, answer, headers = agent.request("POST", "/start", START | {"progress": {}})
    assert (code, answer, headers["content-type"]) == (200, b"", None)
    status = agent.status()
    assert (status["status"], status["reason"], status["assigned_rank"]) == (
        "running",
        "Running",
        "0",
    )
    assert post(agent, "/start", START) == (200, b"")
    assert agent.status() == status

    os.kill(agent.report().workers[0].pid, signal.SIGKILL)
    status = reach(agent, AgentState.FAULTED)
    assert status["reason"] == "WorkerCrash"
    assert "local rank 0 (exit code -9): killed by SIGKILL" in status["message"]
    assert post(agent, "/start", START) == (200, b"")
    assert agent.status() == status


def next_attempt_and_end(agent: Running) -> None:
    assert post(agent, "/stop", {"restart_mode": "process_level_restart"}) == (200, b"")
    status = reach(agent, AgentState.READY)
    assert ("reason" in status, status["assigned_rank"]) == (False, "0")
    code, answer = post(agent, "/stop", {"is_graceful": "maybe"})
    assert (code, detail(answer)[0]["type"]) == (422, "bool_parsing")
    assert post(agent, "/stop", {"restart_mode": "bogus"}) == (200, b"")

    assert post(agent, "/start", START | {"faultCount": 1}) == (200, b"")
    assert agent.status()["status"] == "running"
    assert post(agent, "/shutdown", b"{}") == (200, b"")
    with pytest.raises(ConnectionRefusedError):
        agent.request("GET", "/v1/health")
    assert agent.wait() == 0


def test_the_port_closes_even_while_a_starting_worker_holds_its_copy(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, SLEEPER)) as agent, ExitStack() as stack:
        copies = [stack.enter_context(one) for one in sockets_of(agent.report().pid)]
        assert any(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for one in copies)
        assert post(agent, "/shutdown", b"{}") == (200, b"")
        with pytest.raises(ConnectionRefusedError):
            agent.request("GET", "/v1/health")
        assert agent.wait() == 0


def sockets_of(pid: int | None) -> Iterator[socket.socket]:
    """Copies of the TCP sockets of a process (pidfd_getfd(2))."""
    assert pid is not None
    pidfd = os.pidfd_open(pid)
    for name in os.listdir(f"/proc/{pid}/fd"):
        found = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, int(name), 0)
        if found >= 0 and stat.S_ISSOCK(os.fstat(found).st_mode):
            copy = socket.socket(fileno=found)
            if copy.family == socket.AF_INET:
                yield copy
            else:
                copy.close()
        elif found >= 0:
            os.close(found)
    os.close(pidfd)


def test_stop_after_success_makes_it_ready_again(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, "")) as agent:
        post(agent, "/start", START)
        assert "reason" not in reach(agent, AgentState.COMPLETED)
        assert post(agent, "/stop") == (200, b"")
        reach(agent, AgentState.READY)
        post(agent, "/start", START)
        reach(agent, AgentState.COMPLETED)


def test_strict_callers_are_told_what_cannot_be(agent: Running) -> None:
    assert post(agent, "/start", START, **STRICT) == (200, b"")
    assert post(agent, "/start", START, **STRICT) == (200, b"")
    code, answer = post(agent, "/start", START | {"master_port": 1}, **STRICT)
    assert (code, detail(answer)) == (409, "attempt 0 was started with another rank or address")
    code, answer = post(agent, "/start", START | {"faultCount": 1, "ipVersion": "v2"}, **STRICT)
    assert (code, detail(answer)) == (409, "cannot start attempt 1 in state running")
    assert agent.status()["ipversion"] == "v1"
    assert post(agent, "/stop", {"attempt": 0}, **STRICT) == (200, b"")
    reach(agent, AgentState.READY)
    code, answer = post(agent, "/start", START, **STRICT)
    assert (code, detail(answer)) == (409, "attempt 0 is over; the newest is 0")


def test_a_start_that_is_refused_starts_nothing(agent: Running) -> None:
    code, _ = post(agent, "/start", START | {"rankIps": [{"ip": "10.0.0.1"}]})
    assert code == 422
    assert agent.status()["status"] == "ready"
    assert len(agent.processes()) == 1


@pytest.mark.parametrize(
    ("headers", "refused", "why"),
    [
        ({}, 401, "job's key"),
        ({"Authorization": f"Bearer {KEY.hex()}"}, 401, "job's key"),
        ({TAG_HEADER: "0" * 32}, 401, "job's key"),
        ({TAG_HEADER: "é"}, 400, "not valid UTF-8"),
    ],
)
async def test_without_the_key_nothing_is_said_or_done(
    agent: Running, headers: dict[str, str], refused: int, why: str
) -> None:
    for method, path in [
        ("GET", "/status"),
        ("GET", "/v1/report"),
        ("GET", "/v1/link"),
        ("POST", "/shutdown"),
        ("POST", "/start"),
        ("GET", "/nope"),
    ]:
        with closing(AgentRequests("127.0.0.1", agent.port, None)) as stranger:
            code, answer, _ = stranger.request(method, path, b"{}", headers)
            assert code == refused
            assert why in detail(answer)
            assert stranger.request("GET", "/v1/health", None, {})[0] == 200
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await session.ws_connect(f"http://127.0.0.1:{agent.port}/v1/link")


def test_workers_do_not_learn_the_key_and_get_torchruns_variables(tmp_path: Path) -> None:
    text = "import json, os; print(json.dumps(dict(os.environ)))"
    path = program(tmp_path, text)
    with running(tmp_path, "--role", "trainer", path, HOME="/home/x") as agent:
        post(agent, "/start", START | {"rank": 2, "nnodes": 3, "faultCount": 7})
        reach(agent, AgentState.COMPLETED)
        found = json.loads(agent.attempt_file(7, 1, "stdout.log").read_text())
    directory = Path(found.pop("TORCHELASTIC_ERROR_FILE")).parent
    assert directory.name == "1"
    assert directory.parent.name == "attempt_7"
    expected = {
        "LOCAL_RANK": "1",
        "RANK": "5",
        "GROUP_RANK": "2",
        "ROLE_RANK": "5",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29401",
        "JOB_RESTART_COUNT": "7",
        "TORCHELASTIC_RESTART_COUNT": "7",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "HYPERPOD_SIGNAL_COORDINATION": "disabled",
        "HOME": "/home/x",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert not [name for name in found if name.startswith("UNBROKEN_AGENT_KEY")]


def test_an_address_table_that_cannot_be_written_is_told_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path, place = program(tmp_path, SLEEPER), str(tmp_path / "file")
    with running(tmp_path, path, UNBROKEN_RESOURCE_CONFIG_DIR=place) as agent:
        assert post(agent, "/start", START) == (200, b"")
        status = agent.status()
        assert (status["status"], "ipversion" in status) == ("running", False)
        assert status["message"].startswith(f"cannot write {place}/pod_resourceconfig.json")


def test_addresses_are_kept_over_the_agents_restart_and_changed_by_deltas(tmp_path: Path) -> None:
    path = program(tmp_path, SLEEPER)
    more = {"rank": 1, "nnodes": 3, "rankIps": [{"rank": 2, "ip": "c"}, {"rank": 1, "ip": "b"}]}
    with running(tmp_path, path) as agent:
        post(agent, "/update", START)
    with running(tmp_path, path) as agent:
        assert agent.status()["ipversion"] == "v1"
        post(agent, "/update", START | more | {"ipVersion": "v2"})
        assert agent.status()["ipversion"] == "v2"
    written = json.loads((tmp_path / "config" / "pod_resourceconfig.json").read_text())
    assert written == {"ips": ["127.0.0.1", "b", "c"], "current_pod_ip": "b", "ips_timestamp": "v2"}


def unbrokenrun(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unbroken.agent", *arguments]
    base = {"PATH": os.environ["PATH"]}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=base | environ)


def test_without_a_key_it_does_not_start() -> None:
    found = unbrokenrun("train.py")
    assert found.returncode == 2
    assert "UNBROKEN_AGENT_KEY_FILE" in found.stderr
    assert "UNBROKEN_AGENT_AUTH=none" in found.stderr
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "text"), [(None, "cannot read"), ("\n", "64 hexadecimal"), ("ab" * 31, "64 hexa")]
)
def test_a_key_file_without_a_key_is_refused(
    tmp_path: Path, content: str | None, text: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SpecError, match=text):
        read_key({"UNBROKEN_AGENT_KEY_FILE": str(path), "UNBROKEN_AGENT_AUTH": "none"})


def test_a_job_may_do_without_a_key(tmp_path: Path) -> None:
    path = program(tmp_path, SLEEPER)
    with running(tmp_path, path, UNBROKEN_AGENT_AUTH="none") as agent:
        assert agent.key is None
        assert agent.status()["status"] == "ready"


def test_a_port_that_is_taken_is_told_in_one_line(agent: Running, tmp_path: Path) -> None:
    found = unbrokenrun(
        *("--server-host=127.0.0.1", f"--server-port={agent.port}", "--log-dir", str(tmp_path)),
        "train.py",
        UNBROKEN_AGENT_AUTH="none",
    )
    assert found.returncode == 1
    assert found.stderr.startswith(f"unbrokenrun: cannot listen on 127.0.0.1:{agent.port}: ")
    assert len(found.stderr.splitlines()) == 1


def test_a_huge_body_is_refused(agent: Running) -> None:
    code, answer = post(agent, "/start", b" " * (5 * 1024 * 1024))
    assert code == 413
    assert detail(answer)
    assert agent.status()["status"] == "ready"


async def test_rubbish_on_the_link_changes_nothing(agent: Running) -> None:
    async with raw_link(agent.port, KEY) as link, linked(agent) as operator:
        for frame in ("{", "[]", '{"type": "dance"}', '{"type": "start"}', "x" * 100_000):
            await link.send(frame)
        await link.send(b"\0\1")
        operator.send(start(0))
        await operator.workers(0)
        operator.send(stop(0))
        await operator.state(AgentState.READY)


async def test_a_link_may_ask_for_slower_heartbeats(agent: Running) -> None:
    async def frames(asked: str, count: int) -> list[float]:
        found = []
        async with raw_link(agent.port, KEY, f"?heartbeat={asked}") as link:
            for _ in range(count):
                await link.receive()
                found.append(asyncio.get_running_loop().time())
        return found

    first, second = await frames("1.5", 2)
    assert second - first > 1.1
    for rubbish in ("nan", "-1", "inf", "soon"):
        assert await frames(rubbish, 1)
