"""Reports of a training script, in real processes with a real page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.agent.evidence.pages import PageSource
from unbroken.wire.worker import PAGE_BYTES, VARIABLE, Page, empty, read

pytestmark = pytest.mark.slow
HEAD = """
import math, os, signal, subprocess, sys, threading
from unbroken import worker
from unbroken.worker import progress, phase, checkpoint, context
"""


class Script:
    """Runs scripts with one page."""

    def __init__(self, page: int) -> None:
        self.fd = page

    def run(self, text: str, *wrapper: str, is_lent: bool = True, **environ: str) -> str:
        """Run a script; return its output on both streams."""
        command = [*wrapper, sys.executable, "-W", "error", "-c", HEAD + text]
        done = subprocess.run(
            command,
            env=os.environ | {VARIABLE: str(self.fd)} | environ,
            pass_fds=[self.fd] if is_lent else [],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stdout
        return done.stdout

    @property
    def page(self) -> Page:
        """Contents of the page."""
        found = read(os.pread(self.fd, PAGE_BYTES, 0))
        assert found is not None
        return found[1]


@pytest.fixture
def script() -> Iterator[Script]:
    fd = os.memfd_create("page")
    os.write(fd, empty())
    yield Script(fd)
    os.close(fd)


def test_steps_and_metrics_are_told(script: Script) -> None:
    assert script.run("for step in range(5): progress(step, loss=step / 2)") == ""
    page = script.page
    assert (page.step, page.calls, page.visit_calls) == (4, 5, 5)
    assert page.metrics == {"loss": 2.0}
    assert 0 < page.longest_gap <= page.step_at - page.phase_at


def test_the_first_step_is_kept(script: Script) -> None:
    script.run("progress(2**70); progress(70, loss='none')")
    first = script.page
    assert (first.first_step, first.first_step_at) == (70, first.step_at)
    script.run("progress(71)")
    page = script.page
    assert (page.first_step, page.step) == (70, 71)
    assert page.first_step_at == first.step_at < page.step_at


def test_a_function_that_is_called_again_has_a_first_step_of_its_own(script: Script) -> None:
    source = PageSource(os.dup(script.fd))
    script.run("progress(1); progress(2)")
    assert source.look().first_step == 1
    source.begin_anew()
    script.run("progress(9); worker.begin_attempt(); progress(2); progress(4)")
    page = source.look()
    source.close()
    assert (page.first_step, page.step) == (2, 4)
    assert page.first_step_at is not None
    assert page.first_step_at < page.step_at


def test_a_metric_keeps_its_value_until_it_is_told_again(script: Script) -> None:
    script.run("progress(1, loss=1, norm=2); progress(2, loss=3); progress(3)")
    assert (script.page.step, script.page.metrics) == (3, {"loss": 3.0, "norm": 2.0})


def test_samples_belong_to_their_step(script: Script) -> None:
    script.run("progress(1, samples=8, loss=1); progress(2, samples=16); progress(3, samples=24)")
    assert (script.page.step, script.page.metrics) == (3, {"samples": 24.0, "loss": 1.0})
    for without in ("", ", loss=1", ", samples='?', loss=1"):
        script.run(f"progress(1, loss=1, samples=8); progress(2{without})")
        assert (script.page.step, script.page.metrics) == (2, {"loss": 1.0})
    script.run("progress(1, samples=8); progress(2); progress(3, samples=24)")
    assert script.page.metrics == {"samples": 24.0}


def test_what_is_not_finite_is_counted_by_call(script: Script) -> None:
    script.run("progress(1, a=math.nan, b=math.inf); progress(2, a=1e308, b=1e308); progress(3)")
    assert (script.page.bad_calls, script.page.metrics) == (1, {"a": 1e308, "b": 1e308})


def test_phases_nest_and_go_back(script: Script) -> None:
    script.run("phase('train'); progress(1); progress(2)\nwith phase('eval'): checkpoint(2)")
    page = script.page
    assert (page.phase, page.visit, page.visit_calls, page.longest_gap) == ("train", 3, 0, 0.0)
    assert (page.calls, page.checkpoint_step) == (2, 2)
    assert page.checkpoint_at is not None
    assert page.checkpoint_at <= page.phase_at
    script.run("phase('eval')\nwith phase('eval'): progress(1)")
    assert (script.page.phase, script.page.visit_calls) == ("eval", 1)


def test_an_error_in_a_phase_passes_through_it(script: Script) -> None:
    text = """
try:
    with phase("eval"): 1 / 0
except ZeroDivisionError: progress(3)
"""
    script.run(text)
    assert (script.page.phase, script.page.step) == ("", 3)


def test_nothing_that_is_told_wrong_stops_training(script: Script) -> None:
    text = """
class Bad:
    def __float__(self): raise RuntimeError("device lost")
    def __str__(self): raise RuntimeError("no name")
for _ in range(3):
    progress(1, loss=Bad(), norm="much", rate=0.5)
    progress("many", loss=10 ** 400); progress(2 ** 70); checkpoint(None); phase(Bad())
print("trained")
"""
    told = script.run(text)
    assert "trained" in told
    assert told.count("metric 'loss' is no number: Bad") == 1
    assert told.count("metric 'norm' is no number: str") == 1
    assert "Traceback" not in told
    assert (script.page.calls, script.page.metrics) == (9, {"rate": 0.5})


def test_more_metrics_than_there_is_room_for_are_cut(script: Script) -> None:
    told = script.run("progress(1, **{f'm{i}': i for i in range(20)}); progress(2, m0=7)")
    assert told.count("more than 16 metrics") == 1
    assert (len(script.page.metrics), script.page.metrics["m0"], script.page.step) == (16, 7.0, 2)


def test_a_forked_child_does_not_write_its_parents_page(script: Script) -> None:
    text = """
{before}
if os.fork() == 0:
    phase("data"); progress(99); os._exit(0)
