"""Generated traces of training for the watchdog: four ranks in step, their hazards and faults.

A job is a series of pieces, in each of which every rank has an activity. At the end of a piece the
ranks show a step, output, a phase or a checkpoint. All times and sizes come from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

RANKS = 4


class Doing(NamedTuple):
    """Activity of a process: cores used, bytes a second, state."""

    cores: float
    io: float = 0.0
    state: str = "R"


IDLE = Doing(0.004, 0, "S")
"""Waiting in a collective of gloo, or for a lock."""
SPIN = Doing(1.0)
"""Waiting in a collective of NCCL."""
READS = Doing(0.3, 2e7)
STUCK = Doing(0, 0, "D")
STOPPED = Doing(0, 0, "T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Activity of the ranks for some time, and the signs that they show at its end."""

    seconds: float
    doing: Doing
    shows: tuple[str, ...] = ()
    """Signs of progress: step, line (rank 0), lines (all), phase=NAME, save, exit."""
    alone: Mapping[int, Doing] = field(default_factory=dict)
    """Activity of the ranks that differ from the others."""
    loss: float = 2.0
    is_frozen: bool = False
    """True if the whole machine is frozen, with the agent."""


@dataclass(slots=True)
class World:
    """Nature of a job: its signs of progress, how its ranks wait, and how long a step takes."""

    rng: Random
    seconds: float
    """Seconds to simulate."""
    wait: Doing
    work: Doing
    step: float
    jitter: float = 0.05
    shows: tuple[str, ...] = ("step",)
    at: float = 0.0

    def of(self, piece: Piece) -> Piece:
        """Advance the time by a piece; return the piece."""
        self.at += piece.seconds
        return piece

    def starts(self) -> Iterator[Piece]:
        """Yield the start: imports, data, and first steps with their compilation."""
        rng = self.rng
        yield self.of(Piece(rng.uniform(3, 20), Doing(0.9, 5e6), ("lines",)))
        yield self.of(Piece(rng.uniform(1, 30), READS, ("lines",)))
        for longest in (60, 10, 3):
            yield self.of(Piece(rng.uniform(1, longest), Doing(1.2, 3e5), self.shows))

    def steps(self, until: float, shows: tuple[str, ...] | None = None) -> Iterator[Piece]:
        """Yield steps until then, or until the end."""
        rng, seen = self.rng, self.shows if shows is None else shows
        while self.at < min(until, self.seconds):
            seconds = self.step * rng.lognormvariate(0, self.jitter)
            yield self.of(Piece(seconds, self.work, seen, loss=2 + rng.gauss(0, 0.1)))

    def every(self, low: float, high: float) -> float:
        """Return a random time for the next hazard."""
        return self.at + self.rng.uniform(low, high)


Trace = Callable[[World], Iterator[Piece]]


def steady(world: World) -> Iterator[Piece]:
    """Yield even steps without any hazard."""
    yield from world.steps(math.inf)


def sequence_lengths(world: World) -> Iterator[Piece]:
    """Yield steps that differ by half an order of magnitude; long ones come together."""
    world.jitter = 0.5
    usual = world.step
    while world.at < world.seconds:
        world.step = usual * world.rng.choice((0.6, 0.8, 1, 1, 1.2, 1.4))
        yield from world.steps(world.every(2, 20))


def evaluates(world: World, is_told: bool = False) -> Iterator[Piece]:
    """Yield steps with irregular evaluations of random length; a third of them read nothing."""
    rng = world.rng
    period, usual = rng.uniform(60, 900), rng.uniform(8, 120)
    reads = Doing(1.15, 2e5) if rng.random() < 0.67 else SPIN
    doing = world.work if world.wait is IDLE else reads
    while world.at < world.seconds:
        yield from world.steps(world.every(0.7 * period, 1.3 * period))
        if is_told:
            yield Piece(0, world.work, ("phase=eval",))
        yield world.of(Piece(usual * rng.uniform(0.5, 2), doing))
        if is_told:
            yield Piece(0, world.work, ("phase=train",))


def tells_evaluation(world: World) -> Iterator[Piece]:
    """Yield steps with evaluations that report their phase."""
    yield from evaluates(world, is_told=True)


def saves(world: World, is_told: bool = False) -> Iterator[Piece]:
    """Yield steps with checkpoints: rank 0 writes for the others, sometimes to a slow disk."""
    rng = world.rng
    period, usual = rng.uniform(120, 900), rng.uniform(3, 30)
    while world.at < world.seconds:
        yield from world.steps(world.every(0.9 * period, 1.1 * period))
        seconds = usual * rng.choice((0.8, 1, 1, 1, 1.2, 3))
        doing = rng.choice((Doing(0.4, 2e8), Doing(0.02, 5e7, "D")))
        if is_told:
            yield Piece(0, world.work, ("phase=checkpoint",))
        yield world.of(Piece(seconds, world.wait, ("save",), {0: doing}))
        if is_told:
            yield Piece(0, world.work, ("phase=train",))


def tells_checkpoint(world: World) -> Iterator[Piece]:
    """Yield steps with checkpoints that report their phase."""
    yield from saves(world, is_told=True)


