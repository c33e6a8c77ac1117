"""The tests of one machine find what is planted and name it, and find nothing otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.apiservers import free_port
from tests.nodes.checks.check_calls import CHECKS, call, failures
from tests.watching import PATIENCE_SECONDS
from unbroken.errors import SpecError
from unbroken.nodes.checks import gpu
from unbroken.nodes.checks.basic import meminfo
from unbroken.nodes.checks.dcgm import read_diagnosis
from unbroken.nodes.checks.driver import run_tests
from unbroken.nodes.checks.findings import CheckSettings, read_plants
from unbroken.nodes.checks.sides import Stopwatch, queued_seconds
from unbroken.spec.nodes.kinds import CheckKind, Outcome

pytestmark = pytest.mark.slow


def test_a_machine_that_is_well_fails_no_test(tmp_path: Path) -> None:
    kinds = ("Basic", "InstanceStress", "MultiNodeTrainingValidation")
    results = call(tmp_path, *kinds)
    assert failures(results) == {}
    by_test = {one["test"]: one for one in results}
    assert {one["kind"] for one in results} == set(kinds)
    for test in ("processors", "loopback", "cpu-arithmetic", "memory-pattern", "disk-read-back"):
        assert by_test[test]["outcome"] == "pass", by_test[test]
    assert by_test["disk-write"]["expected"] == 25
    assert "planted" not in json.dumps(results)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("plant", "run", "test", "said"),
    [
        ("memory-flip:0x12345", "memory-pattern", "memory-pattern", "offset 0x12345: "),
        ("slow-disk:20", "disk-read-back", "disk-write", "far too slow"),
        ("disk-flip:3", "disk-read-back", "disk-read-back", "first 3"),
    ],
)
def test_what_is_planted_is_found(
    tmp_path: Path, plant: str, run: str, test: str, said: str
) -> None:
    plants = read_plants(plant)
    settings = CheckSettings(seconds=0.2, directory=tmp_path, doubt_seconds=0.5, plants=plants)
    found = {one.test: one for one in run_tests([CheckKind.STRESS], settings, only=[run])}
    assert found[test].outcome is Outcome.FAIL
    assert said in found[test].message
    assert f"planted: UNBROKEN_CHECK_PLANT={plant}" in found[test].message


def test_the_processor_that_computes_wrongly_is_named(tmp_path: Path) -> None:
    number = max(os.sched_getaffinity(0))
    arguments = ("InstanceStress", "--only", "cpu-arithmetic")
    results = call(tmp_path, *arguments, plant=f"wrong-core:{number}")
    wrong = failures(results)
    assert set(wrong) == {"cpu-arithmetic"}
    assert wrong["cpu-arithmetic"]["message"].startswith(f"processor {number} computes wrongly")


def test_the_gpu_that_multiplies_wrongly_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plant = "simulated-gpus:3,wrong-product:gpu1"
    wrong = failures(call(tmp_path, "InstanceStress", "--only", "gpu-product", plant=plant))
    assert set(wrong) == {"gpu1-product"}
    assert "1 of 262144 numbers of a float64 product" in wrong["gpu1-product"]["message"]


def test_a_test_that_is_killed_or_hangs_is_no_fault_and_stops_no_other(tmp_path: Path) -> None:
    settings = CheckSettings(seconds=0.1, directory=tmp_path, plants=read_plants("crash:memory"))
    only = ["memory", "loopback"]
    found = {one.test: one for one in run_tests([CheckKind.BASIC], settings, only=only)}
    assert found["memory"].outcome is Outcome.UNKNOWN
    assert "killed by SIGKILL" in found["memory"].message
    assert found["loopback"].outcome is Outcome.PASS


def test_a_missing_tool_is_unknown(tmp_path: Path) -> None:
    if not isinstance(gpu.nvml_count(), str):
        pytest.skip("this machine has NVIDIA's driver")
    found = {one["test"]: one for one in call(tmp_path, "Basic", "--only", "gpus", "--gpus", "8")}
    assert found["gpus"]["outcome"] == "unknown"
    assert "8 should be there" in found["gpus"]["message"]


def test_a_disk_that_is_not_there_is_unknown(tmp_path: Path) -> None:
    only = ("--only", "disk", "--only", "disk-read-back")
    results = call(tmp_path / "absent", "Basic", "InstanceStress", *only)
    found = {one["test"]: one for one in results}
    assert found["disk-writable"]["outcome"] == "unknown"
    assert found["disk-read-back"]["outcome"] == "unknown"


def test_two_machines_sum_and_a_wrong_sum_is_found(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    address = f"127.91.7.3:{free_port()}"
    arguments = ["InstanceConnectivity", "--meet", address, "--json", "--seconds", "0.2"]
    with subprocess.Popen(
        [*CHECKS, *arguments, "--rank", "0", "--peer", "b"], stdout=subprocess.PIPE, text=True
    ) as first:
        other = call(tmp_path, *arguments[:3], "--rank", "1", "--peer", "a", plant="wrong-sum:1")
        said = [
            json.loads(line) for line in first.communicate(timeout=PATIENCE_SECONDS)[0].splitlines()
        ]
    for results, peer in ((said, "b"), (other, "a")):
        assert set(failures(results)) == {"all-reduce"}
        by_test = {one["test"]: one for one in results}
        assert by_test["all-reduce"]["peer"] == peer
        assert by_test["all-reduce-bandwidth"]["measured"] > 0
        assert by_test["all-reduce-latency"]["unit"] == "us"


def test_training_gives_other_bits_when_one_weight_is_off(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    right = call(tmp_path, "MultiNodeTrainingValidation")[0]
    wrong = call(tmp_path, "MultiNodeTrainingValidation", plant="wrong-weights:30")[0]
    assert right["message"].split()[:2] != wrong["message"].split()[:2]
    # Each was the same twice, on its machine.
    assert right["outcome"] == wrong["outcome"] == "pass"
    assert right["measured"] >= 2


def test_dcgm_is_read_tolerantly() -> None:
    said = b"""Successfully ran diagnostic
    {"DCGM Diagnostic": {"test_categories": [
      {"category": "Deployment", "tests": [{"name": "Software", "results": [{"status": "Pass"}]}]},
      {"category": "Hardware", "tests": [{"name": "GPU Memory", "results": [
        {"entity_id": 0, "status": "Pass"},
        {"entity_id": 3, "status": "Fail", "warnings": [{"warning": "double bit error"}]}]},
        {"name": "Pulse Test", "results": [{"gpu_id": "0", "status": "Skip"}]}]}]}}"""
    found = {one.test: one for one in read_diagnosis(said)}
    assert found["dcgm-software"].outcome is Outcome.PASS
    assert found["dcgm-gpu-memory"].outcome is Outcome.FAIL
    assert found["dcgm-gpu-memory"].message == "GPU 3: double bit error"
    assert found["dcgm-pulse-test"].outcome is Outcome.SKIPPED


@pytest.mark.parametrize("said", [b"", b"Error: unable to connect", b"{}", b"[1]", b"{broken"])
def test_what_is_no_diagnosis_finds_nothing(said: bytes) -> None:
    assert list(read_diagnosis(said)) == []


@pytest.mark.parametrize("text", ["memory-flop:1", "slow-disk:fast", "slow-disk"])
def test_a_plant_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="UNBROKEN_CHECK_PLANT"):
        read_plants(text)


def test_memory_that_the_kernel_took_out_of_use_is_read(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       16 kB\nHardwareCorrupted:     4 kB\nHugePages_Total:  3\n")
    expected = {"MemTotal": 16384, "HardwareCorrupted": 4096, "HugePages_Total": 3}
    assert meminfo(file) == expected
    assert meminfo(tmp_path / "absent") == {}


def test_a_stopwatch_counts_sleep_and_not_the_queue_for_a_processor() -> None:
    """Fill one processor with processes, so that each waits; the wait must not count as work."""
    processor = min(os.sched_getaffinity(0))
    burn = f"import os; os.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(3)]
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {processor})
        before, queued, watch = time.monotonic(), queued_seconds(), Stopwatch()
        while (waited := queued_seconds() - queued) < 0.2:
            sum(range(1000))
        spent = time.monotonic() - before
        assert watch.seconds() < spent - waited / 2
        watch = Stopwatch()
        time.sleep(0.2)
        assert watch.seconds() > 0.1
    finally:
        os.sched_setaffinity(0, allowed)
        for one in others:
            one.kill()
            one.wait()