os.wait(); progress(2)
"""
    for before in ("", "progress(1)"):
        script.run(text.format(before=before))
        assert (script.page.step, script.page.phase) == (2, "")


def test_a_program_that_the_script_starts_does_not_write_its_page(script: Script) -> None:
    text = """
progress(1)
child = "from unbroken import worker; worker.progress(99)"
subprocess.run([sys.executable, "-c", child], close_fds={close}, check=True)
"""
    for close in (True, False):
        assert script.run(text.format(close=close)) == ""
        assert (script.page.step, script.page.calls) == (1, 1 + (not close))


def test_a_script_in_a_shell_has_the_page_of_the_shell(script: Script) -> None:
    script.run("progress(5)", "bash", "-c", '"$@"; true', "bash")
    assert script.page.step == 5


def test_the_next_program_of_a_worker_goes_on_counting(script: Script) -> None:
    script.run("phase('first'); progress(5, loss=1)")
    first = script.page
    script.run("progress(6)")
    page = script.page
    assert (page.step, page.calls, page.visit_calls) == (6, 2, 1)
    assert (page.phase, page.metrics, page.visit) == ("", {}, first.visit + 1)


def test_a_script_that_starts_itself_anew_keeps_its_page(script: Script) -> None:
    text = """
if "AGAIN" not in os.environ:
    progress(1)
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, sys.orig_argv)
progress(2)
"""
    script.run(text)
    assert (script.page.step, script.page.calls) == (2, 2)


def test_threads_lose_no_record_and_leave_a_page_that_can_be_read(script: Script) -> None:
    text = """
sys.setswitchinterval(1e-6)
def run(index):
    for step in range(3000):
        progress(step, **{f"m{index}": step})
        if step % 100 == 0:
            with phase(f"p{index}"): progress(step)
threads = [threading.Thread(target=run, args=[i]) for i in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
progress(3000, last=1)
"""
    assert script.run(text) == ""
    assert (script.page.step, set(script.page.metrics)) == (3000, {"m0", "m1", "m2", "m3", "last"})


def test_a_writer_killed_at_any_moment_leaves_a_page_that_can_be_read(script: Script) -> None:
    text = """
step = 1
progress(step, loss=step)
threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    step += 1; progress(step, loss=step)
"""
    calls = 0
    for delay in (0.01, 0.012, 0.015, 0.02, 0.03):
        script.run(text.format(delay=delay))
        page = script.page
        assert page.metrics == {"loss": page.step}
        assert page.calls > calls
        calls = page.calls


@pytest.mark.parametrize("content", [b"", b"x" * 4096, b"\0" * 4096])
def test_a_descriptor_that_is_something_else_is_left_alone(
    script: Script, content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "data"
    file.write_bytes(content)
    text = f"import os; f = os.open({str(file)!r}, os.O_RDWR); os.environ[{VARIABLE!r}] = str(f)\n"
    assert script.run(text + "progress(1); phase('eval'); checkpoint(3)") == ""
    assert file.read_bytes() == content


def test_without_a_page_nothing_happens(script: Script) -> None:
    for value in ("", "many", "-1", "9999"):
        assert script.run("progress(1)\nwith phase('x'): checkpoint(1)", UNBROKEN_PAGE=value) == ""
    assert script.run("progress(1)", is_lent=False) == ""
    assert script.page == Page()


def test_a_page_of_another_version_is_warned_of_once(script: Script) -> None:
    os.pwrite(script.fd, (9).to_bytes(4, sys.byteorder), 8)
    told = script.run("progress(1); progress(2)\nwith phase('eval'): pass")
    assert told.count("version 9, not 2") == 1
    assert os.pread(script.fd, PAGE_BYTES, 0)[12:] == empty()[12:]


def test_the_context_is_read_from_the_environment(script: Script) -> None:
    keys = {
        **{"UNBROKEN_JOB": "lm", "UNBROKEN_POD": "lm-1", "RANK": "5", "WORLD_SIZE": "8"},
        **{"LOCAL_RANK": "1", "GROUP_RANK": "2", "JOB_RESTART_COUNT": "3"},
        "TORCHELASTIC_RESTART_COUNT": "4",
    }
    assert script.run("print(context())", **keys).strip() == (
        "Context(is_managed=True, job='lm', pod='lm-1', rank=5, world_size=8, local_rank=1, "
        "node_rank=2, attempt=3, restart_count=4)"
    )


def test_outside_of_unbroken_the_context_is_a_world_of_one(script: Script) -> None:
    bare = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", VARIABLE), "")
    text = f"[os.environ.pop(n, None) for n in {[*bare]!r}]; c = context()\n"
    told = script.run(text + "print(c.is_managed, c.rank, c.world_size, c.attempt)")
    assert told.split() == ["False", "0", "1", "0"]


def test_the_import_loads_nothing_else_of_ours(script: Script) -> None:
    text = (
        "print(*sorted(n for n in sys.modules if n.startswith(('unbroken', 'torch', 'asyncio'))))"
    )
    assert script.run(text).split() == [
        *("unbroken", "unbroken.wire", "unbroken.wire.worker", "unbroken.worker"),
    ]
