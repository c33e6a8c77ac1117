"""Orders that a page sends: their JSON, bounded and typed."""

from __future__ import annotations

from typing import Annotated

import msgspec

from unbroken.errors import SpecError
from unbroken.spec.job.detectors import Detector, Mode

ORDER_BYTES_MAX = 4096
"""Bytes of an order. The longest has two names and a reason."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9.-]+\Z")]
"""Name of an object of Kubernetes (RFC 1123): it is part of a path."""


class _Order(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="action"
):
    """An order; `action` names its kind."""


class _JobOrder(_Order, frozen=True, kw_only=True):
    namespace: Name
    name: Name
    uid: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Uid of the job that the person saw; empty: whichever has the name."""


class RestartJob(_JobOrder, frozen=True, kw_only=True, tag="restart"):
    """Restart the workers of a job."""


class SuspendJob(_JobOrder, frozen=True, kw_only=True, tag="suspend"):
    """Suspend a job."""


class ResumeJob(_JobOrder, frozen=True, kw_only=True, tag="resume"):
    """Resume a suspended job."""


class SetDetector(_JobOrder, frozen=True, kw_only=True, tag="detector"):
    """Set the mode of a detector of a job."""

    detector: Detector
    mode: Mode


class _NodeOrder(_Order, frozen=True, kw_only=True):
    name: Name


class DrainNode(_NodeOrder, frozen=True, kw_only=True, tag="drain"):
    """Cordon a node, and let jobs move off."""

    deadline: Annotated[str, msgspec.Meta(max_length=20)] = ""
    """As `unbroken nodes drain --deadline` takes it; empty: there is none."""


class UncordonNode(_NodeOrder, frozen=True, kw_only=True, tag="uncordon"):
    """Let a node take pods again."""


class ResetNode(_NodeOrder, frozen=True, kw_only=True, tag="reset"):
    """Reset the GPUs of a node."""


class RebootNode(_NodeOrder, frozen=True, kw_only=True, tag="reboot"):
    """Reboot a node."""


class ReplaceNode(_NodeOrder, frozen=True, kw_only=True, tag="replace"):
    """Replace a node by a new one."""


class ClearNode(_NodeOrder, frozen=True, kw_only=True, tag="clear"):
    """Clear the blame of a node."""

    why: Annotated[str, msgspec.Meta(min_length=1, max_length=500, pattern=r"\S")]


JobOrder = RestartJob | SuspendJob | ResumeJob | SetDetector
NodeOrder = DrainNode | UncordonNode | ResetNode | RebootNode | ReplaceNode | ClearNode
Order = JobOrder | NodeOrder


def read_order(body: bytes) -> Order:
    """Read the body of a request.  Raises SpecError."""
    try:
        order: Order = msgspec.json.decode(body, type=Order)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SpecError(f"this is no order: {error}") from error
    return order
