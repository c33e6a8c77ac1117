"""Delays after failures in a row, and requests that are repeated until the API server answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from unbroken.errors import PeerError, WorldError
from unbroken.log_lines import Log

from .clock import entropy, pause
from .errors import ApiRefusal


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


log = Log(__name__)

T = TypeVar("T")

RETRY = Backoff(first=0.1, limit=2.0)
LOUD_FAILURES = 4
"""Failures in a row after which a warning is logged, once."""


async def persist(what: str, request: Callable[[], Awaitable[T]], **values: object) -> T:
    """Return the answer to a request that is repeated until the API server gives one. Raises
    ApiRefusal. Failures are logged with `what` and the values."""
    random, failures = entropy(), 0
    while True:
        try:
            return await request()
        except ApiRefusal:
            raise
        except (WorldError, PeerError) as error:
            failures += 1
            level = logging.WARNING if failures == LOUD_FAILURES else logging.DEBUG
            log.log(
                level, "API request failed", task=what, failures=failures, error=error, **values
            )
        await pause(RETRY.delay(failures, random))
