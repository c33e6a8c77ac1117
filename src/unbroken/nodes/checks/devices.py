"""All devices of one machine sum numbers together, and exchange numbers one with another.

A process for each device is joined in one torch.distributed group. The group is NCCL's where every
process has a GPU of its own, else gloo's. Its processes sum numbers together, then each exchanges
numbers with single others. Each process returns its measurements.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from unbroken.core.nodes.checks.devices import (
    DevicePair,
    bus_bandwidth,
    rounds_of_links,
    slow_parts,
    slow_text,
)
from unbroken.core.nodes.checks.plan import DEVICE_BANDWIDTH, DEVICE_LINKS, DEVICE_SUM, NCCL
from unbroken.kube.clock import monotonic
from unbroken.spec.nodes.kinds import Outcome

from .findings import CheckSettings, Finding, Plants, Test, failed, passed, skipped, unknown
from .gpu import is_hardware, nvml_count
from .sides import LEAST_SECONDS, at_each, queued_threads

if TYPE_CHECKING:
    import torch


BYTES = {NCCL: 2**30, "gloo": 16 * 2**20}
"""Bytes of an all-reduce. HyperPod's NCCL test goes from 8 B to 2 GiB; its bandwidth no longer
changes above 1 GiB."""
EXCHANGE_BYTES = {NCCL: 64 * 2**20, "gloo": 4 * 2**20}
SMALL_BYTES = 8
PATTERN = 1024
"""Numbers after which what is sent repeats itself."""
ROUNDS_LEAST, SMALL_ROUNDS, EXCHANGES = 3, 200, 5
JOIN_SECONDS = 120.0
"""Seconds to wait for the other processes: their pod may have to be started."""
SLOWED, SLOWED_SUM = 30, 3
"""Factors by which the plant `slow-device` slows exchanges and sums down. Processes on a busy
processor differ by a factor of three by themselves."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The part of this machine in the group."""

    host: str
    port: int
    """Address of the store, at the first machine."""
    ranks: int
    """Processes of this machine."""
    is_cuda: bool
    """True if each of them has a GPU."""
    seconds: float
    """Approximate duration of the sums."""
    plants: Plants
    node: int = 0
    nodes: int = 1
    listener: int = -1
    """File descriptor that listens at the address; -1: another machine has it."""

    def of(self, node: int, nodes: int, listener: int = -1) -> DeviceGroup:
        """The part of one of several machines."""
        return replace(self, node=node, nodes=nodes, listener=listener)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Measurements of one process with one other."""

    device: int
    """Number of this process on its machine."""
    other: int
    """Number of the other one on its machine."""
    speed: float
    """GB/s in each direction, both at the same time."""
    wrong: int
    """Received numbers that were wrong."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Results of one process; incomplete if there is an error."""

    error: str = ""
    is_joined: bool = False
    is_open: bool = False
    """True if the error says nothing about links: the process died, or memory was full."""
    backend: str = ""
    world: int = 0
    wrong: int = 0
    """Numbers of sums that were wrong."""
    seconds: float = 0.0
    """Seconds of one all-reduce."""
    queued: float = 0.0
    """Share of these seconds in which a thread of the process waited for a processor, 0 to 1."""
    latency: float = 0.0
    """Seconds of an all-reduce of 8 bytes."""
    latency_queued: float = 0.0
    """Share of the latency, as `queued`."""
    exchanges: tuple[Exchange, ...] = ()

    @property
    def bandwidth(self) -> float:
        """Bus bandwidth in GB/s."""
        return bus_bandwidth(BYTES[self.backend], self.seconds, self.world)


def count_gpus() -> int:
    """GPUs that torch can use. Another process counts them: after that, a process that has looked
    at its GPUs cannot be forked."""
    ((_, count),) = at_each([0], _count)
    return count if isinstance(count, int) else 0


def _count(place: int) -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def reports(group: DeviceGroup) -> list[DeviceReport]:
    """The report of each process of this machine."""
    # Imported once for all of them.
    import torch.distributed  # noqa: F401

    found = at_each(range(group.ranks), lambda local: asdict(_take_part(group, local)))
    return [
        DeviceReport(error=f"device {local}: {one}", is_open=True)
        if isinstance(one, str)
        else msgspec.convert(one, DeviceReport)
        for local, one in found
    ]


