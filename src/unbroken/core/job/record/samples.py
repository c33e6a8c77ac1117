"""Samples that training repeats or skips after a fault, computed from the ranks' reports.

With each step, a rank reports how many samples its data has given since training began. As long as
data and steps stay together, that number follows the step. Afterwards its offset shows the samples
that were skipped (more than the step) or repeated (fewer). Samples of repeated steps are repeated
too, unless the data position was not restored for them.

Numbers are exact if the batches of a rank have one size, and approximate if they vary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from unbroken.core.wording import counted
from unbroken.wire.observation import RankWatch
from unbroken.wire.worker import SAMPLES

SAMPLES_MAX = 2**53
"""Largest sample count: exact in a double, and valid in JSON."""


class SamplePosition(NamedTuple):
    """Position in the data of one rank, after a step."""

    step: int
    samples: float


@dataclass(frozen=True, slots=True)
class Track:
    """One rank in one attempt: its first and its last reported position."""

    first: SamplePosition
    last: SamplePosition

    @property
    def batch(self) -> float | None:
        """Return the samples per step; None: only one position was seen."""
        steps = self.last.step - self.first.step
        return (self.last.samples - self.first.samples) / steps if steps else None


Tracks = dict[int, Track]
"""By global rank."""


@dataclass(frozen=True, slots=True)
class Accounted:
    """Samples of all ranks together."""

    repeated: int
    skipped: int
    is_exact: bool

    def __str__(self) -> str:
        if not self.repeated and not self.skipped:
            return "no sample repeated or skipped"
        about = "" if self.is_exact else "about "
        told = [
            f"{about}{counted(count, 'sample')} {what}"
            for count, what in ((self.repeated, "repeated"), (self.skipped, "skipped"))
            if count
        ]
        return " and ".join(told)


def observe(tracks: Tracks, watch: Iterable[RankWatch]) -> None:
    """Add the sample positions of a report to the tracks."""
    for one in watch:
        samples = one.metrics.get(SAMPLES)
        if one.step is None or samples is None or not 0 <= samples <= SAMPLES_MAX:
            continue
        here = SamplePosition(one.step, samples)
        known = tracks.get(one.rank)
        is_on = known is not None and known.last.step <= here.step
        tracks[one.rank] = Track(known.first if known and is_on else here, here)


def account(
    before: Mapping[int, Track], after: Mapping[int, Track], steps: int | None
) -> Accounted | None:
    """Return the samples repeated and skipped, summed over ranks. `steps`: repeated steps, None:
    not known.

    None: not known, as ranks have not reported (yet), or are different ranks than before.
    """
    if steps is None or not before or before.keys() != after.keys():
        return None
    repeated, skipped, is_exact = 0.0, 0.0, True
    for rank, old in before.items():
        new = after[rank]
        batch = new.batch if old.batch is None else old.batch
        if batch is None:
            return None
        ahead = new.first.samples - old.last.samples - (new.first.step - old.last.step) * batch
        if not batch.is_integer():
            is_exact = False
            # Batch sizes of some steps may vary this much without any change of the data position.
            ahead = 0.0 if abs(ahead) < batch else ahead
        repeated += max(steps * batch - ahead, 0.0)
        skipped += max(ahead, 0.0)
    if not math.isfinite(repeated + skipped):
        return None
    return Accounted(_bounded(repeated), _bounded(skipped), is_exact)


def _bounded(samples: float) -> int:
    return min(round(samples), SAMPLES_MAX)
