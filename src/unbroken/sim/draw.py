"""Meaning of a seed: the scenario that is drawn for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from unbroken.sim.actors.api import Lag
from unbroken.sim.actors.cluster import Manners
from unbroken.sim.actors.links import Quality
from unbroken.sim.actors.snapshots import Keeping
from unbroken.sim.actors.training import Habits
from unbroken.sim.actors.watches import Rhythm
from unbroken.spec.job.types import (
    CleanPodPolicy,
    JobSpec,
    ReplicaSpec,
    RestartPolicy,
    RunPolicy,
    Switch,
)

from .scenario import Restartable, Scenario, Timed

NOISE = {
    "operator_crash": 4,
    "operator_crash_soon": 4,
    "api_away": 3,
    "watches_cut": 3,
    "link_cut_short": 3,
    "node_cut_short": 2,
    "suspend": 1,
    "quota": 1,
}
"""Faults that must never end an attempt, with weights."""
FAULTS = {
    "worker_crash": 6,
    "early_exit": 2,
    "hang": 1,
    "port_taken": 2,
    "agent_crash": 4,
    "agent_crash_soon": 4,
    "pod_delete": 3,
    "pod_fail": 2,
    "node_power": 4,
    "node_cut": 3,
    "node_unhealthy": 2,
    "link_cut": 2,
    "user_restart": 1,
    "not_started": 2,
    "agent_freeze": 2,
    "stuck_worker": 1,
    "slow_start": 1,
    "forbidden": 1,
    "job_delete": 1,
}
"""Faults that may end an attempt, with weights."""


STALLS = {"stall": 3, "stop": 3, "false_silence": 3, "lone_silence": 1}
"""Workers that hang, or seem to, with weights."""
TEMPLATE = {"spec": {"containers": [{"name": "pytorch", "image": "i"}]}}
BESIDE = (
    "worker_crash",
    "operator_crash",
    "operator_crash_soon",
    "link_cut",
    "agent_freeze",
    "suspend",
)
"""Faults that may occur during an examination."""


LONE_SHARE = 0.2
"""Share of worlds with one fault alone."""
FEW_LOST = 0.05
"""Share of messages that such a world loses at most."""
LEASE_FAULTS = {
    "agent_unheard": 2,
    "operator_unheard": 2,
    "peers_unheard": 2,
    "peers_unreached": 4,
    "island": 2,
    "node_pause": 3,
    "lease_edge": 3,
}
"""Faults of worlds with leases, with weights."""


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario of {seed}")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    scenario = kind(_any(rng), rng)
    if not (scenario.is_stock or scenario.rhythm or rng.random() < 0.6):
        scenario = replace(
            scenario,
            quality=replace(scenario.quality, is_beating=True),
            rhythm=_rhythm(rng),
            faults=(*scenario.faults, *_stalls(rng)),
        )
    return _lone(scenario, rng) if rng.random() < LONE_SHARE else scenario


def _lone(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the world with one of its faults alone, and perhaps the loss of the operator.

    The network loses few messages: what is promised to users is judged here.
    """
    harmful = [fault for fault in scenario.faults if fault.name not in NOISE]
    if not harmful or scenario.stays_unreached or scenario.are_abandoned:
        return scenario
    stalls = [fault for fault in harmful if fault.name in ("stall", "stop")]
    fault, quality = rng.choice(stalls or harmful), scenario.quality
    if stalls:
        fault = replace(fault, seconds=rng.uniform(5.0, 25.0), moment="start", number=0)
    lost_at = max(0.0, fault.seconds + rng.uniform(-15.0, 1.0))
    lost = replace(fault, seconds=lost_at, name="operator_crash")
    return replace(
        scenario,
        faults=(fault, lost) if rng.random() < 0.5 else (fault,),
        quality=replace(quality, loss=min(quality.loss, FEW_LOST), late=0.0),
        habits=replace(scenario.habits, is_doomed=False, work_seconds=60.0),
    )


