"""Outcomes of trials, and figures computed from them, without input or output."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scoreboard_trials import BY_NAME, FAULTS, LONG_SEED, PAUSED, PAUSED_LONG, WELL

ORDER = (
    "unbroken",
    "unbroken-output",
    "unbroken-silence",
    "unbroken-act",
    "torchrun",
    "torchrun-fresh-store",
    "ft_launcher",
    "dlrover-run",
)
"""Order of the launchers in tables."""
QUIET, BUSY, UNKNOWN = "quiet", "busy", "-"
BUSY_LOAD = 6.0
"""Load average of a busy machine: three times the cores of the machine of these trials."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one fault with one launcher."""

    fault: str
    seed: int
    launcher: str
    program: str
    """Program of the trial: plain or torch."""
    rank: int
    """Rank that was broken; -1: none."""
    step: int
    survived: bool = False
    """True if all ranks reached the last step with the right result."""
    ending: str = ""
    """Either "right", "wrong result", or the reason why the job never ended."""
    stall_seconds: float | None = None
    """Longest time without any step since the last one before the fault; None: it never ended."""
    detected_seconds: float | None = None
    """Seconds from the fault to the launcher's first message about it, or to its first new process.
    """
    acted: bool = False
    """True: the launcher acted on the fault. False with a detection: it only reported it."""
    blamed: int | None = None
    blamed_pod: Sequence[int] = ()
    """Ranks of the pod that was blamed, if no rank was."""
    said: str = ""
    others: Sequence[str] = ()
    early: int = 0
    """Number of messages about faults before the fault."""
    restarts: int = 0
    lost_steps: int = 0
    """Steps that were made twice."""
    not_run: str = ""
    """Reason why there is no result."""
    mode: str = "told"
    load: int = 0
    """Number of busy processes that ran at the same time."""
    load_average: float | None = None
    """Load average of the machine over the minute before the fault; None: it was not recorded."""

    @property
    def machine(self) -> str:
        """QUIET or BUSY, by the load when the fault was injected; UNKNOWN without a fault."""
        if self.load_average is None:
            return BUSY if self.load else UNKNOWN if self.rank < 0 else QUIET
        return BUSY if self.load_average >= BUSY_LOAD else QUIET

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for a file of figures."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of all seeds of a fault with a launcher."""

    fault: str
    launcher: str
    program: str
    machine: str
    trials: int
    survived: int
    detected: int
    acted: int
    blamed: int
    """Number of trials in which a rank or pod was named."""
    correct: int
    touched: int
    """Trials with a false alarm: in a healthy run, or before the fault."""
    detect_p50: float | None = None
    detect_max: float | None = None
    stall_p50: float | None = None
    lost_p50: float | None = None
    not_run: Sequence[str] = field(default_factory=tuple)

    @property
    def precision(self) -> float | None:
        """Share of correct blames among all blames; None: there were no blames."""
        return self.correct / self.blamed if self.blamed else None

    @property
    def recall(self) -> float | None:
        """Share of trials with the correct blame; None: there were no trials."""
        return self.correct / self.trials if self.trials else None


def row(outcomes: Sequence[Outcome]) -> Row:
    """Return the figures of trials of one fault, launcher and program."""
    ran = [one for one in outcomes if not one.not_run]
    detected = [one.detected_seconds for one in ran if one.detected_seconds is not None]
    stalls = [one.stall_seconds for one in ran if one.stall_seconds is not None and one.survived]
    lost = [one.lost_steps for one in ran if one.survived]
    some = outcomes[0]
    return Row(
        fault=some.fault,
        launcher=some.launcher,
        program=some.program,
        machine=some.machine,
        trials=len(ran),
        survived=sum(one.survived for one in ran),
        detected=len(detected),
        acted=sum(one.acted for one in ran),
        blamed=sum(one.blamed is not None or is_right(one) or bool(one.blamed_pod) for one in ran),
        correct=sum(map(is_right, ran)),
        touched=sum(is_touched(one) for one in ran),
        detect_p50=statistics.median(detected) if detected else None,
        detect_max=max(detected, default=None),
        stall_p50=statistics.median(stalls) if stalls else None,
        lost_p50=statistics.median(lost) if lost else None,
        not_run=sorted({one.not_run for one in outcomes if one.not_run}),
    )


def is_touched(one: Outcome) -> bool:
    """Return whether the launcher saw a fault where there was none."""
    return one.early > 0 or (one.rank < 0 and bool(one.said or one.others or one.restarts))


def is_right(one: Outcome) -> bool:
    """Return whether the launcher blamed the broken rank.

    If the pod was broken, the pod is right too. If the fault lies between ranks, naming no rank is
    right too.
    """
    if one.rank < 0 or one.detected_seconds is None:
        return False
    if one.fault == "parent" and one.blamed is None:
        return one.rank in one.blamed_pod
    is_shared = BY_NAME[one.fault].is_shared
    return one.blamed == one.rank or (is_shared and one.blamed is None)


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each fault, launcher, program and machine, in the order of tables."""
    grouped: dict[tuple[str, str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        is_long = outcome.fault == PAUSED and outcome.seed >= LONG_SEED
        one = replace(outcome, fault=PAUSED_LONG) if is_long else outcome
        grouped.setdefault((one.fault, one.launcher, one.program, one.machine), []).append(one)
    order = [fault.name for fault in FAULTS]
    return sorted(
        (row(group) for group in grouped.values()),
        key=lambda one: (order.index(one.fault), one.program, *_place(one.machine, one.launcher)),
    )


def _place(machine: str, launcher: str) -> tuple[bool, int]:
    """Return the sort key of a launcher's row: rows of a quiet machine come first."""
    return machine == BUSY, ORDER.index(launcher)


def totals(found: Sequence[Row]) -> dict[tuple[str, str, str], Row]:
    """Return the figures of each launcher, program and machine over all faults with a culprit."""
    made: dict[tuple[str, str, str], Row] = {}
    keys = {(one.launcher, one.program, one.machine) for one in found}
    for key in sorted(keys, key=lambda key: (key[1], *_place(key[2], key[0]))):
        mine = [
            one
            for one in found
            if (one.launcher, one.program, one.machine) == key and one.fault not in WELL
        ]
        if not mine:
            continue
        made[key] = Row(
            fault="all",
            launcher=key[0],
            program=key[1],
            machine=key[2],
            trials=sum(one.trials for one in mine),
            survived=sum(one.survived for one in mine),
            detected=sum(one.detected for one in mine),
            acted=sum(one.acted for one in mine),
            blamed=sum(one.blamed for one in mine),
            correct=sum(one.correct for one in mine),
            touched=sum(one.touched for one in mine),
        )
    return made
