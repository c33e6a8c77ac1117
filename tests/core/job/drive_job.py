"""Scripts for the job's machine: one place that knows its interface.

A line is `time event; event -> effect, effect`, with all effects; after a comma it goes on in the
next line. Pods are called by the end of their name (`w-0`). `stop w-0 w-1 in 3 keep gently`: of
attempt 3, workers may keep their process, and have time; `start w-0=1 in 3`: as rank 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

from unbroken.core.job.events import (
    AgentLost,
    AgentReported,
    AskAgent,
    CreatePod,
    DeleteIncident,
    DeleteJob,
    DeletePod,
    FenceNode,
    FenceProven,
    IncidentSeen,
    JobEffect,
    JobEvent,
    JobSeen,
    LedgerWritten,
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
    WriteLedger,
    WriteStatus,
)
from unbroken.core.job.kueue import Gate, Hold
from unbroken.core.job.machine import Job
from unbroken.core.job.transitions import Phase
from unbroken.core.tick import Tick
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import Ledger
from unbroken.spec.job.types import (
    Condition,
    FenceBy,
    JobOptions,
    JobSpec,
    JobStatus,
    ReplicaSpec,
    RunPolicy,
    Switch,
)
from unbroken.spec.nodes.notices import Notice
from unbroken.wire.agent import (
    IN_PROCESS_RESTART,
    AgentReport,
    AgentState,
    FaultKind,
    HistoryCommand,
    WarmCommand,
    WorkerFault,
    WorkerReport,
)
from unbroken.wire.observation import CollectCommand, RankWatch


def spec(replicas: int = 2, spares: int = 0, policy: RunPolicy | None = None) -> JobSpec:
    """A job of one replica spec."""
    return JobSpec((ReplicaSpec("w", {}, replicas, spares),), run_policy=policy or RunPolicy())


T = TypeVar("T")
D = TypeVar("D")


def logical_lines(script: str) -> Iterator[str]:
    """Yield the lines of a script; a line that ends in a comma is joined with the next one."""
    parts: list[str] = []
    for line in filter(None, map(str.strip, script.splitlines())):
        parts.append(line)
        if not line.endswith(","):
            yield " ".join(parts)
            parts = []
    assert not parts, f"the script ends in a comma: {parts}"


class Words:
    """The words that follow an event's name; a word that nothing takes is an error."""

    def __init__(self, words: list[str]) -> None:
        self.options = dict(word.split("=", 1) for word in words if "=" in word)
        self.plain = [word for word in words if "=" not in word]
        assert len(self.options) + len(self.plain) == len(words), f"an option twice: {words}"

    def first(self) -> str:
        """Take the first plain word."""
        return self.plain.pop(0)

    def has(self, name: str) -> bool:
        """Take a plain word if it is there."""
        found = name in self.plain
        if found:
            self.plain.remove(name)
        return found

    def get(self, name: str, default: str = "") -> str:
        """Take the value of an option."""
        return self.options.pop(name, default)

    def read(self, name: str, read: Callable[[str], T], default: D) -> T | D:
        """Take an option whose value is not a text."""
        return read(self.options.pop(name)) if name in self.options else default

    def end(self) -> None:
        """Fail if a word is left."""
        assert not self.plain, f"unknown words: {self.plain}"
        assert not self.options, f"unknown options: {self.options}"


