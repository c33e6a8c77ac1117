"""Faults of worlds whose workers hold leases: ways cut in one direction, islands, paused machines,
and schedules that aim at the end of a lease."""

from __future__ import annotations

from collections.abc import Callable

from unbroken.core.agent.events import KillAll
from unbroken.sim.actors.agents import Agent
from unbroken.sim.actors.cluster import Node
from unbroken.sim.actors.links import Way
from unbroken.sim.actors.operators import SILENCE_SECONDS

from .faults import any_node, any_worker, crash
from .world import World

REPLACED_SECONDS = 60.0
"""Seconds after which the pod of workers that do not end is replaced."""
LOST_SECONDS = 90.0
"""A way stays cut for so long at most."""
CUTS = ("agent_unheard", "operator_unheard", "peers_unheard")
"""Faults that cut ways between a node and others; a later one replaces an earlier one."""


def agent_unheard(world: World) -> None:
    """No message of a node reaches operators; the node receives theirs."""
    node = any_node(world)
    if node is not None:
        _cut_ways(world, node, "agent_unheard", Way.DOWN)


def operator_unheard(world: World) -> None:
    """No message of operators reaches a node; operators receive its messages."""
    node = any_node(world)
    if node is not None:
        _cut_ways(world, node, "operator_unheard", Way.UP)


def peers_unheard(world: World) -> None:
    """No message of other nodes reaches a node, and perhaps none of operators either."""
    node = any_node(world)
    if node is not None:
        node.is_deaf = True
        way = world.schedule.random.choice([Way.BOTH, Way.UP])
        _cut_ways(world, node, "peers_unheard", way)


def peers_unreached(world: World) -> None:
    """No packet passes between a node with workers and other nodes; operators reach all."""
    worker = any_worker(world)
    local = None if worker is None else world.cluster.local(worker.pod)
    if local is None:
        return
    node, seconds = local.node, world.schedule.between(SILENCE_SECONDS, LOST_SECONDS)
    node.is_unreached = True
    for place in dict.fromkeys(map(world.training.place, world.training.live.values())):
        if not (place.is_broken or place.is_done or world.meet(place)):
            world.training.part(place)
            world.watches.silence(place)
    if not world.scenario.stays_unreached:
        world.schedule.after(seconds, free_ways, world, node)


def _cut_ways(world: World, node: Node, kind: str, way: Way) -> None:
    seconds = world.schedule.between(SILENCE_SECONDS, LOST_SECONDS)
    _end_cuts(world, node)
    world.note(kind, node.locals.values(), node, seconds=seconds)
    node.way = way
    world.look_at(node)
    world.schedule.after(seconds, free_ways, world, node)


def free_ways(world: World, node: Node) -> None:
    """Let all messages from and to a node pass."""
    _end_cuts(world, node)
    node.way, node.is_deaf, node.is_unreached = Way.BOTH, False, False
    world.look_at(node)


def _end_cuts(world: World, node: Node) -> None:
    """Note that the ways of a node are no longer cut as they were."""
    for fault in world.truth.faults:
        if fault.node == node.name and fault.kind in CUTS and fault.until is not None:
            fault.until = min(fault.until, world.schedule.now)


def island(world: World) -> None:
    """Some nodes are cut off together: they exchange messages with each other only."""
    nodes = [node for node in world.cluster.machines.values() if node.is_up]
    few = world.schedule.random.sample(nodes, min(len(nodes), world.schedule.random.choice([2, 3])))
    for node in few:
        world.note("node_cut", node.locals.values(), node)
        world.cluster.cut_off(node, f"island of {few[0].name}")
        world.look_at(node)
    world.schedule.probes["island"] += 1


def node_pause(world: World) -> None:
    """A machine is paused, with agents, keepers and workers, and resumes."""
    node = any_node(world)
    if node is not None:
        world.pause(node, world.schedule.between(SILENCE_SECONDS, 60.0))


def lease_edge(world: World) -> None:
    """Aim at the end of a lease.

    A rank is lost right after a renewal, while another one breaks. So the operator waits for that
    lease alone and continues as soon as it may.
    """
    schedule, worker = world.schedule, any_worker(world)
    agent = world.agent_of(worker) if worker is not None else None
    if worker is None or agent is None:
        return
    if schedule.chance(0.2):
        # Until there is another one, the agents vouch for each other.
        world.operator.crash()
        schedule.after(schedule.between(2.0, 15.0), _aim, world, agent, worker.attempt)
    else:
        _aim(world, agent, worker.attempt)


def _aim(world: World, agent: Agent, attempt: int) -> None:
    """The renewal is in the agent's socket, or has been read; a stop for what breaks is late."""
    if world.is_healed:
        return
    schedule, way_seconds = world.schedule, agent.quality.usual_seconds
    here = agent.local.node.locals
    others = [w for w in world.training.live.values() if w.attempt == attempt and w.pod not in here]
    lost_in = agent.beats_at - schedule.now + way_seconds * schedule.random.choice([1.5, 2.5])
    if others:
        break_in = lost_in - schedule.between(0.0, 1.9) * way_seconds
        schedule.after(max(0.0, break_in), crash, world, schedule.random.choice(others))
    schedule.after(max(0.0, lost_in), _lose, world, agent)


def _lose(world: World, agent: Agent) -> None:
    """The agent is lost to operators, and perhaps to its peers; most are frozen as well."""
    schedule, lease = world.schedule, world.scenario.lease_seconds
    is_lost = world.is_healed or not agent.is_alive or agent.is_frozen
    if is_lost or not agent.local.node.is_up:
        return
    schedule.probes["lease_edge"] += 1
    if schedule.chance(0.6):
        seconds = lease * schedule.random.choice([0.5, 0.9, 2.0])
        world.note("agent_freeze", [agent.local], seconds=seconds)
        agent.freeze()
        schedule.after(seconds, world.thaw, agent)
    else:
        world.note("stuck_worker", [agent.local])
        agent.slow[KillAll] = 2 * lease
    ways = [_lose_node, _lose_node, _lose_time]
    if lease < REPLACED_SECONDS:
        # Until its pod is replaced, which a node that is not cut off itself carries out.
        ways += [_lose_link, _lose_ways]
    schedule.random.choice(ways)(world, agent)
    world.operator.look(agent.local.uid)


def _lose_node(world: World, agent: Agent) -> None:
    node = agent.local.node
    world.note("node_cut", node.locals.values(), node)
    world.cluster.cut_off(node)
    world.look_at(node)
    if world.schedule.chance(0.3):
        # It is back about when the operator stops to wait for it.
        seconds = world.scenario.lease_seconds * 1.03 + world.schedule.between(-1.0, 4.0)
        world.schedule.after(seconds, world.repair, node)


def _lose_link(world: World, agent: Agent) -> None:
    seconds = world.scenario.lease_seconds * 2
    world.note("link_cut", [agent.local], seconds=seconds)
    world.cut_link(agent.local.uid, seconds)


def _lose_ways(world: World, agent: Agent) -> None:
    _cut_ways(world, agent.local.node, "agent_unheard", Way.DOWN)


def _lose_time(world: World, agent: Agent) -> None:
    seconds = world.scenario.lease_seconds * 1.03 + world.schedule.between(-1.0, 20.0)
    world.pause(agent.local.node, seconds)


ACTIONS: dict[str, Callable[[World], None]] = {
    action.__name__: action
    for action in (
        agent_unheard, operator_unheard, peers_unheard, peers_unreached, island, node_pause,
        lease_edge,
    )
}  # fmt: skip
