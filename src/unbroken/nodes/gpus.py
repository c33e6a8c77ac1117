"""Looks at the GPUs, each time in a process of its own (`nvml`)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import msgspec

from unbroken.core.nodes.signals import GpuSample

LOOK_SECONDS = 30.0
"""A look takes a second or two where eight GPUs have to wake up; a driver that needs more hangs."""
REAP_SECONDS = 2.0
MARKS = ("dev/nvidiactl", "proc/driver/nvidia/version")
"""Files of which one exists if the driver is installed."""
LIBRARIES = (
    *("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64"),
    # Drivers that the GPU operator or a cloud has installed in a folder of their own.
    *("run/nvidia/driver/usr/lib/x86_64-linux-gnu", "run/nvidia/driver/usr/lib64"),
    "home/kubernetes/bin/nvidia/lib64",
)
"""Paths of the node's library in a container; it needs the C library alone."""
NAME = "libnvidia-ml.so.1"


class GpuEyes:
    """`library` None: that of the driver, where there is one."""

    def __init__(self, root: Path, library: str | None) -> None:
        self._root = root
        self._library = library
        self._hung: asyncio.subprocess.Process | None = None

    async def look(self) -> GpuSample:
        """Return NVML's readings now; a sample with a problem if there are none."""
        if not self._is_there():
            what = self._library or "NVIDIA driver"
            return GpuSample(problem=f"there is no {what}", has_driver=False)
        if self._hung is not None and self._hung.returncode is None:
            return GpuSample(problem=f"NVML still hangs in process {self._hung.pid}")
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "unbroken.nodes.nvml", self._place()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            return GpuSample(problem=f"no process can be started to look at NVML: {error}")
        return await self._answer(process)

    def _is_there(self) -> bool:
        if self._library is None:
            return any((self._root / mark).exists() for mark in MARKS)
        # A name without a folder is looked for by the loader.
        return "/" not in self._library or Path(self._library).exists()

    def _place(self) -> str:
        """The library; empty: the loader knows."""
        if self._library is not None or self._root == Path("/"):
            return self._library or ""
        result = (self._root / folder / NAME for folder in LIBRARIES)
        return next((str(path) for path in result if path.exists()), "")

    async def _answer(self, process: asyncio.subprocess.Process) -> GpuSample:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                said, wrong = await process.communicate()
        except TimeoutError:
            self._hung = process
            return GpuSample(problem=f"NVML does not answer within {LOOK_SECONDS:g} s")
        finally:
            if process.returncode is None:
                await _end(process)
        return _sample(said, wrong, process.returncode)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill it; one that hangs in the driver ends when the driver lets it."""
    process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REAP_SECONDS):
            await process.wait()


def _sample(said: bytes, wrong: bytes, code: int | None) -> GpuSample:
    try:
        return msgspec.json.decode(said, type=GpuSample)
    except msgspec.DecodeError:
        last = wrong.decode(errors="replace").strip().splitlines()[-1:]
        return GpuSample(problem=f"the look at NVML ended with {code}: {' '.join(last)[:200]}")
