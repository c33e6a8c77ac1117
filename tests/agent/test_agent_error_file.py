"""The file of TORCHELASTIC_ERROR_FILE, written by several agents: the first error by time wins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unbroken.agent.workers.facts import ErrorFile

SECOND = 1_000_000_000


class Job:
    """Agents that write one file; times are seconds after the agents were made."""

    def __init__(self, folder: Path, agents: int) -> None:
        self.folder, self.path = folder, folder / "e.json"
        self.agents = [
            ErrorFile(str(self.path), str(folder / f"agent-{number}")) for number in range(agents)
        ]
        self.began = os.stat(folder / f"agent-{agents - 1}").st_mtime_ns

    def record(self, name: str, seconds: float) -> str:
        """Write what `@record` writes for a worker; return the worker's folder."""
        directory = self.folder / name
        directory.mkdir()
        (directory / "error.json").write_text(json.dumps({"message": {"message": name}}))
        at = self.began + int(seconds * SECOND)
        os.utime(directory / "error.json", ns=(at, at))
        return str(directory)

    @property
    def shown(self) -> tuple[str, int] | None:
        """Message and exit code in the file; None: there is none."""
        if not self.path.exists():
            return None
        message = json.loads(self.path.read_text())["message"]
        return message["message"], message["errorCode"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("agents", [1, 2])
def test_the_first_error_by_time_wins_whichever_worker_ends_first(
    tmp_path: Path, agents: int, order: tuple[int, int]
) -> None:
    job = Job(tmp_path, agents)
    errors = [(job.record("cause", 1.0), 3), (job.record("consequence", 1.25), 1)]
    for number in order:
        job.agents[number % agents].failed(*errors[number])
    assert job.shown == ("cause", 3)


def test_an_error_after_one_that_was_not_recorded_is_no_root_cause(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    (agent,) = job.agents
    (tmp_path / "silent").mkdir()
    agent.failed(str(tmp_path / "silent"), 7)
    agent.failed(job.record("consequence", 3600.0), 1)
    assert job.shown is None
    agent.failed(job.record("cause", -3600.0), -6)  # it was recorded before, and ended later
    assert job.shown == ("cause", -6)


def test_an_attempt_begins_without_the_error_of_the_one_before(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    first, second = job.agents
    first.failed(job.record("early", 0.01), 1)
    for agent in (second, first):
        agent.rest()
        agent.begin()
    assert job.shown is None
    first.failed(job.record("again", 3600.0), 1)
    second.begin()  # it has written nothing
    assert job.shown == ("again", 1)


def test_a_file_that_was_there_before_the_job_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text("of another run")
    os.utime(tmp_path / "e.json", (1.0, 1.0))
    job = Job(tmp_path, 1)
    job.agents[0].begin()
    assert job.path.exists()
    job.agents[0].failed(job.record("new", 1.0), 1)
    assert job.shown == ("new", 1)


def test_a_file_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = ErrorFile(str(tmp_path / "absent/e.json"), str(tmp_path / "agent"))
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker/error.json").write_text("no JSON")
    os.utime(tmp_path / "worker/error.json", (1.0, 1.0))
    agent.failed(str(tmp_path / "worker"), 1)
    assert "error file is not written" in caplog.text
