"""Milliseconds that the operator computes between an agent's frame and its own, in a recovery.

`python benchmarks/operator_path.py [--agents 2,500] [--cycles N] [--json FILE]`: reports as their
JSON frames go in, commands as theirs come out, through the job's machine and both codecs.  No
network, no event loop, no API server: what is left is what every recovery of that size costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from arguments import count, output_file

from unbroken.core.job.events import (
    AgentReported,
    JobEffect,
    JobEvent,
    JobSeen,
    LedgerWritten,
    PodName,
    PodPhase,
    PodSeen,
    PodUid,
    PodView,
    StartWorkers,
    StopWorkers,
    Synced,
    WriteLedger,
)
from unbroken.core.job.gang import GangStage
from unbroken.core.job.machine import Job
from unbroken.spec.job.types import JobSpec, JobStatus, ReplicaSpec, RunPolicy
from unbroken.wire.agent import AgentReport, AgentState, FaultKind, WorkerFault, WorkerReport
from unbroken.wire.agent_codec import decode_answer, decode_report, encode_command, encode_report

NPROC = 8
FAULT = WorkerFault(FaultKind.SIGNAL, 0, 0, 100, 5.0, signal=9, message="ended by signal 9")


def workers(rank: int, state: str) -> tuple[WorkerReport, ...]:
    """Return the reports of one agent's workers, all in one state."""
    return tuple(
        WorkerReport(i, rank * NPROC + i, 1000 + rank * NPROC + i, state, 3.0, first_output_at=4.0)
        for i in range(NPROC)
    )


class Cluster:
    """A job's machine and its agents, connected by frames."""

    def __init__(self, agents: int) -> None:
        policy = RunPolicy(job_max_retry_count=1_000_000)
        spec = JobSpec((ReplicaSpec("w", {}, agents, 0),), run_policy=policy)
        self.job = Job("j", JobStatus())
        self.now = 1.0
        self.pods = [PodUid(f"uid-{i:05}") for i in range(agents)]
        self.ready = [
            AgentReport(f"agent-{i}", AgentState.READY, nproc=NPROC, pid=1, offered_port=20_000 + i)
            for i in range(agents)
        ]
        self._give(JobSeen(spec))
        self._give(Synced())
        for i, uid in enumerate(self.pods):
            name, phase, address = PodName(f"j-w-{i}"), PodPhase.RUNNING, f"10.0.{i >> 8}.{i & 255}"
            self._give(PodSeen(PodView(name, uid, "w", i, PodPhase.PENDING)))
            self._give(PodSeen(PodView(name, uid, "w", i, phase, address=address)))
        self.attempt = 0

    def _give(self, event: JobEvent) -> list[JobEffect]:
        self.now += 1e-6
        effects = self.job.step(event, self.now)
        awaited = [e.ledger for e in effects if isinstance(e, WriteLedger) and e.is_awaited]
        return effects + [one for e in awaited for one in self._give(LedgerWritten(e))]

    def take(self, pod: int, frame: str) -> list[str]:
        """Pass one frame to the operator; return the frames that it sends."""
        report = decode_answer(frame.encode())
        assert isinstance(report, AgentReport)
        return self.hear(pod, report)

    def hear(self, pod: int, report: AgentReport) -> list[str]:
        """Pass a report that the link has decoded before: a heartbeat. Return the frames sent."""
        effects = self._give(AgentReported(self.pods[pod], report))
        orders = [e for e in effects if isinstance(e, StartWorkers | StopWorkers)]
        return [encode_command(order.command) for order in orders]

    def frames(self, make: Callable[[int, AgentReport], AgentReport]) -> list[str]:
        """Return a frame of every agent."""
        return [encode_report(make(i, report)) for i, report in enumerate(self.ready)]

    def reports(self, state: AgentState) -> list[str]:
        """Return frames of agents that are all in `state` in the present attempt."""
        attempt = self.attempt

        def make(i: int, idle: AgentReport) -> AgentReport:
            rank = self.job.state.ranks.rank_of.get(self.pods[i])
            known = replace(idle, newest_attempt=attempt, rank=rank, state=state)
            if state is AgentState.READY:
                return replace(known, offered_port=20_000 + (attempt * 7 + i) % 10_000)
            order, of = self.job.state.gang.order, "stopped"
            assert order is not None
            assert rank is not None
            if state is AgentState.RUNNING:
                of = "running"
            at = replace(known, master_addr=order.master_addr, master_port=order.master_port)
            faults = (FAULT,) if state is AgentState.FAULTED else ()
            return replace(at, attempt=attempt, workers=workers(rank, of), faults=faults)

        return self.frames(make)


def timed(work: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def first_start(cluster: Cluster) -> None:
    """Start the job, until all its agents run."""
    sent = run_all(cluster, cluster.frames(lambda _, idle: idle))
    assert len(sent) == len(cluster.pods)
    run_all(cluster, cluster.reports(AgentState.RUNNING))
    assert cluster.job.state.gang.stage is GangStage.RUNNING


def run_all(cluster: Cluster, frames: Iterable[str]) -> list[str]:
    """Pass all frames; return the frames that the operator sends after the last one."""
    last: list[str] = []
    for pod, frame in enumerate(frames):
        last = cluster.take(pod, frame)
    return last


def recover(cluster: Cluster) -> dict[str, float]:
    """Run one recovery: a worker dies, all stop, all start. Return milliseconds of each part."""
    count, found = len(cluster.pods), {}
    cluster.now += 100.0
    running = [decode_report(frame) for frame in cluster.reports(AgentState.RUNNING)]
    run = partial(map, cluster.hear, range(count), running)
    list(run())  # the first is no repetition yet
    found["heartbeats"] = timed(lambda: list(run()))
    faulted = cluster.reports(AgentState.FAULTED)[0]
    stopping, ready = cluster.reports(AgentState.STOPPING), cluster.reports(AgentState.READY)
    sent: list[str] = []
    found["fault_to_stops"] = timed(lambda: sent.extend(cluster.take(0, faulted)))
    assert len(sent) == count
    assert '"stop"' in sent[0]
    found["stopping"] = timed(lambda: run_all(cluster, stopping))
    found["ready"] = timed(lambda: run_all(cluster, ready[:-1]))
    sent.clear()
    found["last_ready_to_starts"] = timed(lambda: sent.extend(cluster.take(count - 1, ready[-1])))
    assert len(sent) == count
    assert '"start"' in sent[0]
    cluster.attempt += 1
    started = cluster.reports(AgentState.RUNNING)
    found["running"] = timed(lambda: run_all(cluster, started))
    assert cluster.job.state.gang.stage is GangStage.RUNNING
    return found


def measure(agents: int, cycles: int) -> dict[str, float]:
    """Medians: milliseconds, and microseconds for each report."""
    cluster = Cluster(agents)
    first_start(cluster)
    parts = [recover(cluster) for _ in range(cycles)]
    found = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    whole = {"fault_to_stops", "last_ready_to_starts"}
    return {
        (f"{name}_ms" if name in whole else f"{name}_us_each"): (
            1e3 * value if name in whole else 1e6 * value / agents
        )
        for name, value in found.items()
    }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", default="2,500")
    parser.add_argument("--cycles", type=count, default=15)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    options = parser.parse_args()
    sizes = [int(text) for text in options.agents.split(",")]
    found = {str(size): measure(size, options.cycles) for size in sizes}
    print(f"{'agents':26}" + "".join(f"{size:>10}" for size in found))
    for name in next(iter(found.values())):
        print(f"{name:26}" + "".join(f"{figures[name]:10.3f}" for figures in found.values()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
