"""Packages of others in a folder of their own, for the PYTHONPATH of a program."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path


class NotInstalledError(Exception):
    """The packages cannot be installed here; the text says why."""


def installed(name: str, *packages: str) -> Path:
    """Return the folder that holds exactly these packages; the first that asks installs them."""
    folder = Path(tempfile.gettempdir()) / f"unbroken-{name}"
    folder.mkdir(exist_ok=True)
    target = folder / "packages"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
            done = subprocess.run(
                [*pip, "--upgrade", "--target", str(target), *packages],
                capture_output=True,
                text=True,
                env=dict(os.environ),
            )
            if done.returncode != 0:
                last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                raise NotInstalledError(f"{' '.join(packages)}: {' '.join(last)}")
            (folder / "done").touch()
    return target
