"""Traces of incidents, if OpenTelemetry's standard variables request them.

A fault of the collector, or of the variables, costs the traces and affects nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from unbroken.core.job.record.spans import Trace
from unbroken.log_lines import Log

if TYPE_CHECKING:
    from .otlp import Sender

log = Log(__name__)

Send = Callable[[Trace], None]

PROTOCOL = "http/protobuf"
FLUSH_SECONDS = 3.0
"""Seconds for unsent traces when the program ends."""
CLOSING = "close-traces"
"""Name of the thread that waits for them."""


@asynccontextmanager
async def sending(environment: Mapping[str, str]) -> AsyncIterator[Send | None]:
    """Yield a function that sends a trace and never blocks, for the time of the block; None:
    off."""
    sender = _sender() if is_wanted(environment) else None
    if sender is None:
        yield None
        return
    log.info("traces are on")
    try:
        yield sender.send
    finally:
        await _close(sender.close)


def _sender() -> Sender | None:
    try:
        # Here, because it is an extra.
        from .otlp import Sender

        return Sender()
    except ImportError as error:
        log.warning("traces are off", error=f"{error}; pip install unbroken[otel]")
    except (ValueError, RuntimeError) as error:
        log.warning("traces are off", error=error)
    return None


def is_wanted(environment: Mapping[str, str]) -> bool:
    """True if the variables name a usable collector; log the reason if it is not usable."""

    def read(*names: str) -> str:
        return next((environment[name] for name in names if environment.get(name)), "")

    is_off = read("OTEL_SDK_DISABLED").lower() == "true" or read("OTEL_TRACES_EXPORTER") == "none"
    prefix = "OTEL_EXPORTER_OTLP"
    if is_off or not read(f"{prefix}_TRACES_ENDPOINT", f"{prefix}_ENDPOINT"):
        return False
    protocol = read(f"{prefix}_TRACES_PROTOCOL", f"{prefix}_PROTOCOL") or PROTOCOL
    if protocol != PROTOCOL:
        log.warning("traces are off", error=f"{prefix}_PROTOCOL is {protocol}, not {PROTOCOL}")
    return protocol == PROTOCOL


async def _close(close: Callable[[], None]) -> None:
    """Call it, which may block for long, and wait for the available time."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        close()
        with contextlib.suppress(RuntimeError):  # nothing waits any more
            loop.call_soon_threadsafe(done.set)

    # Not one of the loop's threads: those are waited for at the end of the program.
    threading.Thread(name=CLOSING, target=work, daemon=True).start()
    try:
        async with asyncio.timeout(FLUSH_SECONDS):
            await done.wait()
    except TimeoutError:
        log.warning("traces are lost", error=f"the collector took more than {FLUSH_SECONDS:g} s")
