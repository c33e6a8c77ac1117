"""The pages of this node's workers: made here, inherited by the workers, read on the watch's
request.

A page is an anonymous file of fixed size. It is read with a system call, so that no action of a
worker on it reaches the agent's own memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import replace

from unbroken.agent.workers.environment import Program
from unbroken.log_lines import Log
from unbroken.wire.worker import PAGE_BYTES, VARIABLE, Page, empty, read

log = Log(__name__)

DESCRIPTOR = 62
"""Number of the page's descriptor in each worker: shells and scripts use low ones, and tables begin
with 64."""
_LOWEST = 8
"""Lowest number of the agent's own descriptor: the start of a worker overwrites lower ones."""
_TRIES = 4


class PageSource:
    """One worker's page, with its last reading."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.page = Page()
        self.is_written = False
        self._before: tuple[int, Page] = 0, Page()
        """The last record of an earlier attempt, and its number."""

    def look(self) -> Page:
        """Read the newest record; a torn or foreign one leaves the last reading as it is."""
        for _ in range(_TRIES):
            result = read(os.pread(self.fd, PAGE_BYTES, 0))
            if result is not None:
                self.is_written = result[0] > self._before[0]
                self.page = _since(self._before[1], result[1]) if self.is_written else Page()
                break
        return self.page

    def begin_anew(self) -> None:
        """Start another attempt in the same worker: reports so far belong to the one before."""
        result = read(os.pread(self.fd, PAGE_BYTES, 0))
        if result is not None:
            self._before = result
        self.is_written, self.page = False, Page()

    def close(self) -> None:
        """Close the page: the worker has ended."""
        os.close(self.fd)


def _since(before: Page, page: Page) -> Page:
    """Return the page of a kept worker since the attempt began: its own counts continue over
    attempts."""
    calls = page.calls - before.calls
    if not before.calls or calls < 0:
        return page
    step = page.step if calls else None
    first, first_at = page.first_step, page.first_step_at
    if first_at == before.first_step_at:  # a function of no `restartable`
        # Assuming one call per step, as it should be.
        first, first_at = None if step is None else step - calls + 1, None
    return replace(
        page,
        first_step=first,
        first_step_at=first_at,
        step=step,
        calls=calls,
        bad_calls=max(0, page.bad_calls - before.bad_calls),
    )


def make() -> PageSource | None:
    """Make a page for a new worker; None: the worker has to do without."""
    try:
        made = os.memfd_create("unbroken-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with contextlib.closing(os.fdopen(made, "wb", buffering=0)) as file:
            file.write(empty())
            # Truncated it would kill a worker that writes.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
            return PageSource(fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, _LOWEST))
    except OSError as error:
        log.warning("no memory for progress pages: steps of workers are unknown", error=error)
        return None


def lend(program: Program, source: PageSource | None) -> Program:
    """Return the program with the page for it to inherit."""
    if source is None or os.sysconf("SC_OPEN_MAX") <= DESCRIPTOR:
        return program
    told = {**program.environment, VARIABLE: str(DESCRIPTOR)}
    return replace(program, environment=told, lent={DESCRIPTOR: source.fd})
