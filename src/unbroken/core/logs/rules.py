"""Evaluation of a worker's output by the job's log rules, line by line and by deadline.

One `LogRules` serves one node for one attempt. The fields mean what HyperPod's documentation and
its agent 1.1.3 define, with these differences:

- Lines of every rank count, of stdout and stderr; `rule_config` decides which ranks *must* log.
- Violations come at their deadline. A line that was written in time but read late still counts,
  and so does a match in a line whose end has not come (`Unfinished`).
  Only a tick finds a hang, and a driver must pass on everything that can be read before the tick.
- Values: see `values`.
- When the rank that matched last ends well, the rule pauses until another rank matches.

A line's matches count before it stops rules. FAULTED stays for the attempt; HANGING and SLOW end
with the next good line, and can come again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from unbroken.core.tick import Tick
from unbroken.spec.job.types import RuleScope
from unbroken.wire.agent import RuleState, RuleView, Violation

from .patterns import SET_MEMORY_BYTES, PatternSet
from .rule_config import CompiledRule
from .rule_events import (
    Lines,
    LogRuleEffect,
    LogRuleEvent,
    LogStarted,
    Paused,
    RankEnded,
    RuleRecovered,
    RuleViolated,
    Unfinished,
)
from .values import Meter

SHOWN_CHARACTERS = 500
"""Most characters of a user's line in an effect or a view."""


@dataclass(slots=True, eq=False)
class _Clock:
    """The deadline of a rank, or of the node's ranks together."""

    limit: float | None
    """Seconds from `since` within which a match must come: start cut-off, then frequency."""
    rank: int | None = None
    """Rank that matched last, or rank of this clock."""
    since: float | None = None
    has_matched: bool = False
    is_overdue: bool = False
    is_stopped: bool = False
    is_resting: bool = False

    @property
    def deadline(self) -> float:
        if self.since is None or not self.limit:
            return math.inf
        if self.is_overdue or self.is_stopped or self.is_resting:
            return math.inf
        return self.since + self.limit


class _Rule:
    """One rule on this node, and its matches so far."""

    def __init__(self, compiled: CompiledRule, ranks: Collection[int], nnodes: int) -> None:
        spec, watch = compiled.spec, compiled.watch
        self.compiled = compiled
        self.name = spec.name
        self.is_per_rank = watch.scope is RuleScope.RANK
        self.is_decisive = watch.scope is not RuleScope.JOB or nnodes == 1
        self.meter = compiled.meter()
        self.clocks: dict[int, _Clock]
        """Clocks by rank; the same clock for all ranks that are watched together."""
        limit = spec.expected_start_cut_off_in_seconds
        if self.is_per_rank:
            watched = [rank for rank in ranks if watch.ranks is None or rank in watch.ranks]
            self.clocks = {rank: _Clock(limit, rank) for rank in watched}
        else:
            self.clocks = dict.fromkeys(ranks, _Clock(limit))
        self.each_clock = tuple(dict.fromkeys(self.clocks.values()))
        self.is_faulted = False
        self.matches = 0
        self.at: float | None = None
        self.rank: int | None = None
        self.stream = ""
        self.line = b""

    @property
    def state(self) -> RuleState:
        if self.is_faulted:
            return RuleState.FAULTED
        if any(clock.is_overdue for clock in self.each_clock):
            return RuleState.HANGING
        if all(clock.is_stopped for clock in self.each_clock):
            return RuleState.STOPPED
        if self.meter and self.meter.is_slow:
            return RuleState.SLOW
        return RuleState.HEALTHY if self.matches else RuleState.WAITING

    def view(self) -> RuleView:
        return RuleView(
            name=self.name,
            state=self.state,
            ranks=str(self.compiled.watch),
            matches=self.matches,
            bad_points=self.meter.bad_points if self.meter else 0,
            unreadable=self.meter.unreadable if self.meter else 0,
            last_match_at=self.at,
            last_rank=self.rank,
            last_stream=self.stream,
            last_line=shown(self.line),
            last_value=self.meter.last[:SHOWN_CHARACTERS] if self.meter else "",
        )

    def stop(self, clock: _Clock, rank: int) -> None:
        """Stop the rule: its stopPattern matched, and no further match is required."""
        clock.is_stopped, clock.is_overdue = True, False
        if self.meter:
            self.meter.forget(rank if self.is_per_rank else None)

    def violated(self, kind: Violation, at: float, why: str) -> RuleViolated:
        """Note a violation by the newest matching line."""
        is_slow = kind is Violation.SLOW and self.meter
        value = self.meter.last_value if is_slow and self.meter else None
        return RuleViolated(
            self.name, kind, at, why, self.rank, self.stream, shown(self.line), value
        )

    def hangs(self, clock: _Clock) -> RuleViolated:
        """Note a hang by a clock that has run out."""
        why = f"no match for {clock.limit:g} s" + ("" if clock.has_matched else " since the start")
        if clock.rank is not None:
            why += f" on rank {clock.rank}" if self.is_per_rank else f"; last on rank {clock.rank}"
        return RuleViolated(
            rule=self.name,
            kind=Violation.HANG,
            at=clock.deadline,
            why=why,
            rank=clock.rank,
            line=shown(self.line),
            is_decisive=self.is_decisive,
        )


