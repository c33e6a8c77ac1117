"""The faults: the effect of each on the world, and the record of it for the checkers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unbroken.core.agent.events import KillAll, Spawn
from unbroken.core.agent.faults import SIGKILL, WorkerEnd
from unbroken.core.job.events import PodName, PodPhase, PodRefused
from unbroken.sim.actors.agents import Agent
from unbroken.sim.actors.cluster import Local, Node
from unbroken.sim.actors.operators import SILENCE_SECONDS
from unbroken.sim.actors.training import Worker, raised
from unbroken.sim.checkers.truth import USER_RESTART

from .world import World

ENDS = (
    raised("ValueError: loss is nan"),
    WorkerEnd(3),
    WorkerEnd(None, 11),
    WorkerEnd(None, SIGKILL),
    WorkerEnd(None, SIGKILL, is_out_of_memory=True),
)


def _locals(world: World) -> list[Local]:
    return [
        local for node in world.cluster.machines.values() for local in node.locals.values()
    ]  # fmt: skip


def any_worker(world: World) -> Worker | None:
    """A worker whose attempt is still wanted."""
    live = [w for w in world.training.live.values() if w.attempt not in world.truth.ended]
    return world.schedule.random.choice(live) if live else None


def _agent(world: World) -> Agent | None:
    agents = [
        local.process
        for local in _locals(world)
        if isinstance(local.process, Agent) and not local.is_ending
    ]
    return world.schedule.random.choice(agents) if agents else None


def any_node(world: World) -> Node | None:
    """A node that runs and can be reached."""
    nodes = [node for node in world.cluster.machines.values() if node.is_up]
    return world.schedule.random.choice(nodes) if nodes else None


def _worker_note(world: World, kind: str, worker: Worker, *, is_anyones: bool = False) -> None:
    local = world.cluster.local(worker.pod)
    pods = [local] if local else []
    world.note(kind, pods, is_prompt=True, is_anyones=is_anyones)


def worker_crash(world: World) -> None:
    """A worker ends badly; sometimes several in the same moment."""
    for _ in range(world.schedule.random.choice([1, 1, 1, 2, 4])):
        worker = any_worker(world)
        if worker is not None:
            crash(world, worker)


def crash(world: World, worker: Worker) -> None:
    """Let a worker end badly, if it lives."""
    if worker.exit is None:
        _worker_note(world, "worker_crash", worker)
        world.training.end(worker, world.schedule.random.choice(ENDS))


def early_exit(world: World) -> None:
    """A worker ends with 0 while its peers train."""
    worker = any_worker(world)
    if worker is None or worker.rank in world.truth.stalled.get(worker.attempt, ()):
        return  # A stopped process does not end by itself.
    living = [w for w in world.training.live.values() if w.attempt == worker.attempt]
    if len(living) > 1 and not world.training.is_work_done:
        # Its agent reports a success, so only the peers' failures show it.
        _worker_note(world, "early_exit", worker, is_anyones=True)
        world.training.exit_early(worker)


def hang(world: World) -> None:
    """A worker hangs, until the watchdogs of its peers end them."""
    worker = any_worker(world)
    if worker is not None and world.training.hang(worker):
        _worker_note(world, "hang", worker, is_anyones=True)


def stall(world: World) -> None:
    """A worker hangs silently, and its peers wait for it."""
    worker = _trainer(world)
    if worker is not None:
        _stand_still(world, "stall", worker)


def stop(world: World) -> None:
    """A worker is stopped by a signal, for good or for a moment."""
    worker = _trainer(world)
    if worker is None or worker.is_stopped:
        return  # The end of the first stop would end a second one, too.
    if world.schedule.chance(0.6):
        world.watches.stopped(worker, None)
        _stand_still(world, "stop", worker)
    else:
        _worker_note(world, "stop_short", worker, is_anyones=True)
        world.truth.stalled.setdefault(worker.attempt, set()).add(worker.rank)
        world.watches.stopped(worker, world.schedule.between(0.1, 8.0))


def _stand_still(world: World, kind: str, worker: Worker) -> None:
    place = world.training.place(worker)
    is_seen = kind == "stop" or world.watches.knows(place)
    _worker_note(world, kind if is_seen else "hang", worker, is_anyones=True)
    world.truth.stalled.setdefault(worker.attempt, set()).add(worker.rank)
    world.training.stall(worker)
    world.watches.silence(place)


def false_silence(world: World) -> None:
    """No rank shows any activity for a while, in which one rank works."""
    worker = _trainer(world)
    if worker is not None and not world.training.place(worker).is_quiet:
        place = world.training.place(worker)
        _worker_note(world, "false_silence", worker, is_anyones=True)
        world.truth.at_work.setdefault(worker.attempt, set()).add(worker.rank)
        place.is_quiet, place.at_work = True, worker.rank
        seconds = world.schedule.between(3.0, 120.0)
        if world.schedule.chance(0.3):
            # No rank can be seen at work, and the others wait longer than links flap.
            agent = world.agent_of(worker)
            if agent is not None:
                agent.is_blind = True
            seconds = world.schedule.between(90.0, 300.0)
        world.watches.silence(place, seconds)


def lone_silence(world: World) -> None:
    """One rank shows nothing for a while, among others that do."""
    worker = _trainer(world)
    if worker is not None and worker.world_size > 1:
        place = world.training.place(worker)
        if world.watches.knows(place) and not place.is_quiet:
            world.schedule.probes["lone_silence"] += 1
            world.watches.lone_silence(worker, world.schedule.between(1.0, 10.0))


def _trainer(world: World) -> Worker | None:
    """Return a worker whose attempt makes progress."""
    worker = any_worker(world)
    is_fit = worker is not None and world.scenario.rhythm and world.training.trains(worker)
    return worker if is_fit else None


def port_taken(world: World) -> None:
    """The next store finds its port taken."""
    world.training.is_port_taken = True


def not_started(world: World) -> None:
    """For a while some programs cannot be started."""
    world.surroundings.ill = 0.3
    world.schedule.after(5.0, _can_start, world)


def _can_start(world: World) -> None:
    world.surroundings.ill = 0.0


def agent_crash(world: World) -> None:
    """An agent is killed."""
    agent = _agent(world)
    if agent is not None:
        world.note("agent_crash", [agent.local], is_prompt=True)
        agent.kill()


def agent_crash_soon(world: World) -> None:
    """An agent dies between two of its next orders."""
    agent = _agent(world)
    if agent is not None:
        agent.crash_in = world.schedule.random.randint(0, 4)


def pod_delete(world: World) -> None:
    """Somebody deletes a pod."""
    locals_ = [local for local in _locals(world) if local.process and not local.is_ending]
    if locals_ and not world.cluster.is_away:
        local = world.schedule.random.choice(locals_)
        world.note("pod_delete", [local])
        world.cluster.delete_pod(local.name, local.uid, force=False)


def pod_fail(world: World) -> None:
    """A kubelet evicts a pod: its containers are killed and do not come back."""
    locals_ = [local for local in _locals(world) if local.process and not local.is_ending]
    if locals_:
        local = world.schedule.random.choice(locals_)
        world.note("pod_fail", [local])
        local.phase = PodPhase.FAILED
        if local.process:
            local.process.kill()


def node_power(world: World) -> None:
    """A machine stops, perhaps for a moment."""
    node = any_node(world)
    if node is not None:
        world.note("node_power", node.locals.values(), node)
        world.cluster.power_off(node)
        _perhaps_repair(world, node, 3.0, 40.0)


def node_cut(world: World) -> None:
    """A machine continues to run, but cannot be reached."""
    node = any_node(world)
    if node is not None:
        world.note("node_cut", node.locals.values(), node)
        world.cluster.cut_off(node)
        world.look_at(node)
        _perhaps_repair(world, node, SILENCE_SECONDS, 40.0)


def node_cut_short(world: World) -> None:
    """A machine cannot be reached for so short a time that it must not matter."""
    node = any_node(world)
    if node is not None and not world.has_cuts:
        world.cluster.cut_off(node)
        world.look_at(node)
        seconds = min(SILENCE_SECONDS, world.cluster.manners.not_ready_after)
        world.schedule.after(seconds * 0.5, world.repair, node)


def _perhaps_repair(world: World, node: Node, least: float, most: float) -> None:
    if world.schedule.chance(0.4):
        world.schedule.after(world.schedule.between(least, most), world.repair, node)


def node_unhealthy(world: World) -> None:
    """A node is found to be bad; what runs there should leave it."""
    node = any_node(world)
    if node is not None and not world.cluster.is_away:
        view = world.cluster.nodes.objects.get(node.name)
        if view is not None and view.is_healthy:
            world.note("node_unhealthy", node.locals.values(), node)
            world.cluster.nodes.put(node.name, replace(view, is_healthy=False))


def link_cut(world: World) -> None:
    """An operator cannot reach an agent for a long time."""
    agent = _agent(world)
    if agent is not None:
        seconds = world.schedule.between(SILENCE_SECONDS, 90.0)
        world.note("link_cut", [agent.local], seconds=seconds)
        world.cut_link(agent.local.uid, seconds)


def link_cut_short(world: World) -> None:
    """Nor for a moment, which matters not."""
    agent = _agent(world)
    if agent is not None and not world.has_cuts:
        world.cut_link(agent.local.uid, world.schedule.between(0.1, SILENCE_SECONDS * 0.8))


def user_restart(world: World) -> None:
    """A user asks for a restart."""
    job = world.control.jobs.objects.get("job")
    if job is not None and not world.cluster.is_away:
        world.note(USER_RESTART, [], is_anyones=True)
        options = replace(job.options, restart=world.schedule.now)
        world.control.jobs.put("job", replace(job, options=options))


def suspend(world: World) -> None:
    """A user suspends the job, and resumes it."""
    if not world.cluster.is_away:
        world.set_suspended(is_suspended=True)
        world.schedule.after(world.schedule.between(1.0, 30.0), world.resume)


def agent_freeze(world: World) -> None:
    """An agent is stopped by a signal, for a short or long time; its workers continue."""
    agent = _agent(world)
    if agent is not None and not agent.is_frozen:
        seconds = world.schedule.between(SILENCE_SECONDS, 60.0)
        world.note("agent_freeze", [agent.local], seconds=seconds)
        agent.freeze()
        world.operator.look(agent.local.uid)
        world.schedule.after(seconds, world.thaw, agent)


def stuck_worker(world: World) -> None:
    """The next workers that are to be killed are stuck in the kernel for long."""
    agent = _agent(world)
    if agent is not None:
        world.note("stuck_worker", [agent.local])
        agent.slow[KillAll] = world.schedule.between(20.0, 90.0)


def slow_start(world: World) -> None:
    """The next workers of an agent take long to start."""
    agent = _agent(world)
    if agent is not None:
        world.note("slow_start", [agent.local])
        agent.slow[Spawn] = world.schedule.between(20.0, 90.0)


def quota(world: World) -> None:
    """For a while the API takes no pod."""
    if world.truth.is_forbidden:
        return
    refused = PodRefused(PodName(""), "exceeded quota", is_final=False)
    world.control.refuses = lambda: refused
    world.schedule.after(world.schedule.between(1.0, 30.0), world.end_quota)


def forbidden(world: World) -> None:
    """From now on the API takes no pod, and reports that as final."""
    refused = PodRefused(PodName(""), "violates PodSecurity", is_final=True)

    def refuse() -> PodRefused:
        world.truth.is_forbidden = True
        world.schedule.probes["forbidden"] += 1
        return refused

    world.control.refuses = refuse


def job_delete(world: World) -> None:
    """A user deletes the job."""
    if not world.cluster.is_away:
        world.delete_job()


def operator_crash(world: World) -> None:
    """The operator is killed."""
    world.operator.crash()


def operator_crash_soon(world: World) -> None:
    """The operator dies between two of its next orders."""
    world.operator.crash_in = world.schedule.random.randint(0, 12)


def api_away(world: World) -> None:
    """The API server answers no request for a while."""
    seconds = world.schedule.between(1.0, 60.0)
    world.cluster.go_away()
    world.operator.cut_watches(seconds + 1.0)
    world.schedule.after(seconds, world.cluster.come_back)


def watches_cut(world: World) -> None:
    """The operator gets no events of the API for a while, and then lists all objects."""
    world.operator.cut_watches(world.schedule.between(0.5, 20.0))


ACTIONS: dict[str, Callable[[World], None]] = {
    action.__name__: action
    for action in (
        worker_crash, early_exit, hang, port_taken, not_started, agent_crash, agent_crash_soon,
        pod_delete, pod_fail, node_power, node_cut, node_cut_short, node_unhealthy, link_cut,
        link_cut_short, user_restart, suspend, operator_crash, operator_crash_soon, api_away,
        stall, stop, false_silence, lone_silence, watches_cut, agent_freeze, stuck_worker,
        slow_start, quota, forbidden, job_delete,
    )
}  # fmt: skip
