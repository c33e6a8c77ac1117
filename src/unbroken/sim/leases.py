"""The leases of a world's workers: who vouches for whom, and the check that none ends in vain."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from unbroken.sim.actors.agents import Agent, Leasing
from unbroken.wire.agent import PORT

from .faults import note
from .lease_faults import KEEPER_LATE_SECONDS

if TYPE_CHECKING:
    from .world import World


def leasing(world: World) -> Leasing:
    """Return what agents need to hold leases."""
    return Leasing(
        drift=world.scenario.drift,
        kill_seconds=KEEPER_LATE_SECONDS,
        peer=partial(_peer, world),
        ran_out=partial(_ran_out, world),
        has_checks=world.scenario.checks_peers,
    )


def _ran_out(world: World, agent: Agent) -> None:
    """Check that only unreachable agents, or agents with bad links, end by their lease."""
    quality = world.surroundings.quality
    is_lossy = quality.loss or quality.late or world.has_cuts or agent.is_frozen
    is_needless = not is_lossy and _is_vouched_for(world, agent)
    world.checkers.require(not is_needless, "a lease runs out without need", agent.local)
    note(world, "lease_over", [agent.local], is_prompt=True)


def _peer(world: World, address: str) -> Agent | None:
    """Return the agent that listens there, wherever its node is."""
    agents = (
        local.process
        for node in world.cluster.machines.values()
        for local in node.locals.values()
        if f"{local.address}:{PORT}" == address
    )
    return next((agent for agent in agents if isinstance(agent, Agent) and agent.is_alive), None)


def _is_vouched_for(world: World, agent: Agent) -> bool:
    """Return whether all ranks of the agent's attempt run it, and reach each other.

    A suspended job uses the numbers of its attempts again: the address distinguishes them.
    """
    told = agent.told
    if told is None or not agent.local.node.is_up:
        return False
    peers = {
        process.told.rank
        for node in world.cluster.machines.values()
        if node.is_up
        for local in node.locals.values()
        if isinstance(process := local.process, Agent)
        if process.told is not None and process.vouches(told.attempt)
        if process.told.master_addr == told.master_addr
        if process.told.master_port == told.master_port
    }
    return peers >= set(range(told.nnodes))
