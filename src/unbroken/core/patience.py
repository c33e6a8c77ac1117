"""Limits of silence: how long a rank, and a job, may show nothing. This is the one table of them.

An agent applies the limits of one rank (`core.watchdog`), the operator those of what looks at all
ranks have shown (`core.job.watch`). `tools/reference.py` writes docs/reference/silence.md from the
rows. What is not here: what counts as a sign of life, as work, or as the same place.

- A rank is *late* after a short silence (`LATE_*`). Then all ranks are looked at; nothing is
  stopped for it alone.
- A longer silence raises an alarm (`BY_SIGN`, and the rows after it while nothing is known).
- What the looks have shown says how long the silence must be before the job is stopped
  (`Allowance`). Looks decide, never time alone: to stop a healthy job costs more than to find a
  hang late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

NEVER = float("inf")
"""A silence of this kind is never judged."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At least `seconds`, and `times` what is usual."""

    seconds: float
    times: float = 0.0

    def of(self, usual_seconds: float, caution: float = 1.0) -> float:
        """Return the limit; `caution` is a factor of its seconds."""
        return max(self.seconds * caution, self.times * usual_seconds)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Silences in seconds; infinite: never judged."""

    idle: float
    spinning: float
    working: float


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Limits of a rank's silence, by what it does meanwhile.

    It is idle, or spins (about whole cores, steadily, nothing read or written), or works at
    something. A rank that seems to work needs a longer silence."""

    situation: str
    idle: Limit
    """Multiple of the longest gap between signs, or of the length of start-ups."""
    spinning: Limit
    """Multiple of the idle limit."""
    working: Limit
    """Multiple of the idle limit."""

    def allowed(
        self, usual_seconds: float = 0.0, caution: float = 1.0, floor_seconds: float = 0.0
    ) -> Allowed:
        """Return the limits in seconds; the idle limit is never below `floor_seconds`."""
        idle = max(self.idle.of(usual_seconds, caution), floor_seconds)
        return Allowed(idle, self.spinning.of(idle, caution), self.working.of(idle, caution))


@dataclass(frozen=True, slots=True)
class History:
    """Gaps between signs, and seconds in which they came."""

    gaps: int
    seconds: float


class SignSource(Enum):
    """Source of the signs of life: the first that the rank gives."""

    STEP = "step"
    OUTPUT = "output"
    WORK = "work"


@dataclass(frozen=True, slots=True)
class SignLimits:
    """Limits of a rank that gives signs from one source, and how much must be known of it."""

    silence: SilenceLimits
    learned: History
    """Least history with which a silence is judged."""
    firm: History
    """Least history with which a silence despite work is judged; the gaps of the start are then
    forgotten."""
    forgets_start: bool = False
    """The first gaps are those of the start-up: they count until the rhythm is firm."""


LOOK_SECONDS = 1.0
"""Seconds between an agent's looks at steps and output: no silence is known more exactly."""

# Alarms of one rank: a rhythm is known.

STEP_FLOOR_SECONDS = 5.0
_FEW = History(8, 30.0)
_LINES, _MANY_LINES = History(12, 60.0), History(50, 600.0)
BY_SIGN: Mapping[SignSource, SignLimits] = {
    SignSource.STEP: SignLimits(
        SilenceLimits(
            "reports steps", Limit(STEP_FLOOR_SECONDS, 4.0), Limit(20.0, 2.0), Limit(600.0, 6.0)
        ),
        _FEW,
        _FEW,
    ),
    SignSource.OUTPUT: SignLimits(
        SilenceLimits("only prints", Limit(15.0, 4.0), Limit(120.0, 5.0), Limit(900.0, 10.0)),
        _LINES,
        _MANY_LINES,
        forgets_start=True,
    ),
    SignSource.WORK: SignLimits(
        SilenceLimits("shows neither", Limit(30.0, 4.0), Limit(NEVER), Limit(NEVER)),
        _LINES,
        _MANY_LINES,
        forgets_start=True,
    ),
}
FEW_GAPS, FEW_VISITS = _FEW.gaps, 3
"""Gaps between signs, and visits of a phase, with which the multiples of the longest gap are
doubled. With many more they are as in the table."""
CAUTION_SECONDS = 120.0
"""Length of the history with which least silences are doubled."""
MISTAKES_MAX = 6
"""Alarms that were wrong, of which each adds a half to multiples and least silences."""
STEADY = History(30, 60.0)
"""Least history in the first visit of a phase: it must be no mere pause."""
START_GAPS = _LINES.gaps
"""Gaps that belong to the start-up of a rank that reports no steps."""
REGULAR_TIMES = 5.0
"""Multiple of its longest gap for which a source other than steps must have given signs, to have a
rhythm."""
WARM_UP_CALLS = 3
"""Steps that compile, tune and allocate; they teach nothing."""

