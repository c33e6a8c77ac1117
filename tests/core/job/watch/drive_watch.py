"""A running job whose agents report their watchdogs' state, and answer questions."""

from __future__ import annotations

from dataclasses import replace

from tests.core.job.drive_job import Script, Words, show, spec
from unbroken.core.job.events import (
    AgentReported,
    AskAgent,
    EvidenceReceived,
    JobEffect,
    JobSeen,
    RecordEvent,
    WriteLedger,
    WriteStatus,
)
from unbroken.core.tick import Tick
from unbroken.spec.job.detectors import Detector, read_detectors
from unbroken.spec.job.ledger import Ledger
from unbroken.wire.observation import (
    Alarm,
    CollectCommand,
    Evidence,
    RankEvidence,
    RankWatch,
    ThreadStack,
)

ALL_REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:2806)", "train (train.py:30)")
IN_DATA = ("clock_nanosleep (libc.so.6)", "get_batch (data.py:41)", "train (train.py:20)")


def alarm(detector: Detector, since: float, at: float | None = None) -> Alarm:
    """Return an alarm with its own name as its text."""
    return Alarm(detector.value, since, since if at is None else at, f"it is {detector.value}")


def well(rank: int, at: float, allowed: float | None = 10.0) -> RankWatch:
    """Return a rank that has just made its step."""
    return RankWatch(rank, "train", int(at), at, 1.0, at, allowed)


def ill(rank: int, detector: Detector, since: float, allowed: float = 10.0) -> RankWatch:
    """Return a rank that has made no step since `since`."""
    return replace(well(rank, since, allowed), alarms=(alarm(detector, since),))


def looked(
    rank: int, frames: tuple[str, ...] = ALL_REDUCE, state: str = "S", share: float = 0.0
) -> RankEvidence:
    """Return a rank that was in the same place both times."""
    threads = (ThreadStack("MainThread", True, frames),)
    return RankEvidence(rank, 100 + rank, state, cpu_share=share, is_same=True, threads=threads)


class WatchedJob(Script):
    """Pods `w-0`, `w-1`, ... with one rank each, all running since 4."""

    def __init__(self, nodes: int = 2, modes: str = "", spares: int = 0) -> None:
        super().__init__(spec(nodes, spares))
        self.detectors = read_detectors(modes)
        self.up()

    def _job(self, words: Words) -> JobSeen:
        seen = super()._job(words)
        return replace(seen, options=replace(seen.options, detectors=self.detectors))

    def tell(self, pod: str, at: float, *watch: RankWatch, attempt: int = 0) -> str:
        """Report the ranks of a pod; return the effects."""
        report = replace(self.report(f"runs {pod} {attempt}"), watch=watch)
        self.agents[pod] = report
        return shown(self.give(AgentReported(self._uid(pod), report), at))

    def tick(self, at: float) -> str:
        """Let time pass; return the effects."""
        return shown(self.give(Tick(), at))

    def answer(self, pod: str, at: float, *ranks: RankEvidence) -> str:
        """Answer the newest question to an agent; return the effects."""
        uid = self._uid(pod)
        asked = [e for e in self.effects if isinstance(e, AskAgent) and e.pod == uid]
        command = asked[-1].request
        assert isinstance(command, CollectCommand)
        agent = self.agents[pod].agent_id
        evidence = Evidence(command.request, command.attempt, agent, at, ranks)
        return shown(self.give(EvidenceReceived(uid, evidence), at))

    @property
    def ledger(self) -> Ledger:
        """The newest written ledger."""
        written = [e.ledger for e in self.effects if isinstance(e, WriteLedger)]
        return written[-1] if written else Ledger()

    def record(self, detector: Detector) -> tuple[int, int]:
        """Return how often a detector was right, and how often wrong."""
        found = self.ledger.detectors.get(detector.value)
        return (found.right, found.wrong) if found else (0, 0)

    def told(self, reason: str) -> list[str]:
        """Return the messages of the events with a reason."""
        events = (e for e in self.effects if isinstance(e, RecordEvent))
        return [e.message for e in events if e.reason == reason]


def shown(effects: list[JobEffect]) -> str:
    """Return the orders to agents and of incidents, in words."""
    others = (WriteStatus, RecordEvent, WriteLedger)
    return ", ".join(show(effect) for effect in effects if not isinstance(effect, others))
