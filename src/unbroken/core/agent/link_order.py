"""The order of an agent's links: only the newest one may command.

Every operator process has a connection of its own. Kernels deliver what a dead operator sent, and
the agent may read it after commands of the next operator from a newer connection.
"""

from __future__ import annotations


class LinkOrder:
    """Number the links of one agent, and fence those that a newer one follows."""

    def __init__(self) -> None:
        self._asked = 0
        self._newest = 0
        """Highest number of a link that was opened."""

    def ask(self) -> int:
        """Number a link when it is requested.

        The number is older than the proof of the key, which can arrive as late as a command.
        """
        self._asked += 1
        return self._asked

    def open(self, number: int) -> None:
        """Open the link, before its first report; from then on no older link may command."""
        self._newest = max(self._newest, number)

    def may_command(self, number: int) -> bool:
        """Return True if no newer link was opened."""
        return number >= self._newest
