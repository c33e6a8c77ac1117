"""A job's log rules over the output of one node, for one attempt.

Everything here but `LogWatch.make` runs in the output's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unbroken.core.agent.events import RulesRead
from unbroken.core.logs.lines import LineAssembler
from unbroken.core.logs.rule_config import read_rules
from unbroken.core.logs.rule_events import (
    Lines,
    LogRuleEvent,
    LogStarted,
    Paused,
    RankEnded,
    RuleViolated,
    Unfinished,
)
from unbroken.core.logs.rules import LogRules
from unbroken.core.tick import Tick
from unbroken.log_lines import Log
from unbroken.spec.problems import Report
from unbroken.wire.agent import StartCommand

log = Log(__name__)

NEWS_SECONDS = 1.0
"""Seconds between two reports in which only counts and lines are new."""


class LogWatch:
    """Feeds the rules; reports violations at once, and their state at intervals."""

    def __init__(
        self,
        attempt: int,
        rules: LogRules,
        clock: Callable[[], float],
        send: Callable[[RulesRead], None],
    ) -> None:
        self._attempt = attempt
        self._rules = rules
        self._clock = clock
        self._send = send
        self._reported = (-1, -1)
        """Hits and turns of the rules at the last report."""
        self._reported_at = 0.0
        self._open: dict[tuple[int, str], tuple[LineAssembler, float]] = {}
        """Open streams, and when each was last read, by rank and name."""

    @classmethod
    def make(
        cls,
        command: StartCommand,
        nproc: int,
        clock: Callable[[], float],
        send: Callable[[RulesRead], None],
    ) -> LogWatch:
        """Make the watch for a start; rules that cannot be used are named in the log, and the
        others run."""
        report = Report()
        rules = read_rules(command.log_rules, report)
        for text in (*map(str, report.problems), *report.warnings):
            log.warning("problem in a log rule", attempt=command.attempt, problem=text)
        first = command.rank * nproc
        ranks = range(first, first + nproc)
        return cls(command.attempt, LogRules(rules, ranks, command.nnodes), clock, send)

    def reader(self, rank: int, stream: str) -> Callable[[bytes, bool], None]:
        """Return a function that takes the data of a stream; empty data: it has ended."""
        lines = LineAssembler()

        def read(chunk: bytes, is_drained: bool) -> None:
            result = lines.feed(chunk, is_drained) if chunk else lines.close()
            self._open[rank, stream] = lines, self._clock()
            if result:
                self._step(Lines(rank, stream, result))

        return read

    def start(self) -> None:
        """Note that workers of a stage run."""
        self._step(LogStarted())

    def pause(self) -> None:
        """Note that no worker runs."""
        self._step(Paused())

    def end_rank(self, rank: int) -> None:
        """Note that the rank's training has ended well."""
        self._step(RankEnded(rank))

    def deadline(self) -> float | None:
        """Return when to `tick`; None: never, in the present state."""
        rules = self._rules
        news = self._reported_at + NEWS_SECONDS if rules.hits != self._reported[0] else None
        due = rules.deadline()
        return min(due, news) if due is not None and news is not None else due or news

    def tick(self) -> None:
        """Tick at the deadline, after everything that could be read was read."""
        for (rank, _), (lines, at) in self._open.items():
            for text in lines.unfinished():
                self._step(Unfinished(rank, text, at))
        self._step(Tick())

    def _step(self, event: LogRuleEvent) -> None:
        rules, now = self._rules, self._clock()
        effects = rules.step(event, now)
        told = (rules.hits, rules.turns)
        is_due = isinstance(event, Paused) or now >= self._reported_at + NEWS_SECONDS
        if effects or told[1] != self._reported[1] or (is_due and told != self._reported):
            self._reported, self._reported_at = told, now
            self._send(RulesRead(self._attempt, rules.views(), _violations(effects)))


def _violations(effects: Iterable[object]) -> tuple[RuleViolated, ...]:
    return tuple(effect for effect in effects if isinstance(effect, RuleViolated))
