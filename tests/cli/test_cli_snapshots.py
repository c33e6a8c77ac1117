"""How `describe` shows a job's snapshots: size, cost of a save, copies, and costs of losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unbroken.cli.job.snapshots import (
    COPIES_SHOWN,
    loss_rows,
    milliseconds,
    most_behind,
    shortage_lines,
    shortage_values,
    snapshot_lines,
    snapshot_values,
)
from unbroken.core.wording import size_text
from unbroken.wire.agent import AgentReport, AgentState, SnapshotReport, SnapshotState
from unbroken.wire.observation import RankWatch

NEWEST, CHECKPOINT = 110, 60
WAITS = "training waits 3.1 ms for a save (median)"


def pod(number: int) -> dict[str, Any]:
    """A pod on a node of its own, as `describe` has it."""
    return {"name": f"pod-{number}", "node": f"node-{number}", "address": f"10.0.0.{number}"}


def report(number: int, buddy: str, **changes: Any) -> AgentReport:
    """An agent with one rank that has saved step 109, and whose buddy has 105."""
    state = SnapshotState(number, "training", 109, 12_345_678, 0.0031, 105, 104)
    saved = SnapshotReport((replace(state, **changes),), buddy, 210e6, 98_765_432)
    watch = RankWatch(number, step=NEWEST, checkpoint_step=CHECKPOINT)
    return AgentReport(f"a{number}", AgentState.RUNNING, watch=(watch,), snapshots=saved)


def values(*reports: AgentReport) -> list[dict[str, Any]]:
    agents = {f"pod-{number}": one for number, one in enumerate(reports)}
    return snapshot_values([pod(number) for number in range(len(reports))], agents)


def test_a_job_shows_size_copies_and_what_a_loss_would_cost() -> None:
    (found,) = values(report(0, "10.0.0.1:8080"), report(1, "10.0.0.0:8080", buddy_step=None))
    assert list(snapshot_lines(found)) == [
        f"training: 12.3 MB a rank, 2 ranks; {WAITS}; all have step 109",
        "memory: 98.8 MB a pod, with copies",
        "copies: sent at 210 MB/s",
        "copy of pod-1 (node-1): at pod-0, nothing has arrived yet",
        "copy of pod-0 (node-0): at pod-1, 4 steps behind",
    ]
    assert list(loss_rows(found["losses"])) == [
        ["a worker", 1, "memory of its agent, after step 109"],
        ["rank 0", 1, "memory of its agent, after step 109"],
        ["a node or its agent", 6, "the copy at its buddy, after step 104"],
        ["a node and its buddy", 50, "the checkpoint after step 60"],
    ]


def test_replicas_are_named_and_no_step_is_lost_with_them() -> None:
    both = [report(number, "", step=NEWEST, replicas="0-1") for number in (0, 1)]
    (found,) = values(*both)
    lines = list(snapshot_lines(found))
    assert "replicas: ranks 0-1 hold the same state" in lines
    assert "copies: none: no other pod is the buddy" in lines
    assert [row[1] for row in loss_rows(found["losses"])] == ["none"] * 3


def test_an_agent_of_an_older_release_and_a_job_without_snapshots_show_nothing() -> None:
    older = replace(report(0, ""), snapshots=None)
    assert values(older) == []
    (found,) = values(older, report(1, "10.0.0.0:8080", save_seconds=None))
    assert next(snapshot_lines(found)) == "training: 12.3 MB a rank, 1 rank; all have step 109"
    assert found["copies"][0]["buddy"] == "pod-0"
    assert values(replace(older, snapshots=SnapshotReport())) == []


def test_a_large_job_shows_the_pods_that_are_most_behind() -> None:
    (found,) = values(
        *(report(n, f"10.0.0.{(n + 1) % 9}:8080", buddy_step=100 + n) for n in range(9))
    )
    shown = [line for line in snapshot_lines(found) if line.startswith("copy of")]
    assert len(shown) == COPIES_SHOWN
    assert shown[0] == "copy of pod-0 (node-0): at pod-1, 9 steps behind"
    assert "copies of 5 more pods: less behind" in list(snapshot_lines(found))
    assert [one["stepsBehind"] for one in most_behind(found["copies"])] == list(range(9, 0, -1))


def short(number: int, **missing: int) -> AgentReport:
    """An agent whose pod has no room for something."""
    one = report(number, "")
    assert one.snapshots is not None
    return replace(one, snapshots=replace(one.snapshots, **missing))


def test_pods_without_room_are_named_with_what_is_missing() -> None:
    pods = [pod(number) for number in range(9)]
    kept = {"pod-0": report(0, ""), "pod-1": replace(report(1, ""), snapshots=None)}
    assert shortage_values(pods, kept) == []
    kept["pod-1"] = short(1, missing_bytes=3_200_000_000)
    kept["pod-2"] = short(2, copies_missing_bytes=7)
    found = shortage_values(pods, kept)
    assert found[0] == {
        "pod": "pod-1", "node": "node-1", "missingBytes": 3_200_000_000, "copiesMissingBytes": 0
    }  # fmt: skip
    assert list(shortage_lines(found)) == [
        "no snapshots in pod-1 (node-1): 3.2 GB of memory are missing",
        "no copies in pod-2 (node-2): 7 bytes of memory are missing",
    ]
    many = {f"pod-{n}": short(n, missing_bytes=1000 * (n + 1)) for n in range(9)}
    lines = list(shortage_lines(shortage_values(pods, many)))
    assert lines[0] == "no snapshots in pod-8 (node-8): 9 kB of memory are missing"
    assert lines[-1] == "no snapshots in 5 more pods: less is missing"


def test_sizes_and_times_have_few_digits() -> None:
    sizes = (0, 999, 1000, 999_400, 999_600, 12_345_678, 5e9, 7e12, 12e15)
    assert [size_text(one) for one in sizes] == [
        "0 bytes", "999 bytes", "1 kB", "999 kB", "1 MB", "12.3 MB", "5 GB", "7 TB", "12000 TB"
    ]  # fmt: skip
    assert [milliseconds(one) for one in (0.0, 0.0031, 0.0994, 0.0995, 2.345)] == [
        "0 ms", "3.1 ms", "99 ms", "0.10 s", "2.35 s"
    ]  # fmt: skip
