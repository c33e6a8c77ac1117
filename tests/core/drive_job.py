"""Scripts for the job's machine: one place that knows its interface.

A line is `time event -> effect, effect`.  Pods are called by the end of their name (`w-0`).
Effects of status, events and incidents are left out of a line unless it asks for them.
"""

from __future__ import annotations

from dataclasses import replace

from unbroken.core.job.events import (
    AgentLost,
    AgentReported,
    AskAgent,
    CreatePod,
    DeleteJob,
    DeletePod,
    FenceNode,
    FenceProven,
    IncidentSeen,
    JobEffect,
    JobEvent,
    JobSeen,
    NodeGone,
    NodeName,
    NodeSeen,
    NodeView,
    PodGone,
    PodName,
    PodPhase,
    PodRefused,
    PodSeen,
    PodUid,
    PodView,
    ProveFence,
    RecordEvent,
    StartWorkers,
    StopWorkers,
    Synced,
    WriteIncident,
    WriteStatus,
)
from unbroken.core.job.kueue import Gate, Hold
from unbroken.core.job.machine import Job
from unbroken.core.tick import Tick
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.types import (
    Condition,
    JobOptions,
    JobSpec,
    JobStatus,
    ReplicaSpec,
    RunPolicy,
    Switch,
)
from unbroken.wire.agent import (
    IN_PROCESS_RESTART,
    AgentReport,
    AgentState,
    FaultKind,
    WarmCommand,
    WorkerFault,
    WorkerReport,
)
from unbroken.wire.observation import CollectCommand, RankWatch


def spec(replicas: int = 2, spares: int = 0, policy: RunPolicy | None = None) -> JobSpec:
    """A job of one replica spec."""
    return JobSpec((ReplicaSpec("w", {}, replicas, spares),), run_policy=policy or RunPolicy())