# Alarms of one rank: no rhythm is known.

START = SilenceLimits(
    "still starts or learns, in the first attempt", Limit(600.0), Limit(1800.0), Limit(NEVER)
)
"""A rank that works in its start-up shows signs."""
NEW_PHASE = SilenceLimits(
    "is in a reported phase that is new", Limit(1800.0), Limit(1800.0), Limit(NEVER)
)
"""The first checkpoint may take ten minutes and more."""
_UNSURE_SECONDS, _UNSURE_SPINNING = 120.0, Limit(0.0, 3.0)
RESTARTED = SilenceLimits(
    "starts again: multiples of the longest start-up so far",
    Limit(_UNSURE_SECONDS, 5.0),
    _UNSURE_SPINNING,
    Limit(NEVER),
)
"""One that resumes has a checkpoint to read, which the first start-up had not."""
EARLY_SIGNS = 5
"""Steps in a visit of a phase, from which on silence has a bound, however little was learned."""
EARLY = SilenceLimits(
    f"has reported {EARLY_SIGNS} steps of a phase, and still learns",
    Limit(_UNSURE_SECONDS, 10.0),
    _UNSURE_SPINNING,
    Limit(NEVER),
)
ENDING = Limit(300.0, 4.0)
"""Once a rank has ended, for each limit of the others: they may be saving the last checkpoint."""

# Looks: a rank is late.


@dataclass(frozen=True, slots=True)
class Lateness:
    """Silences of a rank after which all ranks are looked at, and after which looks may act."""

    sign: str
    known: History
    """Least history."""
    look: Limit
    """Multiple of the usual step, or of the longest gap between lines."""
    act: Limit
    """Multiple of the longest gap."""


LATE_STEPS = Lateness("steps", History(3, 0.0), Limit(2.5, 2.5), Limit(STEP_FLOOR_SECONDS, 1.25))
LATE_STEPS_MIN = 15
"""Least steps after the first ones with which the usual step is known."""
LATE_PAUSE_SECONDS_MAX = 10.0
"""A longer gap in the past delays no look beyond this, though the restart."""
LATE_LINES = Lateness("output only", History(5, 25.0), Limit(10.0, 3.0), Limit(15.0, 3.0))
LATE_SPIN_SECONDS = 60.0
"""Spinning of a rank that reports and prints nothing, after which it is worth a look."""

# The silence of the job, by what looks have shown.


@dataclass(frozen=True, slots=True)
class Allowance:
    """Silence that is given before the job is stopped."""

    situation: str
    seconds: float
    looks: int = 3
    """Least looks in a row that show this."""
    pause_seconds: float = 5.0
    """Seconds between them, in which counters show what the ranks do; 0: as long as the silence."""
    times: float = 0.0
    """Multiple of the silence that is usual at most. It counts up to USUAL_SECONDS_MAX, unless more
    is usual."""

    def after(self, usual_seconds: float, repeats: float = 1.0) -> float:
        """Return the least silence; `repeats` is its factor after restarts that did not help."""
        seconds = self.seconds
        if repeats != 1.0:
            seconds = max(seconds, SLOW.seconds) * repeats
        most = max(usual_seconds, USUAL_SECONDS_MAX)
        return max(seconds, min(self.times * usual_seconds, most))


