"""Snapshots of a job: their size and cost, where copies are, and what a loss would cost now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from unbroken.core.snapshots.costs import LossCost, LossKind, PodSnapshots, Source, loss_costs
from unbroken.core.wording import counted, size_text
from unbroken.wire.agent import AgentReport, SnapshotReport

UNREACHED = (
    "not shown: steps, ranks and snapshots are known to the agents in the pods, which this command "
    "reaches on local clusters only"
)
COPIES_SHOWN = 4
"""Pods whose copies are shown, those that are most behind first."""
REPLICAS_SHOWN = 8
"""Groups of replicas that are shown."""
LOSS_TITLES = ("A LOSS NOW OF", "STEPS MADE AGAIN", "STATE COMES FROM")
LOST = {
    LossKind.WORKER: "a worker",
    LossKind.RANK_0: "rank 0",
    LossKind.NODE: "a node or its agent",
    LossKind.NODE_AND_BUDDY: "a node and its buddy",
}
SOURCES = {
    Source.MEMORY: "memory of its agent, after step {}",
    Source.REPLICA: "a replica, after step {}",
    Source.BUDDY: "the copy at its buddy, after step {}",
    Source.CHECKPOINT: "the checkpoint after step {}",
    Source.NOTHING: "nowhere: no checkpoint was reported",
}


def snapshot_values(
    pods: Sequence[Mapping[str, Any]], agents: Mapping[str, AgentReport]
) -> list[dict[str, Any]]:
    """Return the snapshots of each name as JSON; `pods`: of `pod_summary`."""
    saving = {
        str(pod["name"]): (pod, found)
        for pod in pods
        if (report := agents.get(str(pod["name"]))) is not None
        and (found := report.snapshots) is not None
    }
    watches = [watch for report in agents.values() for watch in report.watch]
    steps = [watch.step for watch in watches if watch.step is not None]
    checkpoints = [one.checkpoint_step for one in watches if one.checkpoint_step is not None]
    by_address = {str(pod["address"]): str(pod["name"]) for pod in pods if pod["address"]}
    names = sorted({rank.name for _, found in saving.values() for rank in found.ranks})
    result = []
    for name in names:
        held = [_Held(pod, found, name, by_address) for pod, found in saving.values()]
        held = [one for one in held if one.ranks]
        newest = max([*steps, *(rank.step for one in held for rank in one.ranks)])
        losses = _losses(held, newest, max(checkpoints, default=None))
        result.append(name_value(name, held, losses))
    return result


def shortage_values(
    pods: Sequence[Mapping[str, Any]], agents: Mapping[str, AgentReport]
) -> list[dict[str, Any]]:
    """Return the pods whose memory has no room for snapshots or copies, as JSON."""
    found = ((pod, agents.get(str(pod["name"]))) for pod in pods)
    told = ((pod, report.snapshots) for pod, report in found if report and report.snapshots)
    return [
        {
            "pod": str(pod["name"]),
            "node": str(pod["node"]),
            "missingBytes": saved.missing_bytes,
            "copiesMissingBytes": saved.copies_missing_bytes,
        }
        for pod, saved in told
        if saved.missing_bytes or saved.copies_missing_bytes
    ]


def shortage_lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines about the pods of `shortage_values`, those first that are short of most."""
    for what, key in (("snapshots", "missingBytes"), ("copies", "copiesMissingBytes")):
        pods = sorted((one for one in found if one[key]), key=lambda one: -one[key])
        for one in pods[:COPIES_SHOWN]:
            size = size_text(one[key])
            yield f"no {what} in {one['pod']} ({one['node']}): {size} of memory are missing"
        if pods[COPIES_SHOWN:]:
            yield f"no {what} in {counted(len(pods) - COPIES_SHOWN, 'more pod')}: less is missing"


class _Held:
    """Snapshots of one name in one pod."""

    def __init__(
        self,
        pod: Mapping[str, Any],
        found: SnapshotReport,
        name: str,
        by_address: Mapping[str, str],
    ) -> None:
        self.pod, self.node, self.report = str(pod["name"]), str(pod["node"]), found
        self.ranks = tuple(rank for rank in found.ranks if rank.name == name)
        self.buddy = by_address.get(found.buddy.rpartition(":")[0].strip("[]"), "")
        """Name of the pod that gets copies; empty: none does."""

    @property
    def buddy_step(self) -> int | None:
        """Newest step that the buddy has of all ranks; None: it has none of some rank."""
        steps = [rank.buddy_step for rank in self.ranks]
        return None if None in steps else min(step for step in steps if step is not None)

    @property
    def behind(self) -> int | None:
        """Steps by which the copy is older than the memory; None: there is no copy."""
        step = self.buddy_step
        return None if step is None else max(rank.step for rank in self.ranks) - step


