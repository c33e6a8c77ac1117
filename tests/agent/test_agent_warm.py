"""Warm workers under a real agent: forked from a template, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.running import Operator, Running, linked, marked, program, running, start, stop
from tests.watching import until
from unbroken.wire.agent import AgentState
from unbroken.wire.warm import LEARNT_VARIABLE

pytestmark = pytest.mark.slow

TRAIN = """
import json, os, signal, sys
import {library}
from unbroken import worker
told = dict(environ=dict(os.environ), argv=sys.argv, name=__name__, file=__file__, cwd=os.getcwd(),
    value={library}.VALUE, sid=os.getsid(0), stdin=os.readlink("/proc/self/fd/0"),
    path=sys.path[0], fds=sorted(map(int, os.listdir("/proc/self/fd"))))
os.write(1, (json.dumps(told) + "\\n").encode())
worker.progress(1)
signal.pause()
"""
GATE = """
import os, sys
if "template" in sys.orig_argv and os.path.exists({gate!r}):
    os.open({gate!r}, os.O_RDONLY)
"""
"""Code that blocks each template until the first workers are known to be cold."""
LIBRARY = "warm_sample"
INFO = "--server-log-level=info"
Story = Callable[[Running, Operator], Awaitable[None]]


def tell(tmp_path: Path, story: Story, *words: str, site_text: str = "", **environ: str) -> str:
    """Run a story with a library that warm start supports; return the agent's log."""
    site = tmp_path / "site"
    site.mkdir()
    (site / f"{LIBRARY}.py").write_text("VALUE = 1\n")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (site / "sitecustomize.py").write_text(GATE.format(gate=str(gate)) + site_text)
    given = {"UNBROKEN_PRELOAD": LIBRARY, "PYTHONPATH": str(site)} | environ
    script = program(tmp_path, TRAIN.replace("{library}", LIBRARY))

    async def main() -> str:
        with running(tmp_path, INFO, script, *words, **given) as agent:
            async with linked(agent) as operator:
                operator.send(start(0))
                await operator.workers(0)
                assert {one.start for one in operator.reports[-1].workers} <= {"cold"}
                # It stays: a template that was stopped in its `open` looks for it again.
                opened = os.open(gate, os.O_RDWR)
                await story(agent, operator)
                os.close(opened)
            agent.process.terminate()
            return (await asyncio.to_thread(agent.stderr.all)).decode()

    return asyncio.run(main())


async def parked_once(agent: Running, count: int = 2) -> None:
    """Wait until workers have been parked, perhaps for a start that has used them meanwhile."""
    await asyncio.to_thread(agent.stderr.wait_for, f"are parked count={count}")


async def until_parked(agent: Running, count: int = 2) -> list[int]:
    """Wait for a template and its parked workers; return their pids, the template's first."""
    await parked_once(agent, count)
    workers = {worker.pid for worker in agent.report().workers}
    found = [pid for pid in agent.processes() if pid not in {*workers, agent.report().pid}]
    return sorted(found, key=lambda pid: b"template" not in cmdline(pid))


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def again(operator: Operator, attempt: int) -> None:
    """End the attempt before, and start another one at once."""
    operator.send(stop(attempt - 1))
    await operator.report(lambda r: r.state is AgentState.READY and r.newest_attempt == attempt - 1)
    operator.send(start(attempt))
    await operator.workers(attempt)


def told(agent: Running, attempt: int, local_rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        agent.attempt_file(attempt, local_rank, "stdout.log").read_text()
    )
    return found


