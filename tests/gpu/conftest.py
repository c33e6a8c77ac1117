"""Skips of tests that need a GPU on machines without one, before torch is imported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


def gpus() -> int:
    """Count the GPUs by the device files of NVIDIA's driver."""
    return len(
        [one for one in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", one.name)]
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip by the marker `gpus(n)`; the default is one GPU."""
    if Path(__file__).parent not in item.path.parents:
        return
    marker = item.get_closest_marker("gpus")
    needed = marker.args[0] if marker else 1
    if gpus() < needed:
        pytest.skip(f"needs {needed} GPU(s) of NVIDIA; here are {gpus()}")
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < needed:
        pytest.skip(f"needs {needed} GPU(s); torch {torch.__version__} sees {seen}")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "gpus(n): needs so many GPUs")


@pytest.fixture
def torch() -> Any:
    """Import torch only for tests that use it."""
    import torch

    return torch
