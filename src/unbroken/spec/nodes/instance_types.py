"""Resources of instance types: CPUs, memory, accelerators, network interfaces.

The table is a file (`operator/data/instance_types.toml`); this reads its text.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from unbroken.errors import SpecError
from unbroken.spec.keys import INSTANCE_TYPES
from unbroken.spec.problems import Report
from unbroken.spec.schema.fields import Natural, read_record

GPU, EFA, NEURON = "nvidia.com/gpu", "vpc.amazonaws.com/efa", "aws.amazon.com/neuron"
"""Resources of pods, as the device plugins of NVIDIA and AWS name them."""
SIMILAR_MAX = 3
ONE_THREAD = re.compile(r"ml\.(?:[a-z]+\d+[a-z]*g[a-z]*|[a-z]+[78]a|p6e-gb\d+)\.")
"""Types whose cores have one thread: Graviton, Grace, and AMD from the seventh generation on. All
others have two (EC2 user guide, "CPU options for Amazon EC2 instance types")."""


@dataclass(frozen=True, slots=True)
class InstanceType:
    """Resources of one machine of the type."""

    cpu: Annotated[int, Meta(ge=1)]
    """Virtual CPUs."""
    memory_gib: float
    """Memory of the whole machine, in GiB."""
    gpus: Natural = 0
    gpu: str = ""
    """Kind of the GPUs, such as `H100`."""
    efa: Natural = 0
    """Interfaces of the Elastic Fabric Adapter."""
    neuron: Natural = 0
    """Trainium or Inferentia devices."""
    all_reduce: float = 0.0
    """Published GB/s of bus bandwidth that an all-reduce over all GPUs of two must reach; 0: none
    is published."""

    @property
    def memory(self) -> str:
        """Return the memory as a Kubernetes quantity."""
        return f"{round(self.memory_gib * 1024)}Mi"

    @property
    def resources(self) -> dict[str, str]:
        """Return other resources that pods may request, besides the GPUs; as Kubernetes
        quantities."""
        result = {EFA: self.efa, NEURON: self.neuron}
        return {name: str(count) for name, count in result.items() if count}

    @property
    def capacity(self) -> dict[str, str]:
        """Return all resources of a node of the type, as Kubernetes quantities."""
        gpus = {GPU: str(self.gpus)} if self.gpus else {}
        return {"cpu": str(self.cpu), "memory": self.memory, **gpus, **self.resources}


def cpus_of(name: str, kind: InstanceType, threads_per_core: int) -> int:
    """Return the CPUs that a machine offers with so many threads for each core; 0: its default."""
    return kind.cpu if threads_per_core != 1 or ONE_THREAD.match(name) else max(1, kind.cpu // 2)


def read_instance_types(text: str) -> dict[str, InstanceType]:
    """Return instance types by name, from the table's text. Raises SpecError with all problems."""
    try:
        decoded = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"instance types: {error}") from error
    report, result = Report(), {}
    for name, value in decoded.get("types", {}).items():
        result[name] = read_record(InstanceType, value, f"types.{name}", report)
    if report.problems:
        raise SpecError("instance types: " + "; ".join(str(problem) for problem in report.problems))
    return result


def instance_type(types: Mapping[str, InstanceType], name: str) -> InstanceType:
    """Return the type of a name. Raises SpecError, which names similar ones, if the table has
    none."""
    kind = types.get(name)
    if kind is not None:
        return kind
    if f"ml.{name}" in types:
        raise SpecError(f"instance type {name} is not known; write it as ml.{name}")
    similar = difflib.get_close_matches(name, types, SIMILAR_MAX)
    hint = f"; similar: {', '.join(similar)}" if similar else ""
    raise SpecError(f"it is not known what a machine of instance type {name} has{hint}")


def instance_type_labels(name: str) -> dict[str, str]:
    """Return the labels of a node of the type; HyperPod writes the type with its `ml.` (reference
    2.1)."""
    return dict.fromkeys(INSTANCE_TYPES, name)
