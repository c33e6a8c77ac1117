"""Faults of worlds whose workers hold leases: ways cut in one direction, islands, paused machines,
and schedules that aim at the end of a lease.

The leases of a world's workers say who vouches for whom; a check is that none ends in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from unbroken.core.agent.events import KillAll
from unbroken.core.job.life import STOP_SECONDS
from unbroken.core.job.recovery.symptoms import STALLED
from unbroken.core.job.watch.unreached import NOT_REACHABLE
from unbroken.sim.actors.agents import AWAKE_SECONDS, Agent, Leasing
from unbroken.sim.actors.cluster import Node
from unbroken.sim.actors.links import Way
from unbroken.sim.actors.operators import SILENCE_SECONDS
from unbroken.sim.actors.training import Gathering, Worker
from unbroken.sim.checkers.truth import UNREACHED
from unbroken.wire.agent import PORT

from .faults import any_node, any_worker, crash, note

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


KEEPER_LATE_SECONDS = 0.9
"""Seconds for a keeper to look and to kill, at most.

With the 0.5 s that it leaves to its agent this is 0.1 s less than the operator's margin.
"""
LOST_SECONDS = 90.0
"""A way stays cut for so long at most."""
UNREACHED_NOTICED = 25.0
"""Seconds after which a node that its peers do not reach has been noticed."""
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
        if not (place.is_broken or place.is_done or meet(world, place)):
            world.training.part(place)
            world.watches.silence(place)
    if not world.scenario.stays_unreached:
        world.schedule.after(seconds, free_ways, world, node)


def meet(world: World, place: Gathering) -> bool:
    """Return whether the workers of an attempt reach each other, and note it if they do not."""
    found = [world.cluster.local(worker.pod) for worker in place.members.values()]
    pods = [local for local in found if local is not None]
    apart = [one.node for one in pods if any(not one.node.receives(two.node) for two in pods)]
    unreached = [node for node in apart if node.is_unreached]
    if unreached:
        # Pods that come later wait for them as well, and may be taken for the one that is cut off.
        ranked = [world.cluster.local(uid) for uid in world.truth.rank_of]
        known = [local for local in ranked if local is not None]
        note(world, UNREACHED, known, unreached[0], is_anyones=True)
    return not unreached


def judge_unreached(world: World) -> None:
    """Check that a node which its peers do not reach is named, and costs one restart if nothing
    else is wrong; two where only two pods can miss each other."""
    faults = [one for one in world.truth.faults if one.kind == UNREACHED]
    if not world.scenario.stays_unreached or not faults:
        return
    require = world.checkers.require
    incidents = sorted(world.control.incidents.objects.values(), key=lambda one: one.number)
    named = [one.culprit.node for one in incidents if one.culprit.fault == NOT_REACHABLE]
    wrong = [node for node in named if node != faults[0].node]
    # An operator that takes over does not know which of the two pods was replaced.
    most = (1 if world.truth.is_undisturbed else 2) if world.scenario.spec.nnodes == 2 else 0
    require(len(wrong) <= most, "the wrong end is blamed", *incidents)
    require(named[-1:] in ([], [faults[0].node]), "the cut-off end is left", *incidents)
    hangs = [one for one in incidents if one.culprit.fault == STALLED]
    require(not hangs, "a node that is not reached is taken for a hang", *hangs)
    if world.truth.is_undisturbed:
        rule = "a node that is not reached costs one restart"
        require(len(incidents) == 1 + len(wrong), rule, *incidents)
        seconds = incidents[0].detected_at - faults[0].at
        require(seconds < UNREACHED_NOTICED, "nobody noticed that a node is not reached", seconds)


def _cut_ways(world: World, node: Node, kind: str, way: Way) -> None:
    seconds = world.schedule.between(SILENCE_SECONDS, LOST_SECONDS)
    _end_cuts(world, node)
    note(world, kind, node.locals.values(), node, seconds=seconds)
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
        note(world, "node_cut", node.locals.values(), node)
        world.cluster.cut_off(node, f"island of {few[0].name}")
        world.look_at(node)
    world.schedule.probes["island"] += 1


def node_pause(world: World) -> None:
    """A machine is paused, with agents, keepers and workers, and resumes."""
    node = any_node(world)
    if node is not None:
        _pause(world, node, world.schedule.between(SILENCE_SECONDS, 60.0))


def _pause(world: World, node: Node, seconds: float) -> None:
    note(world, "node_pause", node.locals.values(), node, seconds=seconds)
    world.cluster.pause(node)
    for agent in _agents(node):
        agent.freeze()
    for worker in _workers(world, node):
        world.truth.stalled.setdefault(worker.attempt, set()).add(worker.rank)
        world.training.pause(worker)
    world.look_at(node)
    world.schedule.after(seconds, wake, world, node)


def wake(world: World, node: Node) -> None:
    """Let a paused machine resume. A clock that counts the pause shows at once that leases have run
    out; with one that does not, workers may live on for one lease."""
    if node.paused_at is None:
        return
    shape, schedule = world.scenario, world.schedule
    since, node.paused_at = node.paused_at, None
    lingers = AWAKE_SECONDS + KEEPER_LATE_SECONDS
    if not shape.counts_pauses:
        lingers += shape.lease_seconds * (1 + 2 * shape.drift) + 1.0
    node.excused_until = schedule.now + lingers
    for agent in _agents(node):
        agent.wake(schedule.now - since, counts=shape.counts_pauses)
    if node.has_power and not node.island:
        world.cluster.repair(node)
    world.look_at(node)
    schedule.after(lingers + 0.01, _judge_woken, world, node)


def _judge_woken(world: World, node: Node) -> None:
    """Check that workers which the paused machine ended late have ended, if nothing holds them in
    the kernel."""
    stuck = [one.uids for one in world.truth.faults if one.kind == "stuck_worker"]
    newest = max((worker.attempt for worker in world.training.live.values()), default=0)
    late = [w for w in _workers(world, node) if w.attempt < newest and not w.is_lease_over]
    late = [w for w in late if not w.is_at_barrier and not any(w.pod in pods for pods in stuck)]
    rule = "workers of a machine that stood still outlive their lease"
    world.checkers.require(not late, rule, *late)


def _agents(node: Node) -> Iterator[Agent]:
    return (local.process for local in node.locals.values() if isinstance(local.process, Agent))


def _workers(world: World, node: Node) -> list[Worker]:
    return [worker for worker in world.training.live.values() if worker.pod in node.locals]


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
        note(world, "agent_freeze", [agent.local], seconds=seconds)
        agent.freeze()
        schedule.after(seconds, world.thaw, agent)
    else:
        note(world, "stuck_worker", [agent.local])
        agent.slow[KillAll] = 2 * lease
    ways = [_lose_node, _lose_node, _lose_time]
    if lease < STOP_SECONDS:
        # Until its pod is replaced, which a node that is not cut off itself carries out.
        ways += [_lose_link, _lose_ways]
    schedule.random.choice(ways)(world, agent)
    world.operator.look(agent.local.uid)


def _lose_node(world: World, agent: Agent) -> None:
    node = agent.local.node
    note(world, "node_cut", node.locals.values(), node)
    world.cluster.cut_off(node)
    world.look_at(node)
    if world.schedule.chance(0.3):
        # It is back about when the operator stops to wait for it.
        seconds = world.scenario.lease_seconds * 1.03 + world.schedule.between(-1.0, 4.0)
        world.schedule.after(seconds, world.repair, node)


def _lose_link(world: World, agent: Agent) -> None:
    seconds = world.scenario.lease_seconds * 2
    note(world, "link_cut", [agent.local], seconds=seconds)
    world.cut_link(agent.local.uid, seconds)


def _lose_ways(world: World, agent: Agent) -> None:
    _cut_ways(world, agent.local.node, "agent_unheard", Way.DOWN)


def _lose_time(world: World, agent: Agent) -> None:
    seconds = world.scenario.lease_seconds * 1.03 + world.schedule.between(-1.0, 20.0)
    _pause(world, agent.local.node, seconds)


ACTIONS: dict[str, Callable[[World], None]] = {
    action.__name__: action
    for action in (
        agent_unheard, operator_unheard, peers_unheard, peers_unreached, island, node_pause,
        lease_edge,
    )
}  # fmt: skip
