"""The workers' output: every line whole and marked, whatever is written, however much."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.agent.running import SLEEPER, Running, linked, program, running, start, stop
from tests.watching import until
from unbroken.agent.workers.output import LINE_BYTES_MAX, OutputThread, Stream, open_file, tail_text
from unbroken.agent.workers.processes import ATTEMPTS_KEPT
from unbroken.wire.agent import AgentReport, AgentState


def run_to_end(agent: Running, attempt: int = 0) -> AgentReport:
    """Start an attempt, and wait until it has ended one way or the other."""

    async def story() -> AgentReport:
        async with linked(agent) as operator:
            operator.send(start(attempt))
            return await operator.report(
                lambda r: (
                    r.attempt == attempt
                    and r.state in (AgentState.COMPLETED, AgentState.FAULTED)
                    and all(worker.state != "running" for worker in r.workers)
                )
            )

    return asyncio.run(story())


def resident_mib(pid: int) -> float:
    """Most memory that a process has ever held."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1024


@pytest.mark.slow
def test_lines_of_all_ranks_are_marked_and_kept(tmp_path: Path) -> None:
    text = """
import os, sys
rank = os.environ["RANK"]
print("one", rank)
sys.stdout.write("half ")
sys.stdout.flush()
print("two", end="\\r")
print("three", rank, end="")
print("bad", rank, file=sys.stderr)
"""
    with running(tmp_path, program(tmp_path, text), nproc=3) as agent:
        run_to_end(agent)
        agent.process.terminate()
        stdout, stderr = agent.stdout.all().decode(), agent.stderr.all().decode()
        for rank in range(3):
            marked = [line for line in stdout.splitlines() if line.startswith(f"[default{rank}]:")]
            assert [line.partition(":")[2] for line in marked] == [
                f"one {rank}",
                "half two",
                f"three {rank}",
            ]
            assert f"[default{rank}]:bad {rank}\n" in stderr
            kept = agent.attempt_file(0, rank, "stdout.log").read_bytes()
            assert kept == f"one {rank}\nhalf two\rthree {rank}".encode()
            assert agent.attempt_file(0, rank, "stderr.log").read_text() == f"bad {rank}\n"
    assert len(stdout.splitlines()) == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--local-ranks-filter=1",), {1}),
        (("-r", "1"), set()),
        (("--redirects=0:3,2:1",), {1}),
        (("--redirect", "3", "--tee", "3"), {0, 1, 2}),
    ],
)
def test_the_console_shows_what_was_asked_for_and_files_hold_all(
    tmp_path: Path, arguments: tuple[str, ...], shown: set[int]
) -> None:
    text = "import os; print('rank', os.environ['RANK'])"
    with running(tmp_path, *arguments, program(tmp_path, text), nproc=3) as agent:
        run_to_end(agent)
        agent.process.terminate()
        stdout = agent.stdout.all().decode()
        for rank in range(3):
            assert (f"rank {rank}" in stdout) == (rank in shown)
            kept = agent.attempt_file(0, rank, "stdout.log").read_text()
            assert kept == f"rank {rank}\n"


@pytest.mark.slow
def test_a_flood_is_passed_on_whole_in_little_memory(tmp_path: Path) -> None:
    text = """
import sys
line = b"x" * 99 + b"\\n"
for _ in range(300):
    sys.stdout.buffer.write(line * 1000)
"""
    with running(tmp_path, program(tmp_path, text)) as agent:
        report = run_to_end(agent)
        assert report.state is AgentState.COMPLETED
        assert report.pid is not None
        assert resident_mib(report.pid) < 70
        agent.process.terminate()
        whole = agent.stdout.all()
        assert whole.count(b"\n") == 600_000
        assert set(whole.splitlines()) == {b"[default%d]:" % rank + b"x" * 99 for rank in (0, 1)}


@pytest.mark.slow
def test_binary_output_and_endless_lines_do_no_harm(tmp_path: Path) -> None:
    text = """
import os, sys
sys.stdout.buffer.write(os.urandom(1 << 20).replace(b"\\n", b"").replace(b"\\r", b"") * 20)
sys.stderr.buffer.write(bytes(range(256)) + b"\\nlast words\\n")
sys.stdout.flush()
os._exit(3)
"""
    with running(tmp_path, program(tmp_path, text), nproc=1) as agent:
        report = run_to_end(agent)
        (fault,) = report.faults
        assert (fault.exit_code, fault.lines[-1]) == (3, "last words")
        kept = agent.attempt_file(0, 0, "stdout.log")
        assert kept.stat().st_size > 19 << 20
        agent.process.terminate()
        longest = max(len(line) for line in agent.stdout.all().split(b"\n"))
        assert longest < 10 * LINE_BYTES_MAX


