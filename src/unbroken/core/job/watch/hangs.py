"""Log rules that the job keeps as a whole (`some`): whether they hang, by what every node says.

Counts are kept, so that a report costs the same in a job of any size. One function of
`core.logs.rule_events` says what they amount to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from unbroken.core.job.events import PodUid
from unbroken.core.job.gang import GangStage
from unbroken.core.job.recovery.symptoms import TEXT_CHARACTERS
from unbroken.core.job.roster import Member
from unbroken.core.job.state import JobState
from unbroken.spec.job.incident import Symptom
from unbroken.spec.job.types import RuleScope
from unbroken.wire.agent import AgentReport, FaultKind, RuleState, RuleView, Violation, rule_reason

Key = tuple[str, int]
"""A rule's name, and its number among those of the same name."""


@dataclass(slots=True)
class Tally:
    """Nodes of the attempt by the state of a rule on them."""

    silent: int = 0
    """Never had a match."""
    silent_past: int = 0
    """Never had a match, and are past its start cut-off."""
    hearing: int = 0
    lost: int = 0
    """Had a match once, and no longer."""

    def add(self, view: RuleView, count: int) -> None:
        """Add the state of the rule on `count` nodes."""
        is_hanging = view.state is RuleState.HANGING
        if not view.matches and is_hanging:
            self.silent_past += count
        elif not view.matches:
            self.silent += count
        elif is_hanging:
            self.lost += count
        else:
            self.hearing += count

    def hangs(self, nnodes: int) -> bool:
        """True if matches have stopped on all nodes that had one, or if no node ever had one in
        time."""
        if self.silent + self.silent_past + self.hearing + self.lost < nnodes or self.hearing:
            return False
        return bool(self.lost) or not self.silent


class Hangs:
    """The rules of one job, in the attempt that runs."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._attempt = -1
        self._views: dict[PodUid, tuple[RuleView, ...]] = {}
        self._tallies: dict[Key, Tally] = {}

    def signs(self, member: Member, report: AgentReport, now: float) -> list[Symptom]:
        """The rules that hang now that this agent has reported."""
        state, uid, views = self._state, member.uid, report.log_rules
        is_part = state.gang.stage is not GangStage.HALTED and uid in state.gang.ranks
        if not views or not is_part or member.attempt_of(report) != state.attempt:
            return []
        if self._attempt != state.attempt:
            self._attempt = state.attempt
            self._views.clear()
            self._tallies.clear()
        before = self._views.get(uid, ())
        if before == views:
            return []
        self._views[uid] = views
        for count, said in ((-1, before), (1, views)):
            for key, view in shared(said):
                tally = self._tallies.setdefault(key, Tally())
                tally.add(view, count)
                if tally == Tally():
                    del self._tallies[key]
        hanging = [key for key, tally in self._tallies.items() if tally.hangs(state.nnodes)]
        return [self._sign(key, now) for key in hanging]

    def _sign(self, key: Key, now: float) -> Symptom:
        """Return the sign of the rank that matched last, if any did."""
        told = ((uid, dict(shared(views)).get(key)) for uid, views in self._views.items())
        said = {uid: view for uid, view in told if view is not None}
        uid = max(said, key=lambda uid: said[uid].last_match_at or 0.0)
        last = said[uid]
        rule, violation = key[0], Violation.HANG.value
        when = "has logged a match since the start" if not last.matches else "logs a match any more"
        text = f"{rule_reason(violation, rule)}: no rank of the job {when}"
        symptom = Symptom(
            now, FaultKind.LOG_RULE.value, text[:TEXT_CHARACTERS], rule=rule, violation=violation
        )  # fmt: skip
        if not last.matches:
            return symptom
        member = self._state.roster.members.get(uid)
        return replace(
            symptom,
            text=f"{text}; last on rank {last.last_rank}"[:TEXT_CHARACTERS],
            pod=member.view.name if member else "",
            node=(member.view.node if member else None) or "",
            rank=last.last_rank,
            evidence=(last.last_line[:TEXT_CHARACTERS],),
        )


def shared(views: tuple[RuleView, ...]) -> Iterator[tuple[Key, RuleView]]:
    """The rules of a node that are the job's as a whole."""
    seen: dict[str, int] = {}
    for view in views:
        if view.ranks == RuleScope.JOB.value:
            number = seen[view.name] = seen.get(view.name, -1) + 1
            yield (view.name, number), view
