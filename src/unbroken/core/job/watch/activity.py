"""Activity of ranks between two looks, by counters of the kernel that looks do not change.

A look sees two moments. An evaluation that waits for a GPU in each batch is in the same place in
both. So is a script that asks every second whether a file has come. A process that hangs gets no
processor, except for threads of libraries that wake up now and then. A process that loops for ever
does not take memory.
"""

from __future__ import annotations

from unbroken.core.diagnosis.rank_activity import Kind, RankActivity
from unbroken.wire.observation import Activity, RankEvidence

MAIN_SHARE, MAIN_SECONDS = 0.001, 0.001
"""Cores, and seconds, that a main thread uses which does more than wake up and wait again."""
PROCESS_SHARE, PROCESS_SECONDS = 0.01, 0.05
"""The same of all threads, and of the processes below: idle threads of torch, NCCL and Python stay
below."""
POLLS_PER_SECOND, POLLS_MIN = 0.1, 2
"""Runs of a main thread that sleeps again and again.  The end of a look may make one."""
FAULTS_PER_SECOND, FAULTS_MIN = 50.0, 20
"""Page faults, by its own processor time, of a rank that computes and gets on: what it makes needs
memory."""
COMPUTED_SECONDS = 0.02
"""Processor time without which a rank that computes shows nothing: a busy machine left it none."""
WATCH_SECONDS = 3.5
"""Time between two looks, at least, for counters to say that a rank did nothing."""
_WAKES_ALONE = (Kind.GIL, Kind.STOPPED, Kind.GONE, Kind.UNKNOWN)
"""A thread that waits for the GIL wakes up 200 times a second."""


def is_active(before: Activity | None, one: RankEvidence, what: RankActivity) -> bool:
    """True if the rank did something between the look that has ended with `before` and this one;
    False also where it was not measured."""
    after = one.activity_before
    if before is None or after is None or what.kind in _WAKES_ALONE:
        return False
    seconds = after.at - before.at
    main, runs = after.main_seconds - before.main_seconds, after.main_runs - before.main_runs
    if seconds <= 0.0 or main < 0.0:
        return False
    if what.kind is Kind.COMPUTE:
        return after.faults - before.faults >= max(FAULTS_PER_SECOND * main, FAULTS_MIN)
    does = main >= max(MAIN_SHARE * seconds, MAIN_SECONDS)
    used = after.cpu_seconds - before.cpu_seconds
    does = does or used >= max(PROCESS_SHARE * seconds, PROCESS_SECONDS)
    polls = runs >= max(POLLS_PER_SECOND * seconds, POLLS_MIN)
    return does or (what.kind is Kind.SLEEP and polls)


def watched_seconds(before: Activity | None, one: RankEvidence, what: RankActivity) -> float:
    """Time for which the rank was watched between two looks; infinite if that would say nothing,
    or its kernel has no counters."""
    after = one.activity_before
    if after is None or what.kind in _WAKES_ALONE:
        return float("inf")
    if before is None:
        return 0.0
    is_starved = after.main_seconds - before.main_seconds < COMPUTED_SECONDS
    return 0.0 if what.kind is Kind.COMPUTE and is_starved else after.at - before.at
