"""The error tree: whose fault it is, and whether trying again may help."""

from __future__ import annotations


class UnbrokenError(Exception):
    """Anything this project raises for its caller to handle; the text is fit for a person."""


class SpecError(UnbrokenError):
    """The user's input is wrong; the text names the place."""


class PeerError(UnbrokenError):
    """An agent, a node or an API broke its protocol."""


class WorldError(UnbrokenError):
    """Network, disk or quota.

    `retry_after_seconds`: 0 to try again at once; None if trying again cannot help.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