class Script:
    """A machine with the world that a script describes."""

    def __init__(self, given: JobSpec | None = None, status: JobStatus | None = None) -> None:
        self.job = Job("j", status or JobStatus())
        self.spec = given or spec()
        self.effects: list[JobEffect] = []
        """All effects."""
        self.views: dict[str, PodView] = {}
        self.agents: dict[str, AgentReport] = {}
        self.nodes: dict[str, NodeView] = {}
        self.gate: Gate = None
        self.now = 0.0
        """Time of the newest line."""
        self.is_api_up = True
        """False: no ledger that a start waits for is stored."""
        self.found_ledger = Ledger()
        """The ledger that the job has when the script begins."""

    def give(self, event: JobEvent, now: float) -> list[JobEffect]:
        """One step; its effects."""
        return self._stored(self.job.step(event, now), now)

    def _stored(self, effects: list[JobEffect], now: float) -> list[JobEffect]:
        """Return the effects, with those of the answer to a ledger that a start waits for."""
        awaited = [e.ledger for e in effects if isinstance(e, WriteLedger) and e.is_awaited]
        self.effects += effects
        if not awaited or not self.is_api_up:
            return effects
        return effects + self.give(LedgerWritten(awaited[-1]), now)

    def run(self, script: str) -> None:
        """Run every line; a line with `->` says all that comes of it, one without does not care."""
        for line in logical_lines(script):
            given, arrow, expected = line.partition("->")
            text = self.say(given)
            assert not arrow or text == expected.strip(), f"{given}-> {text}"

    def say(self, line: str) -> str:
        """Give the events of `time event; event`; return all that comes of them."""
        at, _, events = line.strip().partition(" ")
        self.now = float(at)
        effects: list[JobEffect] = []
        for event in events.split(";"):
            effects += self.give(self.event(event), self.now)
        return show_all(effects)

    def together(self, reports: str, now: float) -> None:
        """Give reports that came together, one a line without its time."""
        lines = map(str.split, filter(None, map(str.strip, reports.splitlines())))
        events = [self._event(name, words) for name, *words in lines]
        self._stored(self.job.steps(events, now), now)

    def create(self) -> list[str]:
        """Let the pods of a new job run; return their names. No agent has reported."""
        self.run("0 job\n0 synced")
        names = [e.name[2:] for e in self.effects if isinstance(e, CreatePod)]
        for name in names:
            self.run(f"0 pod {name} node=n{name[2:]}")
        return names

    def up(self, until: str = "running") -> None:
        """Bring the job to where every agent is ready, or runs."""
        names = self.create()
        for name in names:
            self.run(f"1 ready {name}")
        if until == "running":
            self.run("3 tick")
            self.run_ordered(4.0)

    def run_ordered(self, now: float) -> None:
        """Let every agent start that has received the newest start."""
        last: dict[str, StartWorkers] = {}
        for effect in self.effects:
            if isinstance(effect, StartWorkers):
                last[effect.pod] = effect
        newest = max(e.command.attempt for e in last.values())
        for order in last.values():
            if order.command.attempt == newest:
                name = next(n for n, view in self.views.items() if view.uid == order.pod)
                self.run(f"{now} runs {name} {newest}")

    def successor(self, now: float, *, is_incident_written: bool = True) -> Script:
        """Return a machine that knows the API's state, and has received no report of an agent.

        `is_incident_written`: False if the one before could only write its status."""
        new = Script(self.spec, self.status)
        new.views = dict(self.views)
        ledgers = [e.ledger for e in self.effects if isinstance(e, WriteLedger)]
        new.found_ledger = ledgers[-1] if ledgers else self.found_ledger
        for view in self.views.values():
            new.give(PodSeen(view), now)
        for incident in self.incidents.values() if is_incident_written else ():
            new.give(IncidentSeen(incident), now)
        new.run(f"{now} job")
        return new

    @property
    def status(self) -> JobStatus:
        """The status as last written."""
        written = (e.status for e in reversed(self.effects) if isinstance(e, WriteStatus))
        return next(written, self.job.status)

    @property
    def incidents(self) -> dict[int, Incident]:
        """The incidents as last written, by number, without those that were deleted."""
        found = [e.incident for e in self.effects if isinstance(e, WriteIncident)]
        deleted = {e.number for e in self.effects if isinstance(e, DeleteIncident)}
        return {one.number: one for one in found if one.number not in deleted}

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

    def report(self, line: str) -> AgentReport:
        """The report of a line that has no time."""
        event = self.event(line)
        assert isinstance(event, AgentReported)
        return event.report

    def _event(self, name: str, given: list[str]) -> JobEvent:
        words = Words(given)
        event = self._event_of(name, words)
        words.end()
        return event

    def _event_of(self, name: str, words: Words) -> JobEvent:
        match name:
            case "job":
                return self._job(words)
            case "synced" | "tick":
                return Synced() if name == "synced" else Tick()
            case "node":
                return NodeSeen(self._node(words))
            case "node-gone":
                return NodeGone(NodeName(words.first()))
            case "pod":
                return PodSeen(self._pod(words))
            case "gone":
                pod = words.first()
                event = PodGone(PodName(f"j-{pod}"), self._uid(pod))
                self.views.pop(pod, None)
                return event
            case "refused":
                pod = PodName(f"j-{words.first()}")
                return PodRefused(pod, words.get("why"), words.has("final"))
            case "proven":
                return FenceProven(self._uid(words.first()))
            case "lost":
                silent = words.read("seconds", float, 0.0)
                return AgentLost(self._uid(words.first()), words.get("why", "silent"), silent)
            case _:
                pod = words.first()
                return AgentReported(self._uid(pod), self._report(name, pod, words))

    def _job(self, words: Words) -> JobSeen:
        suspend = words.read("suspend", {"yes": True, "no": False}.__getitem__, None)
        if suspend is not None:
            policy = replace(self.spec.run_policy, suspend=suspend)
            self.spec = replace(self.spec, run_policy=policy)
        chosen = JobOptions(
            restart=words.read("restart", float, None),
            in_process=Switch(words.get("in-process", "on")),
            buddy=Switch(words.get("buddy", "on")),
            planned_moves=Switch(words.get("moves", "on")),
            fence_by=FenceBy(words.get("fence-by", "lease")),
        )
        hold = words.get("hold")
        if hold:
            reason, _, text = hold.partition(":")
            self.gate = Hold(reason, text) if reason != "no" else None
        return JobSeen(self.spec, chosen, words.has("deleting"), self.found_ledger, self.gate)

    def _uid(self, name: str) -> PodUid:
        return self.views[name].uid if name in self.views else PodUid(name)

    def _pod(self, words: Words) -> PodView:
        """`pod w-0 [uid=] [node=] [phase=] [why=] [says=] [ends=] [lines=] [deleting]
        [ended]`; else as it was."""
        name = words.first()
        index = int(name.rsplit("-", 1)[1])
        uid = PodUid(words.get("uid", f"{name}.0"))
        old = self.views.get(name)
        if old is None or old.uid != uid:
            address = f"10.0.0.{index}"
            view = PodView(PodName(f"j-{name}"), uid, "w", index, PodPhase.PENDING, address=address)
        else:
            view = old
        view = replace(
            view,
            node=words.read("node", NodeName, view.node),
            phase=words.read("phase", PodPhase, view.phase),
            reason=words.get("why", view.reason),
            message=words.get("says", view.message),
            ends=words.read("ends", int, view.ends),
            last_lines=words.read("lines", _lines, ()),
            is_deleting=words.has("deleting") or view.is_deleting,
            has_ended=words.has("ended") or view.has_ended,
        )
        self.views[name] = view
        return view

    def _node(self, words: Words) -> NodeView:
        """`node n0 ready|not-ready|fenced|unhealthy [topology=a/b] [notice=NAME ...]`.

        With a notice `[by=] [leaves=] [order]`. `by`: when the node goes; `leaves`: seconds until
        then, from when the notice is seen; `order`: somebody waits for the node."""
        name, is_healthy = NodeName(words.first()), not words.has("unhealthy")
        is_ready, is_not_ready = words.has("ready"), words.has("not-ready")
        by, leaves = words.read("by", float, None), words.read("leaves", float, None)
        is_order = words.has("order")
        notice = words.read(
            "notice", lambda kind: Notice(kind, "it goes", by, leaves, is_order), None
        )
        node = NodeView(
            name,
            is_ready=(is_ready or not is_healthy) and not is_not_ready,
            is_fenced=words.has("fenced"),
            is_healthy=is_healthy,
            topology=tuple(words.get("topology").split("/")),
            notice=notice,
        )
        self.nodes[name] = node
        return node

    def _report(self, name: str, pod: str, words: Words) -> AgentReport:
        """`ready w-0 [newest]`, `runs w-0 attempt`, `completed ...`, `failed ... [kind=]`.

        With `stock=ID`, the report of another maker's agent, which knows no attempts: `[mode=]`.

        `broke w-0 [newest]`: a worker that had no rank yet has ended. `shutdown w-0 [newest]
        ended`: all workers have."""
        has_ended = words.has("ended")
        attempt = int(words.first()) if words.plain else None
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
        if agent := words.get("stock"):
            rank, mode = words.read("rank", int, None), words.get("mode")
            return AgentReport(agent, state, rank=rank, restart_mode=mode)
        is_idle = state in (AgentState.INIT, AgentState.READY) or name == "broke"
        port = 29000 + (attempt if attempt is not None else -1) + 1
        order = self.job.state.gang.order
        report = AgentReport(
            words.get("agent", f"{pod}.a"),
            state,
            newest_attempt=attempt,
            attempt=None if is_idle else attempt,
            rank=words.read("rank", int, None),
            master_addr=words.get("master", order.master_addr if order else "10.0.0.0"),
            master_port=words.read("port", int, order.master_port if order else port),
            nproc=1,
            offered_port=port,
            kept=words.read("kept", lambda value: (int(value),), ()),
            imports=words.read("imports", int, None),
            lease_seconds=words.read("lease", float, None),
            unvouched=words.read("unvouched", int, None),
            watch=words.read("told", lambda step: (RankWatch(0, step=int(step)),), ()),
            copies=words.read("copies", lambda rank: (int(rank),), ()),
            reason=words.get("reason", ""),
            has_ended=has_ended,
        )
        if saved := words.get("saved"):
            report = replace(report, watch=(RankWatch(0, checkpoint_step=int(saved)),))
        if state is AgentState.FAULTED:
            fault = _fault(words.get("kind", "ExitCode"), report.rank or 0, words)
            report = replace(report, faults=(fault,), reason="WorkerCrash")
        elif kind := words.get("fault"):
            report = replace(report, faults=(_fault(kind, report.rank or 0, words),))
        report = replace(
            report,
            workers=(
                *words.read("output", _writing, ()),
                *words.read("trains", _training, ()),
                *words.read("left", _ended, ()),
            ),
        )
        self.agents[pod] = report
        return report


