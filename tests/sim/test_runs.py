"""Runs of many worlds: fresh seeds, progress, and an end by Ctrl-C."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from tests.watching import PATIENCE_SECONDS
from unbroken.sim.__main__ import FRESH_FIRST, FRESH_SEEDS, fresh_seeds, main
from unbroken.sim.progress import LINE_SECONDS, Progress, describe

COMMIT = "affe27bac1bfc6b24d9f0544c5b0af87b585781a"


def test_fresh_seeds_are_drawn_from_the_commit() -> None:
    seeds = fresh_seeds(COMMIT)
    assert seeds == fresh_seeds(COMMIT)
    assert len(seeds) == FRESH_SEEDS == 3000
    assert seeds[0] >= FRESH_FIRST
    assert not set(seeds) & set(fresh_seeds(COMMIT[::-1]))


def test_fresh_seeds_are_run_beside_the_others_and_told_with_the_command_that_repeats_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unbroken.sim.__main__.FRESH_SEEDS", 4)
    first = fresh_seeds(COMMIT)[0]
    assert main(["--seeds", "3", "--fresh", COMMIT, "--processes", "1"]) == 0
    out = capsys.readouterr().out
    assert f"fresh seeds {first} to {first + 3}, drawn from commit {COMMIT}\n" in out
    assert f"python -m unbroken.sim --first {first} --seeds 4\n" in out
    assert "\n7 seeds in " in out


def test_progress_is_a_line_every_some_seconds_where_there_is_no_terminal() -> None:
    now, stream = 100.0, io.StringIO()
    progress = Progress(5000, stream, lambda: now)
    progress.update(50, 0)
    now += LINE_SECONDS
    progress.update(2000, 1)
    progress.update(2050, 1)
    progress.close()
    assert stream.getvalue() == "2,000 of 5,000 seeds, 200 seeds/s, 1 failure, 15 s left\n"


def test_progress_names_the_minutes_that_are_left() -> None:
    text = describe(100, 1000, 2, 10.0)
    assert text == "100 of 1,000 seeds, 10 seeds/s, 2 failures, 1 min 30 s left"
    assert describe(0, 1000, 0, 0.0) == "0 of 1,000 seeds, 0 seeds/s, 0 failures, time left unknown"


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_at_a_terminal_ends_a_run_with_what_was_found(processes: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "unbroken.sim", "--seeds", "9999999"]
    process = subprocess.Popen(
        [*command, "--processes", processes],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(theirs), os.O_RDWR)),
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while b"seeds/s" not in said:
        said += os.read(ours, 4096)
    os.write(ours, b"\x03")
    while True:
        try:
            said += os.read(ours, 4096)
        except OSError:  # the terminal is closed
            break
    os.close(ours)
    assert process.wait(PATIENCE_SECONDS) == 130
    text = said.decode()
    assert text.count("\r\x1b[K") >= 2, "the line is updated, and removed"
    assert "interrupted; up to then:" in text
    assert "failures" in text.rpartition("interrupted")[2]
    assert "Traceback" not in text
