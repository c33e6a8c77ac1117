"""Two machines sum numbers together: torch.distributed over NCCL where both have GPUs, else gloo.

Rank 0 listens at its own address; both tell what they measured, and each whether the sums were
right.  What is too slow is judged by who sees all pairs (`unbroken.core.nodes.checks.verdict`).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

from unbroken.kube.clock import monotonic
from unbroken.spec.nodes.check import Outcome

from .findings import Finding, Pair, Settings, Test, failed, unknown

BYTES, SMALL_BYTES = 16 * 2**20, 8
ROUNDS_LEAST, SMALL_ROUNDS = 3, 200
JOIN_SECONDS = 120.0
"""Until the other is there: its pod may have to be started."""


def exchange(settings: Settings) -> Iterator[Finding]:
    """Join, measure, compare, leave."""
    pair = settings.pair
    if pair is None:
        yield unknown("all-reduce", "needs two nodes: unbroken check NODE NODE --kind Instance...")
        return
    try:
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        yield unknown("all-reduce", f"torch cannot be imported: {error}")
        return
    try:
        backend = _join(pair)
    except (RuntimeError, OSError, ValueError) as error:
        yield failed("all-reduce", f"no connection to {pair.peer or pair.host}: {_line(error)}")
        return
    try:
        yield from _measure(pair, settings, backend)
    except RuntimeError as error:
        yield failed("all-reduce", f"the connection broke: {_line(error)}")
    finally:
        dist.destroy_process_group()


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _join(pair: Pair) -> str:
    """Make the group of two; the name of its backend."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    timeout = timedelta(seconds=JOIN_SECONDS)
    if pair.rank == 0:
        # At this address only: pods of a local cluster share all others.
        listener = socket.create_server((pair.host, pair.port))
        store = dist.TCPStore(
            pair.host,
            pair.port,
            2,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    else:
        _reach(pair)
        store = dist.TCPStore(
            pair.host, pair.port, 2, is_master=False, timeout=timeout, wait_for_workers=False
        )
    # Both must have GPUs for NCCL: they tell each other.
    store.set(f"gpus/{pair.rank}", str(torch.cuda.device_count()))
    counts = [int(store.get(f"gpus/{rank}")) for rank in range(2)]
    backend = "nccl" if min(counts) > 0 else "gloo"
    dist.init_process_group(backend, store=store, rank=pair.rank, world_size=2, timeout=timeout)
    return backend


def _reach(pair: Pair) -> None:
    """Return once rank 0 listens; it may have been started after us."""
    end = monotonic() + JOIN_SECONDS
    while True:
        try:
            with closing(socket.create_connection((pair.host, pair.port), 5)):
                return
        except OSError:
            if monotonic() > end:
                raise
            threading.Event().wait(0.2)


def _measure(pair: Pair, settings: Settings, backend: str) -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    place = "cuda:0" if backend == "nccl" else "cpu"
    small = torch.ones(SMALL_BYTES // 4, device=place)
    latency = _usual(lambda: _reduce(small, place), SMALL_ROUNDS)
    large = torch.empty(BYTES // 4, device=place)
    wanted = torch.arange(BYTES // 4, device=place).remainder(1024).float()
    wrong = 0

    def once() -> float:
        nonlocal wrong
        large.copy_(wanted).mul_(pair.rank + 1)
        if settings.plants.number("wrong-sum") == pair.rank:
            large[7] += 1
        brake = settings.plants.number("slow-link")
        began = monotonic()
        dist.all_reduce(large)
        if brake is not None:
            threading.Event().wait(max(0.0, BYTES / 1e6 / brake - (monotonic() - began)))
        if place != "cpu":
            torch.cuda.synchronize()
        taken = monotonic() - began
        wrong = max(wrong, int((large != wanted * 3).sum()))
        return taken

    # Both must stop after the same round: rank 0 counts how many there is time for.
    once()
    rounds = torch.tensor([max(ROUNDS_LEAST, int(settings.seconds / max(once(), 1e-4)))])
    rounds = rounds.to(place)
    dist.broadcast(rounds, 0)
    taken = _usual(once, int(rounds))
    if wrong:
        text = f"{wrong} numbers of a sum with {pair.peer or pair.host} are wrong"
        yield failed("all-reduce", text)
    else:
        yield Finding("all-reduce", Outcome.PASS, f"{backend}, every sum right")
    # Of two ranks an all-reduce moves as many bytes each way as there are (nccl-tests, busbw).
    speed = round(BYTES / taken / 1e9, 4)
    yield Finding("all-reduce-bandwidth", Outcome.PASS, backend, speed, None, "GB/s")
    yield Finding("all-reduce-latency", Outcome.PASS, backend, round(latency * 1e6, 1), None, "us")


def _reduce(tensor: Any, place: str) -> float:
    import torch
    import torch.distributed as dist

    began = monotonic()
    dist.all_reduce(tensor)
    if place != "cpu":
        torch.cuda.synchronize()
    return monotonic() - began


def _usual(once: Callable[[], float], rounds: int) -> float:
    """The median of the faster half: what the link can do, whoever else is busy for a moment."""
    taken = sorted(once() for _ in range(rounds))
    return taken[len(taken) // 4]


TESTS = (Test("all-reduce", exchange, JOIN_SECONDS + 120.0),)
