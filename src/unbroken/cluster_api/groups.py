"""Limits of requests for instance groups beyond their shape, and the places in groups.  Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unbroken.core.clusters.groups import instance_types
from unbroken.core.clusters.state import ClusterState, InstancePhase
from unbroken.errors import SpecError
from unbroken.spec.nodes.cluster import script_names

from .errors import invalid, limit_exceeded

Object = Mapping[str, Any]
LOGICAL_DIGITS = 8
INSTANCES_MAX = 6758
"""Most instances of a cluster; the largest InstanceCount that the shape allows (API 2017-07-24)."""
NOT_OFFERED = {
    "RestrictedInstanceGroups": "restricted instance groups",
    "RestrictedInstanceGroupsConfig": "restricted instance groups",
}
"""Members of Create- and UpdateCluster that would be promised in vain."""


def check_request(request: Object) -> None:
    """ValidationException for what CreateCluster and UpdateCluster refuse alike."""
    for member, what in NOT_OFFERED.items():
        if request.get(member):
            raise invalid(f"{member}: {what} are not offered here")
    if (request.get("Orchestrator") or {}).get("Slurm") is not None:
        raise invalid("Orchestrator: Slurm is not offered here; clusters are of Kubernetes (Eks)")
    if (request.get("AutoScaling") or {}).get("Mode") == "Enable":
        raise invalid("AutoScaling: Karpenter is not offered here; change InstanceCount instead")
    if (request.get("TieredStorageConfig") or {}).get("Mode") == "Enable":
        raise invalid(
            "TieredStorageConfig: no memory of the nodes is set aside here; leave it out or give"
            " Mode Disable. Jobs keep snapshots in memory with unbroken.worker.Snapshot"
        )
    groups: Sequence[Object] = request.get("InstanceGroups") or ()
    names = [group["InstanceGroupName"] for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"Instance group names must be unique: '{name}' is given twice")
    for group in groups:
        _check_group(group)


def _check_group(group: Object) -> None:
    name = group["InstanceGroupName"]
    is_single, is_several = "InstanceType" in group, "InstanceRequirements" in group
    if is_single == is_several:
        raise invalid(f"Instance group '{name}': give one of InstanceType and InstanceRequirements")
    if (group.get("MinInstanceCount") or 0) > group["InstanceCount"]:
        raise invalid(f"Instance group '{name}': MinInstanceCount is above InstanceCount")
    if group.get("SlurmConfig") is not None:
        raise invalid(f"Instance group '{name}': Slurm is not offered here")
    capacity = group.get("CapacityRequirements") or {}
    if len(capacity) > 1:
        raise invalid(f"Instance group '{name}': give one of Spot and OnDemand")
    scripts = group.get("LifeCycleConfig") or {}
    has_script = scripts.get("OnCreate") or scripts.get("OnInitComplete")
    if has_script and not scripts.get("SourceS3Uri"):
        raise invalid(f"Instance group '{name}': LifeCycleConfig needs SourceS3Uri")
    _check_scripts(name, scripts)
    checks = group.get("OnStartDeepHealthChecks") or ()
    if len(set(checks)) != len(checks):
        raise invalid(f"Instance group '{name}': OnStartDeepHealthChecks are given twice")


def _check_scripts(name: str, scripts: Object) -> None:
    """Refuse addresses and file names of scripts that may lead out of their folder."""
    below = str(scripts.get("SourceS3Uri") or "").partition("://")[2].removesuffix("/")
    files = [scripts.get("OnCreate"), scripts.get("OnInitComplete")]
    for path in (one for one in (below, *files) if one):
        try:
            script_names(path)
        except SpecError as error:
            raise invalid(f"Instance group '{name}': LifeCycleConfig: {error}") from error


def check_change(before: Object, after: Object) -> None:
    """ValidationException where an existing group is asked to be another."""
    name = after["InstanceGroupName"]
    if instance_types(before) != instance_types(after):
        raise invalid(
            f"Instance group '{name}': the instance type cannot be changed; "
            "add a group of the new type and delete this one"
        )


def places(
    name: str,
    count: int,
    held: Sequence[str],
    state: ClusterState,
    new_hex: Callable[[int], str],
) -> list[str]:
    """Logical ids of a group that is to have so many places.

    What is given up is first what does not run, then what came last.
    """
    if count >= len(held):
        new = (f"{name}-{new_hex(LOGICAL_DIGITS)}" for _ in range(count - len(held)))
        return [*held, *new]
    running = {
        instance.logical_id
        for instance in state.instances
        if instance.phase is InstancePhase.RUNNING
    }
    by_worth = sorted(held, key=lambda one: (one not in running, held.index(one)))
    kept = set(by_worth[:count])
    return [one for one in held if one in kept]


def check_limit(targets: Mapping[str, Sequence[str]]) -> None:
    """ResourceLimitExceeded where a cluster would have too many instances."""
    total = sum(len(ids) for ids in targets.values())
    if total > INSTANCES_MAX:
        raise limit_exceeded(f"{total} instances in a cluster; at most {INSTANCES_MAX}")


def added(held: Mapping[str, Sequence[str]], targets: Mapping[str, Sequence[str]]) -> int:
    """Number of instances in `targets` that are not among those held."""
    return sum(len(set(ids) - set(held.get(group) or ())) for group, ids in targets.items())


def token_places(cluster_id: str, token: str, group: str, number: int, count: int) -> list[str]:
    """Logical ids that a ClientToken stands for: the same each time that it is sent."""
    return [
        f"{group}-{hashlib.sha256(f'{cluster_id}/{token}/{number}/{one}'.encode()).hexdigest()[:LOGICAL_DIGITS]}"
        for one in range(count)
    ]
