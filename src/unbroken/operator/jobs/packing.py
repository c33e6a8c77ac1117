"""Topology labels of nodes, and the preferred affinity that packs the pods of a job by them.  Pure.

AWS: EC2's instance topology; Google: GKE's compact placement; Oracle: OKE's RDMA labels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from unbroken.spec import keys

Object = dict[str, Any]

LEVELS = (
    ("topology.kubernetes.io/zone",),
    ("topology.k8s.aws/network-node-layer-1", "oci.oraclecloud.com/rdma.hpc_island_id"),
    (
        "topology.k8s.aws/network-node-layer-2",
        "cloud.google.com/gce-topology-block",
        "oci.oraclecloud.com/rdma.network_block_id",
    ),
    (
        "topology.k8s.aws/network-node-layer-3",
        "cloud.google.com/gce-topology-subblock",
        "oci.oraclecloud.com/rdma.local_block_id",
    ),
    ("topology.kubernetes.io/rack", keys.RACK),
)
"""Keys of the topology labels, widest level first; at each level the first that a node has."""
WEIGHTS = (100, 80, 60, 40, 20)
"""Weight of each level for each pod there, 1 to 100.

A wide network counts more than a narrow one, so that a job stays under one spine before it stays
under one leaf.
"""
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def topology_keys(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the key of a node's label at each level; empty: it has none."""
    return tuple(next((key for key in level if labels.get(key)), "") for level in LEVELS)


def pack(pod: Object, job: str, present: Collection[str]) -> None:
    """Let a pod prefer nodes near the other pods of the job, by the topology labels that are
    `present` on nodes.

    A label with a rule in the template itself is left to the template.
    """
    affinity: Object = pod.get("affinity") or {}
    near: Object = affinity.get("podAffinity") or {}
    own = {*_keys_of(near), *_keys_of(affinity.get("podAntiAffinity") or {})}
    own.update(str(item.get("topologyKey")) for item in pod.get("topologySpreadConstraints") or ())
    selector = {"matchLabels": {keys.JOB_LABEL: job}}
    wishes = [
        {"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
        for weight, level in zip(WEIGHTS, LEVELS, strict=True)
        for key in level
        if key in present and key not in own
    ]
    if wishes:
        near = {**near, PREFERRED: [*(near.get(PREFERRED) or ()), *wishes]}
        pod["affinity"] = {**affinity, "podAffinity": near}


def _keys_of(rules: Mapping[str, Any]) -> Iterable[str]:
    preferred = (rule.get("podAffinityTerm") or {} for rule in rules.get(PREFERRED) or ())
    return [str(term.get("topologyKey")) for term in (*(rules.get(REQUIRED) or ()), *preferred)]
