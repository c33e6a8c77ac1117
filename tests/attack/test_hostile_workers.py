"""Files of a worker that its agent reads in its only thread, and the folder that holds them.

A worker that put a named pipe in the place of its error file held its agent up for ever: the agent
answered nobody, and its job could not be stopped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unbroken.agent.workers.facts import ERROR_FILE_BYTES_MAX, error_file, error_path
from unbroken.agent.workers.output import open_file


@pytest.mark.parametrize("has_writer", [False, True])
def test_a_pipe_in_place_of_an_error_file_is_not_read(tmp_path: Path, has_writer: bool) -> None:
    os.mkfifo(error_path(str(tmp_path)))
    ends = [os.open(error_path(str(tmp_path)), os.O_RDWR)] if has_writer else []
    try:
        assert error_file(str(tmp_path)) == ""
    finally:
        for end in ends:
            os.close(end)


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/ptmx", "/", "nowhere", "error.json"])
def test_a_link_in_place_of_an_error_file_leads_to_no_device(tmp_path: Path, target: str) -> None:
    os.symlink(target, error_path(str(tmp_path)))
    assert error_file(str(tmp_path)) == ""


def test_a_long_error_file_is_read_in_part(tmp_path: Path) -> None:
    Path(error_path(str(tmp_path))).write_bytes(b"\xff" * (ERROR_FILE_BYTES_MAX + 10))
    assert len(error_file(str(tmp_path))) == ERROR_FILE_BYTES_MAX


def test_who_may_rename_the_folder_of_logs_chooses_the_file_that_is_written(tmp_path: Path) -> None:
    """This is not defended: docs/guide/security.md says where it matters and what to do."""
    folder, victim = tmp_path / "unbroken_1", tmp_path / "checkpoint"
    folder.mkdir(0o700)
    victim.write_text("weights")
    folder.rename(tmp_path / "away")
    folder.mkdir()
    (folder / "stdout.log").symlink_to(victim)
    with os.fdopen(open_file(str(folder / "stdout.log")), "wb") as file:
        file.write(b"!")
    assert victim.read_text() == "weights!"
