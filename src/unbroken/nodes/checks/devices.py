"""All devices of one machine sum numbers together, and exchange numbers one with another."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from unbroken.core.nodes.checks.devices import DevicePair, slow_parts, slow_text
from unbroken.core.nodes.checks.plan import DEVICE_BANDWIDTH, DEVICE_LINKS, DEVICE_SUM
from unbroken.spec.nodes.check import Outcome

from .collectives import BYTES, JOIN_SECONDS, Group, Report, count_gpus, reports
from .findings import Finding, Settings, Test, failed, passed, skipped, unknown
from .gpu import is_hardware, nvml_count


def processes(settings: Settings) -> tuple[int, bool] | str:
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


def sum_inside(settings: Settings) -> Iterator[Finding]:
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
        group = Group(host, port, count, is_cuda, settings.seconds, settings.plants)
        found = reports(group.of(0, 1, listener.fileno()))
    yield from _judge(found, settings)


def _judge(found: Sequence[Report], settings: Settings) -> Iterator[Finding]:
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
    yield passed(DEVICE_BANDWIDTH, summary(first), speed, "GB/s")
    yield from _links(found, settings)


def _links(found: Sequence[Report], settings: Settings) -> Iterator[Finding]:
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


def error_of(found: Sequence[Report]) -> tuple[str, bool]:
    """The first error of the processes, empty if there is none; and False if it says nothing about
    links."""
    # Where a process died, the others only lost their connection to it.
    errors = sorted((one for one in found if one.error), key=lambda one: not one.is_open)
    return (errors[0].error, not errors[0].is_open) if errors else ("", True)


def are_judged(report: Report, settings: Settings) -> bool:
    """True if the devices can be compared: processes of one processor only seem to be devices."""
    return report.backend == "nccl" or settings.plants.number("slow-device") is not None


def summary(report: Report) -> str:
    """The conditions of the measurement, in words."""
    return f"{report.backend}, {report.world} processes, {BYTES[report.backend] // 2**20} MiB"


def wrong_exchanges(found: Sequence[Report], whose: str = "") -> str:
    """The devices that received wrong numbers from another device, in words; empty: none."""
    return "; ".join(
        f"device {one.device} received {one.wrong} wrong numbers from device {one.other}{whose}"
        for report in found
        for one in report.exchanges
        if one.wrong
    )


TESTS = (Test(DEVICE_SUM, sum_inside, JOIN_SECONDS + 120.0),)
