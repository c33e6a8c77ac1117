"""`unbroken top` in a real pseudo-terminal, on a local cluster whose job is broken meanwhile."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.attack.test_terminal_escapes import ODD
from tests.cli_calls import UNBROKEN, Cli
from tests.watching import PATIENCE_SECONDS, wait_until
from unbroken.cli.top.browsing import HELP

pytestmark = pytest.mark.slow
HOSTILE = "\x1b]0;broken\x07\x1b[2Jn\u202e"
TRAIN = f"""
import os, time
from unbroken import worker
for step in range(1_000_000):
    time.sleep(0.1)
    worker.progress(step)
    if os.environ["RANK"] == "1" and os.path.exists("break"):
        os.unlink("break")
        raise RuntimeError({HOSTILE!r})
"""
ESCAPE = re.compile("\x1b\\[[?0-9;]*[A-Za-z]")
HOME, ALTERNATE, NORMAL = "\x1b[H", "\x1b[?1049h", "\x1b[?1049l"


class Person:
    """A person at a terminal in which a command runs."""

    def __init__(self, cli: Cli, *command: str, **environment: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self._theirs)
        rest = {name: one for name, one in cli.environment.items() if name != "COLUMNS"}
        self.process = subprocess.Popen(
            [*UNBROKEN, *command],
            cwd=cli.folder,
            env={**rest, "TERM": "xterm-256color", **environment},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            # Only the terminal of its session sends it a signal for Ctrl-C and a new size.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.written = ""

    def resize(self, columns: int, rows: int) -> None:
        """Give the window another size."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    @property
    def screen(self) -> list[str]:
        """The lines of the last frame that was drawn to its end."""
        for frame in reversed(self.written.split(HOME)):
            text = ESCAPE.sub("", frame)
            if HELP[:9] in text:
                return text.replace("\r", "").split("\n")
        return []

    def sees(self, text: str, *, holds: Callable[[list[str]], bool] = lambda _: True) -> list[str]:
        """Wait until the screen has a text, and a condition holds."""
        return wait_until(
            self._look,
            lambda lines: text in "\n".join(lines) and holds(lines),
            logs=lambda: "\n".join(self.screen),
        )

    def _look(self) -> list[str]:
        """The screen after all that the command has written so far."""
        while select.select([self._ours], [], [], 0)[0]:
            self.written += os.read(self._ours, 65536).decode()
        assert self.process.poll() is None, self.written
        return self.screen

    def ends(self) -> int:
        """Wait for the command's end; the terminal must be as it was."""
        code = self.process.wait(PATIENCE_SECONDS)
        while select.select([self._ours], [], [], 0)[0]:
            self.written += os.read(self._ours, 65536).decode()
        assert self.written.count(ALTERNATE) == self.written.count(NORMAL) == 1
        assert self.written.rindex(NORMAL) > self.written.rindex(HOME)
        assert self.written.rindex("\x1b[?25h") > self.written.rindex("\x1b[?25l"), "a cursor"
        assert termios.tcgetattr(self._theirs) == self.before
        return code

    def close(self) -> None:
        """Close the terminal."""
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._ours)


@contextmanager
def at_terminal(cli: Cli, *command: str, **environment: str) -> Iterator[Person]:
    person = Person(cli, *command, **environment)
    try:
        yield person
    finally:
        person.close()


@pytest.fixture(scope="module")
def trained(cli: Cli) -> Cli:
    """A cluster with a job of four ranks."""
    cli.script("train.py", TRAIN)
    options = ("--nnodes", "2", "--nproc-per-node", "2", "--name", "train", "--detach")
    cli.call("run", *options, "train.py")
    wait_until(
        lambda: cli.json("top", "train")["heatMap"], lambda found: found and all(found["steps"])
    )
    return cli


def step_of(lines: list[str]) -> int:
    """The step of the job in its screen."""
    found = re.search(r"^step (\d+)", "\n".join(lines), re.MULTILINE)
    return int(found[1]) if found else -1


