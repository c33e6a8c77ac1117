"""The page: the progress of a training process for the agent in its pod, in shared memory of 4 KiB.

The worker writes it and never waits; the agent reads it at any time. Two places are written in
turn, each with a number and a checksum. A reader takes the newest whole one. So a worker killed
during a write, or a machine that reorders stores, leaves a page that can be read.

Both sides run on one machine: numbers are in its own format. Times are its CLOCK_MONOTONIC.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

VARIABLE = "UNBROKEN_PAGE"
"""Names the inherited descriptor of the page."""
MAGIC = b"UNBRPAGE"
VERSION = 2
PAGE_BYTES = 4096
PLACES = (64, 2048)
"""Offsets of records: the one with number n is at `PLACES[n & 1]`."""
METRICS_MAX = 16
NAME_BYTES_MAX = 48
NO_STEP = -(2**63)
SAMPLES = "samples"
"""The metric that counts the samples that the rank's data has given since training began."""

HEADER = struct.Struct("=8sI")
CHECK = struct.Struct("=I")
seal = CHECK.pack
"""Returns the CRC-32 of a record and its text, as the bytes before it."""
RECORD = struct.Struct("=QqdqQdQdQdQqdHH")
"""Fields after the checksum.

They are number, first_step, first_step_at, step, calls, step_at, visit, phase_at, visit_calls,
longest_gap, bad_calls, checkpoint_step, checkpoint_at, number of metrics, bytes of text. The
metrics' values and the text follow: the phase and the names of the metrics, a zero byte between.
"""
RECORDS = tuple(struct.Struct(f"{RECORD.format}{count}d") for count in range(METRICS_MAX + 1))
"""Records by the number of metrics."""


@dataclass(frozen=True)
class Page:
    """Progress that a worker has reported; seconds of the monotonic clock."""

    first_step: int | None = None
    """First step of the worker."""
    first_step_at: float | None = None
    """Time of its report; None: not known."""
    step: int | None = None
    calls: int = 0
    """Calls of `progress`, in all."""
    step_at: float = 0.0
    """Time of the newest call."""
    phase: str = ""
    """Phase; empty: none was reported."""
    visit: int = 0
    """Raised by each change of phase."""
    phase_at: float = 0.0
    visit_calls: int = 0
    """Calls of `progress` in this visit."""
    longest_gap: float = 0.0
    """Longest time between two of these calls, in seconds."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics as last reported; NaN and infinities as they are."""
    bad_calls: int = 0
    """Calls with a metric that is no finite number."""
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None


def empty() -> bytes:
    """Return a page without any report."""
    return HEADER.pack(MAGIC, VERSION).ljust(PAGE_BYTES, b"\0")


_EMPTY = empty()


def version(data: bytes) -> int | None:
    """Return the version of a page; None: this is no page."""
    if len(data) < HEADER.size:
        return None
    magic, result = HEADER.unpack_from(data)
    return int(result) if magic == MAGIC else None


def text(phase: str, names: Sequence[str] = ()) -> bytes:
    """Return the text of a record; names are cut to the available room."""
    return b"\0".join(_cut(name) for name in (phase, *names[:METRICS_MAX]))


def read(data: bytes) -> tuple[int, Page] | None:
    """Return number and contents of the newest whole record, (0, Page()) if none was written.

    None: both are torn, because they were read during a write; read again.
    """
    if version(data) != VERSION or len(data) < PAGE_BYTES:
        return None
    if data == _EMPTY:
        return 0, Page()
    result = [one for start in PLACES if (one := _read(data, start)) is not None]
    return max(result, key=lambda one: one[0], default=None)


def _cut(name: str) -> bytes:
    raw = name.replace("\0", "").encode(errors="replace")[:NAME_BYTES_MAX]
    return raw.decode(errors="ignore").encode()


def _read(data: bytes, start: int) -> tuple[int, Page] | None:
    body = start + CHECK.size
    *fields, count, length = RECORD.unpack_from(data, body)
    if count > METRICS_MAX:
        return None
    texts = body + RECORDS[count].size
    end = texts + length
    if end > PAGE_BYTES:
        return None
    if CHECK.unpack_from(data, start)[0] != zlib.crc32(data[body:end]):
        return None
    values = RECORDS[count].unpack_from(data, body)[-count:] if count else ()
    return fields[0], _page(fields[1:], values, data[texts:end])


def _page(fields: Sequence[float], values: Sequence[float], texts: bytes) -> Page:
    (
        first,
        first_at,
        step,
        calls,
        step_at,
        visit,
        phase_at,
        visit_calls,
        gap,
        bad,
        saved,
        saved_at,
    ) = fields
    phase, *names = texts.decode(errors="replace").split("\0")
    return Page(
        first_step=None if first == NO_STEP else int(first),
        first_step_at=None if math.isnan(first_at) else first_at,
        step=None if step == NO_STEP else int(step),
        calls=int(calls),
        step_at=step_at,
        phase=phase,
        visit=int(visit),
        phase_at=phase_at,
        visit_calls=int(visit_calls),
        longest_gap=gap,
        metrics=dict(zip(names, values)),
        bad_calls=int(bad),
        checkpoint_step=None if saved == NO_STEP else int(saved),
        checkpoint_at=None if math.isnan(saved_at) else saved_at,
    )
