"""NVLink of all GPUs: `nvidia-smi nvlink -s`, read tolerantly.

A GPU that has fewer active links than its equals is at fault. Cards with bridges have links only in
pairs, so two GPUs without any link are no fault.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unbroken.spec.nodes.kinds import Outcome

from . import tools
from .findings import CheckSettings, Finding, Test, passed, skipped, unknown
from .gpu import gpu_program

SECONDS = 60.0
GPUS_MAX, LINKS_MAX = 64, 64
LEAST = 3
"""GPUs of one model that must be there before one of them is at fault."""
GPU = re.compile(r"GPU (\d{1,3}): ([^(]*)")
LINK = re.compile(r"\s*Link (\d{1,3}): (?:(\d{1,6}(?:\.\d{1,9})?) GB/s|<?inactive>?)\s*$", re.I)
NONE_ACTIVE = "all links are inactive"


@dataclass(slots=True)
class Links:
    """The links of one GPU."""

    number: int
    model: str
    speeds: dict[int, float] = field(default_factory=dict)
    """GB/s by number of the link; 0: it is inactive."""
    is_silent: bool = False
    """True if the driver says only that no link is active."""

    @property
    def active(self) -> dict[int, float]:
        """The links that work."""
        return {number: speed for number, speed in self.speeds.items() if speed}

    @property
    def has_links(self) -> bool:
        """False for a GPU that has no NVLink at all."""
        return bool(self.speeds) or self.is_silent


def read_links(text: str) -> list[Links]:
    """The links of each GPU; lines of other forms are left out."""
    gpus: list[Links] = []
    for line in text.splitlines():
        if (gpu := GPU.match(line)) and len(gpus) < GPUS_MAX:
            gpus.append(Links(int(gpu[1]), gpu[2].strip()[:80]))
        elif gpus and (link := LINK.match(line)) and int(link[1]) < LINKS_MAX:
            gpus[-1].speeds[int(link[1])] = float(link[2] or 0.0)
        if gpus and NONE_ACTIVE in line.lower():
            gpus[-1].is_silent = True
    return gpus


def links(settings: CheckSettings) -> Iterator[Finding]:
    """Ask the driver, and compare GPUs of one model."""
    program = gpu_program("nvlink", "nvidia-smi", settings)
    if isinstance(program, Finding):
        yield program
        return
    done = tools.run([program, "nvlink", "-s"], SECONDS)
    gpus = read_links(done.text.decode(errors="replace"))
    if not gpus:
        yield unknown("nvlink", f"nvidia-smi {done.why()}")
        return
    yield from judge(gpus)


def judge(gpus: Sequence[Links]) -> Iterator[Finding]:
    """A result for each GPU at fault, else one for all."""
    if not any(gpu.has_links for gpu in gpus):
        yield skipped("nvlink", "these GPUs have no NVLink")
        return
    by_model: dict[str, list[Links]] = {}
    for gpu in gpus:
        by_model.setdefault(gpu.model, []).append(gpu)
    faults = [fault for alike in by_model.values() for fault in _faults(alike)]
    counts = [len(gpu.active) for gpu in gpus]
    if faults:
        yield from faults
    elif not any(counts):
        yield unknown("nvlink", "no link is active: no bridge, or the fabric manager does not run")
    elif min(counts) == 0:
        names = ", ".join(str(gpu.number) for gpu in gpus if not gpu.active)
        yield unknown("nvlink", f"GPUs without an active link: {names}; bridges join only pairs")
    else:
        speeds = sorted({speed for gpu in gpus for speed in gpu.active.values()})
        each = "at " + " or ".join(f"{speed:g}" for speed in speeds[:4]) + " GB/s"
        text = f"{len(gpus)} GPUs, the fewest active links of one, {each}"
        yield passed("nvlink", text, min(counts), "links")


def _faults(alike: Sequence[Links]) -> Iterator[Finding]:
    if len(alike) < LEAST:
        return
    counts = Counter(len(gpu.active) for gpu in alike)
    usual = max(counts, key=lambda count: (counts[count], count))
    speed = _usual_speed(alike)
    for gpu in alike:
        active = len(gpu.active)
        is_odd = active < usual and (active > 0 or counts[usual] == len(alike) - 1)
        if is_odd:
            down = [str(number) for number, each in gpu.speeds.items() if not each]
            text = f"GPU {gpu.number}: fewer links are active than of the others"
            text += f"; inactive: {', '.join(down)}" if down else ""
            yield Finding(f"gpu{gpu.number}-nvlink", Outcome.FAIL, text, active, usual, "links")
        for number, each in gpu.active.items() if counts[usual] * 2 > len(alike) else ():
            if each < speed:
                text = f"GPU {gpu.number}: link {number} is slower than the others"
                name = f"gpu{gpu.number}-nvlink"
                yield Finding(name, Outcome.FAIL, text, each, speed, "GB/s")


def _usual_speed(alike: Sequence[Links]) -> float:
    """The speed of most links; 0: there is none of most."""
    speeds: Mapping[float, int] = Counter(speed for gpu in alike for speed in gpu.active.values())
    if not speeds:
        return 0.0
    most = max(speeds, key=speeds.__getitem__)
    return most if speeds[most] * 2 > sum(speeds.values()) else 0.0


TESTS = (Test("nvlink", links, SECONDS + 30.0),)