def name_value(name: str, held: Sequence[_Held], losses: Iterable[LossCost]) -> dict[str, Any]:
    """Snapshots of one name."""
    ranks = [rank for one in held for rank in one.ranks]
    seconds = [rank.save_seconds for rank in ranks if rank.save_seconds is not None]
    rates = [one.report.bytes_per_second for one in held]
    return {
        "name": name,
        "rankCount": len(ranks),
        "stateBytes": max(rank.state_bytes for rank in ranks),
        "step": min(rank.step for rank in ranks),
        "saveSeconds": max(seconds, default=None),
        "bytesPerSecond": min((rate for rate in rates if rate is not None), default=None),
        "memoryBytes": max(one.report.memory_bytes for one in held),
        "replicas": sorted({rank.replicas for rank in ranks if rank.replicas})[:REPLICAS_SHOWN],
        "copies": [copy_value(one) for one in held],
        "losses": [loss_value(one) for one in losses],
    }


def copy_value(held: _Held) -> dict[str, Any]:
    """The places of the copies of a pod's ranks."""
    return {
        "pod": held.pod,
        "node": held.node,
        "buddy": held.buddy,
        "buddyStep": held.buddy_step,
        "stepsBehind": held.behind,
    }


def loss_value(cost: LossCost) -> dict[str, Any]:
    """The cost of one kind of loss now."""
    return {
        "loss": cost.loss.value,
        "source": cost.source.value,
        "resumeStep": cost.step,
        "stepsRepeated": cost.steps,
    }


def _losses(held: Sequence[_Held], newest: int, checkpoint: int | None) -> tuple[LossCost, ...]:
    index = {one.pod: number for number, one in enumerate(held)}
    pods = [PodSnapshots(one.node, index.get(one.buddy), one.ranks) for one in held]
    return loss_costs(pods, newest, checkpoint)


def snapshot_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the snapshots of one name, of `snapshot_values`."""
    size, ranks = size_text(found["stateBytes"]), counted(found["rankCount"], "rank")
    took = found["saveSeconds"]
    saves = "" if took is None else f"; training waits {milliseconds(took)} for a save (median)"
    yield f"{found['name']}: {size} a rank, {ranks}{saves}; all have step {found['step']}"
    yield f"memory: {size_text(found['memoryBytes'])} a pod, with copies"
    yield from _copy_lines(found)
    if found["replicas"]:
        yield f"replicas: ranks {' and '.join(found['replicas'])} hold the same state"


def milliseconds(seconds: float) -> str:
    """Return seconds as `3.1 ms` or `1.25 s`."""
    return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds:.2f} s"


def most_behind(copies: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return values of `copy_value`, pods without copies first, then those most behind."""
    return sorted(
        copies, key=lambda one: -inf if one["stepsBehind"] is None else -one["stepsBehind"]
    )


def _copy_lines(found: Mapping[str, Any]) -> Iterator[str]:
    copies = [one for one in found["copies"] if one["buddy"]]
    if not copies:
        yield "copies: none: no other pod is the buddy"
        return
    rate = found["bytesPerSecond"]
    if rate is not None:
        yield f"copies: sent at {size_text(rate)}/s"
    for one in most_behind(copies)[:COPIES_SHOWN]:
        behind = "nothing has arrived yet"
        if one["stepsBehind"] is not None:
            behind = f"{counted(one['stepsBehind'], 'step')} behind"
        yield f"copy of {one['pod']} ({one['node']}): at {one['buddy']}, {behind}"
    if copies[COPIES_SHOWN:]:
        yield f"copies of {counted(len(copies) - COPIES_SHOWN, 'more pod')}: less behind"


def loss_rows(losses: Iterable[Mapping[str, Any]]) -> Iterator[list[object]]:
    """Yield rows of the table of losses, of `loss_value`."""
    for one in losses:
        source = SOURCES[Source(one["source"])].format(one["resumeStep"])
        yield [LOST[LossKind(one["loss"])], one["stepsRepeated"] or "none", source]
