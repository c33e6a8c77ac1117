"""Progress of an attempt, by the steps that its ranks report.

Progress is what a restart must not be charged for (`core.job.recovery.decision`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import TypedDict

from unbroken.core.job.events import PodUid
from unbroken.spec.job.incident import Incident, Symptom
from unbroken.wire.agent import FaultKind
from unbroken.wire.observation import RankWatch

Watched = dict[PodUid, tuple[RankWatch, ...]]
FIRST_SECONDS = 600.0
"""Seconds after which an attempt without steps has made progress, and errors are at the same
place if they come sooner. 73 % of the tasks that fail at all do so in their first ten minutes."""


class Before(TypedDict):
    """The progress before a fault, as an incident keeps it."""

    progress_before: float | None
    step: int | None
    step_seconds: float | None


def before(watched: Watched, now: float, ended_at: float | None = None) -> Before:
    """Return the progress of the job; without steps, any sign of life is progress.

    `ended_at` is the time of `own_end`. Without steps a worker has trained until its own end unless
    it was late by then: it may print a line in a minute, or none at all.
    """
    ranks = _ranks(watched)
    steps = [rank for rank in ranks if rank.step is not None]
    times = [rank.step_at for rank in steps if rank.step_at is not None]
    signs = times or [rank.sign_at for rank in ranks if rank.sign_at is not None]
    is_late = any(rank.late_since is not None for rank in ranks)
    if signs and ended_at is not None and not times and not is_late:
        signs.append(ended_at)
    # An agent's clock may be wrong.
    newest = min(max(signs), now) if signs else None
    paces = [rank.step_seconds for rank in steps if rank.step_seconds is not None]
    return Before(
        progress_before=newest,
        step=max((rank.step for rank in steps if rank.step is not None), default=None),
        step_seconds=median_low(paces) if paces else None,
    )


def own_end(culprit: Symptom) -> float | None:
    """Return when a worker has ended of itself; None: no worker has, or it missed another, which
    may have been lost before."""
    is_own = culprit.exit_code is not None and culprit.fault != FaultKind.PEER_LOST.value
    return culprit.at if is_own else None


def made(
    step: int | None, found: Sequence[Symptom], earlier: Sequence[Incident], ran_seconds: float
) -> str:
    """Describe the progress of the attempt that broke; empty: it made none.

    `step` is the newest that its ranks reported, and `found` are the signs of its fault. `earlier`
    are the job's incidents before it in order of number, and `ran_seconds` is how long all of it
    ran.

    A step is progress if it is newer than every step of earlier attempts.  For a script that
    reports no steps, the step of the snapshot or checkpoint that the attempt began with stands for
    them: it was saved by the attempt before.  A script that does neither makes progress if an
    attempt runs for `FIRST_SECONDS`.
    """
    began = max((one.step for one in earlier[-1].restored), default=None) if earlier else None
    reached = _newest([step, began, *(symptom.step for symptom in found)])
    known = _newest(
        [one.step for incident in earlier[:-1] for one in incident.restored]
        + [incident.step for incident in earlier]
        + [symptom.step for incident in earlier for symptom in incident.signals]
    )
    if reached is None and known is None:
        return f"ran for {int(ran_seconds // 60)} minutes" if ran_seconds >= FIRST_SECONDS else ""
    if reached is None or (known is not None and reached <= known):
        return ""
    return f"step {reached}" if known is None else f"step {reached} (was {known})"


def _newest(steps: Iterable[int | None]) -> int | None:
    return max((step for step in steps if step is not None), default=None)


def first_step(watch: Iterable[RankWatch]) -> tuple[int, float | None] | None:
    """Return the earliest step that is reported, and when it was made; None: none is.

    Where only the time of the newest step is known, it is that: up to a second too late.
    """
    told = [_first(rank, rank.step) for rank in watch if rank.step is not None]
    return min(told, key=lambda one: one[0]) if told else None


def _first(rank: RankWatch, newest: int) -> tuple[int, float | None]:
    first = newest if rank.first_step is None else rank.first_step
    return first, rank.step_at if rank.first_step_at is None else rank.first_step_at


def _ranks(watched: Watched) -> list[RankWatch]:
    return [rank for watch in watched.values() for rank in watch]
