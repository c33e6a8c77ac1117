"""Events that the watchdog takes, and effects that it asks for.

`now` and every time in these events, those of the page too, are seconds of the driver's one clock,
and so are those of the views.  A clock that does not jump is best.

`Taught` is the knowledge of a rank from one attempt, for the next attempt of the same job. A hang
soon after a restart, often the same one again, would not be found otherwise: every attempt would
learn from the start, and silence itself teaches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unbroken.core.patience import EARLY, EARLY_SIGNS, RESTARTED, Allowed
from unbroken.core.tick import Tick
from unbroken.wire.worker import Page

from .rhythm import Rhythm


@dataclass(frozen=True, slots=True)
class Taught:
    """By the attempts before; nothing, in the first."""

    phases: Mapping[str, Rhythm] = field(default_factory=dict)
    output: Rhythm = field(default_factory=Rhythm)
    start_seconds: float = 0.0
    """The longest start-up: until the steps, or else the output, were in their rhythm; 0: it never
    came to its end."""
    reports_steps: bool = False

    def start(self) -> Allowed | None:
        """Silence in a start-up.  One that works may take as long as it likes."""
        return RESTARTED.allowed(self.start_seconds) if self.start_seconds else None


def early(gap_seconds: float, signs: int) -> Allowed | None:
    """Silence while still learning, after so many signs; None: too few."""
    return EARLY.allowed(gap_seconds) if signs >= EARLY_SIGNS else None


@dataclass(frozen=True, slots=True)
class RankStarted:
    """The rank's worker runs; whatever this attempt has taught of the rank is forgotten."""

    rank: int


@dataclass(frozen=True, slots=True)
class PageRead:
    """Content of the rank's page, read just now."""

    rank: int
    page: Page


@dataclass(frozen=True, slots=True)
class Wrote:
    """Output that came since the last time; nothing came: the event may be left out."""

    rank: int
    at: float
    """Time of the newest."""
    longest_gap: float = 0.0
    """Seconds between two successive writes, the one before these included."""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rank's processes, by /proc, just now."""

    rank: int
    state: str
    """The worst of the worker and the processes below it, in this order: T or t, D, R, S."""
    cpu_seconds: float
    """User and system time so far, of the worker and the processes below it."""
    io_bytes: int = 0
    """Bytes read and written so far, by the same processes; 0 if the kernel does not report
    them."""
    waited_seconds: float = 0.0
    """Seconds that their main threads have waited for a processor so far; 0 if the kernel does not
    report them."""


@dataclass(frozen=True, slots=True)
class Halted:
    """A signal stopped the worker, says the kernel."""

    rank: int


@dataclass(frozen=True, slots=True)
class Continued:
    """A signal continued the worker, says the kernel."""

    rank: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker has ended; nothing more will come from the rank."""

    rank: int


WatchdogEvent = RankStarted | PageRead | Wrote | Sampled | Halted | Continued | Ended | Tick


@dataclass(frozen=True, slots=True)
class Sample:
    """Read page and output of these ranks now. Report `PageRead` for each, and `Wrote` if there is
    output. Then read /proc too, and report `Sampled`, always last."""

    ranks: tuple[int, ...]
    with_processes: bool = True
    """False: /proc is not needed this time; to read it nevertheless does no harm."""


WatchdogEffect = Sample
