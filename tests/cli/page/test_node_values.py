"""The page of a node: fits its schema, is bounded, and says what it cannot show."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli_calls import assert_fits
from unbroken.cli.page.node_metrics import samples
from unbroken.cli.page.node_values import (
    NO_DRIVER,
    NOT_YET,
    RESULTS_SHOWN,
    SILENT,
    UNREACHED,
    NodePasts,
    blame_value,
    check_value,
    links_value,
    node_value,
    past_values,
)
from unbroken.core.page.links import link_matrix
from unbroken.core.page.node_history import Look, look
from unbroken.spec.nodes.kinds import (
    BlameEntry,
    BlameKind,
    CheckKind,
    CheckResult,
    NodeCheckStatus,
    Outcome,
)

METRICS = """
# HELP DCGM_FI_DEV_GPU_TEMP Temperature
# TYPE DCGM_FI_DEV_GPU_TEMP untyped
DCGM_FI_DEV_GPU_TEMP{gpu="0",Hostname="n",modelName="H{2}00"} 71
unbroken_node_gpus_readable{node="n"} 1
node_memory_MemTotal_bytes 4e+09
node_memory_MemAvailable_bytes 1e+09
node_cpu_seconds_total{cpu="0",mode="idle"} 5
unbroken_jobs{state="Running} broken line of another metric
"""


def seen(times: int = 2) -> NodePasts:
    pasts = NodePasts()
    for number in range(times):
        pasts.add(10.0 * number, look(10.0 * number, samples(METRICS)))
    return pasts


def test_the_page_of_a_node_fits_its_schema() -> None:
    result = CheckResult("n", CheckKind.BASIC, "memory", Outcome.FAIL, 1.0, "x" * 9000)
    passed = CheckResult("n", CheckKind.BASIC, "disk", Outcome.PASS, 1.0)
    check = NodeCheckStatus(started_at=5.0, results=(*(passed,) * 60, result))
    node: dict[str, Any] = {"metadata": {"name": "n"}}
    shown = check_value("c", check, "n")
    value = {
        **node_value(node, None, [], 100.0),
        "blame": [blame_value(BlameEntry(50.0, BlameKind.FAULT, "Xid79", "it", 3.0), 100.0)],
        "checks": [shown],
        **past_values("n", seen(), is_local=True),
        "missing": [],
    }
    assert_fits(value, ["page", "node"])
    assert shown["resultCount"] == 61
    assert len(shown["results"]) == RESULTS_SHOWN
    assert shown["results"][0]["outcome"] == "fail"
    assert len(shown["results"][0]["text"]) == 2000
    assert value["gpus"][0]["celsius"] == 71.0
    assert value["gpus"][0]["model"] == "H{2}00"
    assert value["gpuCharts"]["titles"] == ["hottest GPU, °C"]
    assert value["machineCharts"]["titles"][0] == "memory used, %"
    assert value["machineCharts"]["columns"][0] == [75.0, 75.0]


def test_links_fit_their_schema() -> None:
    value = {"nodes": [], "links": links_value(link_matrix([])), "missing": []}
    assert_fits(value, ["page", "nodes"])


@pytest.mark.parametrize(
    ("pasts", "is_local", "note"),
    [
        (NodePasts(), True, NOT_YET),
        (NodePasts(look=Look()), True, NO_DRIVER),
        (NodePasts(look=Look(readable={"n": False})), True, SILENT),
        (NodePasts(), False, UNREACHED),
        (seen(), True, ""),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_sentence(
    pasts: NodePasts, note: str, *, is_local: bool
) -> None:
    value = past_values("n", pasts, is_local=is_local)
    assert value["gpuNote"] == note
    assert bool(value["gpus"]) is (note == "")


def test_a_node_that_is_gone_leaves_no_past() -> None:
    pasts = seen()
    pasts.add(30.0, Look())
    assert pasts.nodes == {}
