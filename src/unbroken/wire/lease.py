"""Questions and answers between agents of an attempt while no operator answers
(`core.agent.peers`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .agent import AGENT_ID_CHARACTERS
from .codec import Limits

ANSWER_BYTES_MAX = 4096
FANOUT = 128
"""Children of an agent: 16,000 agents are two levels below the root."""


def parent_of(rank: int) -> int | None:
    """Return the node rank that this one asks; None: it is the root."""
    return None if rank == 0 else (rank - 1) // FANOUT


def children_of(rank: int, nnodes: int) -> range:
    """Return the node ranks that ask this one."""
    first = rank * FANOUT + 1
    return range(first, min(first + FANOUT, nnodes))


@dataclass(frozen=True, slots=True)
class PeerQuestion:
    """A child's question to its parent: the body of a request to `LEASE_PATH`."""

    attempt: int
    rank: int
    agent_id: Annotated[str, Limits(AGENT_ID_CHARACTERS)] = ""
    """Id of the parent in its last answer; empty: there was none."""
    token: float = 0.0
    """The time of that answer, on the parent's clock."""
    age: Annotated[float, Limits(least=0)] | None = None
    """Seconds since the child and all below it were certainly running; None: not all have
    answered."""
    is_urgent: bool = True
    """The lease of the child, or of an agent below it, ends soon. (Agents that never say so are of
    an earlier version.)"""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """A parent's answer."""

    agent_id: Annotated[str, Limits(AGENT_ID_CHARACTERS, is_required=True)]
    token: float
    age: Annotated[float, Limits(least=0)] | None = None
    """Seconds since all agents were certainly running the attempt; None: not all have answered."""
