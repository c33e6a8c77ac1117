"""Reads from the logs of launchers which rank they blame for a failure.

torchrun (torch/distributed/elastic/multiprocessing/api.py) and what is built on it:
    E1121 10:46:12.123456 99 torch/.../api.py:1010] failed (exitcode: -9) local_rank: 1 (pid: 42) of
nvidia-resiliency-ext (fault_tolerance/rank_monitor_server.py), with the local rank:
    2026-11-21 11:37:43,593 [WARNING] [host] [workload:?(1) infra:?(?)] rank_monitor_server.py:497
    [Cycle 0] Did not get subsequent heartbeat. Waited 5.00 seconds.

A log names the process; whose rank that is, the judge knows.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

_GLOG = re.compile(r"[EWI](\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d+)")
_ISO = re.compile(r"^\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\b")
_FAILED = re.compile(r"failed \(exitcode: -?\d+\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)")
_NO_HEARTBEAT = re.compile(r"\[workload:\S+\((?P<local>\d+)\) .*Did not get \w+ heartbeat")
TOGETHER_SECONDS = 3.0
"""Heartbeats that are missed within this time are one failure; they are looked for each second."""


@dataclass(frozen=True, slots=True)
class Word:
    """A launcher's message about a fault."""

    at: float
    """Seconds since the epoch."""
    rank: int | None
    """Rank that is blamed; None: no rank is named."""
    text: str
    acts: bool = True
    """True: the launcher acts on the fault. False: it only reports it."""
    ranks: tuple[int, ...] = ()
    """Ranks of the pod that is blamed, if no rank is."""


def stamp(line: str, year: int) -> float | None:
    """Return the time at the beginning of a line, in the machine's time zone, or None."""
    if found := _GLOG.search(line):
        text = f"{year}-{found[1]}-{found[2]} {found[3]}"
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S.%f").timestamp()  # noqa: DTZ007  (local)
    if found := _ISO.search(line):
        text = f"{found[1]}.{found[2]}"
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S.%f").timestamp()  # noqa: DTZ007
    return None


def words(lines: Iterable[str], ranks: Mapping[int, int], year: int) -> list[Word]:
    """Return the failures in an agent's log, in its order; `ranks` is the rank of each process."""
    kept = list(lines)
    ends = [found for one in kept if (found := _FAILED.search(one))]
    by_local = {one["local"]: ranks.get(int(one["pid"])) for one in ends}
    said = []
    for line in kept:
        at = stamp(line, year)
        if at is None:
            continue
        if failed := _FAILED.search(line):
            said.append(Word(at, ranks.get(int(failed["pid"])), line.strip()))
        elif late := _NO_HEARTBEAT.search(line):
            said.append(Word(at, by_local.get(late["local"]), line.strip()))
    return said


def first_since(said: Sequence[Word], since: float) -> Word | None:
    """Return the first message about a fault since that time: the first one read is believed.

    If several ranks miss heartbeats, their order means nothing, and no rank is named.
    """
    later = sorted((word for word in said if word.at >= since), key=lambda word: word.at)
    first = next(iter(later), None)
    if first is None or "heartbeat" not in first.text:
        return first
    near = [word for word in later if word.at <= first.at + TOGETHER_SECONDS]
    late = [word for word in near if "heartbeat" in word.text]
    return first if len(late) == 1 else replace(first, rank=None)
