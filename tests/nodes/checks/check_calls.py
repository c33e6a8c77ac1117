"""Calling the tests of a machine as a pod does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

CHECKS = [sys.executable, "-m", "unbroken.nodes.checks"]


def call(directory: Path, *arguments: str, plant: str = "") -> list[dict[str, Any]]:
    """The results of a run that ends well; with short tests over little memory."""
    done = subprocess.run(
        [*CHECKS, *arguments, "--seconds", "0.2", "--json", "--directory", str(directory)],
        env=os.environ | {"UNBROKEN_CHECK_PLANT": plant},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return [msgspec.json.decode(line) for line in done.stdout.splitlines()]


def failures(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tests that found a fault, by name."""
    return {one["test"]: one for one in results if one["outcome"] == "fail"}
