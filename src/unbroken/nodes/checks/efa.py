"""Loopback over each EFA device: `fi_pingpong` to itself, as AWS's own `efa_test.sh` does.

Without SHM transfer, because libfabric sends between processes of one machine through its memory
otherwise. A device that fails while others work is at fault; where none works, the image or the
security group is.
"""

from __future__ import annotations

import re
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median_high

from unbroken.kube.clock import monotonic
from unbroken.spec.nodes.kinds import Outcome

from . import tools
from .findings import CheckSettings, Finding, Test, failed, passed, skipped, unknown

TEST = "efa-loopback"
DEVICES = Path("/sys/class/infiniband")
DRIVER = "efa"
INFO_SECONDS, START_SECONDS, SECONDS = 30.0, 20.0, 40.0
"""Time limits of one `fi_info`, of the start of a server and of a client of `fi_pingpong`."""
DOMAINS_MAX, ROWS_MAX = 64, 64
ITERATIONS = 100
SLOW_SHARE = 0.5
"""Share of the median of the devices below which one is slow (judgement)."""
LEAST = 3
DIRECT = "efa-direct"
LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}")
BLOCK = re.compile(r"(?m)^provider: ")


@dataclass(frozen=True, slots=True)
class FabricDomain:
    """An endpoint of libfabric."""

    name: str
    fabric: str = ""
    """Its fabric, if the domain is in several. Only libfabric 2 has several, and the option for
    them."""

    @property
    def device(self) -> str:
        """Name of its device, such as rdmap0s29."""
        return self.name.removesuffix("-rdm")


@dataclass(frozen=True, slots=True)
class LoopbackFigures:
    """Figures of one loopback, over all sizes of messages."""

    bandwidths: tuple[float, ...]
    """MB/s."""
    latencies: tuple[float, ...]
    """Microseconds of one transfer."""

    @property
    def best(self) -> float:
        """GB/s."""
        return round(max(self.bandwidths) / 1000, 4)

    def text(self) -> str:
        """The figures in the words of HyperPod's log."""
        speeds, delays = self.bandwidths, self.latencies
        return (
            f"MaxBw: {max(speeds):f}, AvgBw: {sum(speeds) / len(speeds):f}, "
            f"MaxTypicalLat: {max(delays):f}, MinTypicalLat: {min(delays):f}, "
            f"AvgLat: {sum(delays) / len(delays):f}"
        )


def devices(folder: Path = DEVICES) -> list[str]:
    """Names of the EFA devices that the kernel shows."""
    try:
        return sorted(
            one.name
            for one in folder.iterdir()
            if (one / "device" / "driver").resolve().name == DRIVER
        )
    except OSError:
        return []


def read_domains(text: str) -> list[FabricDomain]:
    """The domains that `fi_info` shows, each once.

    libfabric 2 shows each in the fabrics efa-direct and efa; `fi_pingpong` hangs on the first.
    """
    found: dict[str, list[str]] = {}
    for block in BLOCK.split(text)[1:]:
        lines = [line.strip().partition(": ") for line in block.splitlines()[1:]]
        said = {key: value for key, _, value in lines}
        fabric, name = said.get("fabric", ""), said.get("domain", "")
        if NAME.fullmatch(fabric) and NAME.fullmatch(name) and len(found) < DOMAINS_MAX:
            found.setdefault(name, []).append(fabric)
    others = {name: [one for one in fabrics if one != DIRECT] for name, fabrics in found.items()}
    return [
        FabricDomain(name, others[name][0] if others[name] and DIRECT in fabrics else "")
        for name, fabrics in found.items()
    ]


def read_pingpong(text: str) -> LoopbackFigures | None:
    """The figures of `fi_pingpong`; None: there are none."""
    speeds: list[float] = []
    delays: list[float] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) != 8 or len(speeds) >= ROWS_MAX or not words[2].startswith("="):
            continue
        try:
            speed, delay = float(words[5]), float(words[6])
        except ValueError:
            continue
        if isfinite(speed) and isfinite(delay) and speed >= 0 and delay > 0:
            speeds.append(speed)
            delays.append(delay)
    return LoopbackFigures(tuple(speeds), tuple(delays)) if speeds else None


