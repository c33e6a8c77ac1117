"""Options of a Machine's node: from its spec, its instance type, and the options of `up`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unbroken.local.node import NodeOptions
from unbroken.local.state import ClusterOptions, Paths
from unbroken.operator.instance_types import instance_types
from unbroken.spec.keys import COMPUTE_TYPE, HEALTH, INSTANCE_GROUP
from unbroken.spec.nodes.instance_types import cpus_of, instance_type, instance_type_labels
from unbroken.spec.nodes.machine import MachineSpec
from unbroken.spec.nodes.values import COMPUTE_TYPE_VALUE, Health
from unbroken.spec.schema.write import write_record

from .pool import MakeOptions

HYPERPOD_LABELS = {HEALTH: Health.SCHEDULABLE.value, COMPUTE_TYPE: COMPUTE_TYPE_VALUE}
"""Labels of a healthy node of HyperPod, which manifests written for it select by."""


@dataclass(frozen=True, slots=True)
class _Capacity:
    cpu: str
    memory: str
    gpus: int
    resources: Mapping[str, str]


def maker(paths: Paths, options: ClusterOptions, kubelet_token: str) -> MakeOptions:
    """Return the function that makes a node's options; it raises SpecError for an unknown instance
    type."""
    general = _general(options)
    heartbeat_seconds = options.for_nodes()[0]

    def make(name: str, spec: MachineSpec, index: int, boot_id: str) -> NodeOptions:
        labels = dict(options.labels)
        capacity = general
        if spec.instance_type:
            result = instance_type(instance_types(), spec.instance_type)
            cpus = cpus_of(spec.instance_type, result, spec.threads_per_core)
            capacity = _Capacity(str(cpus), result.memory, result.gpus, result.resources)
        if kind := spec.instance_type or options.instance_type:
            labels |= instance_type_labels(kind)
        group = {INSTANCE_GROUP: spec.instance_group} if spec.instance_group else {}
        return NodeOptions(
            name=name,
            directory=paths.nodes / name,
            index=index,
            cpu=capacity.cpu,
            memory=capacity.memory,
            gpus=capacity.gpus,
            resources=capacity.resources,
            labels=labels,
            # Like kubelet's --node-labels: whoever changes them on the Node is not overruled.
            first_labels={**HYPERPOD_LABELS, **group, **spec.labels},
            taints=tuple(write_record(taint) for taint in spec.taints),
            boot_id=boot_id,
            kubelet_token=kubelet_token,
            heartbeat_seconds=heartbeat_seconds,
            images=options.images,
        )

    return make


def _general(options: ClusterOptions) -> _Capacity:
    """Return the capacity of a machine without a type of its own."""
    host = machine_size()
    gpus, resources = 0, {}
    if options.instance_type:
        result = instance_type(instance_types(), options.instance_type)
        host = {"cpu": str(result.cpu), "memory": result.memory}
        gpus, resources = result.gpus, result.resources
    return _Capacity(
        cpu=options.cpu or host["cpu"],
        memory=options.memory or host["memory"],
        gpus=options.gpus or gpus,
        resources={**resources, **options.resources},
    )


def machine_size() -> Mapping[str, str]:
    """CPUs and memory of this machine as quantities."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {"cpu": str(os.cpu_count() or 1), "memory": f"{pages * page_bytes // 1024}Ki"}
