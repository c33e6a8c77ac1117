"""Events of a pod on its node, and the resulting orders: values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from unbroken.core.tick import Tick

Object = dict[str, Any]
"""One Kubernetes object, or a part of one, as decoded JSON."""


class ProbeKind(Enum):
    """The three probes of a container; the value is the field's name without `Probe`."""

    STARTUP = "startup"
    LIVENESS = "liveness"
    READINESS = "readiness"


class HookKind(Enum):
    """The two hooks of a container's `lifecycle`."""

    POST_START = "postStart"
    PRE_STOP = "preStop"


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a container's run; times in seconds since the epoch."""

    exit_code: int
    reason: str
    """OOMKilled, StartError, ContainerStatusUnknown, or empty: by the exit code."""
    message: str
    started_at: float
    finished_at: float


# --- what happens


@dataclass(frozen=True, slots=True)
class Prepared:
    """Volumes and directories are there."""


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """Something the pod needs is not there (yet)."""

    message: str


@dataclass(frozen=True, slots=True)
class Started:
    """A container runs."""

    name: str
    attempt: int
    container_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A container could not be made: CreateContainerConfigError, CreateContainerError."""

    name: str
    attempt: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing of a run is alive any more."""

    name: str
    attempt: int
    container_id: str
    exit: Exit


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """A probe gave its answer."""

    name: str
    attempt: int
    kind: ProbeKind
    is_ok: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class HookAnswered:
    """A hook ended."""

    name: str
    attempt: int
    kind: HookKind
    is_ok: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class Deleted:
    """The pod's deletion was asked for; repeated with less grace it hurries."""

    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """The node does not take the pod."""

    reason: str
    message: str


Event = (
    Tick
    | Prepared
    | PrepareFailed
    | Started
    | Refused
    | Ended
    | ProbeAnswered
    | HookAnswered
    | Deleted
    | Rejected
)


# --- what is to be done


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make directories, volumes and the address; answer Prepared or PrepareFailed."""


@dataclass(frozen=True, slots=True)
class Create:
    """Start a container; answer Started or Refused, and Ended later."""

    name: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the program to end (SIGTERM)."""

    name: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End every process of the container at once."""

    name: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Run a probe; answer ProbeAnswered."""

    name: str
    attempt: int
    kind: ProbeKind


@dataclass(frozen=True, slots=True)
class Hook:
    """Run a hook; answer HookAnswered."""

    name: str
    attempt: int
    kind: HookKind


@dataclass(frozen=True, slots=True)
class Note:
    """Record an event about the pod."""

    is_warning: bool
    reason: str
    message: str
    field_path: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing of the pod runs or will; its directories may go."""


Effect = Prepare | Create | Terminate | Kill | Probe | Hook | Note | Finished