def show_all(effects: Iterable[JobEffect]) -> str:
    """Return effects in words; the pods of those that follow each other and say the same are listed
    together."""
    parts = []
    for (verb, rest), those in groupby(map(_words, effects), key=itemgetter(0, 2)):
        pods = [pod for _, pod, _ in those]
        text = " ".join(filter(None, (verb, *pods, rest)))
        parts += [text] * (1 if pods[0] else len(pods))
    return ", ".join(parts)


def show(effect: JobEffect) -> str:
    """Return one effect in words."""
    return show_all((effect,))


def _words(effect: JobEffect) -> tuple[str, str, str]:
    """Return verb, pod, and the rest."""
    match effect:
        case StartWorkers(pod, command):
            lease = f" lease={command.lease_seconds:g}" if command.lease_seconds else ""
            return "start", f"{_name(pod)}={command.rank}", f"in {command.attempt}{lease}"
        case StopWorkers(pod, command):
            keep = " keep" if command.restart_mode == IN_PROCESS_RESTART else ""
            gently = " gently" if command.is_graceful else ""
            return "stop", _name(pod), f"in {command.attempt}{keep}{gently}"
        case AskAgent(pod, WarmCommand(peers)):
            return "warm", _name(pod), f"by={'/'.join(peers)}"
        case AskAgent(pod, HistoryCommand(incidents=incidents)):
            return "tell", _name(pod), f"incidents={len(incidents)}"
        case AskAgent(pod, CollectCommand(samples_per_second=samples)):
            return "sample" if samples else "look", _name(pod), ""
        case CreatePod(name, _, _, avoid):
            return "create", name[2:], f"avoid={'/'.join(sorted(avoid))}" if avoid else ""
        case DeletePod(_, uid, _, force):
            return "delete", _name(uid), "force" if force else ""
        case ProveFence(node, pod):
            return f"prove {node}", _name(pod), ""
        case _:
            return _show_record(effect), "", ""


