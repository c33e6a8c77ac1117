"""Make a request until the API server answers it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from unbroken.errors import PeerError, WorldError
from unbroken.log_lines import Log

from .backoff import Backoff
from .clock import entropy, pause
from .errors import ApiRefusal

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
