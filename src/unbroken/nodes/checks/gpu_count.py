"""Number of GPUs that NVIDIA's management library shows."""

from __future__ import annotations

import ctypes

from . import tools
from .findings import Finding, Settings, skipped, unknown

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


def without_gpus(test: str, why: str, settings: Settings) -> Finding:
    """The result of a test of GPUs where `nvml_count` gave no number."""
    if settings.gpus:
        return unknown(test, f"{why}; {settings.gpus} should be there")
    return (skipped if why == NO_DRIVER else unknown)(test, why)


def gpu_program(test: str, program: str, settings: Settings) -> str | Finding:
    """The path of a program that a test of GPUs needs, or the result of the test without it."""
    count = nvml_count()
    if isinstance(count, str):
        return without_gpus(test, count, settings)
    return tools.find(program) or unknown(test, f"{program} is not installed here")
