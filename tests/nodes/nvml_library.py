"""A library that stands for NVML, compiled from C: real calls, real structures, no GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")


def build(folder: Path) -> Path | None:
    """Compile it; None where there is no gcc."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "libnvidia-ml.so.1"
    flags = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1"]
    subprocess.run([compiler, *flags, "-o", library, SOURCE], check=True, capture_output=True)
    return library
