"""What the tests of the node daemon share."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvml_library import build


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that says of GPUs what the file of NVML_FAKE says."""
    library = build(tmp_path_factory.mktemp("nvml"))
    if library is None:
        pytest.skip("no gcc, which compiles the library that stands for NVML")
    return library


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with what the GPUs are like."""
    file = tmp_path / "gpus.txt"
    monkeypatch.setenv("NVML_FAKE", str(file))
    return file
