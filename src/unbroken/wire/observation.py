"""Observations of an agent about its running ranks: signs of progress, alarms, evidence of a hang.

Signs and alarms are part of each report.  Evidence is collected on request, before anything is
stopped, and sent once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from msgspec import Meta

from .codec import REQUIRED, WRITTEN, Natural, Real, Text

THREADS_MAX = 16
"""Threads of a process in evidence; the main thread is always among them."""
FRAMES_MAX = 48
"""Frames of a thread, from the innermost."""
FRAME_CHARACTERS = 200
COLLECTIVES_MAX = 64
RANKS_MAX = 1024
"""Ranks in one agent's evidence."""
METRICS_MAX = 64
"""Metrics of one rank; a worker sends 16 at most."""
ALARMS_MAX = 16
COLLECT_SECONDS_MAX = 60
SAMPLES_PER_SECOND_MAX = 10


class Bound(Enum):
    """Origin of the bound on how long a rank may be silent before all ranks are looked at."""

    STEPS = "steps"
    OUTPUT = "output"
    WORK = "work"
    """The kernel's counters: the rank reports no steps and prints no regular lines."""
    PHASE = "phase"
    """The rank's earlier visits of the phase."""
    START = "start"
    """The rank starts, or still learns."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A detector's finding that has not ended."""

    detector: Annotated[Text, REQUIRED]
    """`spec.job.detectors.Detector`; a text, since the other side may know more of them."""
    since: Real
    """Start of the finding: the last step, the stop, the first bad value."""
    at: Real
    """Time at which the detector was certain."""
    why: Text
    """One line for people."""
    step: Natural | None = None
    """Step at which it began; None: not known."""


@dataclass(frozen=True, slots=True)
class RankWatch:
    """One rank as the watchdog sees it now. Times are seconds since the epoch."""

    rank: Natural
    phase: Text = ""
    """startup, first step, train, eval, checkpoint, or the script's own word."""
    step: Natural | None = None
    """Newest step that the script has reported; None: it reports none."""
    step_at: Real | None = None
    step_seconds: Real | None = None
    """Median of the newest steps, in seconds."""
    sign_at: Real | None = None
    """Last sign of life: a step, output, or work if the rank shows nothing else."""
    allowed_seconds: Real | None = None
    """Seconds of silence that are usual in this phase, with a margin; None: still learning."""
    checkpoint_step: Natural | None = None
    metrics: Annotated[Mapping[str, float], Meta(max_length=METRICS_MAX)] = field(
        default_factory=dict
    )
    """Metrics as last reported; NaN and infinities as they are."""
    alarms: Annotated[tuple[Alarm, ...], Meta(max_length=ALARMS_MAX)] = ()
    first_step: Natural | None = None
    """The first step that it has reported; it may be older than the first report with a step."""
    first_step_at: Real | None = None
    """None: not known, as in a process that was kept over a restart."""
    bound: Text = ""
    """`Bound`; empty: an older agent."""
    look_seconds: Real | None = None
    """Seconds of silence after which all ranks are looked at; None: only once an alarm is
    raised."""
    act_seconds: Real | None = None
    """Seconds of silence from which on a look with a certain result acts."""
    late_since: Real | None = None
    """Last sign of life, while the silence is longer than `look_seconds`; None: it is not late."""


@dataclass(frozen=True, slots=True)
class CollectCommand:
    """Report the activity of every rank, in Evidence, and stop nothing."""

    request: Natural
    """Number chosen by the sender; the answer has it."""
    attempt: Natural
    seconds: Annotated[float, Meta(ge=0, le=COLLECT_SECONDS_MAX), REQUIRED]
    """Seconds within which the answer is sent, with the evidence so far."""
    samples_per_second: Annotated[int, Meta(ge=0, le=SAMPLES_PER_SECOND_MAX)] = 0
    """Stacks to read of each rank per second, for nearly all of `seconds`.

    The answer then counts those in which the rank waited for its peers, and has no stacks. 0: two
    looks, with stacks.
    """


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The stack of a thread."""

    name: Text
    is_main: bool
    frames: Annotated[
        tuple[Annotated[str, Meta(max_length=FRAME_CHARACTERS)], ...], Meta(max_length=FRAMES_MAX)
    ]
    """`function (file:line)`, native ones `function (library)`; the innermost first."""
    holds_gil: bool = False
    """The thread held Python's global interpreter lock at every look, two at least."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The newest collective of a process group, by the flight recorder."""

    group: Text
    sequence: Natural = 0
    operation: Text = ""
    state: Annotated[Text, WRITTEN] = ""
    """scheduled, started, completed."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Counters of a process.  What they gain from the end of one look to the beginning of the next
    is its own: looks interrupt it."""

    at: Real
    """Time by a clock of the agent's machine: only differences mean something."""
    main_seconds: Real
    """Processor time of its main thread."""
    main_runs: Natural
    """Times that the main thread was given a processor."""
    cpu_seconds: Real
    """Processor time of all its threads and of the processes below it, in hundredths of a second;
    it may shrink."""
    faults: Natural = 0
    """Page faults: it took or touched memory that it had not used so far."""


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank, looked at twice with a pause between."""

    rank: Natural
    pid: Natural
    state: Annotated[Text, WRITTEN] = ""
    """State of the process, by the kernel: R, S, D, T, t, Z; empty: gone."""
    waits_in: Text = ""
    """Function of the kernel in which the main thread waits."""
    cpu_seconds: Real = 0.0
    """Processor seconds since it started, without children that it has waited for."""
    cpu_share: Real | None = None
    """Cores used between the looks, with the processes below it; None: not measured."""
    waited_share: Real | None = None
    """Cores that main threads of these processes were ready to use and did not get, because the
    machine was busy; None: not measured."""
    io_bytes: Natural | None = None
    """Bytes read and written between the looks; None: not measured."""
    is_same: bool | None = None
    """The main thread was in the same functions both times; None: not known."""
    last_output_at: Real | None = None
    last_line: Text = ""
    phase: Text = ""
    step: Natural | None = None
    step_at: Real | None = None
    threads: Annotated[tuple[ThreadStack, ...], Meta(max_length=THREADS_MAX)] = ()
    """The threads, the main thread first."""
    collectives: Annotated[tuple[Collective, ...], Meta(max_length=COLLECTIVES_MAX)] = ()
    note: Text = ""
    """Why something is missing."""
    samples: Natural = 0
    """Stacks that were read for a command with `samples_per_second`."""
    waiting: Natural = 0
    """Samples in which the main thread waited for its peers."""
    activity_before: Activity | None = None
    """Activity when the look began; None: the kernel does not report it."""
    activity_after: Activity | None = None
    """Once the look no longer interrupted the process; None: not measured."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The answer to a CollectCommand."""

    request: Natural
    attempt: Natural
    agent_id: Annotated[Text, REQUIRED]
    at: Real
    """Time at which it was complete."""
    ranks: Annotated[tuple[RankEvidence, ...], Meta(max_length=RANKS_MAX)] = ()
