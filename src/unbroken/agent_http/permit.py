"""Leave to send a command to an agent, which may be taken away at any moment."""

from __future__ import annotations

from typing import Protocol


class Permit(Protocol):
    """Asked just before a command leaves."""

    def is_given(self) -> bool:
        """True if it may leave now."""

    async def given(self) -> None:
        """Return once it may; without giving way to other tasks where it may already."""


class Always:
    """The permit of who need not ask anybody."""

    def is_given(self) -> bool:
        """Always."""
        return True

    async def given(self) -> None:
        """At once."""