def recompiles(world: World) -> Iterator[Piece]:
    """Yield steps with torch.compile for minutes at odd moments, with or without children."""
    rng = world.rng
    yield world.of(Piece(rng.uniform(60, 400), Doing(3.0, 1e6), world.shows))
    while world.at < world.seconds:
        yield from world.steps(world.every(200, 3000))
        for _ in range(rng.randrange(10, 90)):
            doing = Doing(rng.choice((1.0, 1.0, 4.0)), rng.choice((0.0, 0.0, 3e5)))
            yield world.of(Piece(1, doing))


def link_flaps(world: World) -> Iterator[Piece]:
    """Yield steps with waits of all ranks for up to 30 s."""
    while world.at < world.seconds:
        yield from world.steps(world.every(600, 3000))
        yield world.of(Piece(world.rng.uniform(3, 30), world.wait))


def data_stalls(world: World) -> Iterator[Piece]:
    """Yield steps in which one rank waits for data: shared storage answers late."""
    rng = world.rng
    while world.at < world.seconds:
        yield from world.steps(world.every(300, 2000))
        doing = rng.choice((IDLE, STUCK, Doing(0.05, 2e5, "S")))
        yield world.of(Piece(rng.uniform(2, 40), world.wait, (), {rng.randrange(RANKS): doing}))


def accumulates(world: World) -> Iterator[Piece]:
    """Yield long steps."""
    world.step = world.rng.uniform(15, 60)
    yield from world.steps(math.inf)


def logs_growing(world: World) -> Iterator[Piece]:
    """Yield steps with a line for every few of them; steps get longer, and none is reported."""
    every, usual = world.rng.choice((10, 20, 50)), world.step
    while world.at < world.seconds:
        world.step = usual * (1 + 2 * world.at / world.seconds)
        for i in range(every):
            yield from world.steps(world.at + 1e-6, ("line",) if i == 0 else ())


def bars(world: World) -> Iterator[Piece]:
    """Yield a progress bar (tqdm): ten writes a second by rank 0, and evaluation between epochs."""
    while world.at < world.seconds:
        world.step, world.jitter = 0.1, 0.1
        yield from world.steps(world.every(100, 600), ("line",))
        yield world.of(Piece(world.rng.uniform(1, 60), world.work))


def prints_epochs(world: World) -> Iterator[Piece]:
    """Yield output during the start, then a line for each epoch; no step is reported."""
    for _ in range(world.rng.randrange(5, 60)):
        yield world.of(Piece(world.rng.uniform(0.1, 5), Doing(0.9, 5e6), ("lines",)))
    epoch = world.rng.uniform(120, 1500)
    while world.at < world.seconds:
        yield from world.steps(world.every(0.95 * epoch, 1.05 * epoch), ())
        yield Piece(0, world.work, ("line",))


def prints_nothing(world: World) -> Iterator[Piece]:
    """Yield work without any sign of progress."""
    yield from world.steps(math.inf, ())


def ends_slowly(world: World) -> Iterator[Piece]:
    """Yield a run of minutes, and minutes of saving at its end, in no phase."""
    rng = world.rng
    yield from world.steps(world.every(200, 1500))
    seconds, doing = rng.uniform(30, 400), rng.choice((Doing(0.4, 2e8), Doing(0.9, 3e7)))
    yield world.of(Piece(seconds, world.wait, ("save",), {0: doing}))
    yield world.of(Piece(rng.uniform(0, 5), IDLE, ("exit",)))


def machine_freezes(world: World) -> Iterator[Piece]:
    """Yield steps and freezes of the machine with its agent, for minutes."""
    while world.at < world.seconds:
        yield from world.steps(world.every(300, 2000))
        yield world.of(Piece(world.rng.uniform(5, 200), IDLE, is_frozen=True))


def neighbours(world: World) -> Iterator[Piece]:
    """Yield steps that take up to three times as long for up to 25 s."""
    usual = world.step
    while world.at < world.seconds:
        world.step = usual
        yield from world.steps(world.every(100, 600))
        world.step = usual * world.rng.uniform(1.3, 3)
        yield from world.steps(world.every(5, 25))


def broken(
    fault: Callable[[World, int], Iterator[Piece]], before: Trace = steady
) -> Callable[[World, float], Iterator[Piece]]:
    """Return a trace: `before` until the given time of the fault, then `fault` with the culprit."""

    def trace(world: World, at: float) -> Iterator[Piece]:
        whole = world.seconds
        world.seconds = at
        yield from before(world)
        world.seconds = whole
        yield from fault(world, world.rng.randrange(RANKS))

    return trace


def hang(culprit: Doing | None = None) -> Callable[[World, int], Iterator[Piece]]:
    """Return a fault in which all ranks wait until the end, the culprit with its own activity."""

    def fault(world: World, rank: int) -> Iterator[Piece]:
        alone = {} if culprit is None else {rank: culprit}
        yield world.of(Piece(max(1.0, world.seconds - world.at), world.wait, (), alone))

    return fault


def halved(world: World, _rank: int) -> Iterator[Piece]:
    """Yield steps that take twice as long."""
    world.step *= 2
    yield from world.steps(math.inf)


def bad_loss(value: float) -> Callable[[World, int], Iterator[Piece]]:
    """Return a fault in which the loss changes from one step to the next."""

    def fault(world: World, _rank: int) -> Iterator[Piece]:
        while world.at < world.seconds:
            yield world.of(Piece(world.step, world.work, world.shows, loss=value))

    return fault


def no_saves(world: World, _rank: int) -> Iterator[Piece]:
    """Yield steps without any more checkpoints."""
    yield from world.steps(math.inf)