class Script:
    """A machine with the world that a script describes."""

    def __init__(self, given: JobSpec | None = None, status: JobStatus | None = None) -> None:
        self.job = Job("j", status or JobStatus())
        self.spec = given or spec()
        self.effects: list[JobEffect] = []
        """All so far."""
        self.views: dict[str, PodView] = {}
        self.agents: dict[str, AgentReport] = {}
        self.nodes: dict[str, NodeView] = {}
        self.gate: Gate = None

    def give(self, event: JobEvent, now: float) -> list[JobEffect]:
        """One step; its effects."""
        effects = self.job.step(event, now)
        self.effects += effects
        return effects

    def run(self, script: str) -> None:
        """Run every line; a line with `->` says what comes of it, one without does not care."""
        for line in filter(None, map(str.strip, script.splitlines())):
            given, arrow, expected = line.partition("->")
            at, name, *words = given.split()
            shown: list[str] = []
            for effect in self.give(self._event(name, words), float(at)):
                shown += show(effect, expected)
            if arrow:
                assert ", ".join(shown) == expected.strip(), f"{given}-> {', '.join(shown)}"

    def together(self, reports: str, now: float) -> None:
        """Give reports that came together, one a line without its time."""
        lines = map(str.split, filter(None, map(str.strip, reports.splitlines())))
        events = [self._event(name, words) for name, *words in lines]
        self.effects += self.job.steps(events, now)

    def up(self, until: str = "running") -> None:
        """Bring the job to where every agent is ready, or runs."""
        self.run("0 job\n0 synced")
        names = [e.name[2:] for e in self.effects if isinstance(e, CreatePod)]
        for name in names:
            self.run(f"0 pod {name} node=n{name[2:]}")
        for name in names:
            self.run(f"1 ready {name}")
        if until == "running":
            self.run("3 tick")
            self.run_ordered(4.0)

    def run_ordered(self, now: float) -> None:
        """Let every agent that was last told to start do so."""
        last: dict[str, StartWorkers] = {}
        for effect in self.effects:
            if isinstance(effect, StartWorkers):
                last[effect.pod] = effect
        newest = max(e.command.attempt for e in last.values())
        for order in last.values():
            if order.command.attempt == newest:
                name = next(n for n, view in self.views.items() if view.uid == order.pod)
                self.run(f"{now} runs {name} {newest}")

    def successor(self, now: float) -> Script:
        """A machine that knows what the API does, and has yet to hear the agents."""
        new = Script(self.spec, self.status)
        new.views = dict(self.views)
        for view in self.views.values():
            new.give(PodSeen(view), now)
        for incident in self.incidents.values():
            new.give(IncidentSeen(incident), now)
        new.run(f"{now} job")
        return new

    @property
    def status(self) -> JobStatus:
        """As last written."""
        written = (e.status for e in reversed(self.effects) if isinstance(e, WriteStatus))
        return next(written, self.job.status)

    @property
    def incidents(self) -> dict[int, Incident]:
        """As last written, by number."""
        found = [e.incident for e in self.effects if isinstance(e, WriteIncident)]
        return {incident.number: incident for incident in found}

    @property
    def events(self) -> list[str]:
        """Reasons of the events so far."""
        return [e.reason for e in self.effects if isinstance(e, RecordEvent)]

    @property
    def condition(self) -> Condition:
        """The last condition that is true."""
        return [c for c in self.status.conditions if c.status == "True"][-1]

    def event(self, line: str) -> JobEvent:
        """The event of a line that has no time."""
        name, *words = line.split()
        return self._event(name, words)

    def _event(self, name: str, words: list[str]) -> JobEvent:
        options = dict(word.split("=", 1) for word in words if "=" in word)
        words = [word for word in words if "=" not in word]
        match name:
            case "job":
                return self._job(words, options)
            case "synced":
                return Synced()
            case "tick":
                return Tick()
            case "node":
                return NodeSeen(self._node(words, options))
            case "node-gone":
                return NodeGone(NodeName(words[0]))
            case "pod" | "gone" | "refused":
                return self._pod_event(name, words, options)
            case "proven":
                return FenceProven(self._uid(words))
            case "lost":
                return AgentLost(self._uid(words), options.get("why", "silent"))
            case _:
                return AgentReported(self._uid(words), self._report(name, words, options))

    def _pod_event(self, name: str, words: list[str], options: dict[str, str]) -> JobEvent:
        if name == "pod":
            return PodSeen(self._pod(words, options))
        pod = PodName(f"j-{words[0]}")
        if name == "gone":
            event = PodGone(pod, self._uid(words))
            self.views.pop(words[0], None)
            return event
        return PodRefused(pod, options["why"], "final" in words)

    def _job(self, words: list[str], options: dict[str, str]) -> JobSeen:
        policy = self.spec.run_policy
        if "suspend" in options:
            policy = replace(policy, suspend=options["suspend"] == "yes")
        self.spec = replace(self.spec, run_policy=policy)
        asked = float(options["restart"]) if "restart" in options else None
        chosen = JobOptions(
            restart=asked,
            in_process=Switch(options.get("in-process", "on")),
            buddy=Switch(options.get("buddy", "on")),
        )
        if "hold" in options:
            reason, _, text = options["hold"].partition(":")
            self.gate = Hold(reason, text) if reason != "no" else None
        return JobSeen(self.spec, chosen, "deleting" in words, gate=self.gate)

    def _uid(self, words: list[str]) -> PodUid:
        return self.views[words[0]].uid if words[0] in self.views else PodUid(words[0])

    def _pod(self, words: list[str], options: dict[str, str]) -> PodView:
        """`pod w-0 [uid=] [node=] [phase=] [why=] [says=] [ends=] [lines=] [deleting]
        [ended]`; else as it was."""
        name = words[0]
        index = int(name.rsplit("-", 1)[1])
        uid = PodUid(options.get("uid", f"{name}.0"))
        old = self.views.get(name)
        if old is None or old.uid != uid:
            address = f"10.0.0.{index}"
            view = PodView(PodName(f"j-{name}"), uid, "w", index, PodPhase.PENDING, address=address)
        else:
            view = old
        view = replace(
            view,
            node=NodeName(options["node"]) if "node" in options else view.node,
            phase=PodPhase(options["phase"]) if "phase" in options else view.phase,
            reason=options.get("why", view.reason),
            message=options.get("says", view.message),
            ends=int(options.get("ends", view.ends)),
            last_lines=tuple(options["lines"].split("|")) if "lines" in options else (),
            is_deleting="deleting" in words or view.is_deleting,
            has_ended="ended" in words or view.has_ended,
        )
        self.views[name] = view
        return view

    def _node(self, words: list[str], options: dict[str, str]) -> NodeView:
        """`node n0 ready|not-ready|fenced|unhealthy [topology=a/b]`."""
        name = NodeName(words[0])
        node = NodeView(
            name,
            is_ready="ready" in words or "unhealthy" in words,
            is_fenced="fenced" in words,
            is_healthy="unhealthy" not in words,
            topology=tuple(options.get("topology", "").split("/")),
        )
        self.nodes[name] = node
        return node

    def _report(self, name: str, words: list[str], options: dict[str, str]) -> AgentReport:
        """`ready w-0 [newest]`, `runs w-0 attempt`, `completed ...`, `failed ... [kind=]`.

        `broke w-0 [newest]`: a worker that had no rank yet has ended."""
        pod, attempt = words[0], int(words[1]) if len(words) > 1 else None
        state = {
            "boots": AgentState.INIT,
            "ready": AgentState.READY,
            "runs": AgentState.RUNNING,
            "completed": AgentState.COMPLETED,
            "failed": AgentState.FAULTED,
            "broke": AgentState.FAULTED,
            "stopping": AgentState.STOPPING,
            "shutdown": AgentState.SHUTDOWN,
        }[name]
        is_idle = state in (AgentState.INIT, AgentState.READY) or name == "broke"
        port = 29000 + (attempt if attempt is not None else -1) + 1
        order = self.job.state.gang.order
        report = AgentReport(
            options.get("agent", f"{pod}.a"),
            state,
            newest_attempt=attempt,
            attempt=None if is_idle else attempt,
            rank=int(options["rank"]) if "rank" in options else None,
            master_addr=options.get("master", order.master_addr if order else "10.0.0.0"),
            master_port=int(options.get("port", order.master_port if order else port)),
            nproc=1,
            offered_port=port,
            kept=(int(options["kept"]),) if "kept" in options else (),
        )
        if "imports" in options:
            report = replace(report, imports=int(options["imports"]))
        if "told" in options:
            report = replace(report, watch=(RankWatch(0, step=int(options["told"])),))
        if state is AgentState.FAULTED:
            report = replace(report, faults=(_fault(options),), reason="WorkerCrash")
        elif "fault" in options:
            report = replace(report, faults=(_fault({**options, "kind": options["fault"]}),))
        if "output" in options:
            worker = WorkerReport(0, 0, 1, "running", 0.0, None, float(options["output"]))
            report = replace(report, workers=(worker,))
        if "left" in options:
            worker = WorkerReport(0, int(options["left"]), 1, "succeeded", 0.0, 1.0)
            report = replace(report, workers=(*report.workers, worker))
        self.agents[pod] = report
        return report


