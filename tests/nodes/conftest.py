"""Fixtures of the tests of the node daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.nvml_library import build


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a library that reports the GPUs in the file NVML_FAKE."""
    library = build(tmp_path_factory.mktemp("nvml"))
    if library is None:
        pytest.skip("no gcc, which compiles the library that stands for NVML")
    return library


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the file with the state of the GPUs."""
    file = tmp_path / "gpus.txt"
    monkeypatch.setenv("NVML_FAKE", str(file))
    return file
