"""Errors as the clients of the cluster API know them: a code, a message, an HTTP status.

Source of codes and statuses: reference section 1.1 and the common errors of AWS's JSON services.
Clients retry statuses of 500 and above, and ThrottlingException.
"""

from __future__ import annotations

from unbroken.errors import UnbrokenError


class ClusterApiError(UnbrokenError):
    """An operation that is refused; `code` is what clients compare."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


def invalid(message: str) -> ClusterApiError:
    """The request cannot be fulfilled as it is."""
    return ClusterApiError("ValidationException", message)


def not_found(message: str) -> ClusterApiError:
    """There is no such cluster, node, event or operation."""
    return ClusterApiError("ResourceNotFound", message)


def in_use(message: str) -> ClusterApiError:
    """The name is taken."""
    return ClusterApiError("ResourceInUse", message)


def conflict(message: str) -> ClusterApiError:
    """Not now: something else is under way."""
    return ClusterApiError("ConflictException", message)


def limit_exceeded(message: str) -> ClusterApiError:
    """More than there may be."""
    return ClusterApiError("ResourceLimitExceeded", message)


def not_offered(operation: str) -> ClusterApiError:
    """An operation of SageMaker that this server does not have."""
    return ClusterApiError(
        "UnsupportedOperationException",
        f"{operation} is not offered here; docs/guide/cluster-api.md says what is.",
    )
