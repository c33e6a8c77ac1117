"""The text of `py-spy dump`, read as data."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .observation import FRAME_CHARACTERS, FRAMES_MAX, THREADS_MAX, RankEvidence, ThreadStack

PROCESSES_MAX = 4096
_PROCESS = re.compile(r"^Process (\d{1,9}): (.*)")
_THREAD = re.compile(r'^Thread (?:0x)?[0-9A-Fa-f]{1,20} \(([\w+]{1,40})\)(?:: "(.{0,200})")?')
_FRAME = re.compile(r"^    (\S.{0,400} \([^()]{1,300}\))\s*$")


def is_spy_dump(text: str) -> bool:
    """True if a text is the output of `py-spy dump`."""
    start = text[:4096].splitlines()
    return any(map(_PROCESS.match, start)) and any(map(_THREAD.match, start))


def read(text: str, rank: int) -> RankEvidence | None:
    """Return the first process of a dump; None: it has none. The main thread comes first."""
    pid, state, threads = 0, "S", list[tuple[str, list[str]]]()
    for name, status, frames in _threads(text):
        if name is None:
            if pid:
                break
            pid = int(status)
        elif len(threads) < THREADS_MAX:
            is_main = name == "MainThread"
            state = "R" if is_main and status.startswith("active") else state
            threads.append((name, frames))
    if not threads:
        return None
    threads.sort(key=lambda one: one[0] != "MainThread")
    stacks = (ThreadStack(name, name == "MainThread", tuple(result)) for name, result in threads)
    return RankEvidence(rank, pid, state, threads=tuple(stacks))


def _threads(text: str) -> Iterator[tuple[str | None, str, list[str]]]:
    """Yield threads as name, status and frames; a process as None, its pid and nothing."""
    frames: list[str] = []
    for line in text.splitlines():
        if match := _PROCESS.match(line):
            yield None, match[1], []
            frames = []
        elif match := _THREAD.match(line):
            frames = []
            yield (match[2] or "")[:FRAME_CHARACTERS], match[1], frames
        elif (match := _FRAME.match(line)) and len(frames) < FRAMES_MAX:
            frames.append(match[1][-FRAME_CHARACTERS:])
