#!/usr/bin/env python3
"""False alarms and delays of the watchdog on generated traces.

    benchmarks/watchdog.py [--quick] [--json FILE] [--only KIND] [--floor SECONDS]

Four ranks in step share each hazard.  "Job" counts a silence when every rank that has learned a
rhythm is silent: then the operator begins its examination.  The stacks, by which the operator
dismisses further alarms, are not part of this.  "Rank" counts every alarm of every rank.
A false alarm does not end a trace: the watchdog learns from it and continues.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random

import watchdog_traces as traces
from arguments import count, output_file
from watchdog_traces import IDLE, RANKS, SPIN, STOPPED, STUCK, Doing, Piece, World

from unbroken.core.tick import Tick
from unbroken.core.watchdog.events import (
    Ended,
    Halted,
    PageRead,
    RankStarted,
    Sample,
    Sampled,
    Wrote,
)
from unbroken.core.watchdog.machine import Watchdog
from unbroken.spec.job.detectors import DEFAULTS
from unbroken.wire.observation import RankWatch
from unbroken.wire.worker import Page

SILENCES = {"silent", "spinning"}
MULTI = Doing(3.5)


class Side:
    """One rank of a trace, with the values that an agent would see."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.cpu = self.io = 0.0
        self.state = "R"
        self.page: dict[str, object] = asdict(Page())
        self.has_ended = False
        self.wrote: list[float] = []
        self._wrote_at = 0.0

    def show(self, what: str, at: float, loss: float) -> None:
        """Show a sign of progress at the end of a piece."""
        name, _, value = what.partition("=")
        if name == "lines" or (name == "line" and self.rank == 0):
            self.wrote.append(at)
        elif name == "step":
            self._step(at, loss)
        elif name == "phase":
            page = self.page
            page |= {"phase": value, "phase_at": at, "visit": _int(page["visit"]) + 1}
            page |= {"visit_calls": 0, "longest_gap": 0.0}
        elif name == "save":
            self.page |= {"checkpoint_at": at, "checkpoint_step": self.page["step"]}
        elif name == "exit":
            self.has_ended = True

    def _step(self, at: float, loss: float) -> None:
        page = self.page
        gap = at - float(str(page["step_at"])) if page["visit_calls"] else 0.0
        page |= {"step": _int(page["step"] or 0) + 1, "calls": _int(page["calls"]) + 1}
        page |= {"longest_gap": max(float(str(page["longest_gap"])), gap), "step_at": at}
        page |= {"visit_calls": _int(page["visit_calls"]) + 1, "metrics": {"loss": loss}}
        page["bad_calls"] = _int(page["bad_calls"]) + (not math.isfinite(loss))

    def events(self, is_deep: bool) -> Iterator[PageRead | Wrote | Sampled]:
        """Yield the events of one look."""
        yield PageRead(self.rank, Page(**self.page))  # type: ignore[arg-type]
        if self.wrote:
            times = [self._wrote_at or self.wrote[0], *self.wrote]
            gaps = [after - before for before, after in itertools.pairwise(times)]
            yield Wrote(self.rank, self.wrote[-1], max(gaps), len(self.wrote))
            self._wrote_at = self.wrote[-1]
            self.wrote.clear()
        if is_deep:
            yield Sampled(self.rank, self.state, self.cpu, int(self.io))


def _int(value: object) -> int:
    return int(str(value))


@dataclass(slots=True)
class Found:
    """Alarms of one trace."""

    rank_alarms: Counter[str] = field(default_factory=Counter)
    job_alarms: Counter[str] = field(default_factory=Counter)
    first_at: dict[str, float] = field(default_factory=dict)
    """Time of the first job alarm since the fault, by detector."""


