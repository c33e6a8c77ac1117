"""Delays after failures in a row."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that grow by `factor` from `first` to `limit` seconds, each shortened by up to half.

    The jitter keeps many clients from coming back to a restarted server in the same instant.
    """

    first: float = 0.05
    limit: float = 5.0
    factor: float = 2.0

    def delay(self, failures: int, random: Random) -> float:
        """Return the seconds to wait after `failures` failures in a row (1 or more)."""
        # The exponent is bounded so that a day of failures does not overflow.
        grown = self.first * self.factor ** min(failures - 1, 64)
        return min(self.limit, grown) * (1.0 - random.random() / 2)
