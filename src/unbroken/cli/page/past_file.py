"""The past of jobs in a file beside the local cluster, so that it outlives `unbroken up`.

The file is SQLite and mirrors what is in memory: a job that is not there any more leaves the file,
too. So its size is bounded as that of the memory is. A save is one transaction that adds the newest
points; only a job whose points were thinned out is written as a whole. After `kill -9`, what was
added since the last save is lost.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from unbroken.core.page.history import POINTS_MAX, MetricHistory, Point
from unbroken.errors import WorldError
from unbroken.log_lines import LastProblem, Log

log = Log(__name__)

SAVE_SECONDS = 5.0
"""Seconds between saves: so much is lost at most after `kill -9`."""
LOCKED_SECONDS = 0.1
"""Seconds to wait for another program that has the file open: everything else waits, too."""
FORM = 1
"""Version of the tables."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    uid TEXT PRIMARY KEY, seconds REAL NOT NULL, names TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS points (
    uid TEXT NOT NULL, at REAL NOT NULL, step INTEGER, rate REAL, metrics TEXT NOT NULL,
    PRIMARY KEY (uid, at)) WITHOUT ROWID;
"""


class _Saved(NamedTuple):
    """The past of a job in the file."""

    seconds: float
    names: tuple[str, ...]
    until: float
    """Time of the newest point."""


class PastFile:
    """The open file."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._saved: dict[str, _Saved] = {}
        self._logged = LastProblem()

    def load(self) -> dict[str, MetricHistory]:
        """Read the past of every job, by uid.

        Raises sqlite3.Error and msgspec.MsgspecError if the file is damaged.
        """
        result = {}
        for uid, seconds, names in self._database.execute("SELECT uid, seconds, names FROM jobs"):
            rows = self._database.execute(
                "SELECT at, step, rate, metrics FROM points WHERE uid = ? ORDER BY at LIMIT ?",
                (uid, POINTS_MAX),
            )
            points = [_point(*row) for row in rows]
            known = tuple(msgspec.json.decode(names, type=list[str]))
            history = MetricHistory(msgspec.convert(seconds, float), points, known)
            result[str(uid)] = history
            self._saved[str(uid)] = _mark(history)
        return result

    def save(self, pasts: Mapping[str, MetricHistory]) -> None:
        """Have the file mirror the past of all jobs. A failure is logged, and tried again later."""
        try:
            saved = self._save({uid: one for uid, one in pasts.items() if one.points})
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            if self._logged.note(str(error)):
                log.warning("history of jobs not saved", error=error)
        else:
            self._saved = saved
            self._logged.note("")

    def _save(self, pasts: Mapping[str, MetricHistory]) -> dict[str, _Saved]:
        marks = {uid: _mark(history) for uid, history in pasts.items()}
        if marks == self._saved:
            return marks
        self._database.execute("BEGIN")
        for uid in self._saved.keys() - marks.keys():
            self._delete(uid)
        for uid, mark in marks.items():
            known = self._saved.get(uid)
            if known != mark:
                self._write(uid, pasts[uid], known)
        self._database.execute("COMMIT")
        return marks

    def _write(self, uid: str, history: MetricHistory, known: _Saved | None) -> None:
        if known is None or known.seconds != history.seconds:
            self._delete(uid)
            known = None
        names = msgspec.json.encode(history.names).decode()
        row = (uid, history.seconds, names)
        self._database.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", row)
        added = (one for one in history.points if known is None or one.at > known.until)
        self._database.executemany(
            "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?)",
            [
                (uid, one.at, one.step, one.rate, msgspec.json.encode(one.metrics).decode())
                for one in added
            ],
        )

    def _delete(self, uid: str) -> None:
        for table in ("jobs", "points"):
            self._database.execute(f"DELETE FROM {table} WHERE uid = ?", (uid,))


def _mark(history: MetricHistory) -> _Saved:
    return _Saved(history.seconds, history.names, history.points[-1].at)


def _point(at: object, step: object, rate: object, metrics: str) -> Point:
    return Point(
        msgspec.convert(at, float),
        msgspec.convert(step, int | None),
        msgspec.convert(rate, float | None),
        msgspec.json.decode(metrics, type=dict[str, float]),
    )


@contextmanager
def past_file(path: Path) -> Iterator[tuple[PastFile, dict[str, MetricHistory]]]:
    """Open the file, and read the past of all jobs.

    A damaged file is set aside, and a new one is begun.  Raises WorldError if none can be made.
    """
    try:
        database, file, found = _opened(path)
    except (sqlite3.Error, msgspec.MsgspecError, WorldError) as error:
        aside = path.with_name(f"{path.name}.damaged")
        log.warning("history of jobs damaged, renamed and begun anew", file=aside, error=error)
        try:
            os.replace(path, aside)
            for end in ("-wal", "-shm"):
                path.with_name(path.name + end).unlink(missing_ok=True)
            database, file, found = _opened(path)
        except (OSError, sqlite3.Error) as again:
            raise WorldError(f"{path} cannot be written: {again}") from again
    with closing(database):
        yield file, found


def _opened(path: Path) -> tuple[sqlite3.Connection, PastFile, dict[str, MetricHistory]]:
    database = sqlite3.connect(path, isolation_level=None, timeout=LOCKED_SECONDS)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        (form,) = database.execute("PRAGMA user_version").fetchone()
        if form not in (0, FORM):
            raise WorldError(f"its form is {form}, and this version knows {FORM}")
        (check,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if check != "ok":
            raise WorldError(str(check))
        database.executescript(SCHEMA)
        database.execute(f"PRAGMA user_version = {FORM}")
        file = PastFile(database)
        return database, file, file.load()
    except BaseException:
        with suppress(sqlite3.Error):
            database.close()
        raise
