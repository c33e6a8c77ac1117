"""Orders that a page sends: their JSON, bounded and typed."""

from __future__ import annotations

from typing import Annotated

import msgspec

from unbroken.errors import SpecError

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


class RestartJob(_JobOrder, frozen=True, kw_only=True, tag="restart"):
    """Restart the workers of a job."""


class SuspendJob(_JobOrder, frozen=True, kw_only=True, tag="suspend"):
    """Suspend a job."""


class ResumeJob(_JobOrder, frozen=True, kw_only=True, tag="resume"):
    """Resume a suspended job."""


Order = RestartJob | SuspendJob | ResumeJob


def read_order(body: bytes) -> Order:
    """Read the body of a request.  Raises SpecError."""
    try:
        order: Order = msgspec.json.decode(body, type=Order)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SpecError(f"this is no order: {error}") from error
    return order