def longest(allowances: Iterable[Allowance]) -> Allowance:
    """Return an allowance that satisfies each of these, named as the longest; none: no time."""
    found = (ASLEEP, *allowances)
    named = max(found, key=lambda one: one.seconds)
    return Allowance(
        named.situation,
        named.seconds,
        max(one.looks for one in found),
        max(one.pause_seconds for one in found),
        max(one.times for one in found),
    )


USUAL_TIMES, USUAL_SECONDS_MAX = 3.0, 600.0
ASLEEP = Allowance(
    "a rank that others wait for sleeps once and for all, waits for a lock or a queue, holds the "
    "GIL without running, or is stopped",
    0.0,
    looks=2,
    pause_seconds=4.0,
)
SLOW = Allowance(
    "it waits for files, the network, a pipe, a child process or a DataLoader worker, or computes "
    "in one place",
    30.0,
)
SPINNING = Allowance(
    "it computes in one place, and its silence is an alarm",
    SLOW.seconds,
    pause_seconds=10.0,
    times=USUAL_TIMES,
)
"""Seen twice in one place by chance, an evaluation would look the same."""
STUCK = Allowance("it is in the kernel, state D", 60.0)
CHECKPOINT = Allowance("it is inside the code that reads or writes checkpoints", 120.0)
COMPILING = Allowance("it is inside torch's compiler", 600.0)
ACTIVE = Allowance(
    "it did something between the looks: it may ask now and then for what takes long", 600.0
)
BEGINNING = Allowance(
    "it is in its first steps, or in a reported phase that is new", START.idle.seconds
)
DIFFERENT = Allowance("every rank waits, in different collectives", SLOW.seconds)
ALL_WAIT = Allowance("every rank waits, in the same collective", 60.0)
"""Links that flap come back within 30 s as a rule."""
IN_STORE = Allowance("every rank waits in the store of torch.distributed", NEVER)
"""Torch has limits of its own there."""
CUT_OFF = Allowance(
    "every rank waits, and agents do not reach each other", 3.0, looks=2, pause_seconds=3.0
)
"""By then connections have failed for at least eight seconds, as long as the lease of a node that
is cut off from everybody."""


def _unnamed(situation: str, seconds: float, looks: int = 3) -> Allowance:
    return Allowance(situation, seconds, looks, pause_seconds=0.0, times=USUAL_TIMES)


NOBODY = _unnamed("nobody is named, and no rank did anything between looks", ALL_WAIT.seconds)
"""A link may flap, and a rank that was late is on its way."""
UNSEEN = _unnamed("nobody is named, and a rank could not be looked at", 80.0)
"""Its agent says that it is silent, and looks of a busy machine take up to 16 s."""
BLIND = _unnamed("no rank could be looked at", 600.0, looks=2)
WORKING = _unnamed(
    "nobody is named, and a rank computed, moved, polled or waited for its GPU", 1800.0, looks=2
)
"""All ranks may evaluate. NCCL ends a collective that hangs after 600 s by itself."""
ALLOWANCES = (
    ASLEEP, SLOW, SPINNING, STUCK, CHECKPOINT, COMPILING, ACTIVE, BEGINNING, DIFFERENT, ALL_WAIT,
    IN_STORE, CUT_OFF, NOBODY, UNSEEN, BLIND, WORKING,
)  # fmt: skip
REPEAT_FACTOR, REPEATS_MAX = 8.0, 2
"""Multiple of the silence that is given after each restart that did not help, and how often: 64
minutes at last, where nobody is named (judgement)."""
WATCH_SECONDS = 3.5
"""Least seconds between two looks for counters to say that a rank did nothing."""
CALM_PAUSE_SECONDS, CALM_PAUSE_SECONDS_MAX = 3.0, 60.0
"""Least seconds between looks at ranks that are late while all is well: they double from look to
look. And most of them where looks are the only sign."""
