"""Trials: a job of each mode, a kill in each in turn, and the recovery that was seen."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from recovery_launch import NODE, RANK_0, WORKER, Launcher, Setting, Unavailable
from recovery_records import Recovery
from recovery_watch import Watch, Worker

STEPS_BEFORE_KILL = 5
"""Steps that every rank makes between the start of the launcher's turn and the kill."""
SETTLE_SECONDS = (0.5, 1.0)
"""Shortest and longest wait before a kill, so that it meets polling launchers at any phase."""
FAILURES_MAX = 2
"""Failures after which a mode without any success is not tried with this fault again."""
AGAIN = " again"
"""Suffix of the mode for a kill that follows at once on the recovery from another."""


def say(text: str) -> None:
    """Print progress to standard error, since the table goes to standard output."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Contestant:
    """A mode, its job while it has one, and its kills."""

    kind: type[Launcher]
    base: Path
    setting: Setting
    recoveries: list[Recovery] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Reason why the mode is not tried, by fault."""
    job: Launcher | None = None
    jobs: int = 0
    used_at: float = 0.0

    def ensure(self) -> Launcher:
        """Return a job whose ranks have all made a step."""
        self.used_at = time.monotonic()
        if self.job is not None and not self.job.is_spent():
            return self.job
        self.drop()
        self.jobs += 1
        job = self.kind(self.base / f"{self.kind.mode}-{self.jobs}", self.setting)
        job.start_and_step()
        self.job = job
        say(f"{self.kind.mode}: job {self.jobs} steps")
        return job

    def drop(self) -> None:
        """Take the job away."""
        job, self.job = self.job, None
        if job is not None:
            job.drop()

    def is_hopeless(self, fault: str) -> bool:
        """Return whether another such kill is useless."""
        mine = [one for one in self.recoveries if one.fault == fault]
        return len(mine) >= FAILURES_MAX and not any(one.stepped_at for one in mine)

    def failed(self, fault: str, rank: int, why: str) -> Recovery:
        """Return a recovery that failed, and end the job so that the next kill gets a new one."""
        self.drop()
        return Recovery(self.kind.mode, rank, time.time(), why_not=why, fault=fault)


@dataclass(frozen=True)
class Plan:
    """Faults and number of kills of a race, and its bounds."""

    faults: Sequence[str]
    kills: int
    bound_seconds: float
    jobs_max: int
    kills_a_turn: int = 1


def pick(job: Launcher, fault: str, number: int) -> Worker:
    """Choose the worker to kill, or one on the machine to kill."""
    ranks = job.setting.ranks
    start = {RANK_0: 0, WORKER: 1 + number % max(1, ranks - 1)}.get(fault, number % ranks)
    newest = job.watch.newest
    order = [newest[(start + more) % ranks] for more in range(1 if fault == RANK_0 else ranks)]
    for worker in order:
        if job.may_be_struck(fault, worker):
            return worker
    raise Unavailable("rank 0 cannot be lost there")


def run_on(watch: Watch, settle_seconds: float, bound: float) -> bool:
    """Let all ranks make some more steps."""
    goals = {worker: worker.steps + STEPS_BEFORE_KILL for worker in watch.newest.values()}
    watch.wait(lambda: False, settle_seconds)
    return watch.wait(
        lambda: all(one.steps >= goals.get(one, 0) for one in watch.newest.values()), bound
    )


def kill_once(contestant: Contestant, fault: str, number: int, bound: float) -> Recovery:
    """Kill a worker of a running job; watch until the job makes a step again, or for `bound`."""
    job = contestant.job
    assert job is not None
    watch = job.watch
    old = list(watch.newest.values())
    victim = pick(job, fault, number)
    if any(one.died_at for one in old):
        return contestant.failed(fault, victim.rank, "lost a rank by itself")
    lost, seen = job.shares_fate(fault, victim), len(watch.workers)
    usual = [took for one in old for took in one.step_seconds(STEPS_BEFORE_KILL)]
    killed_at = time.time()
    job.strike(fault, victim)
    watch.wait(lambda: job.is_back(old, lost) or bool(job.ended()), bound, reaps=victim)
    if not job.is_back(old, lost):
        why = job.ended() or f"no step in {bound:.0f} s"
        return contestant.failed(fault, victim.rank, why)
    if fault == NODE:  # an order to a platform takes its time; nobody can know before they die
        killed_at = min((one.died_at for one in lost if one.died_at), default=killed_at)
    kill = Recovery(
        job.mode, victim.rank, killed_at, victim.reaped_at, fault=fault,
        step_seconds=statistics.median(usual) if usual else None,
    )  # fmt: skip
    return job.told(outcome(kill, job, old, lost, watch.workers[seen:]))


