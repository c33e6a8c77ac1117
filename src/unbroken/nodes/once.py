"""One look at a node, without a cluster: what the daemon would find now."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.core.nodes.health_object import NODE_ACTIONS
from unbroken.core.nodes.kernel_log import KernelLine
from unbroken.core.nodes.signals import GpuWatch, Sign, SignTable, believed, weakened

from . import host
from .gpus import GpuEyes
from .kernel_reader import FileReader, KmsgReader

TWICE = 2
"""Missing GPUs count when they are missing twice in a row."""


@dataclass(slots=True)
class Findings:
    """Findings of one look."""

    signs: list[Sign] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    """Part -> why nothing is known of it."""

    @property
    def is_faulty(self) -> bool:
        """True if something of the node calls for its repair."""
        return any(sign.entry.action in NODE_ACTIONS for sign in self.signs)


async def look_once(
    table: SignTable, root: Path, kernel_log: Path | None, gpus: int | None, library: str | None
) -> Findings:
    """The last five minutes of the kernel's log, and one look at GPUs and system."""
    findings, lines = Findings(), list[KernelLine]()
    reader = FileReader(kernel_log, "") if kernel_log else KmsgReader(root, "")
    try:
        if isinstance(reader, KmsgReader):
            reader.open()
        lines = [line for line, _ in reader.read()]
        if isinstance(reader, FileReader) and not reader.is_open:
            findings.unknown["kernel log"] = f"there is no file {kernel_log}"
    except OSError as error:
        findings.unknown["kernel log"] = str(error)
    finally:
        reader.close()
    system = await asyncio.to_thread(host.look, root, tuple(table.counter_limits))
    for finding in table.host_watch().look(system, 0.0):
        findings.signs += table.of_finding(finding)
    sample = await GpuEyes(root, library).look()
    if sample.problem:
        findings.unknown["GPUs"] = sample.problem
    watch, seen = GpuWatch(gpus), []
    for _ in range(TWICE):
        seen = list(watch.look(sample, system.uptime_seconds))
    for line in lines:
        for sign in table.of_line(line):
            sure = believed(sign, line, system, watch.known)
            is_refuted = sure.entry.unless_listed and sample.lists(sure.part)
            findings.signs.append(
                weakened(sure, "NVML lists the GPU as well") if is_refuted else sure
            )
    findings.signs += [sign for gpu_finding in seen for sign in table.of_finding(gpu_finding)]
    return findings