class Replay:
    """Drives a watchdog through a trace, as an agent would."""

    def __init__(self, pieces: Iterator[Piece], floor: float) -> None:
        self.dog = Watchdog(range(RANKS), DEFAULTS, floor)
        self.sides = [Side(rank) for rank in range(RANKS)]
        self.found = Found()
        self._pieces = pieces
        self._now = 0.0
        self._open: set[tuple[int, str]] = set()
        self._open_job: set[str] = set()
        self._turns = -1
        for rank in range(RANKS):
            self.dog.step(RankStarted(rank), 0.0)

    def run(self, fault_at: float = math.inf) -> Found:
        """Replay the trace to its end. Alarms after the fault are not false."""
        for piece in self._pieces:
            end = self._now + piece.seconds
            self._enter(piece)
            while not piece.is_frozen and (due := self.dog.deadline()) is not None and due < end:
                self._spend(piece, max(0.0, due - self._now))
                self._tick(fault_at)
            self._spend(piece, end - self._now)
            for side in self.sides:
                for what in piece.shows:
                    side.show(what, end, piece.loss)
                if side.has_ended:
                    self.dog.step(Ended(side.rank), end)
        return self.found

    def _enter(self, piece: Piece) -> None:
        for side in self.sides:
            side.state = piece.alone.get(side.rank, piece.doing).state
            if side.state == "T":
                self.dog.step(Halted(side.rank), self._now)

    def _spend(self, piece: Piece, seconds: float) -> None:
        self._now += seconds
        for side in self.sides:
            doing = piece.alone.get(side.rank, piece.doing)
            if not piece.is_frozen:
                side.cpu += doing.cores * seconds
                side.io += doing.io * seconds

    def _tick(self, fault_at: float) -> None:
        dog, now = self.dog, self._now
        for effect in dog.step(Tick(), now):
            self._answer(effect, now)
        if dog.turns != self._turns:
            self._turns = dog.turns
            self._count(dog.views(), fault_at)

    def _answer(self, effect: Sample, now: float) -> None:
        for rank in effect.ranks:
            for event in self.sides[rank].events(effect.with_processes):
                self.dog.step(event, now)

    def _count(self, views: Sequence[RankWatch], fault_at: float) -> None:
        now = {(view.rank, alarm.detector) for view in views for alarm in view.alarms}
        learned = {view.rank for view in views if view.allowed_seconds is not None}
        silent = {rank for rank, name in now if name in SILENCES | {"stopped"}}
        job = {name for _, name in now if name not in SILENCES}
        if learned and learned <= silent:
            job |= {name for _, name in now if name in SILENCES}
        is_false = self._now < fault_at
        for _, name in now - self._open:
            self.found.rank_alarms[name] += is_false
        for name in job - self._open_job:
            self.found.job_alarms[name] += is_false
            if not is_false:
                self.found.first_at.setdefault(name, self._now)
        self._open, self._open_job = now, job


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table."""

    name: str
    trace: Callable[..., Iterator[Piece]]
    fault: tuple[str, ...] = ()
    """Detectors, any of which finds the fault; empty: no fault."""
    wait: Doing | None = None
    """The way in which ranks wait; None: half of the runs as gloo, half as NCCL."""
    shows: tuple[str, ...] = ("step",)
    seconds: float = 2 * 3600.0


SILENT = ("silent", "spinning")
KINDS = (
    Kind("steady", traces.steady),
    Kind("sequence lengths", traces.sequence_lengths),
    Kind("evaluation, unreported", traces.evaluates),
    Kind("evaluation, reported", traces.tells_evaluation),
    Kind("slow checkpoint, unreported", traces.saves),
    Kind("slow checkpoint, reported", traces.tells_checkpoint),
    Kind("recompilation", traces.recompiles),
    Kind("link flaps to 30 s", traces.link_flaps),
    Kind("data loader stalls", traces.data_stalls),
    Kind("gradient accumulation", traces.accumulates),
    Kind("log line in N steps, growing", traces.logs_growing, shows=("line",)),
    Kind("progress bar", traces.bars, shows=("line",)),
    Kind("one line an epoch", traces.prints_epochs, shows=("line",)),
    Kind("prints nothing", traces.prints_nothing, shows=()),
    Kind("minutes of saving at the end", traces.ends_slowly),
    Kind("machine frozen, agent too", traces.machine_freezes),
    Kind("noisy neighbours", traces.neighbours),
    Kind("SIGSTOP", traces.broken(traces.hang(STOPPED)), ("stopped",)),
    Kind("deadlock, gloo", traces.broken(traces.hang()), SILENT, IDLE),
    Kind("deadlock, NCCL", traces.broken(traces.hang()), SILENT, SPIN),
    Kind("endless loop of one, gloo", traces.broken(traces.hang(SPIN)), SILENT, IDLE),
    Kind("state D", traces.broken(traces.hang(STUCK)), ("stuck",)),
    Kind(
        "deadlock after evaluations",
        traces.broken(traces.hang(), traces.tells_evaluation),
        SILENT,
        IDLE,
    ),
    Kind("deadlock, lines only", traces.broken(traces.hang()), SILENT, IDLE, ("line",)),
    Kind("deadlock, lines only, NCCL", traces.broken(traces.hang()), SILENT, SPIN, ("line",)),
    Kind("deadlock, nothing printed", traces.broken(traces.hang()), SILENT, IDLE, ()),
    Kind("throughput halved", traces.broken(traces.halved), ("slow",)),
    Kind("loss NaN", traces.broken(traces.bad_loss(math.nan)), ("nan",)),
    Kind("loss spike", traces.broken(traces.bad_loss(9.0)), ("spike",)),
    Kind("no checkpoint", traces.broken(traces.no_saves, traces.saves), ("checkpoint",), SPIN),
)


@dataclass(slots=True)
class Row:
    """Figures of one kind of trace."""

    kind: str
    runs: int
    hours: float
    false_job: dict[str, float]
    """False alarms of the job in 1000 hours, by detector."""
    false_rank: dict[str, float]
    found: float | None = None
    """Share of the runs in which the fault was found."""
    delay_p50: float | None = None
    delay_p95: float | None = None


def world_of(kind: Kind, seed: int, seconds: float) -> World:
    """Return the world of one run."""
    rng = Random(f"{kind.name} {seed}")
    wait = kind.wait or (IDLE, SPIN)[seed % 2]
    work = rng.choice((MULTI, SPIN)) if wait is IDLE else SPIN
    step = math.exp(rng.uniform(math.log(0.1), math.log(4)))
    return World(rng, seconds, wait, work, step, shows=kind.shows)


def play(kind: Kind, seed: int, seconds: float, floor: float) -> tuple[Found, float, float]:
    """Play a run. Return alarms, time of the fault (infinite: none), and hours before it."""
    world = world_of(kind, seed, seconds)
    fault_at = world.rng.uniform(150, 1800) if kind.fault else math.inf
    if kind.fault:
        world.seconds = fault_at + 2400
        if "deadlock after" in kind.name or "checkpoint" in kind.name:
            fault_at, world.seconds = fault_at + 3600, fault_at + 3600 + 7200

    def pieces() -> Iterator[Piece]:
        yield from world.starts()
        yield from kind.trace(world, fault_at) if kind.fault else kind.trace(world)

    found = Replay(pieces(), floor).run(fault_at)
    return found, fault_at, min(world.at, fault_at) / 3600


def measure(kind: Kind, runs: int, seconds: float, floor: float) -> Row:
    """Play all runs of one kind."""
    job: Counter[str] = Counter()
    rank: Counter[str] = Counter()
    hours, delays, hits = 0.0, [], 0
    for seed in range(runs):
        found, fault_at, spent = play(kind, seed, seconds, floor)
        job += found.job_alarms
        rank += found.rank_alarms
        hours += spent
        seen = [found.first_at[name] for name in kind.fault if name in found.first_at]
        hits += bool(seen)
        delays += [min(seen) - fault_at] if seen else []
    row = Row(kind.name, runs, hours, _rates(job, hours), _rates(rank, hours))
    if kind.fault:
        row.found = hits / runs
    if delays:
        row.delay_p50 = statistics.median(delays)
        row.delay_p95 = sorted(delays)[math.ceil(0.95 * len(delays)) - 1]
    return row


def _rates(counts: Mapping[str, int], hours: float) -> dict[str, float]:
    return {name: 1000 * count / hours for name, count in sorted(counts.items()) if count}


def table(rows: Sequence[Row]) -> str:
    """Return the table in Markdown."""
    lines = [
        "| kind | runs | hours | false, job | false, rank | found | delay p50 | p95 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        job, rank = (_shown(rates) for rates in (row.false_job, row.false_rank))
        found = "" if row.found is None else f"{row.found:.0%}"
        delays = [f"{d:.0f} s" if d is not None else "" for d in (row.delay_p50, row.delay_p95)]
        cells = (row.kind, row.runs, f"{row.hours:.0f}", job, rank, found, *delays)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _shown(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()) or "0"


def main() -> None:
    """Print the table; rates are per 1000 hours."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two runs of each kind, one hour")
    parser.add_argument("--json", type=output_file, help="write the rows to this file too")
    parser.add_argument("--only", default="", help="kinds whose names have this in them")
    parser.add_argument("--floor", type=float, default=5.0, help="no silence is shorter (s)")
    parser.add_argument("--runs", type=count, default=10)
    options = parser.parse_args()
    runs, rows = (2 if options.quick else options.runs), []
    for kind in KINDS:
        if options.only in kind.name:
            seconds = 3600.0 if options.quick else kind.seconds
            rows.append(measure(kind, runs, seconds, options.floor))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