def outcome(
    kill: Recovery, job: Launcher, old: list[Worker], lost: list[Worker], since: list[Worker]
) -> Recovery:
    """Return the recovery with the times of its workers.

    `old` are the workers before the kill, `lost` are those of them that it killed, and `since`
    began after it.
    """
    new = [one for one in job.watch.newest.values() if one not in old]
    pids = {one.pid for one in old}
    ended = [one.died_at for one in old if one.died_at is not None]
    made = [one for one in new if one.pid not in pids]
    before = max(one.step_at(kill.killed_at) for one in old)
    first = min((one.first_step or 0 for one in new), default=0)
    dead_at = min((one.died_at for one in lost if one.died_at), default=kill.killed_at)
    return replace(
        kill,
        stopped_at=max(ended) if len(ended) == len(old) else None,
        started_at=max((one.started_at(kill.killed_at) for one in new), default=None),
        stepped_at=job.stepped_at(old, lost),
        lost_steps=max(0, before + 1 - first),
        details={
            "attempts": max(Counter(one.rank for one in since).values(), default=0),
            "kept": len(new) - len(made),
            "made": len(made),
            "made_before": sum(one.process_at < kill.killed_at - 0.02 for one in made),
            "kernel_ends_victim": dead_at - kill.killed_at,
            "to_first_step": _prepared(new, kill.killed_at) - kill.killed_at,
            **slowest(new, kill.killed_at),
            **slowest([one for one in new if one not in made], kill.killed_at, "kept_"),
        },
    )


def _prepared(workers: list[Worker], killed_at: float) -> float:
    """Return when the last rank began its first step."""
    return max((one.marks.get("restored", killed_at) for one in workers), default=killed_at)


PARTS = {
    "python": "process_to_python", "imported": "import_torch", "joined": "join", "built": "build",
    "loaded": "load", "restored": "wrap", "learned": "first_step", "first_step": "first_save",
}  # fmt: skip
"""Names of the parts until the first step, by the mark that ends each."""


def slowest(workers: list[Worker], killed_at: float, prefix: str = "") -> dict[str, float]:
    """Return the duration of each part until the first step, of the rank that took longest."""
    parts: dict[str, list[float]] = {}
    for one in workers:
        began = max(one.began_at, killed_at)
        reached = max(one.started_at(killed_at), killed_at)
        ends = {"python": began, **one.marks, "first_step": one.first_step_at or began}
        for name in PARTS:
            finish = max(reached, ends.get(name, reached))
            parts.setdefault(PARTS[name], []).append(finish - reached)
            reached = finish
        parts.setdefault("first_step_cpu", []).append(one.first_step_cpu_seconds or 0.0)
    return {prefix + name: max(values) for name, values in parts.items()}


def turn(
    contestant: Contestant, fault: str, number: int, plan: Plan, rng: random.Random
) -> list[Recovery]:
    """Kill once. If the mode counts second kills, kill again at once."""
    job = contestant.ensure()
    job.watch.drain()
    job.watch.resume()
    notes = job.settle(fault)
    if not run_on(job.watch, rng.uniform(*SETTLE_SECONDS), plan.bound_seconds):
        return [contestant.failed(fault, -1, "did not run on by itself")]
    found = [replace(kill_once(contestant, fault, number, plan.bound_seconds), notes=notes)]
    if fault == WORKER and job.kills_again and contestant.job is not None:
        if run_on(job.watch, 0.0, plan.bound_seconds):
            again = kill_once(contestant, fault, number + 1, plan.bound_seconds)
        else:
            again = contestant.failed(fault, -1, "did not run on by itself")
        found.append(replace(again, mode=job.mode + AGAIN))
    if contestant.job is not None:
        job.repair(fault)
        job.watch.pause()
    return found


def race(contestants: Sequence[Contestant], plan: Plan) -> None:
    """Kill in turns, fault by fault, with a new order in each turn."""
    rng = random.Random(0)
    rounds = [range(first, first + plan.kills_a_turn) for first in
              range(0, plan.kills, plan.kills_a_turn)]  # fmt: skip
    for numbers in rounds:
        for fault in plan.faults:
            racing = [one for one in contestants if fault not in one.skipped]
            for contestant in rng.sample(racing, len(racing)):
                _make_room(contestants, contestant, plan.jobs_max)
                for number in numbers:
                    if number < plan.kills and not contestant.is_hopeless(fault):
                        _kill(contestant, fault, number, plan, rng)


def _make_room(contestants: Sequence[Contestant], wanted: Contestant, jobs_max: int) -> None:
    running = [one for one in contestants if one.job is not None and one is not wanted]
    for one in sorted(running, key=lambda one: one.used_at)[: max(0, len(running) + 1 - jobs_max)]:
        one.drop()


def _kill(contestant: Contestant, fault: str, number: int, plan: Plan, rng: random.Random) -> None:
    mode = contestant.kind.mode
    try:
        found = turn(contestant, fault, number, plan, rng)
    except Unavailable as error:
        if not contestant.recoveries:
            contestant.drop()
            contestant.skipped[fault] = str(error)
            say(f"{mode}: {fault}: {error}")
            return
        found = [contestant.failed(fault, -1, str(error))]
    contestant.recoveries += found
    for one in found:
        took = f"{one.seconds:.3f} s" if one.seconds is not None else one.why_not
        lost = f", {one.lost_steps} steps lost" if one.lost_steps is not None else ""
        more = f" ({'; '.join(one.notes)})" if one.notes else ""
        say(f"{number + 1}/{plan.kills} {fault:7}{one.mode:23} rank {one.rank}: {took}{lost}{more}")
