"""GPUs: their number, products whose every bit is known, and how fast memory and matrix units are.

The matrices hold -1, 0 and 1, and consist of equal tiles, a power of two of them. So the product is
exact in every type and in every order of summing. It is compared bit for bit with one tile that the
processor computed in integers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.core.nodes.checks.plan import GPU_PRODUCT
from unbroken.kube.clock import monotonic
from unbroken.spec.nodes.kinds import Outcome

from . import tools
from .findings import CheckSettings, Finding, Test, failed, passed, skipped, unknown

if TYPE_CHECKING:
    import torch


LIBRARY = "libnvidia-ml.so.1"
DRIVER_NOT_LOADED = 9
"""nvml.h, NVML_ERROR_DRIVER_NOT_LOADED."""

NO_DRIVER = "no NVIDIA driver is installed here"


def nvml_count() -> int | str:
    """The number, or why nothing can be said."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return NO_DRIVER
    code = library.nvmlInit_v2()
    if code == DRIVER_NOT_LOADED:
        return "the NVIDIA driver is not loaded"
    if code:
        return f"NVML does not start: error {code}"
    try:
        count = ctypes.c_uint()
        code = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return f"NVML does not say: error {code}" if code else count.value
    finally:
        library.nvmlShutdown()


def without_gpus(test: str, why: str, settings: CheckSettings) -> Finding:
    """The result of a test of GPUs where `nvml_count` gave no number."""
    if settings.gpus:
        return unknown(test, f"{why}; {settings.gpus} should be there")
    return (skipped if why == NO_DRIVER else unknown)(test, why)


def gpu_program(test: str, program: str, settings: CheckSettings) -> str | Finding:
    """The path of a program that a test of GPUs needs, or the result of the test without it."""
    count = nvml_count()
    if isinstance(count, str):
        return without_gpus(test, count, settings)
    return tools.find(program) or unknown(test, f"{program} is not installed here")


TILE = 256
AMD = Path("/dev/kfd")
"""There where AMD's driver is: torch says "cuda" of its GPUs too."""
DTYPES = ("float64", "float32", "bfloat16", "float16")
SIZE, SIMULATED_SIZE = 8192, 512
COPY_BYTES = 2**30
COPIES = 16
SLOW_SHARE = 0.5
"""Share of the median of the machine's GPUs: a GPU below it is far from its equals (judgement)."""
BROKEN = ("uncorrectable ecc", "unspecified launch failure", "hardware", "gpu is lost", "nvlink")
"""Errors of the CUDA runtime where the device is at fault (CUDA runtime API, cudaError); all other
errors are of the software or of another user of the GPU."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or what plays it."""

    number: int
    place: str
    """The device, as torch names it."""
    size: int
    """Size of the matrices."""

    @property
    def is_real(self) -> bool:
        """Not played by the processor."""
        return self.place != "cpu"


def devices(settings: CheckSettings) -> list[Device] | str:
    """All there are, or why nothing can be said."""
    played = settings.plants.number("simulated-gpus")
    why = nvml_count()
    if isinstance(why, str) and not AMD.exists() and not played:
        # Without a driver torch needs not be loaded, which takes seconds.
        return why
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {error}"
    if torch.cuda.is_available():
        return [Device(n, f"cuda:{n}", SIZE) for n in range(torch.cuda.device_count())]
    if played:
        return [Device(n, "cpu", SIMULATED_SIZE) for n in range(played)]
    return "torch sees no GPU"


def products(settings: CheckSettings) -> Iterator[Finding]:
    """Each GPU multiplies in several types until the time is over."""
    result = devices(settings)
    if isinstance(result, str):
        yield without_gpus(GPU_PRODUCT, result, settings)
        return
    speeds = {}
    for device in result:
        test = f"gpu{device.number}-product"
        try:
            speed, wrong = _multiply(device, settings)
        except RuntimeError as error:
            yield _broken(test, error)
            continue
        if wrong:
            yield failed(test, wrong)
            continue
        speeds[device.number] = speed
        played = "" if device.is_real else "played by the processor"
        yield passed(test, played, round(speed, 1), "TFLOP/s")
    if all(device.is_real for device in result):
        yield from _outliers("gpu{}-speed", speeds, "TFLOP/s")


def is_hardware(error: str) -> bool:
    """True for an error of the CUDA runtime where the device is at fault."""
    return any(sign in error.lower() for sign in BROKEN)


