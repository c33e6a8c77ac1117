"""Checks of all devices of a machine together: processes with gloo where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.apiservers import free_port
from tests.nodes.checks.check_calls import CHECKS, call, failures
from tests.watching import PATIENCE_SECONDS

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")

INSIDE = ("InstanceStress", "--only", "device-all-reduce")


def without_gpus() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")


def test_all_devices_sum_and_each_meets_each_other(tmp_path: Path) -> None:
    without_gpus()
    results = call(tmp_path, *INSIDE, "--ranks", "3")
    assert failures(results) == {}
    by_test = {one["test"]: one for one in results}
    assert set(by_test) == {"device-all-reduce", "device-bandwidth", "device-links"}
    assert by_test["device-all-reduce"]["message"] == ("gloo, 3 processes, 16 MiB, every sum right")
    assert by_test["device-bandwidth"]["measured"] > 0
    assert by_test["device-bandwidth"]["backend"] == "gloo"
    assert by_test["device-links"]["message"].startswith("the slowest of 3 links is that of")


def test_the_slow_device_is_named(tmp_path: Path) -> None:
    without_gpus()
    results = call(tmp_path, *INSIDE, "--ranks", "4", plant="slow-device:2")
    assert set(failures(results)) == {"device-links"}
    # On a busy processor others may be slow too.
    text = "device 2 is slow with every other device: "
    (found,) = (one for one in results if one["message"].startswith(text))
    assert found["outcome"] == "fail"
    assert found["measured"] < found["expected"]


def test_a_wrong_sum_over_the_devices_is_a_fault(tmp_path: Path) -> None:
    wrong = failures(call(tmp_path, *INSIDE, plant="wrong-sum:1"))
    assert set(wrong) == {"device-all-reduce"}
    assert "1 numbers of a sum over all devices are wrong" in wrong["device-all-reduce"]["message"]


def pair(tmp_path: Path, ranks: tuple[int, int], plant: str = "") -> list[list[dict[str, Any]]]:
    """The results of two machines that meet; the fault is planted on the second."""
    arguments = ["InstanceConnectivity", "--meet", f"127.91.7.4:{free_port()}", "--json"]
    first = [*CHECKS, *arguments, "--seconds", "0.2", "--rank", "0", "--peer", "b"]
    first += ["--ranks", str(ranks[0])]
    with subprocess.Popen(first, stdout=subprocess.PIPE, text=True) as process:
        more = ("--rank", "1", "--peer", "a", "--ranks", str(ranks[1]))
        other = call(tmp_path, *arguments[:3], *more, plant=plant)
        said = process.communicate(timeout=PATIENCE_SECONDS)[0].splitlines()
    return [[json.loads(line) for line in said], other]


def test_two_machines_sum_with_all_devices_whatever_their_numbers(tmp_path: Path) -> None:
    without_gpus()
    for results in pair(tmp_path, (2, 3)):
        assert failures(results) == {}
        by_test = {one["test"]: one for one in results}
        assert by_test["all-reduce"]["message"] == "gloo, 5 processes, 16 MiB, every sum right"
        assert by_test["all-reduce-bandwidth"]["measured"] > 0
        assert by_test["all-reduce-bandwidth"]["backend"] == "gloo"
        assert by_test["device-links"]["message"].startswith("the slowest is device ")


@contextmanager
def one_busy_processor(others: int) -> Iterator[None]:
    """Let this process and what it starts share one processor with others that always compute."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_links_say_for_how_long_no_processor_was_free(tmp_path: Path) -> None:
    without_gpus()
    with one_busy_processor(others=4):
        busy = pair(tmp_path, (2, 2))
    for results in busy:
        shares = {one["test"]: one["measured"] for one in results if one.get("unit") == "%"}
        assert set(shares) == {"all-reduce-bandwidth-queued", "all-reduce-latency-queued"}
        assert 10 < shares["all-reduce-bandwidth-queued"] <= 100
        assert 0 <= shares["all-reduce-latency-queued"] <= 100


def test_the_device_with_the_slow_link_is_named_by_its_node(tmp_path: Path) -> None:
    without_gpus()
    first, second = pair(tmp_path, (3, 3), "slow-device:1")
    assert failures(first) == {}
    wrong = failures(second)
    assert set(wrong) == {"device-links"}
    assert "the link between device 1 and that of a is slow: " in wrong["device-links"]["message"]
    assert wrong["device-links"]["peer"] == "a"
