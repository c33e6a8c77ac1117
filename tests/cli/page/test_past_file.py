"""The past of jobs in a file: it is there after a restart, bounded, and never in the way."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.cli.page.past_file import past_file
from unbroken.cli.page.values import JobPast, forget_deleted
from unbroken.core.page.history import POINTS_MAX, MetricHistory
from unbroken.local import folders
from unbroken.local.state import Paths
from unbroken.wire.observation import RankWatch


def history(points: int, first: int = 0) -> MetricHistory:
    """The past of a job with this many points."""
    made = MetricHistory(2.0)
    for number in range(first, first + points):
        made.add(
            2.0 * number, [RankWatch(0, step=number * 3, metrics={"loss": 1.0 / (number + 1)})]
        )
    return made


def same(one: MetricHistory, other: MetricHistory) -> bool:
    return (one.points, one.names, one.seconds) == (other.points, other.names, other.seconds)


def load(path: Path) -> dict[str, MetricHistory]:
    with past_file(path) as (_, found):
        return found


def rows(path: Path) -> int:
    found = sqlite3.connect(path).execute("SELECT count(*) FROM points").fetchone()
    return int(found[0])


def test_a_history_is_as_before_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "past.sqlite"
    one, quiet = history(20), MetricHistory(2.0)
    with past_file(path) as (file, found):
        assert found == {}
        file.save({"a": one, "quiet": quiet})
    found = load(path)
    assert same(found["a"], one)
    assert "quiet" not in found, "it has no points"
    found["a"].add(40.0, [RankWatch(0, step=60)])
    assert [one.at for one in found["a"].points[-2:]] == [38.0, 40.0]


def test_points_are_added_and_thinned_out_as_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "past.sqlite"
    made = MetricHistory(2.0)
    with past_file(path) as (file, _):
        for number in range(POINTS_MAX * 3):
            made.add(2.0 * number, [RankWatch(0, step=number)])
            if number % 7 == 0:
                file.save({"a": made})
        file.save({"a": made})
    assert made.seconds == 8.0
    assert same(load(path)["a"], made)
    assert rows(path) <= POINTS_MAX


def test_a_deleted_job_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "past.sqlite"
    pasts = {"a": JobPast(history(5)), "b": JobPast(history(5))}
    with past_file(path) as (file, _):
        file.save({uid: one.history for uid, one in pasts.items()})
        forget_deleted(pasts, [{"metadata": {"uid": "b"}}])
        file.save({uid: one.history for uid, one in pasts.items()})
        assert rows(path) == 5
    assert list(load(path)) == ["b"]


def text(path: Path) -> None:
    path.write_text("no database")


def middle(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[1024:-1024] = b"x" * (len(body) - 2048)
    path.write_bytes(body)


def values(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("UPDATE points SET step = 'many'")
    database.commit()
    database.close()


def later_version(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()


@pytest.mark.parametrize("damage", [text, middle, values, later_version])
def test_a_damaged_file_is_set_aside_with_a_message(
    damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Paths(tmp_path).ui_history
    with past_file(path) as (file, _):
        file.save({"a": history(500)})
    assert callable(damage)
    damage(path)
    with past_file(path) as (file, found):
        assert found == {}
        file.save({"b": history(3)})
        # `unbroken down --purge` deletes a folder only if it knows each file in it.
        assert set(os.listdir(tmp_path)) <= set(folders.MADE)
    assert "history of jobs damaged, renamed and begun anew" in caplog.text
    assert str(path) in caplog.text
    assert path.with_name("ui-history.sqlite.damaged").exists()
    assert list(load(path)) == ["b"]


def test_a_file_that_cannot_be_written_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "past.sqlite"
    with past_file(path) as (file, _):
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            file.save({"a": history(3)})
        assert caplog.text.count("history of jobs not saved") == 1
        other.execute("ROLLBACK")
        file.save({"a": history(3)})
        other.close()
    assert len(load(path)["a"].points) == 3


SAVES = """
import sys
from pathlib import Path
from tests.cli.page.test_past_file import history
from unbroken.cli.page.past_file import past_file

with past_file(Path(sys.argv[1])) as (file, _):
    made = history(10)
    file.save({"a": made})
    print("saved", flush=True)
    sys.stdin.read()
"""


def test_a_save_outlives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "past.sqlite"
    command = [sys.executable, "-c", SAVES, str(path)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved\n"
        os.kill(process.pid, signal.SIGKILL)
    assert same(load(path)["a"], history(10))
