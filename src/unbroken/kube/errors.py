"""Refusals of requests by the Kubernetes API, as exceptions.

This module is light: commands may import it before they need a connection.
"""

from __future__ import annotations

from unbroken.errors import PeerError, WorldError


class Unauthorized(WorldError):
    """401: the API does not accept the credential; a file of it may hold a newer one soon."""


class ApiRefusal(PeerError):
    """The API understood and declined; `code` and `reason` are those of its Status."""

    def __init__(self, message: str, code: int, reason: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class Forbidden(ApiRefusal):
    """403: this client may not do it, or the namespace is being deleted."""


class NotFound(ApiRefusal):
    """404: the API has no such object, or serves no such kind."""


class MethodNotAllowed(ApiRefusal):
    """405: objects of this kind cannot be listed, or deleted as a collection."""


class Conflict(ApiRefusal):
    """409: the object has changed since it was read, or another object has its name."""


class AlreadyExists(Conflict):
    """409 to a create: an object of this name exists."""


class Expired(ApiRefusal):
    """410: the history since the version that a watch or a list requests is gone."""


_CLASSES = {403: Forbidden, 404: NotFound, 405: MethodNotAllowed, 409: Conflict, 410: Expired}


def refusal(message: str, code: int, reason: str) -> ApiRefusal:
    """Return the exception for a Status."""
    if (code, reason) == (409, "AlreadyExists"):
        return AlreadyExists(message, code, reason)
    return _CLASSES.get(code, ApiRefusal)(message, code, reason)
