"""The run of one world: it is harmed, healed, and judged at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unbroken.core.job.recovery.symptoms import STALLED
from unbroken.core.job.watch.unreached import NOT_REACHABLE
from unbroken.sim.actors.agents import Agent
from unbroken.sim.actors.links import Way
from unbroken.sim.checkers.checkers import Violation, condition
from unbroken.sim.checkers.endings import Ending
from unbroken.sim.checkers.truth import UNREACHED
from unbroken.spec.job.types import CleanPodPolicy

from . import faults, lease_faults
from .draw import NOISE
from .scenario import Scenario, Timed
from .schedule import EPOCH
from .world import World

REST_SECONDS = 3000.0
"""Seconds of rest of a healed world, until its job must have ended."""
SETTLE_SECONDS = 60.0
"""Seconds after the end, until everything must be in order."""
UNREACHED_NOTICED = 25.0
"""Seconds after which a node that its peers do not reach has been noticed."""
ACTIONS = faults.ACTIONS | lease_faults.ACTIONS
"""Effect of each fault, by its name."""


class Simulation(World):
    """A world that runs from its beginning to its end."""

    def __init__(
        self,
        seed: int,
        tell: Callable[[str], None] | None = None,
        scenario: Scenario | None = None,
    ) -> None:
        super().__init__(seed, tell, scenario)
        self._struck: set[Timed] = set()
        self.training.finishing = lambda: self._moment("finish", 0)
        self.checkers.moment = self._moment

    def run(self) -> None:
        """Faults, then health, then the end of the job, and rest."""
        self._open()
        self.schedule.run(EPOCH + self.scenario.heal_after)
        self.heal()
        end = self.schedule.now + REST_SECONDS
        while not self.is_over:
            self._progresses(end)
            self.schedule.run(self.schedule.now + 10.0)
        self.schedule.run(self.schedule.now + SETTLE_SECONDS)
        if self.truth.is_deleted or "job" not in self.control.jobs.objects:
            self._nothing_is_left()
        else:
            self._at_rest()

    def _open(self) -> None:
        self.operator.start()
        for fault in self.scenario.faults:
            if not fault.moment:
                self.schedule.after(fault.seconds, self._happen, fault.name)

    def _moment(self, moment: str, number: int) -> None:
        """Let the faults come that were waiting for this."""
        for fault in self.scenario.faults:
            is_due = fault.moment == moment and fault.number in (0, number)
            if is_due and fault not in self._struck:
                self._struck.add(fault)
                self.schedule.after(fault.seconds, self._happen, fault.name)

    def _happen(self, name: str) -> None:
        if not self.is_healed and not self.is_over:
            self.schedule.trace("FAULT", name)
            if name in NOISE:
                self.schedule.probes[name] += 1
            self.truth.strikes.append(name)
            ACTIONS[name](self)

    def heal(self) -> None:
        """No more faults; what is broken is repaired."""
        self.schedule.trace("WORLD", "is healed")
        self.is_healed = True
        self.surroundings.quality.heal()
        self.surroundings.ill = self.surroundings.stubborn = 0.0
        self.training.is_port_taken = False
        self.end_quota()
        self.control.ambiguous = 0.0
        self.operator.crash_in = None
        self.cluster.come_back()
        self.operator.heal_watches()
        self.resume()
        self._cuts.clear()
        manners, are_left = self.cluster.manners, self.scenario.are_abandoned
        if not are_left:
            self.cluster.manners = replace(manners, fence_after=manners.fence_after or 2.0)
        machines = self.cluster.machines.values()
        for node in [one for one in machines if one.has_power or not are_left]:
            view = self.cluster.nodes.objects.get(node.name)
            if view is not None and not view.is_healthy:
                self.cluster.nodes.put(node.name, replace(view, is_healthy=True))
            if node.is_fence_asked:
                self.cluster.fence(node.name)
            if not node.is_up:
                self.schedule.after(self.schedule.between(5.0, 30.0), self.repair, node)
            node.way, node.is_deaf = Way.BOTH, False
            node.is_unreached &= self.scenario.stays_unreached
            for local in node.locals.values():
                if isinstance(local.process, Agent):
                    local.process.crash_in = None
                    local.process.slow.clear()
                    self.thaw(local.process)
            self.look_at(node)

    # The end.

    def _progresses(self, end: float) -> None:
        if self.schedule.now > end:
            status = self.control.statuses.objects.get("job")
            pods = "\n    ".join(map(str, self.cluster.pods.objects.values()))
            raise Violation(f"a healed world does not come to its end\n    {status}\n    {pods}")

    def _at_rest(self) -> None:
        status = self.control.statuses.objects["job"]
        require, spec = self.checkers.require, self.scenario.spec
        require(not self.training.live, "workers outlive their job", *self.training.live.values())
        require(self.operator.is_idle, "something is left unwritten")
        require(status == self.checkers.ordered_status, "the status is not what was decided")
        if self.snapshots is not None and condition(status, "Completed"):
            told = self.control.incidents.objects.values()
            for wrong in self.snapshots.judge_end(told, status, status.restart_count):
                require(False, wrong)
        told = self.control.incidents.objects.values()
        ranks = self.scenario.nproc * spec.nnodes
        for wrong in self.watches.judge_end(told, status.restart_count, ranks):
            require(False, wrong)
        _judge_unreached(self)
        ending = Ending(self.checkers, self.truth, spec, status, self.training.reached)
        name = ending.judge(self.control.incidents.objects.values())
        if spec.run_policy.clean_pod_policy is CleanPodPolicy.ALL:
            pods = self.cluster.pods.objects.values()
            require(not pods, "pods outlive their job", *pods)
        require(name == "Failed" or not self.scenario.habits.is_doomed, "a doomed job is complete")
        self.schedule.probes[name] += 1
        if self.scenario.is_stock and status.restart_count:
            self.schedule.probes["stock_restart"] += 1

    def _nothing_is_left(self) -> None:
        require, pods = self.checkers.require, self.cluster.pods.objects.values()
        if not self.truth.is_deleted:
            self.schedule.probes["expired"] += 1
            self._collect()
        self.schedule.run(self.schedule.now + SETTLE_SECONDS)
        require(not self.training.live, "workers outlive their job", *self.training.live.values())
        require(not pods, "pods outlive their job", *pods)


def _judge_unreached(world: World) -> None:
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
