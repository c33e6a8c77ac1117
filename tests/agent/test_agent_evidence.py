"""Evidence that the agent collects from its ranks: real processes in all kinds of hang."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.agent.running import Operator, Running, linked, program, running, start, stop
from unbroken.agent.evidence import procfs, spy
from unbroken.agent.evidence.examine import ExaminedWorker, RankExamination, Request
from unbroken.core.diagnosis.rank_activity import GIL_IDLE_SHARE, Kind, activities_of
from unbroken.core.diagnosis.stacks import blame
from unbroken.core.job.watch.looks import is_active
from unbroken.errors import WorldError
from unbroken.wire.agent import AgentState, WorkerReport
from unbroken.wire.agent_codec import decode_evidence
from unbroken.wire.observation import CollectCommand, Evidence, RankEvidence

pytestmark = pytest.mark.slow

HANGS = """
import ctypes, os, re, signal, sys, threading, time
def up(): os.write(1, b"up\\n")
def sleeping():
    up()
    while True: signal.pause()
def asking():
    up()
    while not os.path.exists("never"): time.sleep(0.05)
def spinning():
    up()
    while True: pass
def uninterruptible():
    # The child runs its program only when it has opened its files, one of which nobody writes; its
    # parent waits for that as after vfork(2): in state D.
    os.mkfifo("silent")
    up()
    files = [(os.POSIX_SPAWN_OPEN, 0, "silent", os.O_RDONLY, 0)]
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=files)
def threaded():
    threading.Thread(target=sleeping_beside, name="beside", daemon=True).start()
    sleeping()
def sleeping_beside(): threading.Event().wait()
def ended(): pass
def holding():
    threading.Thread(target=pausing, name="holder", daemon=True).start()
    while True: time.sleep(0.01)
def pausing():
    up()
    ctypes.PyDLL(None).pause()
def looping():
    threading.Thread(target=matching, name="holder", daemon=True).start()
    while True: time.sleep(0.01)
def matching():
    up()
    re.compile("(a*)*b").match("a" * 40)
def pausing_itself(): pausing()
globals()[sys.argv[1 + int(os.environ["LOCAL_RANK"])]]()
"""
Story = Callable[[Running, Operator], Awaitable[None]]


def tell(directory: Path, story: Story, *arguments: str, nproc: int = 2, **environ: str) -> None:
    """Run an agent whose workers are up, and a story at the same time."""

    async def run() -> None:
        with running(directory, *arguments, nproc=nproc, **environ) as agent:
            async with linked(agent) as operator:
                operator.send(start(0))
                await operator.workers(0)
                await story(agent, operator)

    asyncio.run(run())


def main_frames(rank: RankEvidence) -> tuple[str, ...]:
    """Return the functions on the main thread's stack, without files and lines."""
    assert rank.threads, rank.note
    assert rank.threads[0].is_main
    return tuple(frame.partition(" (")[0] for frame in rank.threads[0].frames)


