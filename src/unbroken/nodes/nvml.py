"""One look at the GPUs through NVML: run as a process of its own, it prints a JSON object and ends.

It is a process of its own, because a driver that hangs or crashes must not take the daemon along.
Also, a GPU cannot be reset while a program holds it. Values that NVML does not offer are null.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pynvml as nvml  # type: ignore[import-untyped]

from unbroken.core.nodes.signals import IS_LOST, NEEDS_RESET, GpuReading, GpuSample

T = TypeVar("T")
NO_GPUS = 1
"""NVML_INIT_FLAG_NO_GPUS (nvml.h): a node without any is no failure."""
LINK_COUNTERS = (
    nvml.NVML_NVLINK_ERROR_DL_REPLAY,
    nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    nvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
)
BROKEN = (IS_LOST, NEEDS_RESET)


def look(library: str) -> GpuSample:
    """Readings of NVML for every GPU; `library` empty: the driver's."""
    try:
        if library:
            nvml.nvmlLib = ctypes.CDLL(library)
        nvml.nvmlInitWithFlags(NO_GPUS)
    except (nvml.NVMLError, OSError) as error:
        return GpuSample(problem=f"NVML cannot be used: {error}")
    try:
        count: int = nvml.nvmlDeviceGetCount()
        return GpuSample(tuple(_gpu(index) for index in range(count)))
    except nvml.NVMLError as error:
        return GpuSample(problem=f"NVML does not count the GPUs: {error}")
    finally:
        _asked(nvml.nvmlShutdown)


def _gpu(index: int) -> GpuReading:
    pci = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        return _reading(index, pci, handle)
    except nvml.NVMLError as error:
        return GpuReading(index, pci, error=error.value if error.value in BROKEN else 0)


def _reading(index: int, pci: str, handle: Any) -> GpuReading:
    rows = _asked(nvml.nvmlDeviceGetRemappedRows, handle)
    links = _links(handle)
    return GpuReading(
        index,
        pci,
        ecc_uncorrected=_asked(
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        is_sram_over=_sram(handle),
        is_remap_pending=None if rows is None else bool(rows[2]),
        is_remap_failed=None if rows is None else bool(rows[3]),
        nvlink_errors=_link_errors(handle, links),
        links_up=links,
        slowdown=_asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        recovery=_recovery(handle),
    )


def _asked(ask: Callable[..., T], *arguments: Any) -> T | None:
    """The answer; None where the GPU or the driver has none.  One that is lost raises."""
    try:
        return ask(*arguments)
    except nvml.NVMLError as error:
        if error.value in BROKEN:
            raise
        return None


def _sram(handle: Any) -> bool | None:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    answer = _asked(nvml.nvmlDeviceGetSramEccErrorStatus, handle, ctypes.byref(status))
    return None if answer is None else bool(status.bThresholdExceeded)


def _links(handle: Any) -> tuple[int, ...] | None:
    up, is_known = [], False
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _asked(nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break
        is_known = True
        if state:
            up.append(link)
    return tuple(up) if is_known else None


def _link_errors(handle: Any, links: tuple[int, ...] | None) -> int | None:
    counts = [
        _asked(nvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter)
        for link in links or ()
        for counter in LINK_COUNTERS
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _recovery(handle: Any) -> int | None:
    """The driver's own verdict; drivers before 570 have none."""
    field = nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
    values = _asked(nvml.nvmlDeviceGetFieldValues, handle, [field])
    if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


if __name__ == "__main__":
    sample = look(sys.argv[1] if len(sys.argv) > 1 else "")
    sys.stdout.buffer.write(msgspec.json.encode(sample))