def _broken(test: str, error: RuntimeError) -> Finding:
    text = str(error).splitlines()[0]
    if is_hardware(text):
        return failed(test, f"the GPU failed: {text}")
    return unknown(test, text)


def _multiply(device: Device, settings: CheckSettings) -> tuple[float, str]:
    """The best TFLOP/s of bfloat16, and what was wrong."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    repeats = device.size // TILE
    generator = torch.Generator().manual_seed(device.number)
    tiles = [torch.randint(-1, 2, (TILE, TILE), generator=generator) for _ in range(2)]
    wanted = (tiles[0] @ tiles[1]) * repeats
    is_planted = settings.plants.text("wrong-product") == f"gpu{device.number}"
    best, turns, end = 0.0, 0, monotonic() + settings.seconds
    while turns < len(DTYPES) or monotonic() < end:
        name = DTYPES[turns % len(DTYPES)]
        dtype = getattr(torch, name)
        a, b = (tile.to(device.place, dtype).repeat(repeats, repeats) for tile in tiles)
        _wait(device)
        began = monotonic()
        c = a @ b
        _wait(device)
        taken = monotonic() - began
        if is_planted and turns == 0:
            c[TILE + 1, 2] += repeats
        wrong = _compare(c, wanted.to(device.place, dtype), name)
        if wrong:
            return best, wrong
        if name == "bfloat16":
            best = max(best, 2.0 * device.size**3 / taken / 1e12)
        turns += 1
    return best, ""


def _compare(c: torch.Tensor, tile: torch.Tensor, name: str) -> str:
    """Differences from the tile, in words; empty: none.  c: [n, n], tile: [TILE, TILE]."""
    n = c.shape[0] // TILE
    differs = c.view(n, TILE, n, TILE) != tile.view(1, TILE, 1, TILE)
    count = int(differs.sum())
    if not count:
        return ""
    row, column = divmod(int(differs.reshape(-1).nonzero()[0]), c.shape[1])
    got, want = float(c[row, column]), float(tile[row % TILE, column % TILE])
    place = f"row {row}, column {column}: {got:g} instead of {want:g}"
    return f"{count} of {c.numel()} numbers of a {name} product are wrong, first {place}"


def _wait(device: Device) -> None:
    import torch

    if device.is_real:
        torch.cuda.synchronize(device.number)


def copies(settings: CheckSettings) -> Iterator[Finding]:
    """Each GPU's memory is copied within it, and what arrives compared."""
    result = devices(settings)
    if isinstance(result, str) or not all(device.is_real for device in result):
        why = result if isinstance(result, str) else "a played GPU has no memory of its own"
        yield without_gpus("gpu-memory", why, settings)
        return
    speeds = {}
    for device in result:
        test = f"gpu{device.number}-memory"
        try:
            speed, wrong = _copy(device)
        except RuntimeError as error:
            yield _broken(test, error)
            continue
        if wrong:
            yield failed(test, f"{wrong} of {COPY_BYTES // 8} words were not what was copied")
            continue
        speeds[device.number] = speed
        yield passed(test, measured=round(speed, 1), unit="GB/s")
    yield from _outliers("gpu{}-memory-bandwidth", speeds, "GB/s")


def _copy(device: Device) -> tuple[float, int]:
    import torch

    item = torch.arange(COPY_BYTES // 8, dtype=torch.int64, device=device.place)
    other, best = torch.empty_like(item), 0.0
    for _ in range(COPIES):
        _wait(device)
        began = monotonic()
        other.copy_(item)
        _wait(device)
        best = max(best, 2 * COPY_BYTES / (monotonic() - began) / 1e9)
        item, other = other, item
    wanted = torch.arange(COPY_BYTES // 8, dtype=torch.int64, device=device.place)
    return best, int((item != wanted).sum())


def _outliers(name: str, speeds: dict[int, float], unit: str) -> Iterator[Finding]:
    """GPUs that are far slower than their equals; nothing of fewer than three."""
    if len(speeds) < 3:
        return
    limit = sorted(speeds.values())[len(speeds) // 2] * SLOW_SHARE
    for number, speed in speeds.items():
        if speed < limit:
            text = "far slower than the others of this machine: look for throttling"
            test, measured = name.format(number), round(speed, 1)
            yield Finding(test, Outcome.FAIL, text, measured, round(limit, 1), unit)


TESTS = (Test(GPU_PRODUCT, products, 600.0), Test("gpu-memory", copies, 120.0))
