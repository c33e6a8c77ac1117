"""One attempt, as the checkers see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from unbroken.core.job.events import PodUid
from unbroken.sim.actors.training import Worker


@dataclass(eq=False, slots=True)
class Attempt:
    """The processes of one attempt, by global rank."""

    master: tuple[str, int]
    world_size: int
    generation: int
    """Generation of the operator that first ordered it."""
    born: dict[int, Worker] = field(default_factory=dict)
    pods: dict[int, PodUid] = field(default_factory=dict)