def _take_part(group: DeviceGroup, local: int) -> DeviceReport:
    import torch
    import torch.distributed as dist

    report = DeviceReport()
    try:
        ranks = _join(group, local)
        report = replace(report, is_joined=True, backend=ranks.backend, world=ranks.world)
        report = _measure(group, ranks, report)
        ranks.leave()
    except torch.cuda.OutOfMemoryError as error:
        return replace(report, error=_line(error), is_open=True)
    except (RuntimeError, OSError, ValueError) as error:
        return replace(report, error=_line(error))
    dist.destroy_process_group()
    return report


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The joined group, as one of its processes sees it."""

    store: Any
    backend: str
    local: int
    node: int
    counts: tuple[int, ...]
    """Processes of each machine."""

    @property
    def world(self) -> int:
        return sum(self.counts)

    @property
    def first(self) -> int:
        """Rank of the first process of this machine."""
        return sum(self.counts[: self.node])

    @property
    def rank(self) -> int:
        return self.first + self.local

    @property
    def place(self) -> str:
        return f"cuda:{self.local}" if self.backend == NCCL else "cpu"

    def meet(self) -> None:
        """Wait until all processes are here."""
        import torch
        import torch.distributed as dist

        _timed(self, lambda: dist.all_reduce(torch.zeros(1, device=self.place)))

    def leave(self) -> None:
        """Wait for the others where the store is: they need it until they leave."""
        self.store.set(f"done/{self.rank}", "")
        if self.rank == 0:
            with suppress(RuntimeError):
                self.store.wait([f"done/{rank}" for rank in range(self.world)])


def _join(group: DeviceGroup, local: int) -> _Ranks:
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    timeout = timedelta(seconds=JOIN_SECONDS)
    is_first = group.listener >= 0 and local == 0
    more = {"master_listen_fd": group.listener} if is_first else {}
    store = dist.TCPStore(
        group.host,
        group.port,
        is_master=is_first,
        timeout=timeout,
        wait_for_workers=False,
        **more,
    )
    if local == 0:
        # NCCL refuses two processes on one GPU, as nodes of a local cluster would have.
        machine = BOOT_ID.read_text().strip() if group.is_cuda else ""
        store.set(f"node/{group.node}", f"{group.ranks} {machine}")
    told = [store.get(f"node/{node}").decode().partition(" ") for node in range(group.nodes)]
    machines = {machine for _, _, machine in told}
    backend = NCCL if "" not in machines and len(machines) == group.nodes else "gloo"
    counts = tuple(int(count) for count, _, _ in told)
    ranks = _Ranks(store, backend, local, group.node, counts)
    if backend == NCCL:
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=timeout
    )
    return ranks


def _measure(group: DeviceGroup, ranks: _Ranks, report: DeviceReport) -> DeviceReport:
    import torch
    import torch.distributed as dist

    small = torch.ones(SMALL_BYTES // 4, device=ranks.place)
    latency = _usual(lambda: _timed(ranks, lambda: dist.all_reduce(small)), SMALL_ROUNDS)
    once = _Sum(group, ranks)
    # All must stop after the same round: rank 0 counts how many there is time for, comparison
    # included.
    once()
    began = monotonic()
    once()
    rounds = torch.tensor([max(ROUNDS_LEAST, int(group.seconds / (monotonic() - began)))])
    rounds = rounds.to(ranks.place)
    dist.broadcast(rounds, 0)
    taken = _usual(once, int(rounds))
    wrong = once.wrong
    del once
    return replace(
        report,
        wrong=wrong,
        seconds=taken.seconds,
        queued=taken.queued_share,
        latency=latency.seconds,
        latency_queued=latency.queued_share,
        exchanges=tuple(_exchanges(group, ranks)),
    )


class _Sum:
    """All-reduces of numbers whose sum is exact in any order."""

    def __init__(self, group: DeviceGroup, ranks: _Ranks) -> None:
        import torch

        self._ranks, self._plants = ranks, group.plants
        count = BYTES[ranks.backend] // 4
        self._sent = torch.empty(count, device=ranks.place)
        self._wanted = _pattern(count, ranks)
        # Below 2**24 for up to 180 processes: every partial sum is exact.
        self._times = ranks.world * (ranks.world + 1) // 2
        self.wrong = 0

    def __call__(self) -> _Taken:
        """Sum once and compare; the time that the sum took."""
        import torch.distributed as dist

        ranks, plants = self._ranks, self._plants
        self._sent.copy_(self._wanted).mul_(ranks.rank + 1)
        if plants.number("wrong-sum") == ranks.local:
            self._sent[7] += 1
        ranks.meet()
        taken = _timed(ranks, lambda: dist.all_reduce(self._sent))
        brake = plants.number("slow-link")
        seconds = taken.seconds
        if brake is not None:
            most = bus_bandwidth(BYTES[ranks.backend], 1.0, ranks.world) * 1000 / brake
            seconds += _wait(most - seconds)
        seconds += _slowed(plants, ranks, seconds, SLOWED_SUM)
        self.wrong = max(self.wrong, int((self._sent != self._wanted * self._times).sum()))
        return replace(taken, seconds=seconds)


def _pattern(count: int, ranks: _Ranks) -> torch.Tensor:
    """Numbers to send; `count` is a multiple of PATTERN."""
    import torch

    return torch.arange(PATTERN, device=ranks.place).float().repeat(count // PATTERN)


def _slowed(plants: Plants, ranks: _Ranks, taken: float, times: int) -> float:
    """The planted delay after something that took so many seconds."""
    return _wait(taken * (times - 1)) if plants.number("slow-device") == ranks.local else 0.0


def _wait(seconds: float) -> float:
    seconds = max(0.0, seconds)
    threading.Event().wait(seconds)
    return seconds


def _exchanges(group: DeviceGroup, ranks: _Ranks) -> list[Exchange]:
    """Exchange numbers with single others: on one machine each device with each other one after
    the other, else all devices with the same ones of the other machine at once."""
    import torch

    count = EXCHANGE_BYTES[ranks.backend] // 4
    pattern = _pattern(count, ranks)
    found = []
    for links in _rounds(ranks):
        ranks.meet()
        pair = next((link for link in links if ranks.rank in link), None)
        if pair is None:
            continue
        other = sum(pair) - ranks.rank
        sent, got = pattern + ranks.rank, torch.empty_like(pattern)
        best = min(_swap(group, ranks, sent, got, other) for _ in range(EXCHANGES))
        wrong = int((got != pattern + other).sum())
        number = other - ranks.first if group.nodes == 1 else ranks.local
        found.append(Exchange(ranks.local, number, sent.numel() * 4 / best / 1e9, wrong))
    return found


def _rounds(ranks: _Ranks) -> Sequence[Sequence[tuple[int, int]]]:
    if len(ranks.counts) == 1:
        return rounds_of_links(ranks.world)
    return [[(local, ranks.counts[0] + local) for local in range(min(ranks.counts))]]


def _swap(group: DeviceGroup, ranks: _Ranks, sent: Any, got: Any, other: int) -> float:
    import torch.distributed as dist

    def both() -> None:
        send, receive = dist.isend, dist.irecv
        works = dist.batch_isend_irecv(
            [dist.P2POp(send, sent, other), dist.P2POp(receive, got, other)]
        )
        for work in works:
            work.wait()

    taken = _timed(ranks, both).seconds
    return taken + _slowed(group.plants, ranks, taken, SLOWED)


@dataclass(frozen=True, slots=True, order=True)
class _Taken:
    """Time that something took."""

    seconds: float
    queued: float
    """Seconds for which the threads of this process waited for a processor: the most of one
    thread. GPUs need none."""

    @property
    def queued_share(self) -> float:
        return min(1.0, self.queued / max(self.seconds, LEAST_SECONDS))


def _timed(ranks: _Ranks, work: Callable[[], object]) -> _Taken:
    import torch

    if ranks.backend == NCCL:
        began = monotonic()
        work()
        torch.cuda.synchronize()
        return _Taken(monotonic() - began, 0.0)
    queued = queued_threads()
    began = monotonic()
    work()
    taken = monotonic() - began
    waits = [after - queued.get(thread, 0.0) for thread, after in queued_threads().items()]
    return _Taken(taken, max(waits))


def _usual(once: Callable[[], _Taken], rounds: int) -> _Taken:
    """Return the median of the faster half: what the links can do, even if others are busy for a
    moment."""
    taken = sorted(once() for _ in range(rounds))
    return taken[len(taken) // 4]


def processes(settings: CheckSettings) -> tuple[int, bool] | str:
    """Processes to start here, and whether each has a GPU; a text: nothing can be tested."""
    try:
        import torch.distributed  # noqa: F401
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {error}"
    count = count_gpus()
    if count:
        return count, True
    there = nvml_count()
    if isinstance(there, int) and there:
        return f"torch sees none of the {there} GPUs: the image needs torch with CUDA"
    return settings.ranks, False


def sum_inside(settings: CheckSettings) -> Iterator[Finding]:
    """Start a process for each device, measure, compare."""
    here = processes(settings)
    if isinstance(here, str):
        yield unknown(DEVICE_SUM, here)
        return
    count, is_cuda = here
    if count < 2:
        yield skipped(DEVICE_SUM, "needs two devices: this machine has one")
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        group = DeviceGroup(host, port, count, is_cuda, settings.seconds, settings.plants)
        found = reports(group.of(0, 1, listener.fileno()))
    yield from _judge(found, settings)


def _judge(found: Sequence[DeviceReport], settings: CheckSettings) -> Iterator[Finding]:
    broken, _ = error_of(found)
    if broken:
        yield (failed if is_hardware(broken) else unknown)(DEVICE_SUM, broken)
        return
    first, wrong = found[0], max(one.wrong for one in found)
    if wrong:
        yield failed(DEVICE_SUM, f"{wrong} numbers of a sum over all devices are wrong")
    else:
        yield passed(DEVICE_SUM, f"{summary(first)}, every sum right")
    speed = round(min(one.bandwidth for one in found), 4)
    yield passed(DEVICE_BANDWIDTH, summary(first), speed, "GB/s", first.backend)
    yield from _links(found, settings)


def _links(found: Sequence[DeviceReport], settings: CheckSettings) -> Iterator[Finding]:
    text = wrong_exchanges(found)
    if text:
        yield failed(DEVICE_LINKS, text)
        return
    speeds: dict[DevicePair, float] = {}
    for exchange in (exchange for report in found for exchange in report.exchanges):
        pair = (min(exchange.device, exchange.other), max(exchange.device, exchange.other))
        speeds[pair] = min(speeds.get(pair, exchange.speed), exchange.speed)
    slow = slow_parts(speeds) if are_judged(found[0], settings) else []
    for one in slow:
        measured = round(one.measured, 4)
        yield Finding(DEVICE_LINKS, Outcome.FAIL, slow_text(one), measured, one.expected, "GB/s")
    if not slow:
        pair = min(speeds, key=speeds.__getitem__)
        text = f"the slowest of {len(speeds)} links is that of devices {pair[0]} and {pair[1]}"
        yield passed(DEVICE_LINKS, text, round(speeds[pair], 4), "GB/s")


def error_of(found: Sequence[DeviceReport]) -> tuple[str, bool]:
    """The first error of the processes, empty if there is none; and False if it says nothing about
    links."""
    # Where a process died, the others only lost their connection to it.
    errors = sorted((one for one in found if one.error), key=lambda one: not one.is_open)
    return (errors[0].error, not errors[0].is_open) if errors else ("", True)


def are_judged(report: DeviceReport, settings: CheckSettings) -> bool:
    """True if the devices can be compared: processes of one processor only seem to be devices."""
    return report.backend == NCCL or settings.plants.number("slow-device") is not None


def summary(report: DeviceReport) -> str:
    """The conditions of the measurement, in words."""
    return f"{report.backend}, {report.world} processes, {BYTES[report.backend] // 2**20} MiB"


def wrong_exchanges(found: Sequence[DeviceReport], whose: str = "") -> str:
    """The devices that received wrong numbers from another device, in words; empty: none."""
    return "; ".join(
        f"device {one.device} received {one.wrong} wrong numbers from device {one.other}{whose}"
        for report in found
        for one in report.exchanges
        if one.wrong
    )


TESTS = (Test(DEVICE_SUM, sum_inside, JOIN_SECONDS + 120.0),)