def test_a_sleeping_and_a_spinning_rank_are_told_apart(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        evidence = await operator.examine()
        sleeping, spinning = evidence.ranks
        assert (evidence.attempt, sleeping.rank, spinning.rank) == (0, 0, 1)
        assert [one.pid for one in evidence.ranks] == [
            one.pid for one in operator.reports[-1].workers
        ]
        assert main_frames(sleeping)[-2:] == ("sleeping", "<module>")
        assert main_frames(spinning)[-2:] == ("spinning", "<module>")
        assert sleeping.threads[0].frames[0] == "pause (libc.so.6)", "native frames are there"
        assert sleeping.threads[0].frames[-1].startswith("<module> (train.py:")
        assert (sleeping.state, sleeping.is_same, sleeping.io_bytes) == ("S", True, 0)
        assert sleeping.cpu_share == pytest.approx(0.0, abs=0.05)
        assert spinning.cpu_share is not None
        assert spinning.cpu_share > 0
        assert spinning.cpu_seconds > 0
        assert (sleeping.note, spinning.note) == ("", "")
        assert sleeping.last_line == "up"
        assert sleeping.last_output_at is not None
        assert sleeping.last_output_at <= evidence.at
        assert procfs.stat(spinning.pid).state == "R"  # type: ignore[union-attr]

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", "spinning")


def test_a_rank_that_sleeps_again_and_again_is_active_between_looks(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        before = (await operator.examine()).ranks
        while True:
            await operator.more(2)  # heartbeats: some time passes, without a look
            after = (await operator.examine()).ranks
            doings = activities_of({one.rank: one for one in after})
            sleeping, asking = (
                is_active(then.activity_after, now, doings[now.rank])
                for then, now in zip(before, after, strict=True)
            )
            assert {one.kind for one in doings.values()} == {Kind.SLEEP}
            assert not sleeping, (before[0].activity_after, after[0].activity_before)
            if asking:
                break
            before = after

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", "asking")


def test_every_thread_is_told_the_main_one_first(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        (rank,) = (await operator.examine()).ranks
        names = [(one.name, one.is_main) for one in rank.threads]
        assert names == [("MainThread", True), ("beside", False)]
        assert any(frame.startswith("sleeping_beside (") for frame in rank.threads[1].frames)

    tell(tmp_path, story, program(tmp_path, HANGS), "threaded", nproc=1)


def test_a_stopped_rank_is_looked_at_and_stays_stopped(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        pid = operator.reports[-1].workers[1].pid
        os.kill(pid, signal.SIGSTOP)
        other, stopped = (await operator.examine()).ranks
        assert (other.state, stopped.state, stopped.is_same) == ("S", "T", True)
        assert main_frames(stopped)[-2:] == ("sleeping", "<module>")
        assert stopped.cpu_share == 0.0
        assert procfs.stat(pid).state == "T"  # type: ignore[union-attr]
        os.kill(pid, signal.SIGCONT)

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", "sleeping")


def test_a_rank_that_the_kernel_does_not_let_go_holds_up_nobody(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        pid = operator.reports[-1].workers[1].pid
        while _state(pid) != "D":
            await asyncio.sleep(0)
        other, stuck = (await operator.examine()).ranks
        assert main_frames(other)[-2:] == ("sleeping", "<module>")
        assert (stuck.state, stuck.io_bytes, stuck.is_same) == ("D", None, True)
        assert main_frames(stuck)[-2:] == ("uninterruptible", "<module>")
        assert _state(pid) == "D"
        (tmp_path / "silent").write_text("")  # lets it continue

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", "uninterruptible")


def test_a_crash_ends_the_examination(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        operator.send(CollectCommand(1, 0, 60.0))
        os.kill(operator.reports[-1].workers[1].pid, signal.SIGKILL)
        await operator.until(lambda: bool(operator.evidence))
        assert [one.rank for one in operator.evidence[0].ranks] in ([0, 1], [0], [])
        await operator.state(AgentState.FAULTED)

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", "sleeping")


async def test_a_rank_that_ends_between_the_looks_is_gone(tmp_path: Path) -> None:
    script = program(tmp_path, HANGS)
    workers = []
    for rank in range(2):
        worker = await asyncio.create_subprocess_exec(
            sys.executable, script, "sleeping", "sleeping",
            stdout=subprocess.PIPE, env=os.environ | {"LOCAL_RANK": str(rank)},
        )  # fmt: skip
        assert worker.stdout is not None
        await worker.stdout.readline()
        workers.append(worker)
    reports = [WorkerReport(i, i, one.pid, "running", 0.0) for i, one in enumerate(workers)]
    examination = RankExamination(0, reports, 20.0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(examination.run())
        workers[1].kill()
        await workers[1].wait()
    one, gone = examination.evidence()
    assert (gone.rank, gone.state, gone.note) == (1, "", "it has ended")
    assert (main_frames(one)[-1], one.is_same) == ("<module>", True)
    workers[0].kill()
    await workers[0].wait()


def test_what_is_known_by_the_end_of_the_time_is_the_answer(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        evidence = await operator.examine(seconds=0.0)
        assert [one.rank for one in evidence.ranks] == [0, 1]
        assert {one.state for one in evidence.ranks} <= {"R", "S"}, "up, and about to sleep"
        assert {one.note for one in evidence.ranks} == {"there was no time to look at its stack"}
        # The next question is answered in full: nothing is left of the one before.
        evidence = await operator.examine()
        assert main_frames(evidence.ranks[0])[-2:] == ("sleeping", "<module>")

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", "sleeping")


def test_of_another_attempt_nothing_is_said(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        evidence = await operator.examine(attempt=7)
        assert (evidence.attempt, evidence.ranks) == (7, ())

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", nproc=1)


def test_two_who_ask_are_both_answered(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        async with linked(agent) as other:
            await other.workers(0)
            answers = await asyncio.gather(operator.examine(), other.examine())
            assert answers[0].ranks == answers[1].ranks
            assert (len(operator.evidence), len(other.evidence)) == (1, 1)

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", nproc=1)


def test_people_ask_by_http(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        code, body, headers = await asyncio.to_thread(
            agent.request, "GET", "/v1/evidence?seconds=20"
        )
        assert (code, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
        (rank,) = decode_evidence(body).ranks
        assert main_frames(rank)[-2:] == ("sleeping", "<module>")
        for wrong in ("soon", "-1", "nan", "1e9"):
            path = f"/v1/evidence?seconds={wrong}"
            code, body, _ = await asyncio.to_thread(agent.request, "GET", path)
            assert (code, body) == (422, b'{"detail":"seconds: a number from 0 to 60"}')
        assert operator.evidence == [], "who did not ask is not told"

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", nproc=1)


def test_a_worker_below_a_shell_is_found(tmp_path: Path) -> None:
    inner = program(tmp_path, HANGS, "inner.py")
    script = program(tmp_path, f"{sys.executable} -u {inner} sleeping; true\n", "train.sh")

    async def story(agent: Running, operator: Operator) -> None:
        (rank,) = (await operator.examine()).ranks
        assert rank.pid != operator.reports[-1].workers[0].pid
        assert main_frames(rank)[-2:] == ("sleeping", "<module>")

    tell(tmp_path, story, "--no-python", "bash", script, nproc=1)


def test_a_worker_below_a_launcher_is_found(tmp_path: Path) -> None:
    inner = program(tmp_path, HANGS, "inner.py")
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-u', {inner!r}, 'sleeping'])"

    async def story(agent: Running, operator: Operator) -> None:
        (rank,) = (await operator.examine()).ranks
        assert main_frames(rank)[-2:] == ("sleeping", "<module>")
        assert rank.threads[0].frames[-1].startswith("<module> (inner.py:")

    tell(tmp_path, story, program(tmp_path, text), nproc=1)


WITH_A_LOADER = """
import os, subprocess, time
if os.fork() == 0:
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass
    time.sleep(1e9)
def compiling(): subprocess.run(["sh", "-c", "sleep 0.3; echo up; while :; do :; done"])
compiling()
"""


def test_a_rank_that_waits_for_a_program_is_looked_at_and_not_its_loader(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        (rank,) = (await operator.examine()).ranks
        assert rank.pid == operator.reports[-1].workers[0].pid
        assert main_frames(rank)[-2:] == ("compiling", "<module>")
        assert rank.cpu_share is not None
        assert rank.waited_share is not None
        assert rank.cpu_share + rank.waited_share >= 0.1

    tell(tmp_path, story, program(tmp_path, WITH_A_LOADER), nproc=1)


def test_what_is_no_python_has_a_state_and_a_note(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        (rank,) = (await operator.examine()).ranks
        assert (rank.state, rank.threads) == ("S", ())
        assert rank.note.startswith("py-spy: ")

    script = program(tmp_path, "echo up; read line < $0.fifo\n", "train.sh")
    os.mkfifo(f"{script}.fifo")
    tell(tmp_path, story, "--no-python", "bash", script, nproc=1)


def test_the_workers_are_stopped_while_they_are_examined(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        operator.send(CollectCommand(1, 0, 60.0))
        operator.send(stop(0))
        await operator.state(AgentState.READY)
        await operator.until(lambda: bool(operator.evidence))
        assert {one.rank for one in operator.evidence[0].ranks} <= {0, 1}, "who died first is left"
        operator.send(start(1))
        await operator.workers(1)
        assert len((await operator.examine(attempt=1)).ranks) == 2

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", "sleeping")


def test_an_agent_ends_while_it_examines(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        operator.send(CollectCommand(1, 0, 60.0))
        agent.process.terminate()
        assert await asyncio.to_thread(agent.wait) == 128 + signal.SIGTERM

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", "sleeping")


def test_a_process_goes_on_when_py_spy_is_ended_while_it_is_paused(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        worker = operator.reports[-1].workers[0]
        pid, caught = worker.pid, 0
        subject = ExaminedWorker(worker, pid, Request(0, {}))
        subject.look(0.0)
        while caught < 3:
            looking = asyncio.ensure_future(spy.dump(pid, spy.NATIVE))
            while not looking.done() and _state(pid) != "t":
                await asyncio.sleep(0)
            caught += not looking.done()
            subject.look(1.0)
            assert subject.stat is not None
            assert subject.stat.state == "R", "our own py-spy is no debugger"
            looking.cancel()
            await asyncio.wait([looking])
            while _state(pid) == "t":
                await asyncio.sleep(0)
            assert _state(pid) == "R"

    tell(tmp_path, story, program(tmp_path, HANGS), "spinning", nproc=1)


def _state(pid: int) -> str:
    found = procfs.stat(pid)
    return found.state if found is not None else ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("holding", "holds the GIL (thread holder) in pausing"),
        ("looping", "holds the GIL and computes (thread holder) in matching"),
        ("pausing_itself", "holds the GIL in pausing"),
    ],
)
def test_the_thread_that_holds_the_gil_is_told(tmp_path: Path, how: str, words: str) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        (rank,) = (await operator.examine(seconds=60.0)).ranks
        assert [one.name for one in rank.threads if one.holds_gil] == [
            "MainThread" if how == "pausing_itself" else "holder"
        ]
        # On a busy machine a thread that computes may use no more than one that waits.
        is_starved = rank.cpu_share is not None and rank.cpu_share < GIL_IDLE_SHARE
        seen = words.replace(" and computes", "") if is_starved else words
        assert blame([rank], 0.0).why.startswith(f"rank 0 {seen}")
        (group,) = blame([rank], 0.0).groups
        assert any(frame.startswith(words.rpartition(" ")[2]) for frame in group.stack)

    tell(tmp_path, story, program(tmp_path, HANGS), how, nproc=1)


def test_threads_that_take_turns_hold_no_gil_for_good(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        (rank,) = (await operator.examine(seconds=60.0)).ranks
        assert not any(one.holds_gil for one in rank.threads)

    tell(tmp_path, story, program(tmp_path, HANGS), "threaded", nproc=1)


TRACER = """
import ctypes, os, sys
PTRACE_SEIZE = 0x4206
ctypes.CDLL(None).ptrace(PTRACE_SEIZE, int(sys.argv[1]), 0, 0)
print("traces", flush=True)
sys.stdin.read()
"""


def test_a_rank_that_another_process_traces_is_read_and_no_capability_advised(
    tmp_path: Path,
) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        pid = operator.reports[-1].workers[0].pid
        words = [sys.executable, "-c", TRACER, str(pid)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
            assert tracer.stdout is not None
            assert tracer.stdout.readline() == b"traces\n"
            with pytest.raises(WorldError, match=f"process {tracer.pid} .* traces it"):
                await spy.dump(pid, spy.PLAIN)
            (rank,) = (await operator.examine(seconds=10.0)).ranks
            tracer.communicate()
        assert (rank.note, main_frames(rank)[:1]) == ("", ("sleeping",))

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", nproc=1)


def test_a_process_that_the_kernel_protects_leads_to_the_advice(tmp_path: Path) -> None:
    program = "import os; os.setuid(65534); print(1, flush=True); input()"
    nobody = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    if os.getuid():
        pytest.skip("only root can become somebody else, and give its capabilities up")
    asks = (
        "import asyncio, os, sys\n"
        "from unbroken.agent.evidence import spy\n"
        "os.setuid(65533)\n"
        "try: asyncio.run(spy.dump(int(sys.argv[1]), spy.PLAIN))\n"
        "except Exception as error: print(error)"
    )
    with subprocess.Popen([sys.executable, "-c", program], **nobody) as other:  # type: ignore[call-overload]
        other.stdout.readline()
        done = subprocess.run(
            [sys.executable, "-c", asks, str(other.pid)], capture_output=True, text=True, check=True
        )
        other.communicate(b"\n")
    assert done.stdout.strip() == spy.NOT_ALLOWED


async def test_a_process_that_has_ended_is_said_to_have_ended() -> None:
    with subprocess.Popen(["/bin/true"]) as ended:
        await asyncio.to_thread(os.waitid, os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(WorldError, match="it has ended"):
            await spy.dump(ended.pid, spy.PLAIN)


async def test_without_py_spy_the_note_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    monkeypatch.setattr(sys, "executable", str(bare / "python"))
    monkeypatch.setenv("PATH", str(bare))
    examination = RankExamination(0, [WorkerReport(0, 0, os.getpid(), "running", 0.0)], 20.0)
    await examination.run()
    (rank,) = examination.evidence()
    assert (rank.state, rank.threads, rank.note) == ("R", (), spy.MISSING)


def test_evidence_names_who_asked(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        operator.send(CollectCommand(2**40, 0, 20.0))
        await operator.until(lambda: bool(operator.evidence))
        evidence: Evidence = operator.evidence[0]
        report = operator.reports[-1]
        assert (evidence.request, evidence.agent_id) == (2**40, report.agent_id)
        assert report.workers[0].started_at <= evidence.at

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", nproc=1)


WAITING = """
import os, signal
import torch, torch.distributed as dist
store = "file://" + os.path.abspath("store")
dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
ones = torch.ones(2)
dist.all_reduce(ones)
def data():
    while True: signal.pause()
os.write(1, b"together\\n")
if dist.get_rank() == 1: data()
dist.all_reduce(ones)
"""


def test_who_waits_in_a_collective_of_torch_is_told_from_who_does_not(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        pid = operator.reports[-1].workers[0].pid
        while not procfs.waits_in(pid).startswith("futex"):
            await asyncio.sleep(0)
        waiting, elsewhere = (await operator.examine(seconds=60.0)).ranks
        assert "all_reduce" in main_frames(waiting)
        assert any("(libtorch_cpu.so)" in frame for frame in waiting.threads[0].frames)
        assert main_frames(elsewhere)[-2:] == ("data", "<module>")
        found = blame([waiting, elsewhere], 0.0)
        assert (found.ranks, found.is_working) == ((1,), False)

    tell(tmp_path, story, program(tmp_path, WAITING))


async def test_an_agent_without_a_link_is_not_asked(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, HANGS), "sleeping", nproc=1, link=False) as agent:
        async with linked(agent) as operator:
            operator.send(CollectCommand(1, 0, 1.0))
            operator.send(start(0))
            await operator.state(AgentState.RUNNING)
            assert operator.evidence == []


IN_STEP = """
import os, socket, sys, time
rank = int(os.environ["LOCAL_RANK"])
address = "peer.sock"
if rank == 0:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("new.sock"); listener.listen()
    os.rename("new.sock", address)
    peer, _ = listener.accept()
else:
    peer = socket.socket(socket.AF_UNIX)
    while peer.connect_ex(address): time.sleep(0.01)
def barrier():
    peer.send(b"x")
    peer.recv(1)
os.write(1, b"up\\n")
while True:
    time.sleep(0.2 if rank == int(sys.argv[1]) else 0.1)
    barrier()
"""


def test_samples_show_which_of_two_ranks_the_other_waits_for(tmp_path: Path) -> None:
    """Take samples of two jobs at the same time: the first or the second rank is slow."""

    def show(slow: int) -> None:
        async def story(agent: Running, operator: Operator) -> None:
            evidence = await operator.examine(seconds=8.0, samples_per_second=5)
            assert [one.rank for one in evidence.ranks] == [0, 1]
            counts = [(one.samples, one.waiting) for one in evidence.ranks]
            (samples, waiting), (_, other) = counts[slow], counts[1 - slow]
            assert samples >= 10, evidence
            assert waiting * 3 < other, evidence
            assert not any(one.threads for one in evidence.ranks)

        place = tmp_path / str(slow)
        place.mkdir()
        tell(place, story, program(place, IN_STEP), str(slow))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(show, (0, 1))) == [None, None]


def test_sampling_ends_with_the_workers(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        operator.send(CollectCommand(1, 0, 60.0, 5))
        operator.send(stop(0))
        await operator.until(lambda: bool(operator.evidence))
        assert {one.rank for one in operator.evidence[0].ranks} <= {0, 1}

    tell(tmp_path, story, program(tmp_path, HANGS), "sleeping", "sleeping")