def loopback(settings: CheckSettings) -> Iterator[Finding]:
    """Measure each device, and compare them."""
    there = devices()
    if not there and settings.efa:
        yield unknown(TEST, f"this machine has no EFA device; {settings.efa} should be there")
        return
    if not there:
        yield skipped(TEST, "this machine has no EFA device")
        return
    if len(there) < (settings.efa or 0):
        text = "the kernel shows too few EFA devices"
        yield Finding("efa-devices", Outcome.FAIL, text, len(there), settings.efa, "devices")
    info, pingpong = tools.find("fi_info"), tools.find("fi_pingpong")
    if info is None or pingpong is None:
        yield unknown(
            TEST, f"{len(there)} EFA devices, and no fi_info and fi_pingpong to test them"
        )
        return
    done = tools.run([info, "-p", DRIVER, "-t", "FI_EP_RDM"], INFO_SECONDS)
    domains = read_domains(done.text.decode(errors="replace"))
    if not domains:
        yield unknown(TEST, f"{len(there)} EFA devices, of which fi_info shows none: {done.why()}")
        return
    measured: dict[str, LoopbackFigures | str] = {}
    for domain in domains:
        measured[domain.device] = measure(pingpong, DRIVER, domain)
    for domain in domains:
        # A second time, if a neighbour was busy.
        if any(one.outcome is Outcome.FAIL for one in _of(domain.device, judge(measured))):
            measured[domain.device] = measure(pingpong, DRIVER, domain)
    yield from judge(measured)


def _of(device: str, found: Sequence[Finding]) -> list[Finding]:
    return [one for one in found if one.test == f"{TEST}-{device}"]


def measure(program: str, provider: str, domain: FabricDomain) -> LoopbackFigures | str:
    """The figures of one domain, or why there are none."""
    # Some providers ignore the name of the domain; the variable leaves only this device.
    environment = {"FI_EFA_ENABLE_SHM_TRANSFER": "0", "FI_EFA_IFACE": domain.device}
    port = _free_port()
    command = [program, "-e", "rdm", "-p", provider, "-d", domain.name, "-I", str(ITERATIONS)]
    command += ["-f", domain.fabric] if domain.fabric else []
    with subprocess.Popen(
        [*command, "-B", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=tools.with_environment(environment),
    ) as server:
        try:
            if not _is_ready(server, port):
                return "the server of fi_pingpong does not start"
            done = tools.run([*command, "-P", str(port), "127.0.0.1"], SECONDS, environment)
        finally:
            server.kill()
    found = read_pingpong(done.text.decode(errors="replace"))
    return found if found is not None and done.code == 0 else f"fi_pingpong {done.why()}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def _is_ready(server: subprocess.Popen[bytes], port: int) -> bool:
    """True once the server listens: it takes the first connection for its client."""
    end = monotonic() + START_SECONDS
    while not is_listening(port):
        if server.poll() is not None or monotonic() > end:
            return False
        threading.Event().wait(0.05)
    return True


def is_listening(port: int) -> bool:
    """True if a process of this network namespace listens at the port."""
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                return True
    return False


def judge(measured: Mapping[str, LoopbackFigures | str]) -> list[Finding]:
    """A result for each device."""
    good = {device: one for device, one in measured.items() if isinstance(one, LoopbackFigures)}
    limit = 0.0
    if len(good) >= LEAST:
        limit = round(median_high(one.best for one in good.values()) * SLOW_SHARE, 4)
    found = []
    for device, one in measured.items():
        test = f"{TEST}-{device}"
        if isinstance(one, str):
            is_alone = 2 * len(good) > len(measured)
            found.append((failed if is_alone else unknown)(test, f"{device}: {one}"))
        elif one.best < limit:
            text = f"{device}: far slower than the other EFA devices; {one.text()}"
            found.append(Finding(test, Outcome.FAIL, text, one.best, limit, "GB/s"))
        else:
            found.append(passed(test, one.text(), one.best, "GB/s"))
    return found


TESTS = (Test(TEST, loopback, 1800.0),)