def _any(rng: random.Random) -> Scenario:
    """Return a world of our own agents, without leases."""
    spec = _spec(rng)
    pods = sum(replica.replicas + replica.spares for replica in spec.replica_specs)
    slots = rng.choice([1, 1, 2])
    heal_after = rng.uniform(20.0, 120.0)
    return Scenario(
        spec=spec,
        nproc=rng.choice([1, 1, 2]),
        nodes=-(-pods // slots) + rng.choice([0, 1, 2]),
        manners=_manners(rng, slots),
        quality=_quality(rng),
        lag=_lag(rng),
        habits=_habits(rng),
        ambiguous=rng.choice([0.0, 0.0, 0.1]),
        is_stock=False,
        kill_seconds=rng.choice([0.02, 0.02, 3.0]),
        stubborn=rng.choice([0.0, 0.5]),
        topology=rng.random() < 0.5,
        skew_seconds=rng.choice([0.0, 0.0, 0.0, 3.0]),
        faults=_faults(rng, heal_after),
        heal_after=heal_after,
        members=_members(rng),
        in_process=Switch.OFF if rng.random() < 0.06 else Switch.ON,
        keeping=_keeping(rng),
        is_warm=rng.random() < 0.3,
        busy_seconds=rng.choice([0.0, 0.005, 0.1]),
    )


def _fenced(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return a world in which lost nodes are fenced by a provider, and workers hold no leases."""
    return scenario


def _stock(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return a world of HyperPod's agents; half of these are for in-process restart.

    Such an agent has no fence, so nothing protects it from repeated or late commands. It is polled,
    and requests do neither.
    """
    return replace(
        scenario,
        is_stock=True,
        has_waiting=rng.random() < 0.5,
        quality=Quality(usual_seconds=scenario.quality.usual_seconds, is_polled=True),
        members=None,
        in_process=Switch.ON,
        keeping=None,
        is_warm=False,
    )


def _leased(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return a world in which workers hold leases, and agents check whether they reach their peers.

    A clock may run fast or slow, and may not count the pauses of its machine.
    """
    count = rng.choice([0, 1, 1, 2, 3])
    names = rng.choices(list(LEASE_FAULTS), list(LEASE_FAULTS.values()), k=count)
    moments = ["", "start", "stop"]
    faults = (Timed(rng.uniform(0.0, 40.0), name, rng.choice(moments)) for name in names)
    return replace(
        scenario,
        lease_seconds=rng.choice([4.0, 8.0, 8.0, 60.0]),
        drift=rng.choice([0.0, 0.02, 0.02]),
        counts_pauses=rng.random() < 0.7,
        quality=replace(scenario.quality, outlives_cuts=True),
        checks_peers=True,
        faults=(*scenario.faults, *faults),
    )


def _at_the_edge(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return a world in which a lease runs out while nothing else delays the operator.

    Ranks are lost, their nodes cannot be asked, and there is a place for others at once.
    """
    ranks, lease = rng.choice([2, 3, 4]), rng.choice([4.0, 8.0, 8.0, 50.0, 200.0])
    at = rng.uniform(2.0, 10.0)
    edges = [Timed(at, "lease_edge", "start")]
    if rng.random() < 0.3:
        edges.append(
            Timed(at + rng.uniform(0.0, 1.2 * lease), rng.choice(list(LEASE_FAULTS)), "start")
        )
    usual = rng.choice([0.002, 0.02, 0.2])
    return replace(
        _leased(scenario, rng),
        spec=JobSpec((ReplicaSpec("pods", TEMPLATE, ranks, 1),), "2", RunPolicy()),
        nodes=ranks + 2,
        manners=replace(scenario.manners, slots=1, start=0.2, fence_after=None),
        quality=Quality(loss=rng.choice([0.0, 0.0, 0.1]), usual_seconds=usual, outlives_cuts=True),
        lag=Lag(),
        # Workers that lose a peer hang, and nothing but the lease ends them.
        habits=Habits(work_seconds=lease + 60.0, peers_hang=True, watchdog_seconds=600.0),
        busy_seconds=0.0,
        lease_seconds=lease,
        faults=tuple(edges),
        heal_after=at + 1.2 * lease + 30.0,
    )


def _abandoned(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return a world whose dead nodes nobody fences or repairs.

    At most two of at least three ranks are lost with them, so that a rank is left that has stopped,
    and there is a place for each pod.
    """
    ranks, spares = rng.choice([3, 4, 6]), rng.choice([0, 0, 1])
    began = rng.choice([0.0, 2.0, 20.0])
    times = [began + rng.uniform(0.0, 10.0) for _ in range(rng.choice([1, 2, 2]))]
    faults = [Timed(at, "node_power") for at in times]
    if rng.random() < 0.6:
        faults.append(Timed(times[0] + rng.uniform(-2.0, 20.0), "operator_crash"))
    if rng.random() < 0.3:
        faults.append(Timed(times[0] + rng.uniform(0.0, 20.0), "worker_crash"))
    manners = replace(scenario.manners, slots=1, start=rng.choice([0.2, 2.0]), fence_after=None)
    return replace(
        _leased(scenario, rng),
        spec=JobSpec((ReplicaSpec("pods", TEMPLATE, ranks, spares),), "1", RunPolicy()),
        nodes=ranks + spares + 3,
        manners=manners,
        lease_seconds=rng.choice([4.0, 8.0]),
        faults=tuple(sorted(faults, key=lambda fault: fault.seconds)),
        heal_after=60.0,
        are_abandoned=True,
    )


def _unreached(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return a world in which a node is not reached by its peers, from some moment on and for ever.

    Nothing else is wrong but perhaps a lost operator: it is the node to be replaced.
    """
    ranks, spares = rng.choice([2, 2, 3, 4]), rng.choice([0, 0, 1])
    faults = [Timed(rng.uniform(0.0, 20.0), "peers_unreached", "start")]
    if rng.random() < 0.3:
        faults.append(Timed(rng.uniform(0.0, 40.0), "operator_crash"))
    return replace(
        _leased(scenario, rng),
        spec=JobSpec((ReplicaSpec("pods", TEMPLATE, ranks, spares),), "1", RunPolicy()),
        nodes=ranks + spares + 2,
        manners=replace(scenario.manners, slots=1, start=0.2),
        quality=Quality(
            usual_seconds=rng.choice([0.002, 0.02, 0.2]), is_beating=True, outlives_cuts=True
        ),
        lag=Lag(),
        habits=Habits(work_seconds=rng.uniform(40.0, 120.0), watchdog_seconds=600.0),
        ambiguous=0.0,
        busy_seconds=0.0,
        rhythm=_rhythm(rng),
        members=scenario.members and replace(scenario.members, mortal=0.0),
        faults=tuple(faults),
        heal_after=60.0,
        stays_unreached=True,
    )


KINDS: Mapping[Callable[[Scenario, random.Random], Scenario], float] = {
    _fenced: 40,
    _stock: 8,
    _leased: 22,
    _at_the_edge: 10,
    _abandoned: 10,
    _unreached: 10,
}
"""Functions that turn any world into one of their kind, with weights."""


def _members(rng: random.Random) -> Restartable | None:
    if rng.random() < 0.4:
        return None
    return Restartable(
        share=rng.choice([0.7, 1.0, 1.0]),
        arrive_seconds=rng.choice([0.02, 0.5, 4.0]),
        absent=rng.choice([0.0, 0.0, 0.2]),
        mortal=rng.choice([0.0, 0.0, 0.2]),
    )


def _keeping(rng: random.Random) -> Keeping | None:
    if rng.random() < 0.3:
        return None
    return Keeping(
        every_seconds=rng.choice([1.0, 3.0]),
        lag_seconds=rng.choice([0.05, 0.5, 4.0]),
        is_told=rng.random() < 0.5,
        buddy=Switch.OFF if rng.random() < 0.1 else Switch.ON,
    )


def _rhythm(rng: random.Random) -> Rhythm:
    return Rhythm(rng.choice([0.5, 3.0, 10.0]), rng.choice([1.0, 5.0, 12.0]))


def _stalls(rng: random.Random) -> Iterator[Timed]:
    """Yield times at which workers stall, or seem to; sometimes with another fault at that
    moment."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        name = rng.choices(list(STALLS), list(STALLS.values()))[0]
        moment = rng.choice(["", "start"])
        seconds = rng.uniform(2.0, 40.0 if moment else 100.0)
        yield Timed(seconds, name, moment)
        if rng.random() < 0.5:
            other = rng.choice(BESIDE)
            yield Timed(seconds + rng.uniform(0.0, 20.0), other, moment)


def _spec(rng: random.Random) -> JobSpec:
    spares = rng.choice([0, 0, 1, 2])
    groups = [ReplicaSpec("pods", TEMPLATE, rng.choice([1, 2, 2, 3, 4, 6]), spares)]
    if rng.random() < 0.15:
        groups.append(ReplicaSpec("more", TEMPLATE, rng.choice([1, 2]), rng.choice([0, 1])))
    policy = None
    if rng.random() < 0.4:
        policy = RestartPolicy(
            eval_period_seconds=rng.choice([600, 3600]),
            num_restart_before_full_job_restart=rng.choice([None, 1, 2]),
            max_full_job_restarts=rng.choice([None, 1, 2]),
            max_num_repeat_offenders_to_avoid=rng.choice([None, 1]),
        )
    run_policy = RunPolicy(
        clean_pod_policy=rng.choice(list(CleanPodPolicy)),
        job_max_retry_count=rng.choice([None, None, 1, 3, 6]),
        active_deadline_seconds=rng.choice([50, 200]) if rng.random() < 0.04 else None,
        startup_deadline_seconds=rng.choice([5, 60]) if rng.random() < 0.04 else None,
        fault_deadline_seconds=rng.choice([5, 60]) if rng.random() < 0.04 else None,
        ttl_seconds_after_finished=20 if rng.random() < 0.05 else -1,
        restart_policy=policy,
    )
    return JobSpec(tuple(groups), "2", run_policy)


def _habits(rng: random.Random) -> Habits:
    return Habits(
        work_seconds=rng.uniform(5.0, 90.0),
        peers_hang=rng.random() < 0.4,
        watchdog_seconds=rng.choice([20.0, 600.0]),
        finish_seconds=rng.choice([0.5, 4.0]),
        is_doomed=rng.random() < 0.05,
        are_confused=rng.random() < 0.2,
    )


def _manners(rng: random.Random, slots: int) -> Manners:
    return Manners(
        slots=slots,
        start=rng.choice([0.2, 1.0, 5.0]),
        grace=rng.choice([1.0, 20.0]),
        not_ready_after=rng.choice([3.0, 10.0]),
        evict_after=rng.choice([None, 2.0, 15.0]),
        fence_after=rng.choice([None, 1.0, 5.0]),
        fence_deletes_node=rng.random() < 0.2,
        collects_fenced=rng.random() < 0.5,
        restarts_containers=rng.random() < 0.85,
        removal=rng.choice([0.0, 0.5, 8.0]),
    )


def _quality(rng: random.Random) -> Quality:
    usual = rng.choice([0.002, 0.02, 0.2])
    if rng.random() < 0.4:
        return Quality(usual_seconds=usual)
    return Quality(
        loss=rng.choice([0.0, 0.05, 0.3]),
        double=rng.choice([0.0, 0.2]),
        late=rng.choice([0.0, 0.2]),
        late_seconds=rng.choice([0.5, 5.0, 15.0]),
        usual_seconds=usual,
    )


def _lag(rng: random.Random) -> Lag:
    if rng.random() < 0.5:
        return Lag()
    return Lag(0.02, rng.choice([0.5, 4.0, 15.0]))


def _faults(rng: random.Random, heal_after: float) -> tuple[Timed, ...]:
    if rng.random() < 0.2:
        names: dict[str, float] = {**NOISE}
        count = rng.choice([1, 2, 4])
    else:
        names = {**NOISE, **FAULTS}
        count = rng.choice([1, 2, 3, 4, 6, 9])
    chosen = rng.choices(list(names), list(names.values()), k=count)
    # Faults come in clusters: most bugs need a second one while the first is being dealt with.
    centre = rng.uniform(0.0, heal_after)
    spread = rng.choice([1.0, 5.0, heal_after])
    result = []
    for name in chosen:
        if rng.random() < 0.5:
            at = centre + rng.uniform(-spread, spread)
            result.append(Timed(min(max(0.0, at), heal_after), name))
        else:
            moment = rng.choice(["start", "stop", "stop", "finish"])
            seconds = rng.choice([0.0, 0.1, 1.0, 5.0]) * rng.random()
            result.append(Timed(seconds, name, moment, rng.choice([0, 0, 0, 1, 2])))
    return tuple(result)
