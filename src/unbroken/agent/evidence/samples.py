"""Samples of the activity of this agent's ranks: how often each waits for its peers.

The stack of a rank's main thread is read again and again without pausing it, at moments that are
independent of the steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace

from unbroken.core.diagnosis.rank_activity import Kind, activity_of, awaits_peers, is_backward
from unbroken.errors import WorldError
from unbroken.wire.agent import WorkerReport
from unbroken.wire.observation import RankEvidence

from . import procfs, spy
from .examine import matters_most

ANSWER_SECONDS = 1.0
"""Seconds reserved for the last samples to end, and to send the answer."""
_ENDED = "it has ended"
_IN_VAIN = (spy.NOT_ALLOWED, spy.MISSING, _ENDED)


class Sampling:
    """Samples of several workers, each at a mean rate of `per_second`, for `seconds`."""

    def __init__(self, workers: Sequence[WorkerReport], seconds: float, per_second: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + max(0.0, seconds - ANSWER_SECONDS)
        self._per_second = per_second
        self._over = asyncio.Event()
        self._ranks = [RankEvidence(worker.rank, matters_most(worker.pid)) for worker in workers]

    def stop(self) -> None:
        """Stop sampling: the workers are being ended."""
        self._over.set()

    async def run(self) -> tuple[RankEvidence, ...]:
        """Return the counts of each worker once the time is up."""
        return tuple(await asyncio.gather(*map(self._sample, self._ranks)))

    async def _sample(self, rank: RankEvidence) -> RankEvidence:
        now = self._loop.time
        while now() < self._until and not self._over.is_set():
            # Equal intervals could coincide with the steps, and show one part of each only.
            due = min(self._until, now() + random.uniform(0.5, 1.5) / self._per_second)
            try:
                async with asyncio.timeout_at(self._until + ANSWER_SECONDS / 2):
                    is_waiting = await _look(rank)
            except (WorldError, TimeoutError) as error:
                rank = replace(rank, note=str(error))
                if rank.note in _IN_VAIN:
                    break
            else:
                waiting = rank.waiting + bool(is_waiting)
                rank = replace(
                    rank, samples=rank.samples + (is_waiting is not None), waiting=waiting
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._over.wait()
        return rank


async def _look(rank: RankEvidence) -> bool | None:
    """Return whether the rank waits for its peers now; None: it could not be determined. Raises
    WorldError."""
    stat = procfs.stat(rank.pid)
    if stat is None:
        raise WorldError(_ENDED)
    threads = (await spy.dump(rank.pid, spy.NONBLOCKING)).threads[:1]
    # The kernel's data are some ms older than the stack, so they count only if the stack alone
    # cannot distinguish waiting from computing.
    share = 1.0 if stat.state == "R" else 0.0
    is_open = any(is_backward(thread.frames) for thread in threads)
    seen = RankEvidence(
        rank.rank, rank.pid, "S", cpu_share=share if is_open else None, threads=threads
    )
    what = activity_of(seen)
    return None if what.kind is Kind.UNKNOWN else awaits_peers(seen, what)
