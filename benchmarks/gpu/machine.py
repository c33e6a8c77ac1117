"""The machine that is measured, and the outcome of a measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

QUESTION = """
import json, torch
from torch import distributed as dist
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
free = [torch.cuda.mem_get_info(one)[0] for one in range(gpus)]
nccl = dist.is_available() and dist.is_nccl_available()
print(json.dumps({
    "gpus": [torch.cuda.get_device_name(one) for one in range(gpus)],
    "gpu_free_bytes": min(free, default=0),
    "torch": torch.__version__, "cuda": torch.version.cuda or "",
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus and nccl else "",
}))
"""
RANKS_MAX = 8


@dataclass(frozen=True)
class Machine:
    """The GPUs of the machine, and how ranks share them."""

    device: str
    """`cuda` or `cpu`."""
    gpus: tuple[str, ...] = ()
    gpu_free_bytes: int = 0
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    host_free_bytes: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks: one for each GPU, at least two where one dies."""
        return min(max(2, len(self.gpus)), RANKS_MAX)

    @property
    def backend(self) -> str:
        """Backend of torch.distributed; NCCL refuses two ranks on one GPU."""
        return "nccl" if len(self.gpus) >= 2 and self.nccl else "gloo"

    @property
    def why_gloo(self) -> str:
        """Reason for gloo; empty with NCCL."""
        if self.backend == "nccl":
            return ""
        return f"{len(self.gpus)} GPU: NCCL refuses 2 ranks on one" if self.gpus else "no GPU"


@dataclass
class Outcome:
    """Outcome of one part of the measurement."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Errors that were found, in the machine or in unbroken."""
    skipped: str = ""
    """Reason why the part did not run."""

    def row(self) -> str:
        """Return the outcome as a row of the table."""
        if self.skipped:
            return f"{self.name:24} not run: {self.skipped}"
        told = "  ".join(f"{name}={_text(value)}" for name, value in self.figures.items())
        wrong = "".join(f"\n{'':24} WRONG: {one}" for one in self.problems)
        return f"{self.name:24} {told}{wrong}"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def found(device: str) -> Machine:
    """Describe the machine's GPUs.

    A process of its own asks CUDA, so that this process has no CUDA context.
    """
    meminfo = dict(one.split(":", 1) for one in Path("/proc/meminfo").read_text().splitlines())
    host = int(meminfo["MemAvailable"].split()[0]) * 1024
    if device == "cpu":
        return Machine(device, torch=version("torch"), host_free_bytes=host)
    asked = subprocess.run(
        [sys.executable, "-c", QUESTION], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or ["it was killed"]
        raise SystemExit(f"torch cannot be asked for GPUs: {lines[-1]}")
    told = json.loads(asked.stdout)
    if not told["gpus"]:
        raise SystemExit(f"torch {told['torch']} sees no GPU (--device cpu tests this program)")
    return Machine(device, tuple(told.pop("gpus")), host_free_bytes=host, **told)


def write(folder: Path, machine: Machine, outcomes: Sequence[Outcome]) -> None:
    """Write the outcomes as JSON and as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"machine": asdict(machine), "parts": [asdict(one) for one in outcomes]}
    (folder / "gpu.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "gpu.txt").write_text(table(machine, outcomes))


def table(machine: Machine, outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table for people."""
    where = f"{len(machine.gpus)} x {machine.gpus[0]}" if machine.gpus else "CPU"
    head = f"{where}, torch {machine.torch}, CUDA {machine.cuda or '-'}, NCCL {machine.nccl or '-'}"
    return "\n".join([head, f"{os.cpu_count()} cores", *(one.row() for one in outcomes)]) + "\n"
