"""Number of GPUs that NVIDIA's management library shows."""

from __future__ import annotations

import ctypes

LIBRARY = "libnvidia-ml.so.1"
DRIVER_NOT_LOADED = 9
"""nvml.h, NVML_ERROR_DRIVER_NOT_LOADED."""


def nvml_count() -> int | str:
    """The number, or why nothing can be said."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return "no NVIDIA driver is installed here"
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
