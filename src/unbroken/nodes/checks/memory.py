"""Memory: patterns that are written, read again and compared, and how fast it can be copied.

Each process takes a region of its own and writes all of it before it reads any. So reads come from
the memory and not from the caches.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from unbroken.kube.clock import monotonic
from unbroken.spec.nodes.kinds import Outcome

from .basic import meminfo
from .findings import CheckSettings, Finding, Test, against, failed, unknown
from .sides import Stopwatch, at_each

BLOCK = 2**20
REGION_PER_SECOND = 64 * BLOCK
"""Region of each process: all patterns over so much take about a second."""
PROCESSES_MAX = 32
RESERVE_BYTES = 512 * BLOCK
"""Left to everybody else whatever the share is."""
COPY_BYTES = 64 * BLOCK
COPIES = 24
COPY_FLOOR = 1.0
"""GB/s.  DDR4 with one channel gives more than 10; below this something is broken, not busy
(judgement; the best of many copies counts)."""
NAMED_MAX = 4


def _patterns() -> Iterator[tuple[str, bytes | None]]:
    """Name and one block of each; None: each block holds its own number."""
    yield "offset", array("Q", range(BLOCK // 8)).tobytes()
    for value in (0x00, 0xFF, 0xAA, 0x55):
        yield f"0x{value:02x}", bytes([value]) * BLOCK
    for bit in range(8):
        yield f"walking one 0x{1 << bit:02x}", bytes([1 << bit]) * BLOCK
    yield "number", None


def _block(pattern: bytes | None, index: int) -> bytes:
    return index.to_bytes(8, "little") * (BLOCK // 8) if pattern is None else pattern


def _flips(region: mmap.mmap, start: int, wanted: bytes) -> Iterator[str]:
    """Bytes of a block that differ, with their bits and whether they still do."""
    got = region[start : start + BLOCK]
    places = (i for i, (is_, want) in enumerate(zip(got, wanted, strict=True)) if is_ != want)
    for place in places:
        again = region[start + place]
        stays = "and still so" if again == got[place] else f"then {again:#04x}"
        text = f"{got[place]:#04x} instead of {wanted[place]:#04x}"
        yield f"offset {start + place:#x}: {text} ({got[place] ^ wanted[place]:#04x}), {stays}"


def _test_region(number: int, length: int, settings: CheckSettings) -> tuple[int, list[str]]:
    """Bytes compared, and what was found wrong."""
    plant = settings.plants.number("memory-flip") if number == 0 else None
    compared, end = 0, monotonic() + settings.seconds
    patterns = list(_patterns())
    with mmap.mmap(-1, length) as region:
        for turn, (name, pattern) in enumerate(_cycle(patterns, end)):
            for start in range(0, length, BLOCK):
                region[start : start + BLOCK] = _block(pattern, start // BLOCK)
            if plant is not None and turn == 0:
                region[plant % length] ^= 1
            for start in range(0, length, BLOCK):
                wanted = _block(pattern, start // BLOCK)
                if region[start : start + BLOCK] != wanted:
                    result = islice(_flips(region, start, wanted), NAMED_MAX)
                    return compared, [f"pattern {name}, {text}" for text in result]
            compared += length
    return compared, []


def _cycle(
    patterns: list[tuple[str, bytes | None]], end: float
) -> Iterator[tuple[str, bytes | None]]:
    """Every pattern once, then again until the time is over."""
    yield from patterns
    while monotonic() < end:
        for pattern in patterns:
            if monotonic() >= end:
                return
            yield pattern


def cgroup_room() -> int | None:
    """Bytes that the container may still take; None: no limit."""
    try:
        limit, used = (
            Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current")
        )
    except OSError:
        return None
    return None if limit == "max" else int(limit) - int(used)


def patterns(settings: CheckSettings) -> Iterator[Finding]:
    """A share of the free memory, by as many processes as there are processors."""
    room = meminfo().get("MemAvailable")
    if room is None:
        yield unknown("memory-pattern", "the kernel does not say how much memory is free")
        return
    limited = cgroup_room()
    room = room if limited is None else min(room, limited)
    count = min(PROCESSES_MAX, len(os.sched_getaffinity(0)))
    share = int(min(room * settings.memory_share, room - RESERVE_BYTES) / count)
    length = min(share, int(settings.seconds * REGION_PER_SECOND)) // BLOCK * BLOCK
    if length < BLOCK:
        yield unknown("memory-pattern", f"only {room // BLOCK} MiB are free")
        return
    compared, wrong, silent = 0, [], []
    work = partial(_test_region, length=length, settings=settings)
    for number, answer in at_each(range(count), work):
        if isinstance(answer, str):
            silent.append(f"process {number}: {answer}")
        else:
            compared += answer[0]
            wrong += [f"region {number}, {text}" for text in answer[1]]
    if wrong:
        text = "; ".join(wrong[:NAMED_MAX])
        yield failed("memory-pattern", f"memory gave back other bytes: {text}")
    elif silent:
        yield unknown("memory-pattern", "; ".join(silent[:NAMED_MAX]))
    else:
        tested = round(length * count / 2**30, 3)
        text = f"{compared / 2**30:.1f} GiB compared"
        yield Finding("memory-pattern", Outcome.PASS, text, tested, None, "GiB")


def bandwidth(settings: CheckSettings) -> Iterator[Finding]:
    """The best of many copies of a region that no cache holds."""
    with mmap.mmap(-1, COPY_BYTES) as one, mmap.mmap(-1, COPY_BYTES) as other:
        source, target = memoryview(one), memoryview(other)
        source[:] = target[:] = b"\x5a" * COPY_BYTES
        best = 0.0
        for _ in range(COPIES):
            watch = Stopwatch()
            target[:] = source
            best = max(best, 2 * COPY_BYTES / watch.seconds() / 1e9)
        source.release()
        target.release()
    yield against(
        *("memory-bandwidth", best, COPY_FLOOR, "GB/s"),
        "memory is far slower than any that is well: look for throttling or a lost channel",
    )


TESTS = (Test("memory-pattern", patterns, 300.0), Test("memory-bandwidth", bandwidth))
