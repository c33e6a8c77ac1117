"""Errors as the API reports them: `Status` objects with code, reason and causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import UnbrokenError

Object = dict[str, Any]
"""One Kubernetes object as decoded JSON."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing wrong with one field (`metav1.StatusCause`)."""

    reason: str
    """FieldValueRequired, FieldValueInvalid, FieldValueNotSupported, FieldManagerConflict, ..."""
    field: str
    """Path as Kubernetes writes it: `spec.containers[0].name`."""
    message: str


class ApiError(UnbrokenError):
    """A request that is answered with an error; `as_object` is the body."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Object | None = None,
        causes: Sequence[Cause] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = dict(details or {})
        if causes:
            self.details["causes"] = [
                {"reason": c.reason, "message": c.message, "field": c.field} for c in causes
            ]

    def as_object(self) -> Object:
        """The `Status` object to send."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            **({"details": self.details} if self.details else {}),
            "code": self.code,
        }


def bad_request(message: str) -> ApiError:
    """400: the request cannot be understood."""
    return ApiError(400, "BadRequest", message)


def invalid(group: str, kind: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """422: the object was understood and breaks rules; one cause a rule."""
    texts = [f"{cause.field}: {cause.message}" for cause in causes]
    listed = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    title = f"{kind}.{group}" if group else kind
    return ApiError(
        422,
        "Invalid",
        f'{title} "{name}" is invalid: {listed}',
        details=_details(name, group, kind),
        causes=causes,
    )


def _details(name: str, group: str, kind: str) -> Object:
    """Details of a Status; the core group is left out."""
    return {"name": name, **({"group": group} if group else {}), "kind": kind}


def not_found(group: str, resource: str, name: str) -> ApiError:
    """404 for an object that does not exist."""
    title = f"{resource}.{group}" if group else resource
    return ApiError(
        404,
        "NotFound",
        f'{title} "{name}" not found',
        details=_details(name, group, resource),
    )


def already_exists(group: str, resource: str, name: str) -> ApiError:
    """409 for a create of what exists."""
    title = f"{resource}.{group}" if group else resource
    return ApiError(
        409,
        "AlreadyExists",
        f'{title} "{name}" already exists',
        details=_details(name, group, resource),
    )


def conflict(group: str, resource: str, name: str, why: str) -> ApiError:
    """409 for a write on top of a state that has moved on."""
    title = f"{resource}.{group}" if group else resource
    return ApiError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {title} "{name}": {why}',
        details=_details(name, group, resource),
    )