def patterns_of(rules: Sequence[CompiledRule], memory_bytes: int = SET_MEMORY_BYTES) -> PatternSet:
    """Return the patterns of rules as `LogRules` asks them: the log patterns come first."""
    stops = [rule.stop for rule in rules if rule.stop]
    return PatternSet([*(rule.pattern for rule in rules), *stops], memory_bytes)


class LogRules:
    """The rules of a job on one node, for one attempt; `ranks` are those of the node's workers."""

    def __init__(
        self,
        rules: Sequence[CompiledRule],
        ranks: Collection[int],
        nnodes: int = 1,
        patterns: PatternSet | None = None,
    ) -> None:
        """`patterns`: those of the rules, from `patterns_of`, if others use them, too."""
        built = (_Rule(rule, ranks, nnodes) for rule in rules)
        self._rules = [rule for rule in built if rule.clocks]
        self._targets = [*self._rules, *(rule for rule in self._rules if rule.compiled.stop)]
        """Rules by index of the pattern."""
        if patterns is None or len(patterns) != len(self._targets):
            patterns = patterns_of([rule.compiled for rule in self._rules])
        self._patterns = patterns
        self._clocks = [clock for rule in self._rules for clock in rule.each_clock]
        self._has_started = False
        self._paused_at: float | None = None
        self._next = math.inf
        """Lower bound of all deadlines."""
        self._effects: list[LogRuleEffect] = []
        self.hits = 0
        """Matches of any pattern so far."""
        self.turns = 0
        """Number of times that a rule matched first, matched again after a hang, or stopped."""

    def step(self, event: LogRuleEvent, now: float) -> list[LogRuleEffect]:
        """Take an event; return its effects, in order."""
        self._effects = []
        match event:
            case Lines():
                self._read(event, now if self._paused_at is None else self._paused_at)
            case Unfinished() if self._paused_at is None:
                self._glance(event)
            case LogStarted():
                self._start(now)
            case Paused():
                self._paused_at = now if self._paused_at is None else self._paused_at
            case RankEnded():
                self._end(event.rank)
            case Tick() if self._paused_at is None and now >= self._next:
                self._expire(now)
            case Tick() | Unfinished():
                pass
        return self._effects

    def deadline(self) -> float | None:
        """Return when to tick at the latest. It may be early: a tick then finds nothing and moves
        it on."""
        return self._next if self._paused_at is None and self._next < math.inf else None

    def views(self) -> tuple[RuleView, ...]:
        """Return the state of every rule, for display, and for hangs of the whole job."""
        return tuple(rule.view() for rule in self._rules)

    def matches(self) -> list[int]:
        """Return the matches of each rule so far, in the order of `views`."""
        return [rule.matches for rule in self._rules]

    def _start(self, now: float) -> None:
        if self._has_started and self._paused_at is None:
            return
        for clock in self._clocks:
            if clock.since is None:
                clock.since = now
            elif self._paused_at is not None:
                clock.since += now - self._paused_at
        self._has_started, self._paused_at = True, None
        self._find_next()

    def _find_next(self) -> None:
        self._next = min((clock.deadline for clock in self._clocks), default=math.inf)

    def _read(self, event: Lines, now: float) -> None:
        match_line, targets, rule_count = self._patterns.match, self._targets, len(self._rules)
        rank, stream = event.rank, event.stream
        for line in event.lines:
            for index in match_line(line):
                rule = targets[index]
                clock = rule.clocks.get(rank)
                if clock is None or clock.is_stopped:
                    continue
                self.hits += 1
                if index >= rule_count:
                    rule.stop(clock, rank)
                    self.turns += 1
                    continue
                rule.matches += 1
                rule.at, rule.rank, rule.stream, rule.line = now, rank, stream, line
                clock.since, clock.rank = now, rank
                if not clock.has_matched or clock.is_overdue or clock.is_resting:
                    self._revive(rule, clock, now)
                if rule.meter:
                    self._measure(rule, rule.meter, now)
                if rule.compiled.spec.fault_on_match and not rule.is_faulted:
                    rule.is_faulted = True
                    why = f"rank {rank} logged: {shown(line)}"
                    self._effects.append(rule.violated(Violation.FAULT, now, why))

    def _glance(self, event: Unfinished) -> None:
        """Move the deadlines of rules that match a line without an end."""
        for index in self._patterns.match(event.text):
            rule = self._targets[index]
            clock = rule.clocks.get(event.rank)
            is_stop = index >= len(self._rules)
            if is_stop or clock is None or clock.is_stopped or clock.since is None:
                continue
            if event.at >= clock.since:
                clock.since, clock.rank = event.at, event.rank
                if not clock.has_matched or clock.is_overdue or clock.is_resting:
                    self._revive(rule, clock, event.at)

    def _revive(self, rule: _Rule, clock: _Clock, now: float) -> None:
        """Restart a clock at its first match, or after its hang."""
        if clock.is_overdue:
            self._effects.append(RuleRecovered(rule.name, Violation.HANG, now, clock.rank))
        clock.has_matched, clock.is_overdue, clock.is_resting = True, False, False
        self.turns += 1
        clock.limit = rule.compiled.spec.expected_recurring_frequency_in_seconds
        self._next = min(self._next, clock.deadline)

    def _measure(self, rule: _Rule, meter: Meter, now: float) -> None:
        text = rule.compiled.pattern.first_group(rule.line)
        if text is None:
            return
        was_slow = meter.is_slow
        if meter.add((rule.rank or 0, rule.stream), text):
            why = f"rank {rule.rank}: {meter.what}; newest: {shown(meter.last.encode())}"
            self._effects.append(rule.violated(Violation.SLOW, now, why))
        elif was_slow and not meter.is_slow:
            self._effects.append(RuleRecovered(rule.name, Violation.SLOW, now, rule.rank))

    def _end(self, rank: int) -> None:
        for rule in self._rules:
            clock = rule.clocks.get(rank)
            if clock and rule.is_per_rank:
                self.turns += not clock.is_stopped
                clock.is_stopped = True
            elif clock and clock.rank == rank:
                clock.is_resting = True

    def _expire(self, now: float) -> None:
        """Return the clocks that have run out, earliest first."""
        late = [(rule, clock) for rule, clock in self._each() if clock.deadline <= now]
        for rule, clock in sorted(late, key=lambda result: result[1].deadline):
            self._effects.append(rule.hangs(clock))
            clock.is_overdue = True
        self._find_next()

    def _each(self) -> Iterable[tuple[_Rule, _Clock]]:
        return ((rule, clock) for rule in self._rules for clock in rule.each_clock)


def shown(line: bytes) -> str:
    """Return a user's line as text, cut."""
    text = line[: SHOWN_CHARACTERS * 4].decode(errors="replace")
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
