"""Speed of the devices of a node: bus bandwidth, and the device or link that is slow. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median_high

DevicePair = tuple[int, int]
"""Numbers of two devices, the smaller one first."""
SLOW_SHARE = 0.5
"""Share of what is usual on the node below which a device is slow (judgement)."""
LINK_SHARE = 0.25
"""Share of what is usual below which a single link is slow.

It is lower: links of good devices differ where some go over NVLink and others over PCIe, and links
to another node share network cards (judgement).
"""
LEAST = 3
"""Devices, or links, that must have been measured before one of them is called slow."""


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the GB/s of an all-reduce of `size` bytes over `ranks` processes.

    It is the bus bandwidth of nccl-tests (doc/PERFORMANCE.md): size / time * 2 (n - 1) / n. It is
    limited by the slowest link, whatever the number of processes.
    """
    return size / seconds / 1e9 * 2 * (ranks - 1) / ranks


def rounds_of_links(count: int) -> list[list[DevicePair]]:
    """Return rounds in which every device meets every other once, and only one at a time."""
    # The circle method: the first one stays, the others move on by one place.
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(
            [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        )
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


@dataclass(frozen=True, slots=True)
class Slow:
    """A device, or the link between two devices, that is slower than its equals."""

    devices: tuple[int, ...]
    """One: the device; two: only the link between them."""
    measured: float
    """GB/s; of a device that of its fastest link."""
    expected: float


def slow_parts(speeds: Mapping[DevicePair, float]) -> list[Slow]:
    """Return what is slow among devices that all met each other, from the GB/s of each link.

    A device is slow if none of its links is fast. A link between two good devices is slow if it is
    the only slow one of both. So nothing is said where the machine is built of fast and slow links.
    """
    best: dict[int, float] = {}
    for pair, speed in speeds.items():
        for device in pair:
            best[device] = max(best.get(device, 0.0), speed)
    if len(best) < LEAST:
        return []
    limit = round(median_high(best.values()) * SLOW_SHARE, 4)
    slow = [Slow((one,), round(best[one], 4), limit) for one in sorted(best) if best[one] < limit]
    out = {device for one in slow for device in one.devices}
    good = {pair: speed for pair, speed in speeds.items() if not out & set(pair)}
    return slow + _single_links(good)


def _single_links(speeds: Mapping[DevicePair, float]) -> list[Slow]:
    if len(speeds) < LEAST:
        return []
    usual = median_high(speeds.values())
    weak = {pair for pair, speed in speeds.items() if speed < usual * SLOW_SHARE}
    return [
        Slow(pair, round(speeds[pair], 4), round(usual * LINK_SHARE, 4))
        for pair in sorted(weak)
        if speeds[pair] < usual * LINK_SHARE and not _touches(pair, weak - {pair})
    ]


def _touches(pair: DevicePair, others: Collection[DevicePair]) -> bool:
    return any(set(pair) & set(other) for other in others)


def slow_lanes(speeds: Mapping[int, float]) -> list[Slow]:
    """Return the devices whose link to the same device of another node is slower than the others,
    from the GB/s of each device."""
    if len(speeds) < LEAST:
        return []
    limit = round(median_high(speeds.values()) * LINK_SHARE, 4)
    return [
        Slow((one,), round(speeds[one], 4), limit) for one in sorted(speeds) if speeds[one] < limit
    ]


def slow_text(slow: Slow, peer: str = "") -> str:
    """Return a sentence about what is slow; `peer`: the other node, if there is one."""
    if peer:
        what = f"the link between device {slow.devices[0]} and that of {peer} is slow"
    elif len(slow.devices) == 2:
        what = f"the link between devices {slow.devices[0]} and {slow.devices[1]} is slow"
    else:
        what = f"device {slow.devices[0]} is slow with every other device"
    return f"{what}: {slow.measured:g} GB/s, expected {slow.expected:g}"
