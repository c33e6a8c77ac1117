"""Two machines sum numbers together, with all devices of both.

Rank 0 listens at its own address. Both report what they measured, and each whether the sums were
right. The caller, which sees all pairs, decides what is too slow
(`unbroken.core.nodes.checks.verdict`).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

from unbroken.core.nodes.checks.devices import slow_lanes, slow_text
from unbroken.core.nodes.checks.plan import (
    BANDWIDTH,
    BANDWIDTH_QUEUED,
    DEVICE_LINKS,
    LATENCY,
    LATENCY_QUEUED,
    SUM,
)
from unbroken.kube.clock import monotonic
from unbroken.spec.nodes.kinds import Outcome

from .devices import (
    JOIN_SECONDS,
    DeviceGroup,
    DeviceReport,
    are_judged,
    error_of,
    processes,
    reports,
    summary,
    wrong_exchanges,
)
from .findings import CheckSettings, Finding, PairPart, Test, failed, passed, unknown


def exchange(settings: CheckSettings) -> Iterator[Finding]:
    """Join, measure, compare, leave."""
    pair = settings.pair
    if pair is None:
        yield unknown(SUM, "needs two nodes: unbroken check NODE NODE --kind Instance...")
        return
    here = processes(settings)
    if isinstance(here, str):
        yield unknown(SUM, here)
        return
    peer = pair.peer or pair.host
    try:
        found = _together(pair, here, settings)
    except OSError as error:
        yield failed(SUM, f"no connection to {peer}: {error}")
        return
    yield from _judge(found, peer, settings)


def _together(
    pair: PairPart, here: tuple[int, bool], settings: CheckSettings
) -> list[DeviceReport]:
    ranks, is_cuda = here
    group = DeviceGroup(pair.host, pair.port, ranks, is_cuda, settings.seconds, settings.plants)
    if pair.rank == 0:
        # At this address only: pods of a local cluster share all others.
        family = socket.AF_INET6 if ":" in pair.host else socket.AF_INET
        with socket.create_server((pair.host, pair.port), family=family) as listener:
            return reports(group.of(0, 2, listener.fileno()))
    _reach(pair)
    return reports(group.of(1, 2))


def _reach(pair: PairPart) -> None:
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


def _judge(found: Sequence[DeviceReport], peer: str, settings: CheckSettings) -> Iterator[Finding]:
    first = found[0]
    broken, is_known = error_of(found)
    if broken:
        what = "the connection broke" if first.is_joined else f"no connection to {peer}"
        yield (failed if is_known else unknown)(SUM, f"{what}: {broken}")
        return
    wrong = max(one.wrong for one in found)
    if wrong:
        yield failed(SUM, f"{wrong} numbers of a sum with {peer} are wrong")
    else:
        yield passed(SUM, f"{summary(first)}, every sum right")
    speed = round(min(one.bandwidth for one in found), 4)
    yield passed(BANDWIDTH, summary(first), speed, "GB/s", first.backend)
    latency = max(one.latency for one in found)
    yield passed(LATENCY, first.backend, round(latency * 1e6, 1), "us")
    for test, queued in (
        (BANDWIDTH_QUEUED, max(one.queued for one in found)),
        (LATENCY_QUEUED, max(one.latency_queued for one in found)),
    ):
        yield passed(test, "time in which no processor was free", round(queued * 100, 1), "%")
    yield from _lanes(found, peer, settings)


def _lanes(found: Sequence[DeviceReport], peer: str, settings: CheckSettings) -> Iterator[Finding]:
    """The link of each device to the same device of the other machine."""
    text = wrong_exchanges(found, f" of {peer}")
    if text:
        yield failed(DEVICE_LINKS, text)
        return
    speeds = {one.device: one.speed for each in found for one in each.exchanges}
    if not speeds:
        return
    slowest = min(speeds, key=speeds.__getitem__)
    slow = slow_lanes(speeds) if are_judged(found[0], settings) else []
    if slow:
        text = "; ".join(slow_text(one, peer) for one in slow)
        measured, expected = round(slow[0].measured, 4), slow[0].expected
        yield Finding(DEVICE_LINKS, Outcome.FAIL, text, measured, expected, "GB/s")
    else:
        yield passed(
            DEVICE_LINKS, f"the slowest is device {slowest}", round(speeds[slowest], 4), "GB/s"
        )


TESTS = (Test(SUM, exchange, JOIN_SECONDS + 120.0),)
