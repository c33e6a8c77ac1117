"""Errors as the clients of the cluster API know them: a code, a message, an HTTP status.

Source of codes and statuses: reference section 1.1 and the common errors of AWS's JSON services.
Clients retry statuses of 500 and above, and ThrottlingException.
"""

from __future__ import annotations

from unbroken.errors import UnbrokenError


class ApiError(UnbrokenError):
    """An operation that is refused; `code` is what clients compare."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


def invalid(message: str) -> ApiError:
    """The request cannot be fulfilled as it is."""
    return ApiError("ValidationException", message)


def not_found(message: str) -> ApiError:
    """There is no such cluster, node, event or operation."""
    return ApiError("ResourceNotFound", message)


def in_use(message: str) -> ApiError:
    """The name is taken."""
    return ApiError("ResourceInUse", message)


def conflict(message: str) -> ApiError:
    """Not now: something else is under way."""
    return ApiError("ConflictException", message)


def limit_exceeded(message: str) -> ApiError:
    """More than there may be."""
    return ApiError("ResourceLimitExceeded", message)


def not_offered(operation: str) -> ApiError:
    """An operation of SageMaker that this server does not have."""
    return ApiError(
        "UnsupportedOperationException",
        f"{operation} is not offered here; docs/guide/cluster-api.md says what is.",
    )