def test_a_job_is_watched_while_it_is_broken(trained: Cli) -> None:
    with at_terminal(trained, "top") as person:
        person.sees("2 of 2 nodes ready")
        first = person.sees("train  Running")
        assert all(len(line) <= 80 for line in first)
        person.press("\r")
        seen = step_of(person.sees("4 ranks, of which", holds=lambda lines: step_of(lines) > 0))
        person.sees("steps/s", holds=lambda lines: step_of(lines) > seen)
        trained.call("chaos", "freeze-worker", "train", "--rank", "3")
        # The stopped rank is first, above those that wait or go on.
        person.sees("ranks, of which", holds=lambda lines: _first_rank(lines) == "3")
        person.sees("incidents, newest first")
        (trained.folder / "break").touch()
        person.sees("2         ", holds=lambda lines: "RuntimeError" in "\n".join(lines))
        person.press("\x1b[6~")
        person.sees("broken", holds=lambda lines: "\\x1b]0;" in "\n".join(lines))
        person.press("\x7f")
        person.sees("2 of 2 nodes ready")
        person.press("q")
        assert person.ends() == 0
        assert not ODD.search(ESCAPE.sub("", person.written).replace("\r", ""))
        assert "\x1b]" not in person.written


def _first_rank(lines: list[str]) -> str:
    title = next((number for number, line in enumerate(lines) if line.startswith("RANK ")), 0)
    return lines[title + 1].split()[0] if title else ""


def test_a_window_may_change_its_size(trained: Cli) -> None:
    # Some shells, and readline, put the size of the beginning into the environment.
    size = {"COLUMNS": "80", "LINES": "24"}
    with at_terminal(trained, "top", "train", NO_COLOR="1", **size) as person:
        person.sees("ranks, of which")
        for columns, rows in ((120, 40), (40, 10), (9, 3), (1, 1), (80, 24)):
            person.resize(columns, rows)
            if columns >= 9:
                person.sees(
                    HELP[:9],
                    holds=lambda lines, size=(columns, rows): (  # type: ignore[misc]
                        len(lines) == size[1] and {len(line) for line in lines} == {size[0]}
                    ),
                )
        person.press("q")
        assert person.ends() == 0
        styles = {one for one in ESCAPE.findall(person.written) if one.endswith("m")}
        assert styles <= {"\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[7m", "\x1b[1;7m", "\x1b[2;7m"}


@pytest.mark.parametrize(("keys", "code"), [("q", 0), ("\x03", 130), ("\x1b[B\x1aq", 0)])
def test_the_terminal_is_restored_at_the_end(trained: Cli, keys: str, code: int) -> None:
    with at_terminal(trained, "top") as person:
        person.sees("2 of 2 nodes ready")
        person.press(keys)
        assert person.ends() == code


def test_the_terminal_is_restored_after_a_signal(trained: Cli) -> None:
    with at_terminal(trained, "top") as person:
        person.sees("2 of 2 nodes ready")
        person.process.terminate()
        assert person.ends() == 143


def test_a_cluster_may_go_away_and_come_back(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli(1)
    with at_terminal(cli, "top") as person:
        person.sees("1 of 1 node ready")
        cli.call("down")
        lines = person.sees("not up to date")
        assert "1 of 1 node ready" in "\n".join(lines), "the last values stay"
        cli.call("up", "--detach", "--nodes", "2")
        person.sees("2 of 2 nodes ready", holds=lambda lines: "not up" not in "\n".join(lines))
        person.press("q")
        assert person.ends() == 0


def test_without_a_terminal_it_prints_once(trained: Cli) -> None:
    lines = trained.call("top").stdout.splitlines()
    assert lines[0].startswith("1 job: 1 ")
    assert lines[1].split()[:4] == ["JOB", "STATE", "RANKS", "STEP"]
    assert "\x1b" not in trained.call("top", "train").stdout
    found = trained.json("top")
    assert [one["name"] for one in found["jobs"]] == ["train"]
    assert [one["name"] for one in found["nodes"]] == ["node-0", "node-1"]
    assert trained.json("top", "train")["heatMap"]["ranks"] == 4
    # The same cluster, of which the command knows no folder: as any other.
    elsewhere = trained.folder / "elsewhere"
    elsewhere.write_text((trained.directory / "kubeconfig").read_text())
    other = trained.call("top", "train", "--kubeconfig", str(elsewhere)).stdout
    assert "Steps, metrics and ranks are known to the agents in the pods." in other
    assert trained.json("top", "--kubeconfig", str(elsewhere))["missing"] == []
    with at_terminal(trained, "top", "--once") as person:
        assert person.process.wait(PATIENCE_SECONDS) == 0
    with at_terminal(trained, "top", TERM="dumb") as person:
        assert person.process.wait(PATIENCE_SECONDS) == 0


def test_a_job_that_is_not_there_is_an_error(trained: Cli) -> None:
    assert 'no job "nowhere"' in trained.call("top", "nowhere", code=1).stderr
    with at_terminal(trained, "top", "nowhere") as person:
        assert person.process.wait(PATIENCE_SECONDS) == 1
