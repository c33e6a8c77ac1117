"""Permission to send a command to an agent, which may be withdrawn at any moment."""

from __future__ import annotations

from typing import Protocol


class Permit(Protocol):
    """Asked just before a command is sent."""

    def is_given(self) -> bool:
        """True if it may be sent now."""

    async def given(self) -> None:
        """Return once it may be sent; without yielding to other tasks if it may already."""


class Always:
    """The permit for callers that need no permission."""

    def is_given(self) -> bool:
        """Always True."""
        return True

    async def given(self) -> None:
        """Return at once."""
