"""Position in an epoch, and the samples of each step, for any number of ranks.

An epoch is one order of all samples, the same on all ranks. Each step takes the next samples of
that order, and rank `r` of `n` takes each `n`-th of them from the `r`-th on (the rule of torch's
DistributedSampler). So the number of samples that were taken is the position of all ranks, and
another number of ranks continues from it. Pure: no torch, no process, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Division:
    """Division of an epoch among ranks."""

    size: int
    """Samples of an epoch."""
    ranks: int
    batch: int
    """Samples of one rank in one step."""
    drop_last: bool = False
    """Leave out the samples at the end of an epoch that do not fill a step."""

    def step(self, done: int) -> int:
        """Return the position after the next step; `done` itself if the epoch has no more steps.

        Every rank gets a sample in every step. So the last step takes fewer samples, or a few more
        where less than one for each rank would be left.
        """
        left, full = self.size - done, self.ranks * self.batch
        if left < (full if self.drop_last else self.ranks):
            return done
        has_more = self.drop_last or left - full >= self.ranks
        return done + full if has_more else self.size

    def steps(self, done: int) -> Iterator[tuple[int, int]]:
        """Yield the first position and the end of each step that is left in the epoch."""
        while (end := self.step(done)) > done:
            yield done, end
            done = end


@dataclass(frozen=True)
class Position:
    """Position of all ranks together."""

    epoch: int = 0
    done: int = 0
    """Samples of this epoch that were taken. Negative: so many of the epoch before are left, which
    the first step takes as well."""

    def start(self, division: Division) -> Position:
        """Return the position from which the next step is made: after an epoch the next one's.

        Samples that are fewer than the ranks are left where the number of ranks has grown. They
        are taken with the next epoch's.
        """
        if division.step(self.done) > self.done:
            return self
        left = 0 if division.drop_last else division.size - self.done
        return Position(self.epoch + 1, -left)
