"""The page: what a training process tells the agent in its pod, in shared memory of 4 KiB.

The worker writes it and never waits; the agent reads it when it likes.  Two places are written in
turn, each with a number and a checksum: whoever reads takes the newest that is whole, so that a
worker killed while it writes, or a machine that reorders stores, leaves a page that can be read.

Both sides run on one machine: numbers are in its own format.  Times are its CLOCK_MONOTONIC.
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
VERSION = 1
PAGE_BYTES = 4096
PLACES = (64, 2048)
"""Where records begin: the one with number n at `PLACES[n & 1]`."""
METRICS_MAX = 16
NAME_BYTES_MAX = 48
NO_STEP = -(2**63)
SAMPLES = "samples"
"""The metric that is a count: of what the data of the rank has given since training began."""

HEADER = struct.Struct("=8sI")
CHECK = struct.Struct("=I")
seal = CHECK.pack
"""The CRC-32 of a record and its text, as bytes before it."""
RECORD = struct.Struct("=QqqQdQdQdQqdHH")
"""After the checksum: number, first_step, step, calls, step_at, visit, phase_at, visit_calls,
longest_gap, bad_calls, checkpoint_step, checkpoint_at, number of metrics, bytes of text.  The
metrics' values and the text follow: the phase and the names of the metrics, a zero byte between."""
RECORDS = tuple(struct.Struct(f"{RECORD.format}{count}d") for count in range(METRICS_MAX + 1))
"""By the number of metrics."""


@dataclass(frozen=True, slots=True)
class Page:
    """Progress that a worker has told; seconds of the monotonic clock."""

    first_step: int | None = None
    """Where the worker began."""
    step: int | None = None
    calls: int = 0
    """Calls of `progress`, in all."""
    step_at: float = 0.0
    """Time of the newest call."""
    phase: str = ""
    """Empty: none was told."""
    visit: int = 0
    """Raised by each change of phase."""
    phase_at: float = 0.0
    visit_calls: int = 0
    """Calls of `progress` in this visit."""
    longest_gap: float = 0.0
    """Between two of these."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As told last; NaN and infinities as they are."""
    bad_calls: int = 0
    """With a metric that is no finite number."""
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None


def empty() -> bytes:
    """A page in which nothing is told."""
    return HEADER.pack(MAGIC, VERSION).ljust(PAGE_BYTES, b"\0")


_EMPTY = empty()


def version(data: bytes) -> int | None:
    """Version of a page; None: this is no page."""
    if len(data) < HEADER.size:
        return None
    magic, found = HEADER.unpack_from(data)
    return int(found) if magic == MAGIC else None


def text(phase: str, names: Sequence[str] = ()) -> bytes:
    """The text of a record; names are cut to what there is room for."""
    return b"\0".join(_cut(name) for name in (phase, *names[:METRICS_MAX]))


def read(data: bytes) -> tuple[int, Page] | None:
    """Number and contents of the newest whole record, (0, Page()) where none was written.

    None: both are torn, as they were read while they were written; read again."""
    if version(data) != VERSION or len(data) < PAGE_BYTES:
        return None
    if data == _EMPTY:
        return 0, Page()
    found = [one for start in PLACES if (one := _read(data, start)) is not None]
    return max(found, key=lambda one: one[0], default=None)


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
    first, step, calls, step_at, visit, phase_at, visit_calls, gap, bad, saved, saved_at = fields
    phase, *names = texts.decode(errors="replace").split("\0")
    return Page(
        first_step=None if first == NO_STEP else int(first),
        step=None if step == NO_STEP else int(step),
        calls=int(calls),
        step_at=step_at,
        phase=phase,
        visit=int(visit),
        phase_at=phase_at,
        visit_calls=int(visit_calls),
        longest_gap=gap,
        metrics=dict(zip(names, values, strict=False)),
        bad_calls=int(bad),
        checkpoint_step=None if saved == NO_STEP else int(saved),
        checkpoint_at=None if math.isnan(saved_at) else saved_at,
    )
