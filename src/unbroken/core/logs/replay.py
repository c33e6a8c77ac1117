"""Replay of recorded logs through a job's rules: the violations, their times and ranks.

The evaluator is the agent's own. Rules that the job keeps as a whole see all ranks in one machine,
which is equivalent to a hang on all nodes (`core.job.watch.hangs`). Rules that each node keeps for
itself have one machine per node. Logs lack what only an agent knows: that a rank has ended well.

Logs of a healthy job are evidence about its rules: limits too tight, patterns that miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from unbroken.core.tick import Tick
from unbroken.spec.job.types import RuleScope
from unbroken.wire.agent import RuleView

from .recorded import Line, LinePlace
from .rule_config import CompiledRule
from .rule_events import Lines, LogRuleEffect, LogStarted, RuleRecovered, RuleViolated
from .rule_lint import LintFinding, Severity
from .rules import LogRules, shown


@dataclass(slots=True)
class Found:
    """A violation that a rule would have reported."""

    violation: RuleViolated
    newest: Line | None
    """The newest match of the blamed rank; None: it has none."""
    over_at: float | None = None
    """Time at which the log continued normally."""


@dataclass(slots=True)
class RuleMatches:
    """Matches of one rule in the log."""

    name: str
    node: int | None
    """Node rank; None: the rule is for the job as a whole."""
    matches: int = 0
    first_at: float | None = None
    last_at: float | None = None
    place: LinePlace | None = None
    by_rank: dict[int, Line] = field(default_factory=dict)
    """The newest match of each rank."""
    gap_seconds: float = 0.0
    """Longest time between two matches of any rank, in seconds."""
    gap_place: LinePlace | None = None
    """Place of the match after the longest gap."""


@dataclass(slots=True)
class _Machine:
    node: int | None
    rules: LogRules
    matches: list[RuleMatches]
    hits: int = 0


class Replay:
    """Replay of one attempt of a job."""

    def __init__(self, rules: Sequence[CompiledRule], ranks: Iterable[int], nproc: int) -> None:
        self.found: list[Found] = []
        self.lines = 0
        self.strange: set[int] = set()
        """Ranks that wrote and are not part of the job; their lines do not count."""
        whole = [rule for rule in rules if rule.watch.scope is not RuleScope.NODE]
        ranks = sorted(ranks)
        self._nproc, self._ranks = nproc, frozenset(ranks)
        self._whole = self._machine(None, whole, ranks)
        own = [rule for rule in rules if rule.watch.scope is RuleScope.NODE]
        nodes = sorted({rank // nproc for rank in ranks}) if own else []
        self._nodes = {
            node: self._machine(node, own, [r for r in ranks if r // nproc == node])
            for node in nodes
        }
        self._machines = [
            machine for machine in (self._whole, *self._nodes.values()) if machine.matches
        ]

    @staticmethod
    def _machine(node: int | None, rules: Sequence[CompiledRule], ranks: Sequence[int]) -> _Machine:
        built = LogRules(rules, ranks)
        return _Machine(node, built, [RuleMatches(view.name, node) for view in built.views()])

    def start(self, at: float) -> None:
        """Start the workers at this time."""
        for machine in self._machines:
            machine.rules.step(LogStarted(), at)

    def read(self, line: Line) -> None:
        """Take the next line; times never go back."""
        self.lines += 1
        if line.rank not in self._ranks:
            self.strange.add(line.rank)
            return
        own = self._nodes.get(line.rank // self._nproc)
        event = Lines(line.rank, line.stream, (line.text,))
        for machine in (self._whole, own):
            if machine is None or not machine.matches:
                continue
            self._tick(machine, line.at)
            effects = machine.rules.step(event, line.at)
            if machine.rules.hits != machine.hits:
                self._count(machine, line)
            if effects:
                self._note_effects(machine, effects)

    def end(self, at: float) -> None:
        """Let the job continue until this time."""
        for machine in self._machines:
            self._tick(machine, at)

    def views(self) -> list[tuple[RuleMatches, RuleView]]:
        """Return the state of every rule."""
        return [
            pair
            for machine in self._machines
            for pair in zip(machine.matches, machine.rules.views(), strict=True)
        ]

    def would_follow(self) -> list[RuleViolated]:
        """Return the violations if no rank ever logs again; nothing can be read after this."""
        later: list[RuleViolated] = []
        for machine in self._machines:
            while (deadline := machine.rules.deadline()) is not None:
                effects = machine.rules.step(Tick(), deadline)
                later += [effect for effect in effects if isinstance(effect, RuleViolated)]
        return sorted(later, key=lambda violation: violation.at)

    def _tick(self, machine: _Machine, until: float) -> None:
        while (deadline := machine.rules.deadline()) is not None and deadline < until:
            self._note_effects(machine, machine.rules.step(Tick(), deadline))

    def _count(self, machine: _Machine, line: Line) -> None:
        machine.hits = machine.rules.hits
        for heard, matches in zip(machine.matches, machine.rules.matches(), strict=True):
            if matches == heard.matches:
                continue
            if heard.last_at is not None and line.at - heard.last_at > heard.gap_seconds:
                heard.gap_seconds, heard.gap_place = line.at - heard.last_at, line.place
            heard.matches, heard.last_at, heard.place = matches, line.at, line.place
            heard.by_rank[line.rank] = line
            heard.first_at = line.at if heard.first_at is None else heard.first_at

    def _note_effects(self, machine: _Machine, effects: Sequence[LogRuleEffect]) -> None:
        newest = {heard.name: heard.by_rank for heard in machine.matches}
        for effect in effects:
            if isinstance(effect, RuleViolated):
                result = newest[effect.rule]
                line = None if effect.rank is None else result.get(effect.rank)
                self.found.append(Found(effect, line))
                continue
            self._end(effect)

    def _end(self, recovered: RuleRecovered) -> None:
        for result in reversed(self.found):
            what = result.violation
            if (what.rule, what.kind) == (recovered.rule, recovered.kind) and not result.over_at:
                result.over_at = recovered.at
                return


ROOM = 2
"""Recommended limit, as a multiple of the longest time seen."""


def check_limits(
    rule: CompiledRule, path: str, heard: RuleMatches, view: RuleView, start_at: float
) -> Iterator[LintFinding]:
    """Yield findings about a rule's limits, from its replay."""
    spec = rule.spec

    def finding(severity: Severity, key: str, what: str, why: str, instead: str) -> LintFinding:
        return LintFinding(severity, spec.name, f"{path}.{key}", what, why, instead)

    limits = (
        ("expectedStartCutOffInSeconds", spec.expected_start_cut_off_in_seconds, heard.first_at),
        ("expectedRecurringFrequencyInSeconds", spec.expected_recurring_frequency_in_seconds, None),
    )
    for key, limit, first_at in limits:
        seen = heard.gap_seconds if "Recurring" in key else (first_at or start_at) - start_at
        if not limit or not seen or limit >= ROOM * seen:
            continue
        what = f"{limit:g} s, and the logs have a silence of {seen:g} s"
        severity = Severity.WARNING if limit < seen else Severity.NOTE
        why = "such a job would be restarted" if limit < seen else "there is little room"
        yield finding(severity, key, what, why, f"give at least {ROOM * seen:g}")
    if view.unreadable:
        what = f"{view.unreadable} captured texts are no numbers"
        why = "each counts as a bad value once a number was seen"
        yield finding(Severity.WARNING, "logPattern", what, why, "capture the number alone")


def check_sample(rule: CompiledRule, path: str, lines: Sequence[bytes]) -> Iterator[LintFinding]:
    """Yield findings about a rule's patterns, from lines of the logs."""
    name, matching = rule.spec.name, [line for line in lines if rule.pattern.is_match(line)]
    if not matching:
        inside = [line for line in lines if rule.pattern.is_found(line)]
        what = f"matches none of {len(lines)} lines of the logs"
        why = "its time limits would be over, its values never seen"
        instead = "see how the line really looks"
        if inside:
            why = f"{len(inside)} have it, but not at their start: {shown(inside[0])[:80]!r}"
            instead = "begin the pattern with .*"
        severity = Severity.WARNING if inside or not rule.spec.fault_on_match else Severity.NOTE
        yield LintFinding(severity, name, f"{path}.logPattern", what, why, instead)
    elif rule.stop and all(map(rule.stop.is_match, matching)):
        what = "matches whenever logPattern does"
        why = "the first match stops the rule for good"
        instead = "match what is written once at the end"
        yield LintFinding(Severity.WARNING, name, f"{path}.stopPattern", what, why, instead)
