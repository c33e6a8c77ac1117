"""Reports that operators received: no decision can depend on a message that never arrived."""

from __future__ import annotations

from collections.abc import Container, Iterable

from unbroken.core.job import events as core
from unbroken.core.job.events import PodUid
from unbroken.wire.agent import AgentState


class ReceivedReports:
    """The reports that reached the operators of one job."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        """The newest step reported of each attempt before its end; -1: none was."""
        self.newest = -1
        """The newest attempt that an agent has named to the present operator."""
        self._pods: set[PodUid] = set()
        """Pods whose agents have reached the present operator."""
        self._found: set[PodUid] = set()
        """Pods that ran when the present operator came."""
        self._since: float | None = None
        """Time at which the present operator knew all objects of the API."""

    def take(self, events: Iterable[core.JobEvent], ended: Container[int], now: float) -> None:
        """Note what one step of the operator takes; `ended` are the attempts that are over."""
        for event in events:
            match event:
                case core.Synced():
                    self._since = now
                case core.PodSeen(view):
                    if self._since is None and view.phase is core.PodPhase.RUNNING:
                        self._found.add(view.uid)
                case _:
                    pass
            if not isinstance(event, core.AgentReported):
                continue
            self._pods.add(event.pod)
            report = event.report
            named = (report.newest_attempt, report.attempt)
            self.newest = max([self.newest, *(one for one in named if one is not None)])
            if report.state is AgentState.FAULTED:
                return  # what comes with it comes after the end
            told = [rank.step for rank in report.watch if rank.step is not None]
            if report.attempt is not None and report.attempt not in ended:
                newest = self.steps.get(report.attempt, -1)
                self.steps[report.attempt] = max([newest, *told])

    def misses(self, pods: Iterable[PodUid], seconds: float, now: float) -> bool:
        """Return whether the operator has waited this long for one of the pods, without a
        report."""
        is_over = self._since is not None and now >= self._since + seconds
        return is_over and not self._pods.issuperset(pods)

    @property
    def is_complete(self) -> bool:
        """True if the agents of all pods that the operator found running have reached it."""
        return self._found <= self._pods

    def forget(self, written: int) -> None:
        """Let the operator die; of attempts from `written` on it had written nothing down."""
        self.newest = -1
        self._pods.clear()
        self._found.clear()
        self._since = None
        self.steps = {attempt: step for attempt, step in self.steps.items() if attempt < written}