def show(effect: JobEffect, asked: str) -> list[str]:
    """The order in words; one of status and the like only where `asked` has such a word."""
    match effect:
        case StartWorkers(pod, command):
            return [f"start {_name(pod)} {command.attempt} rank={command.rank}"]
        case StopWorkers(pod, command):
            mode = " keep" if command.restart_mode == IN_PROCESS_RESTART else " end"
            is_asked = " keep" in asked or " end" in asked
            return [f"stop {_name(pod)} {command.attempt}{mode if is_asked else ''}"]
        case AskAgent(pod, WarmCommand(peers)):
            return [f"warm {_name(pod)} by={'/'.join(peers)}"]
        case AskAgent(pod, CollectCommand(samples_per_second=samples)):
            return [f"{'sample' if samples else 'look'} {_name(pod)}"]
        case CreatePod(name, _, _, avoid):
            away = f" avoid={'/'.join(sorted(avoid))}" if avoid else ""
            return [f"create {name[2:]}{away}"]
        case DeletePod(_, uid, _, force):
            return [f"delete {_name(uid)}{' force' if force else ''}"]
        case FenceNode(node, _):
            return [f"fence {node}"]
        case ProveFence(node, pod):
            return [f"prove {node} {_name(pod)}"]
        case DeleteJob():
            return ["delete-job"]
        case _:
            return [word for word in _record(effect) if word.split()[0] in asked]


def _record(effect: JobEffect) -> list[str]:
    match effect:
        case WriteStatus(status):
            true = [c.type for c in status.conditions if c.status == "True"]
            return [f"status {true[-1]} {status.restart_count}"]
        case RecordEvent(reason):
            return [f"event {reason}"]
        case WriteIncident(incident):
            return [f"incident {incident.number} {incident.outcome or 'open'}"]
        case _:
            return []


def _name(uid: str) -> str:
    return uid.removesuffix(".0")


def _fault(options: dict[str, str]) -> WorkerFault:
    return WorkerFault(
        FaultKind(options.get("kind", "ExitCode")),
        local_rank=0,
        rank=int(options.get("rank", "0")),
        pid=1,
        at=float(options.get("at", "0")),
        exit_code=1,
        message=options.get("text", "exit code 1"),
        lines=tuple(options["lines"].split("|")) if "lines" in options else (),
        fingerprint=options.get("print", ""),
        step=int(options["step"]) if "step" in options else None,
    )
