"""One look at the GPUs through NVML: run as a process of its own, it prints a JSON object and ends.

It is a process of its own, because a driver that hangs or crashes must not take the daemon along.
Also, a GPU cannot be reset while a program holds it. Values that NVML does not offer are null.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import msgspec
import pynvml as nvml  # type: ignore[import-untyped]

from unbroken.core.nodes.signals import (
    IS_LOST,
    NEEDS_RESET,
    GpuReading,
    GpuSample,
    GpuValues,
)

T = TypeVar("T")
NO_GPUS = 1
"""NVML_INIT_FLAG_NO_GPUS (nvml.h): a node without any is no failure."""
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
        indices = range(nvml.nvmlDeviceGetCount())
        shown = tuple(one for index in indices for one in _values(index))
        return GpuSample(tuple(map(_gpu, indices)), shown=shown)
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
        nvlink_errors=_link_errors(handle, links, _LINK_ERRORS.values()),
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


def _link_errors(
    handle: Any, links: tuple[int, ...] | None, counters: Collection[int]
) -> int | None:
    counts = [
        _asked(nvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter)
        for link in links or ()
        for counter in counters
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _recovery(handle: Any) -> int | None:
    """The driver's own verdict; drivers before 570 have none."""
    return _field(handle, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)


def _field(handle: Any, field: int) -> int | None:
    """Return a field of an unsigned number."""
    values = _asked(nvml.nvmlDeviceGetFieldValues, handle, [field])
    if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


# --- Values for metrics


def _values(index: int) -> Iterator[GpuValues]:
    """Yield the values of a GPU; nothing if it is lost or needs a reset."""
    with contextlib.suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        about = (
            _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
            _text(_asked(nvml.nvmlDeviceGetUUID, handle) or ""),
            _text(_asked(nvml.nvmlDeviceGetName, handle) or ""),
        )
        yield GpuValues(index, *about, dict(_fields(handle)))


def _fields(handle: Any) -> Iterator[tuple[str, float]]:
    for name, (function, *arguments) in _PLAIN.items():
        value = _asked(function, handle, *arguments)
        if value is not None:
            yield f"DCGM_FI_DEV_{name}", value * _UNITS.get(name, 1)
    use = _asked(nvml.nvmlDeviceGetUtilizationRates, handle)
    if use is not None:
        yield "DCGM_FI_DEV_GPU_UTIL", use.gpu
        yield "DCGM_FI_DEV_MEM_COPY_UTIL", use.memory
    memory = _asked(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if memory is not None:
        for part in ("total", "free", "used", "reserved"):
            yield f"DCGM_FI_DEV_FB_{part.upper()}", getattr(memory, part) / MIB
    rows = _asked(nvml.nvmlDeviceGetRemappedRows, handle)
    for name, count in zip(_ROWS, rows or (), strict=False):
        yield f"DCGM_FI_DEV_{name}", count
    heat = _field(handle, nvml.NVML_FI_DEV_MEMORY_TEMP)
    if heat is not None:
        yield "DCGM_FI_DEV_MEMORY_TEMP", heat
    links = _links(handle)
    for name, counter in _LINK_ERRORS.items():
        count = _link_errors(handle, links, (counter,))
        if count is not None:
            yield f"DCGM_FI_DEV_NVLINK_{name}_ERROR_COUNT_TOTAL", count


MIB = 1 << 20
_CORRECTED, _UNCORRECTED = (
    nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
)
_PLAIN: dict[str, tuple[Any, ...]] = {
    "SM_CLOCK": (nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
    "MEM_CLOCK": (nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
    "GPU_TEMP": (nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
    "POWER_USAGE": (nvml.nvmlDeviceGetPowerUsage,),
    "TOTAL_ENERGY_CONSUMPTION": (nvml.nvmlDeviceGetTotalEnergyConsumption,),
    "PCIE_REPLAY_COUNTER": (nvml.nvmlDeviceGetPcieReplayCounter,),
    "CLOCKS_EVENT_REASONS": (nvml.nvmlDeviceGetCurrentClocksThrottleReasons,),
    "ECC_SBE_VOL_TOTAL": (nvml.nvmlDeviceGetTotalEccErrors, _CORRECTED, nvml.NVML_VOLATILE_ECC),
    "ECC_DBE_VOL_TOTAL": (nvml.nvmlDeviceGetTotalEccErrors, _UNCORRECTED, nvml.NVML_VOLATILE_ECC),
    "ECC_SBE_AGG_TOTAL": (nvml.nvmlDeviceGetTotalEccErrors, _CORRECTED, nvml.NVML_AGGREGATE_ECC),
    "ECC_DBE_AGG_TOTAL": (nvml.nvmlDeviceGetTotalEccErrors, _UNCORRECTED, nvml.NVML_AGGREGATE_ECC),
}
"""Field of DCGM without its prefix -> NVML's function and its arguments after the GPU."""
_UNITS = {"POWER_USAGE": 1e-3}
"""Factor of a field whose unit differs: NVML has milliwatts."""
_ROWS = (
    *("CORRECTABLE_REMAPPED_ROWS", "UNCORRECTABLE_REMAPPED_ROWS"),
    *("ROW_REMAP_PENDING", "ROW_REMAP_FAILURE"),
)
"""Fields in the order of NVML's answer about remapped rows."""
_LINK_ERRORS = {
    "REPLAY": nvml.NVML_NVLINK_ERROR_DL_REPLAY,
    "RECOVERY": nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    "CRC_FLIT": nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    "CRC_DATA": nvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
}


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


if __name__ == "__main__":
    sample = look(sys.argv[1] if len(sys.argv) > 1 else "")
    sys.stdout.buffer.write(msgspec.json.encode(sample))
