"""Recorded runs raise no alarm, and a hang at their end is found.

`watchdog_traces/*.json`: times of the writes of rank 0, and of each rank what /proc showed once a
second (time, state, processor seconds, bytes read and written).
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest

from unbroken.core.tick import Tick
from unbroken.core.watchdog.events import RankStarted, Sampled, Wrote
from unbroken.core.watchdog.machine import Watchdog
from unbroken.spec.job.detectors import DEFAULTS

TRACES = sorted((Path(__file__).parent / "watchdog_traces").glob("*.json"))


class Recorded:
    """A run, as far as it was recorded, and nothing more after that."""

    def __init__(self, path: Path) -> None:
        self.trace: dict[str, Any] = json.loads(path.read_text())
        self.end: float = self.trace["writes"][-1]
        self.dog = Watchdog(range(2), DEFAULTS)
        self.raised: set[tuple[int, str]] = set()
        self._wrote_at = 0.0
        for rank in range(2):
            self.dog.step(RankStarted(rank), 0.0)

    def run(self, until: float) -> None:
        """Replay the trace as an agent would."""
        while (now := self.dog.deadline()) is not None and now < until:
            for effect in self.dog.step(Tick(), now):
                for rank in effect.ranks:
                    self._look(rank, now)
            for view in self.dog.views():
                self.raised |= {(view.rank, alarm.detector) for alarm in view.alarms}

    def _look(self, rank: int, now: float) -> None:
        new = [at for at in self.trace["writes"] if self._wrote_at < at <= now] if not rank else []
        if new:
            gaps = itertools.pairwise([self._wrote_at, *new])
            longest = max(after - before for before, after in gaps)
            self.dog.step(Wrote(rank, new[-1], longest, len(new)), now)
            self._wrote_at = new[-1]
        samples = self.trace["samples"][str(rank)]
        found = bisect_right(samples, now, key=lambda one: one[0]) - 1
        _, state, cpu, io = samples[max(0, found)]
        is_over = found == len(samples) - 1
        self.dog.step(Sampled(rank, "S" if is_over else state, cpu, io), now)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_recorded_run_raises_no_alarm(path: Path) -> None:
    run = Recorded(path)
    run.run(run.end)
    assert all(view.allowed_seconds is not None for view in run.dog.views())
    assert run.dog.views()[0].phase == "train"
    assert run.raised == set()


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_hang_at_its_end_is_found_on_every_rank(path: Path) -> None:
    run = Recorded(path)
    run.run(run.end)
    run.run(run.end + 200)
    assert run.raised == {(0, "silent"), (1, "silent")}


def test_there_are_recorded_runs() -> None:
    assert TRACES
