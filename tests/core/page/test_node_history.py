"""The past of a node: the worst GPU, rates of counters, bounded."""

from __future__ import annotations

import math

import pytest

from unbroken.core.page.history import POINTS_MAX
from unbroken.core.page.node_history import (
    CPU_TITLE,
    GPUS_MAX,
    MEMORY_TITLE,
    RECEIVED_TITLE,
    MetricSample,
    NodeHistory,
    gpu_values,
    host_values,
    look,
)


def gpu(number: int, metric: str, value: float, **labels: str) -> MetricSample:
    return MetricSample(
        f"DCGM_FI_DEV_{metric}", {"Hostname": "n", "gpu": str(number), **labels}, value
    )


def machine(busy: float, idle: float, received: float) -> list[MetricSample]:
    return [
        MetricSample("node_cpu_seconds_total", {"cpu": "0", "mode": "user"}, busy),
        MetricSample("node_cpu_seconds_total", {"cpu": "0", "mode": "idle"}, idle),
        MetricSample("node_memory_MemTotal_bytes", {}, 1000.0),
        MetricSample("node_memory_MemAvailable_bytes", {}, 250.0),
        MetricSample("node_network_receive_bytes_total", {"device": "eth0"}, received),
        MetricSample("node_network_receive_bytes_total", {"device": "lo"}, 1e12),
        MetricSample("node_network_transmit_bytes_total", {"device": "eth0"}, 0.0),
    ]


def test_one_hot_gpu_is_visible_among_eight() -> None:
    samples = [gpu(n, "GPU_TEMP", 90.0 if n == 3 else 60.0) for n in range(8)]
    samples += [gpu(n, "GPU_UTIL", 5.0 if n == 3 else 99.0) for n in range(8)]
    samples += [gpu(n, "ECC_DBE_VOL_TOTAL", 1.0) for n in range(8)]
    found = gpu_values(look(0.0, samples).gpus["n"])
    assert found == {
        "hottest GPU, °C": 90.0,
        "least busy GPU, %": 5.0,
        "uncorrected memory errors of all GPUs": 8.0,
    }


def test_gpus_are_in_order_with_their_pods_and_bounded() -> None:
    samples = [gpu(n, "GPU_TEMP", 1.0, namespace="a", pod="p") for n in reversed(range(100))]
    found = look(0.0, samples).gpus["n"]
    assert len(found) == GPUS_MAX
    assert [int(one.number) for one in found] == list(range(100 - GPUS_MAX, 100))
    assert {one.pod for one in found} == {"a/p"}


def test_the_use_of_a_machine_is_that_between_two_looks() -> None:
    first = look(100.0, machine(10.0, 90.0, 1e6))
    assert host_values(first, None) == {MEMORY_TITLE: 75.0}
    then = look(110.0, machine(12.0, 98.0, 21e6))
    found = host_values(then, first.machine)
    assert found[CPU_TITLE] == pytest.approx(20.0)
    assert found[RECEIVED_TITLE] == pytest.approx(2000.0)
    assert RECEIVED_TITLE not in host_values(look(120.0, machine(1.0, 2.0, 0.0)), then.machine)


def test_odd_samples_are_left_out() -> None:
    found = look(0.0, [gpu(0, "GPU_TEMP", math.nan), MetricSample("other", {}, 1.0)])
    assert (found.gpus, found.machine, found.memory) == ({}, None, None)


def test_the_past_of_a_node_is_bounded() -> None:
    history = NodeHistory(5.0)
    for number in range(POINTS_MAX * 4):
        history.add(5.0 * number, {"x": 1.0})
    assert len(history.points) <= POINTS_MAX
    assert history.points[0].at == 0.0