def test_a_warm_start_is_as_a_cold_one(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        parked = (await until_parked(agent))[1:]
        await again(operator, 1)
        workers = operator.reports[-1].workers
        assert {worker.start for worker in workers} == {"warm"}
        assert sorted(worker.pid for worker in workers) == sorted(parked)
        for worker in workers:
            cold, warm = (told(agent, attempt, worker.local_rank) for attempt in (0, 1))
            assert warm["sid"] == worker.pid
            environ = warm["environ"]
            expected = cold["environ"] | {
                "MASTER_PORT": "29401",
                "JOB_RESTART_COUNT": "1",
                "TORCHELASTIC_RESTART_COUNT": "1",
                "TORCHELASTIC_ERROR_FILE": environ["TORCHELASTIC_ERROR_FILE"],
            }
            assert environ == expected
            assert f"attempt_1/{worker.local_rank}/" in environ["TORCHELASTIC_ERROR_FILE"]
            hidden = {"UNBROKEN_WARM", "UNBROKEN_PRELOAD", LEARNT_VARIABLE}
            assert not hidden & set(environ)
            for key in ("argv", "name", "file", "cwd", "value", "stdin", "path"):
                assert warm[key] == cold[key], key
            assert set(warm["fds"]) <= set(cold["fds"])
        await until_replaced(agent, operator)

    log = tell(tmp_path, story, "--lr", "0.1")
    assert "started cold" not in log


async def until_replaced(agent: Running, operator: Operator) -> None:
    """Wait until used workers are replaced; check that the next start is warm again."""
    await asyncio.to_thread(agent.stderr.wait_for, r"(?s)are parked.*are parked")
    await again(operator, 2)
    assert told(agent, 2)["environ"]["JOB_RESTART_COUNT"] == "2"


def test_an_edited_script_is_read_anew(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        await until_parked(agent)
        program(tmp_path, "import os, signal; os.write(1, b'[2]\\n'); signal.pause()")
        await again(operator, 1)
        text = agent.attempt_file(1, 0, "stdout.log").read_text()
        assert text == "[2]\n"
        assert {worker.start for worker in operator.reports[-1].workers} == {"warm"}

    tell(tmp_path, story)


def test_an_edited_module_means_a_cold_start_and_a_new_template(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        before = await until_parked(agent)
        (tmp_path / "site" / f"{LIBRARY}.py").write_text("VALUE = 'another'\n")
        await again(operator, 1)
        assert {worker.start for worker in operator.reports[-1].workers} == {"cold"}
        assert told(agent, 1)["value"] == "another"
        await asyncio.to_thread(agent.stderr.wait_for, r"(?s)are parked.*are parked")
        assert not set(before) & set(agent.processes())
        await again(operator, 2)
        assert told(agent, 2)["value"] == "another"

    log = tell(tmp_path, story)
    assert log.count("started cold") == 1
    assert f'started cold attempt=1 reason="{tmp_path}/site/{LIBRARY}.py has changed"' in log


OF_A_RANK = """
import os, signal, sys
was_imported = "warm_rank" in sys.modules
import warm_rank
os.write(1, f"{was_imported} {warm_rank.RANK}\\n".encode())
signal.pause()
"""


def test_a_module_that_reads_its_rank_is_imported_by_parked_workers(tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.mkdir()
    (more / "warm_rank.py").write_text("import os\nRANK = int(os.environ['RANK'])\n")

    async def story(agent: Running, operator: Operator) -> None:
        prepared = "(?s)has imported for its rank.*has imported for its rank"
        await asyncio.to_thread(agent.stderr.wait_for, prepared)
        program(tmp_path, OF_A_RANK)
        await again(operator, 1)
        assert {worker.start for worker in operator.reports[-1].workers} == {"warm"}
        texts = [agent.attempt_file(1, rank, "stdout.log").read_text() for rank in (0, 1)]
        assert texts == ["True 0\n", "True 1\n"]
        await again(operator, 2)
        assert {worker.start for worker in operator.reports[-1].workers} == {"warm"}
        texts = [agent.attempt_file(2, rank, "stdout.log").read_text() for rank in (0, 1)]
        assert [text.split()[1] for text in texts] == ["0", "1"]

    path = f"{tmp_path / 'site'}:{more}"
    tell(tmp_path, story, UNBROKEN_PRELOAD=f"{LIBRARY},warm_rank", PYTHONPATH=path)


def test_starts_that_follow_each_other_at_once_are_warm(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        await until_parked(agent)
        for attempt in range(1, 5):
            await again(operator, attempt)
            starts = {worker.start for worker in operator.reports[-1].workers}
            assert starts == {"warm"}, attempt

    tell(tmp_path, story)


async def test_with_modules_that_the_job_names_the_first_start_can_be_warm(tmp_path: Path) -> None:
    # Until it is killed: standard input may be at its end.
    text = "import os, signal, sys; os.write(1, b'%d\\n' % ('colorsys' in sys.modules))"
    text += "; signal.pause()"
    script = program(tmp_path, text)
    with running(tmp_path, INFO, script, UNBROKEN_PRELOAD="decimal,colorsys") as agent:
        await asyncio.to_thread(agent.stderr.wait_for, "are parked count=2")
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.workers(0)
            assert [worker.start for worker in report.workers] == ["warm", "warm"]
            assert agent.attempt_file(0, 1, "stdout.log").read_text() == "1\n"


LATER = """
import os, signal, sys
from unbroken import worker
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
worker.progress(1)
os.write(1, b"%d" % ("colorsys" in sys.modules))
if os.environ["JOB_RESTART_COUNT"] == "0":
    signal.sigwait({signal.SIGUSR1})
    import colorsys, wave
    worker.progress(2)
signal.pause()
"""


async def test_what_is_imported_after_the_template_began_is_learned_too(tmp_path: Path) -> None:
    with running(tmp_path, INFO, program(tmp_path, LATER)) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            await operator.workers(0)
            await until_parked(agent)
            for worker in operator.reports[-1].workers:
                os.kill(worker.pid, signal.SIGUSR1)
            await operator.report(lambda r: all(one.step == 2 for one in r.watch))
            await again(operator, 1)
            assert agent.attempt_file(1, 0, "stdout.log").read_text() == "0"
            await asyncio.to_thread(agent.stderr.wait_for, r"(?s)is ready.*is ready.*are parked")
            await again(operator, 2)
            assert {one.start for one in operator.reports[-1].workers} == {"warm"}
            assert agent.attempt_file(2, 1, "stdout.log").read_text() == "1"


def starts(agent: Running) -> set[str]:
    return {worker.start for worker in agent.report().workers}


async def first_start(tmp_path: Path, **environ: str) -> tuple[set[str], str]:
    """Run a job's first start, and wait for parked workers; return how it began, and the log."""
    script = program(tmp_path, TRAIN.replace("{library}", LIBRARY))
    given = {"PYTHONPATH": str(tmp_path / "site")} | environ
    with running(tmp_path, INFO, script, **given) as agent:
        async with linked(agent) as operator:
            await operator.state(AgentState.READY)
            operator.send(start(0))
            report = await operator.workers(0)
            began = {worker.start for worker in report.workers}
            assert told(agent, 0)["value"] == 1
            await parked_once(agent)
            # Used workers are replaced a moment later.
            warm = (await operator.report(lambda r: bool(r.warm and not r.warm.cold_because))).warm
            assert warm is not None
            assert warm.modules > 0
            assert warm.seconds > 0
            agent.process.terminate()
            log = (await asyncio.to_thread(agent.stderr.all)).decode()
    shutil.rmtree(tmp_path / "logs")
    return began, log


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of learned imports, and write the library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / f"{LIBRARY}.py").write_text("import decimal\nVALUE = 1\n")
    return tmp_path / "cache" / "unbroken" / "imports"


def entries(cache: Path) -> list[Path]:
    return [*cache.iterdir()]


async def test_the_second_run_of_a_program_is_warm_from_its_first_start(
    tmp_path: Path, cache: Path
) -> None:
    assert (await first_start(tmp_path))[0] == {"cold"}
    (entry,) = entries(cache)
    known = json.loads(entry.read_text())
    assert {"decimal", "unbroken.worker"} <= {*known["modules"]}
    assert (await first_start(tmp_path))[0] == {"warm"}
    # A changed file is learned anew.
    (file,) = (each for each in known["files"] if each["name"].endswith("/decimal.py"))
    file["text"] = "1:1"
    entry.write_text(json.dumps(known))
    began, log = await first_start(tmp_path)
    assert began == {"cold"}
    assert f"imports are learned anew: a file has changed file={file['name']}" in log
    assert (await first_start(tmp_path))[0] == {"warm"}


HOSTILE = {
    "rubbish": {"modules": [{"os": 1}]},
    "a module that ends its process": {"modules": ["antigravity", "this", "idlelib.__main__"]},
    "all is left out": {"left_out": [{"name": each, "text": "why"} for each in ("os", "decimal")]},
}


@pytest.mark.parametrize("contents", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_learned_imports_cost_time_at_most(
    tmp_path: Path, cache: Path, contents: dict[str, Any]
) -> None:
    assert (await first_start(tmp_path))[0] == {"cold"}
    (entry,) = entries(cache)
    entry.write_text(json.dumps(json.loads(entry.read_text()) | contents))
    await first_start(tmp_path)


UNFIT = """
import os, sys
if "template" in sys.orig_argv and os.path.exists({mark!r}):
    os.kill(os.getpid(), 9)
"""


async def test_learned_imports_that_no_template_survives_are_forgotten(
    tmp_path: Path, cache: Path
) -> None:
    mark = tmp_path / "mark"
    site = tmp_path / "site"
    (site / "sitecustomize.py").write_text(UNFIT.format(mark=str(mark)))
    assert (await first_start(tmp_path))[0] == {"cold"}
    mark.write_text("")
    script = program(tmp_path, TRAIN.replace("{library}", LIBRARY))
    with running(tmp_path, INFO, script, PYTHONPATH=str(site)) as agent:
        async with linked(agent) as operator:
            await operator.state(AgentState.READY)
            assert entries(cache) == []
            mark.unlink()
            operator.send(start(0))
            await operator.workers(0)
            assert starts(agent) == {"cold"}
            await until_parked(agent)


UNSAFE = """
import sys, threading
if "template" in sys.orig_argv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_an_interpreter_with_threads_means_cold_starts(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        await asyncio.to_thread(agent.stderr.wait_for, r"next start is cold")
        await again(operator, 1)
        assert told(agent, 1)["value"] == 1

    log = tell(tmp_path, story, site_text=UNSAFE)
    assert 'started cold attempt=1 reason="unsafe: ' in log
    assert "thread" in log


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        await again(operator, 1)
        assert [b"boot.py" in cmdline(pid) for pid in agent.processes()] == [False] * 3
        assert "UNBROKEN_WARM" not in told(agent, 1)["environ"]

    assert "warm" not in tell(tmp_path, story, UNBROKEN_WARM="off")


@pytest.mark.parametrize("victim", ["template", "parked", "while parking"])
def test_who_is_killed_is_replaced_and_delays_no_start(tmp_path: Path, victim: str) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        if victim == "while parking":
            await asyncio.to_thread(agent.stderr.wait_for, "template is ready")
            family = [pid for pid in agent.processes() if b"template" in cmdline(pid)]
            template = family[0]
        else:
            template, *others = await until_parked(agent)
            template = others[0] if victim == "parked" else template
        os.kill(template, signal.SIGKILL)
        if victim != "parked":
            await until(lambda: not Path(f"/proc/{template}").exists())
        await again(operator, 1)
        workers = operator.reports[-1].workers
        assert {worker.state for worker in workers} == {"running"}
        assert told(agent, 1, 1)["environ"]["RANK"] == "1"
        if victim == "parked":
            # One too few is parked, and the template may not have parked another in time.
            assert "warm" in {worker.start for worker in workers}
            await until_replaced(agent, operator)
            return
        assert {worker.start for worker in workers} == {"cold"}
        await asyncio.to_thread(agent.stderr.wait_for, "(?s)started cold.*are parked")
        operator.send(stop(1))
        await operator.state(AgentState.READY)

    log = tell(tmp_path, story)
    assert victim == "parked" or "started cold attempt=1" in log


@pytest.mark.parametrize("count", [1, 2])
def test_no_start_is_handed_to_a_worker_that_was_killed_but_has_not_ended(
    tmp_path: Path, count: int
) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        dying = (await until_parked(agent))[1 : 1 + count]
        with contextlib.ExitStack() as held:
            for pid in dying:
                held.enter_context(killed_but_held(pid))
            operator.send(stop(0))
            await operator.report(lambda r: r.state is AgentState.READY and r.newest_attempt == 0)
            operator.send(start(1))
            begun = await operator.report(lambda r: r.attempt == 1 and len(r.workers) == 2)
            assert not {worker.pid for worker in begun.workers} & set(dying)
            await operator.workers(1)
            await again(operator, 2)
        assert all(told(agent, 2, rank)["environ"]["RANK"] == str(rank) for rank in (0, 1))

    tell(tmp_path, story)


@contextlib.contextmanager
def killed_but_held(pid: int) -> Iterator[None]:
    """Kill a process, and hold it where it has closed none of its files yet."""
    seize, detach, options_exit, wait_all = 0x4206, 17, 0x40, 0x40000000  # linux/ptrace.h, wait.h
    ptrace = ctypes.CDLL(None).ptrace
    assert ptrace(seize, pid, None, ctypes.c_void_p(options_exit)) == 0
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSTOPPED(os.waitpid(pid, wait_all)[1])
    yield
    assert ptrace(detach, pid, None, None) == 0


@pytest.mark.parametrize("victim", ["agent", "keeper", "both"])
def test_template_and_parked_end_with_the_agent(tmp_path: Path, victim: str) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        await until_parked(agent)
        report = agent.report()
        assert report.pid is not None
        own = {"agent": [report.pid], "keeper": [agent.process.pid]}
        pids = own.get(victim, [report.pid, agent.process.pid])
        left = [os.pidfd_open(pid) for pid in agent.processes() if pid not in pids]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for fd in left:
            await readable(fd)
            os.close(fd)
        await asyncio.to_thread(agent.wait)
        assert marked(agent.mark) == []

    tell(tmp_path, story)


async def readable(fd: int) -> None:
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, event.set)
    await event.wait()
    loop.remove_reader(fd)


TORCH = """
import datetime, os, signal
import torch
import torch.distributed as dist
from unbroken import worker
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
value = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(value)
worker.progress(int(value))
def wait_here():
    os.write(1, f"sum {int(value)}\\n".encode())
    signal.pause()
wait_here()
"""


async def test_ranks_of_torch_that_learned_from_the_first_train_warm(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, TORCH)) as agent:
        async with linked(agent) as operator:
            report = await operator.state(AgentState.READY)
            operator.send(start(0, master_port=report.offered_port))
            await operator.workers(0)
            await until_parked(agent)
            os.kill(operator.reports[-1].workers[1].pid, signal.SIGKILL)
            await operator.state(AgentState.FAULTED)
            operator.send(stop(0))
            report = await operator.state(AgentState.READY)
            operator.send(start(1, master_port=report.offered_port))
            report = await operator.workers(1)
            assert [worker.start for worker in report.workers] == ["warm", "warm"]
            assert agent.attempt_file(1, 0, "stdout.log").read_text() == "sum 3\n"
            await operator.report(lambda r: all(one.step == 3 for one in r.watch))
            evidence = await operator.examine(attempt=1)
            for rank in evidence.ranks:
                (main,) = [thread for thread in rank.threads if thread.is_main]
                assert main.frames[-2:] == ("wait_here (train.py:12)", "<module> (train.py:13)")
