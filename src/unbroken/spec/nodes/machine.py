"""The Machine: a provider makes a node of it, and repairs are ordered for it.

On the local cluster each is a node of processes; the name is that of the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from unbroken.spec.schema.fields import Limits

Time = Annotated[float, Limits(is_time=True, has_microseconds=True)]
Count = Annotated[int, Limits(minimum=0)]


class MachinePhase(Enum):
    """Phase of a machine."""

    PENDING = "Pending"
    STARTING = "Starting"
    """Its node is brought up, its lifecycle script runs."""
    RUNNING = "Running"
    REBOOTING = "Rebooting"
    RESETTING = "Resetting"
    """Its GPUs are being reset."""
    STOPPING = "Stopping"
    """Being deleted: some of its processes may still be alive."""
    FAILED = "Failed"
    """It cannot start: see the message."""


@dataclass(frozen=True, slots=True)
class MachineTaint:
    """A taint of the node from its start."""

    key: str
    effect: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class LifeCycle:
    """Scripts of the instance group, as `LifeCycleConfig`."""

    source: str = ""
    """`s3://bucket/prefix`, mapped to a directory by configuration."""
    on_create: str = ""
    """File in `source`, run before the node joins, with `SAGEMAKER_...` of the documented names."""
    on_init_complete: str = ""
    """File in `source`, run after it has joined."""


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """The desired state of a machine."""

    cluster: str = ""
    """Cluster object that it belongs to; empty: none."""
    instance_group: str = ""
    instance_type: str = ""
    """Type such as `ml.p5.48xlarge`: gives its capacity; empty: as the local cluster was
    started."""
    threads_per_core: Count = 0
    """1: a node of a type with two threads for each core offers one CPU for each core. 0 or 2: all
    virtual CPUs."""
    logical_id: str = ""
    """Logical id of the place in its group, kept when the machine is replaced."""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[MachineTaint, ...] = ()
    life_cycle: LifeCycle = LifeCycle()
    boots: Count = 0
    """Reboots ordered so far: raise it to order one."""
    resets: Count = 0
    """Resets of the GPUs ordered so far."""


@dataclass(frozen=True, slots=True)
class MachineStatus:
    """The observed state of a machine."""

    phase: MachinePhase = MachinePhase.PENDING
    message: str = ""
    boots: Count = 0
    """Reboots carried out: when it equals the spec's, all have been."""
    resets: Count = 0
    index: Count | None = None
    """Number of its addresses on this host; local cluster only."""
    boot_id: str = ""
    started_at: Time | None = None
    """Time of its latest start."""
    life_cycle: str = ""
    """State of the newest script: empty, Skipped, Running, Succeeded or Failed."""
    life_cycle_log: str = ""
    """File with its output."""