def _show_record(effect: JobEffect) -> str:
    match effect:
        case FenceNode(node):
            return f"fence {node}"
        case WriteStatus(status):
            true = [c.type for c in status.conditions if c.status == "True"]
            return f"status {true[-1]} {status.restart_count}"
        case RecordEvent(reason):
            return f"event {reason}"
        case WriteIncident(incident):
            return f"incident {incident.number} {incident.outcome or 'open'}"
        case DeleteIncident(number):
            return f"delete-incident {number}"
        case WriteLedger(_, is_awaited):
            return "ledger awaited" if is_awaited else "ledger"
        case DeleteJob():
            return "delete-job"
        case _:
            raise AssertionError(f"no words for {effect}")


def begun(replicas: int = 1, policy: RunPolicy | None = None) -> Script:
    """Return a job whose pods run, but whose agents have not reported."""
    script = Script(spec(replicas, 0, policy))
    script.create()
    return script


def running(
    replicas: int = 2, spares: int = 0, *told: str, policy: RunPolicy | None = None
) -> Script:
    """Return a job whose attempt 0 runs since 4.0, after these lines."""
    script = Script(spec(replicas, spares, policy))
    script.up()
    script.run("\n".join(told))
    return script


def restart(script: Script, at: float, attempt: int, *, fault: str = "", then: str = "") -> None:
    """Let the attempt of a job of two pods fail, and the next one run if there is one.

    `then` is the report of its rank 0.
    """
    script.run(f"""
        {at} failed w-1 {attempt} {fault}
        {at + 0.1} ready w-0 {attempt}
        {at + 0.1} ready w-1 {attempt}
    """)
    if script.job.phase is Phase.TRAINING:
        script.run(f"{at + 0.2} runs w-0 {attempt + 1}\n{at + 0.2} runs w-1 {attempt + 1}")
    if then:
        script.run(f"{at + 0.3} runs w-0 {attempt + 1} {then}")


