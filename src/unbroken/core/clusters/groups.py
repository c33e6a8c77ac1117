"""The instance groups of a Cluster: the machines that its request describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unbroken.spec import keys
from unbroken.spec.nodes.kinds import CheckKind, ClusterSpec, LifeCycle, MachineSpec, MachineTaint
from unbroken.spec.nodes.values import (
    COMPUTE_TYPE_VALUE,
    TAINT_EFFECT,
    TAINT_VALUE,
    DeepCheck,
    Health,
)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Labels and taints of a group's KubernetesConfig, without those that unbroken puts on
    nodes."""

    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[MachineTaint, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """An instance group as requested."""

    name: str
    instance_type: str
    logical_ids: tuple[str, ...]
    minimum: int = 0
    checks: tuple[CheckKind, ...] = ()
    """Deep checks of each new node before it takes pods."""
    request: Mapping[str, Any] | None = None
    """The ClusterInstanceGroupSpecification."""


def is_continuous(spec: ClusterSpec) -> bool:
    """True if partial capacity is kept (NodeProvisioningMode)."""
    return spec.request.get("NodeProvisioningMode") == "Continuous"


DEFAULT_CHECKPOINT_PERCENT = 20
"""Share of each node's memory where Mode is Enable and no percentage is given."""


def checkpoint_percent(spec: ClusterSpec) -> int | None:
    """Return the share of each node's memory for tiered checkpoints (TieredStorageConfig).

    0: switched off. None: the cluster does not say.
    """
    given = spec.request.get("TieredStorageConfig")
    if not isinstance(given, Mapping):
        return None
    if given.get("Mode") != "Enable":
        return 0
    percent = given.get("InstanceMemoryAllocationPercentage")
    is_share = isinstance(percent, int) and 0 <= percent <= 100
    return percent if is_share else DEFAULT_CHECKPOINT_PERCENT


def instance_groups(spec: ClusterSpec) -> tuple[InstanceGroup, ...]:
    """Return the groups, in the order of the request."""
    return tuple(_group(spec, item) for item in _requested(spec))


def _requested(spec: ClusterSpec) -> Sequence[Mapping[str, Any]]:
    result: Sequence[Mapping[str, Any]] = spec.request.get("InstanceGroups") or ()
    return result


def _group(spec: ClusterSpec, request: Mapping[str, Any]) -> InstanceGroup:
    name = str(request["InstanceGroupName"])
    return InstanceGroup(
        name,
        instance_types(request)[0],
        tuple(spec.targets.get(name) or ()),
        int(request.get("MinInstanceCount") or 0),
        tuple(CheckKind(kind) for kind in request.get("OnStartDeepHealthChecks") or ()),
        request,
    )


def instance_types(request: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that machines of a group may have; they get the first."""
    several = (request.get("InstanceRequirements") or {}).get("InstanceTypes") or ()
    return tuple(several) or (str(request.get("InstanceType") or ""),)


def retargeted(spec: ClusterSpec, targets: Mapping[str, Sequence[str]]) -> ClusterSpec:
    """Return the spec with other logical ids in some groups, and their counts to match."""
    merged = {**spec.targets, **{name: list(ids) for name, ids in targets.items()}}
    groups = [
        {**item, "InstanceCount": len(merged.get(item["InstanceGroupName"]) or ())}
        for item in _requested(spec)
    ]
    return replace(spec, targets=merged, request={**spec.request, "InstanceGroups": groups})


def machine_spec(
    spec: ClusterSpec, object_name: str, group: InstanceGroup, logical_id: str
) -> MachineSpec:
    """Return the machine for a place in a group.

    A node that is to be checked first is created unschedulable: no pod can be placed before.
    """
    request = group.request or {}
    kubernetes = request.get("KubernetesConfig") or {}
    health = Health.UNSCHEDULABLE if group.checks else Health.SCHEDULABLE
    labels = {
        **(kubernetes.get("Labels") or {}),
        keys.CLUSTER_NAME: spec.name,
        keys.INSTANCE_GROUP: group.name,
        keys.COMPUTE_TYPE: COMPUTE_TYPE_VALUE,
        keys.HEALTH: health.value,
        **dict.fromkeys(keys.INSTANCE_TYPES, group.instance_type),
    }
    taints = [
        MachineTaint(kubernete["Key"], kubernete["Effect"], kubernete.get("Value") or "")
        for kubernete in kubernetes.get("Taints") or ()
    ]
    if group.checks:
        labels[keys.DEEP_CHECK] = DeepCheck.IN_PROGRESS.value
        taints.append(MachineTaint(keys.HEALTH, TAINT_EFFECT, TAINT_VALUE))
    scripts = request.get("LifeCycleConfig") or {}
    return MachineSpec(
        cluster=object_name,
        instance_group=group.name,
        instance_type=group.instance_type,
        threads_per_core=int(request.get("ThreadsPerCore") or 0),
        logical_id=logical_id,
        labels=labels,
        taints=tuple(taints),
        life_cycle=LifeCycle(
            scripts.get("SourceS3Uri") or "",
            scripts.get("OnCreate") or "",
            scripts.get("OnInitComplete") or "",
        ),
    )


def node_config(spec: MachineSpec) -> NodeConfig:
    """Return the labels and taints of a machine that came from its group's KubernetesConfig."""
    labels = {
        key: value
        for key, value in spec.labels.items()
        if not key.startswith(keys.HYPERPOD_PREFIX) and key not in keys.INSTANCE_TYPES
    }
    return NodeConfig(labels, tuple(taint for taint in spec.taints if taint.key != keys.HEALTH))
