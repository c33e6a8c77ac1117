"""Input and output of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.spec.nodes.check import Outcome

from .plants import Plants

SHORT_SECONDS = 2.0
"""Duration of a test that can be longer or shorter."""
RANKS_LEAST = 2
"""Processes of a test of links: with fewer, nothing goes from one to another."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The part of this machine in a test of two."""

    rank: int
    """0 listens, 1 connects."""
    host: str
    """Address of rank 0."""
    port: int
    peer: str = ""
    """Name of the other node."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of the tests."""

    seconds: float = SHORT_SECONDS
    """Approximate duration of each test of a part under load."""
    directory: Path = Path("/tmp")
    """On the disk that is tested."""
    gpus: int | None = None
    """GPUs that should be there; None: not known."""
    efa: int | None = None
    """EFA devices that should be there; None: not known."""
    memory_share: float = 0.5
    """Share of the free memory to be tested."""
    ranks: int = RANKS_LEAST
    """Processes of this machine in tests of links, where it has no GPUs."""
    dcgm_level: int = 2
    """Level of NVIDIA's `dcgmi diag`: 1 to 4."""
    doubt_seconds: float = 8.0
    """Extra seconds for a disk that seems slow to show that it is not. Of 28 short runs with six
    programs that wrote to the same disk, one saw 22 MB/s."""
    pair: Pair | None = None
    plants: Plants = field(default_factory=Plants)


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of one test; the caller adds its node, kind and duration."""

    test: str
    outcome: Outcome
    message: str = ""
    """The problem and what to do; of a pass, what was seen."""
    measured: float | None = None
    expected: float | None = None
    unit: str = ""


def passed(test: str, message: str = "", measured: float | None = None, unit: str = "") -> Finding:
    """Nothing is wrong."""
    return Finding(test, Outcome.PASS, message, measured, None, unit)


def failed(test: str, message: str) -> Finding:
    """Something was seen to be wrong."""
    return Finding(test, Outcome.FAIL, message)


def unknown(test: str, message: str) -> Finding:
    """Nothing can be said."""
    return Finding(test, Outcome.UNKNOWN, message)


def skipped(test: str, message: str) -> Finding:
    """There is no such hardware here."""
    return Finding(test, Outcome.SKIPPED, message)


def against(test: str, measured: float, least: float, unit: str, message: str) -> Finding:
    """A measurement that must reach a limit; `message` is what to do where it does not."""
    is_good = measured >= least
    outcome = Outcome.PASS if is_good else Outcome.FAIL
    return Finding(test, outcome, "" if is_good else message, round(measured, 3), least, unit)


@dataclass(frozen=True, slots=True)
class Test:
    """One test; it may find several things."""

    __test__ = False  # pytest would take it for one of its own

    name: str
    run: Callable[[Settings], Iterator[Finding]]
    limit_seconds: float = 30.0
    """It is given up after this and twice the settings' seconds."""
