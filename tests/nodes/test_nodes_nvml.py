"""Looks at GPUs through a shared library with NVML's functions, each in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import unbroken.nodes.gpus
from unbroken.core.nodes.signals import GpuReading, GpuSample
from unbroken.nodes.gpus import GpuEyes

pytestmark = pytest.mark.slow


def look(library: Path | None, root: Path = Path("/")) -> GpuSample:
    async def ask() -> GpuSample:
        return await GpuEyes(root, None if library is None else str(library)).look()

    return asyncio.run(ask())


def test_every_value_comes_from_its_function(nvml: Path, gpus: Path) -> None:
    gpus.write_text(
        "gpu 00000000:3B:00.0 ecc=3 sram=1 pending=1 failed=1 links=4 nvlink_errors=9 "
        "slowdown=64 recovery=2\ngpu 00000000:5E:00.0\n"
    )
    assert look(nvml) == GpuSample(
        (
            GpuReading(
                0,
                "00000000:3B:00.0",
                ecc_uncorrected=3,
                is_sram_over=True,
                is_remap_pending=True,
                is_remap_failed=True,
                nvlink_errors=9,
                links_up=(0, 1, 2, 3),
                slowdown=64,
                recovery=2,
            ),
            GpuReading(
                1,
                "00000000:5E:00.0",
                is_sram_over=False,
                is_remap_pending=False,
                is_remap_failed=False,
                slowdown=0,
            ),
        )
    )


@pytest.mark.parametrize("code", [15, 16])
def test_a_gpu_that_is_lost_or_needs_a_reset_is_told(nvml: Path, gpus: Path, code: int) -> None:
    gpus.write_text(f"gpu 00000000:3B:00.0 error={code}\n")
    assert look(nvml).gpus == (GpuReading(0, "00000000:3B:00.0", error=code),)


def test_another_error_of_a_function_is_no_fault(nvml: Path, gpus: Path) -> None:
    gpus.write_text("gpu 00000000:3B:00.0 error=999\n")
    (found,) = look(nvml).gpus
    assert (found.error, found.is_remap_pending) == (0, None)


def test_a_node_without_gpus_has_none(nvml: Path, gpus: Path) -> None:
    gpus.write_text("")
    assert look(nvml) == GpuSample()


def test_whatever_is_wrong_with_nvml_is_unknown(
    nvml: Path, gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "NVML cannot be used" in look(nvml).problem  # no driver
    gpus.write_text("fail 18\n")
    assert "NVML cannot be used" in look(nvml).problem
    gpus.write_text("crash\n")
    assert "ended with -11" in look(nvml).problem
    assert look(tmp_path / "no.so").problem == f"there is no {tmp_path / 'no.so'}"
    (tmp_path / "text.so").write_text("no library")
    assert "NVML cannot be used" in look(tmp_path / "text.so").problem
    assert look(None, tmp_path).problem == "there is no NVIDIA driver"
    monkeypatch.setattr(unbroken.nodes.gpus, "LOOK_SECONDS", 1.0)
    gpus.write_text("hang\n")
    assert "does not answer within 1 s" in look(nvml).problem


def test_a_container_finds_the_library_of_its_node(nvml: Path, gpus: Path, tmp_path: Path) -> None:
    gpus.write_text("gpu 00000000:3B:00.0\n")
    folder = tmp_path / "usr/lib64"
    folder.mkdir(parents=True)
    (folder / "libnvidia-ml.so.1").symlink_to(nvml)
    assert look(None, tmp_path).problem == "there is no NVIDIA driver"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert len(look(None, tmp_path).gpus) == 1