@pytest.mark.slow
async def test_a_console_that_takes_nothing_holds_up_the_workers_and_not_the_agent(
    tmp_path: Path,
) -> None:
    text = """
import os, pathlib, sys
for _ in range(100):
    os.write(1, b"y" * 65535 + b"\\n")
pathlib.Path("through").touch()
"""
    script = program(tmp_path, text)
    reader, writer = os.pipe()
    try:
        with running(tmp_path, script, nproc=1, stdout=writer) as agent:
            async with linked(agent) as operator:
                operator.send(start(0))
                report = await operator.workers(0)
                # It still listens, and still kills.
                os.kill(report.workers[0].pid, signal.SIGKILL)
                report = await operator.state(AgentState.FAULTED)
                assert not (tmp_path / "through").exists()
    finally:
        os.close(reader)
        os.close(writer)


def test_a_disk_or_console_that_fails_is_let_go(tmp_path: Path) -> None:
    """The rest of the output goes where it still can."""
    full = os.open("/dev/full", os.O_WRONLY)
    broken_reader, broken = os.pipe()
    os.close(broken_reader)
    source, sink = os.pipe()
    output = OutputThread()
    stream = Stream(source=source, file=full, console=broken, prefix=b"p:")
    done: list[tuple[str, ...]] = []
    output.start()
    output.add(stream)
    os.write(sink, b"one\ntwo\n")
    os.close(sink)
    output.finish((stream,), lambda: done.append(tail_text(stream)))
    output.stop(seconds=60)
    os.close(broken)
    assert done == [("one", "two")]
    assert (stream.file, stream.console) == (None, None)


def test_a_file_that_grows_is_kept_in_two_parts_and_no_byte_is_lost_between(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    source, sink = os.pipe()
    stream = Stream(source, open_file(str(path)), None, b"", path=str(path), most_bytes=100_000)
    output = OutputThread()
    output.start()
    output.add(stream)
    lines = b"".join(b"%d\n" % number for number in range(50_000))
    written = 0
    while written < len(lines):
        written += os.write(sink, lines[written : written + 4096])
    os.close(sink)
    output.finish((stream,), lambda: None)
    output.stop(seconds=60)
    older, newer = Path(f"{path}.1").read_bytes(), path.read_bytes()
    assert 100_000 <= len(older) < 200_000
    assert lines.endswith(older + newer)
    assert {one.name for one in tmp_path.iterdir()} == {"stdout.log", "stdout.log.1"}


@pytest.mark.slow
async def test_of_a_folder_of_the_agents_own_the_newest_attempts_are_kept(tmp_path: Path) -> None:
    place = tmp_path / "own"
    place.mkdir()
    own = (
        *(sys.executable, "-m", "unbroken.agent", "--server-host", "127.0.0.1"),
        *("--server-port", "0", "--rdzv-id", "job", "--nproc-per-node", "1"),
    )
    script = program(tmp_path, SLEEPER)
    with running(tmp_path, script, command=own, TMPDIR=str(place)) as agent:
        async with linked(agent) as operator:
            for attempt in range(6):
                operator.send(start(attempt))
                await operator.workers(attempt)
                operator.send(stop(attempt))
                await operator.report(
                    lambda r, attempt=attempt: (
                        r.state is AgentState.READY and r.newest_attempt == attempt
                    )
                )
            made = await until(
                lambda: sorted(place.glob("unbroken_*/job_*/attempt_*")),
                lambda found: len(found) <= ATTEMPTS_KEPT,
            )
            assert [one.name for one in made] == ["attempt_3", "attempt_4", "attempt_5"]


@pytest.mark.slow
async def test_a_line_that_recurred_tells_that_training_has_resumed(tmp_path: Path) -> None:
    text = """
import sys, time
print("starting", flush=True)
open(sys.argv[1]).read()
for step in range(4):
    print("step", step, "loss", 1 / (step + 1), flush=True)
time.sleep(1000)
"""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with running(tmp_path, program(tmp_path, text), str(gate), nproc=1) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            await operator.report(lambda r: bool(r.workers and r.workers[0].first_output_at))
            gate.write_text("")
            stdout = agent.attempt_file(0, 0, "stdout.log")
            await until(stdout.read_text, lambda written: written.count("loss") == 4)
            operator.send(stop(0))
            await operator.state(AgentState.READY)

            operator.send(start(1))
            report = await operator.report(
                lambda r: bool(r.attempt == 1 and r.workers and r.workers[0].first_output_at)
            )
            assert report.workers[0].recurring_line_at is None
            opened_at = time.time()
            gate.write_text("")
            report = await operator.report(
                lambda r: bool(r.attempt == 1 and r.workers[0].recurring_line_at)
            )
    (worker,) = report.workers
    assert worker.first_output_at is not None
    assert worker.recurring_line_at is not None
    assert worker.first_output_at < opened_at <= worker.recurring_line_at