def left(replicas: int = 2, spares: int = 0, *told: str, policy: RunPolicy | None = None) -> Script:
    """Return the successor of an operator that left a running job after these lines."""
    old = running(replicas, spares, policy=policy)
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    old.run("\n".join(told))
    return old.successor(100)


def _name(uid: str) -> str:
    return uid.removesuffix(".0")


def _lines(value: str) -> tuple[str, ...]:
    return tuple(value.split("|"))


def _writing(value: str) -> tuple[WorkerReport, ...]:
    """A worker that wrote its last output at that time."""
    return (WorkerReport(0, 0, 1, "running", 0.0, None, float(value)),)


def _training(value: str) -> tuple[WorkerReport, ...]:
    """A worker that wrote a line that recurs in training at that time."""
    at = float(value)
    return (WorkerReport(0, 0, 1, "running", 0.0, None, at, recurring_line_at=at),)


def _ended(rank: str) -> tuple[WorkerReport, ...]:
    """A worker that has succeeded."""
    return (WorkerReport(0, int(rank), 1, "succeeded", 0.0, 1.0),)


def _fault(kind: str, rank: int, words: Words) -> WorkerFault:
    return WorkerFault(
        FaultKind(kind),
        local_rank=0,
        rank=rank,
        pid=1,
        at=words.read("at", float, 0.0),
        exit_code=1,
        message=words.get("text", "exit code 1"),
        lines=words.read("lines", _lines, ()),
        fingerprint=words.get("print"),
        step=words.read("step", int, None),
    )
