"""Looks at GPUs through a shared library with NVML's functions, each in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import unbroken.nodes.gpus
from unbroken.core.nodes.signals import GpuReading, GpuSample
from unbroken.nodes.gpu_metrics import FIELDS
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
    assert look(nvml).gpus == (
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


def test_values_of_metrics_come_from_their_functions_in_dcgms_units(nvml: Path, gpus: Path) -> None:
    gpus.write_text(
        "gpu 00000000:3B:00.0 use=93 memory=70000 temperature=61 watts=655 ecc=3 pending=1 "
        "links=2 nvlink_errors=9\ngpu 00000000:5E:00.0\ngpu 00000000:86:00.0 error=15\n"
    )
    full, bare = look(nvml).shown  # the third one is lost
    assert (full.index, full.pci, full.model) == (0, "00000000:3B:00.0", "NVIDIA H100 80GB HBM3")
    assert full.uuid == "GPU-00000000:3B:00.0"
    assert full.values == {
        "DCGM_FI_DEV_GPU_UTIL": 93,
        "DCGM_FI_DEV_MEM_COPY_UTIL": 46,
        "DCGM_FI_DEV_FB_TOTAL": 81559,
        "DCGM_FI_DEV_FB_USED": 70000,
        "DCGM_FI_DEV_FB_FREE": 11000,
        "DCGM_FI_DEV_FB_RESERVED": 559,
        "DCGM_FI_DEV_SM_CLOCK": 1980,
        "DCGM_FI_DEV_MEM_CLOCK": 2619,
        "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 0,
        "DCGM_FI_DEV_GPU_TEMP": 61,
        "DCGM_FI_DEV_MEMORY_TEMP": 61,
        "DCGM_FI_DEV_POWER_USAGE": 655,
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": 7,
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 3,
        "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": 7,
        "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": 3,
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": 0,
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 0,
        "DCGM_FI_DEV_ROW_REMAP_PENDING": 1,
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0,
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 9,
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": 0,
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 0,
        "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": 0,
    }
    assert "DCGM_FI_DEV_GPU_UTIL" not in bare.values
    assert full.values.keys() <= FIELDS.keys()


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
