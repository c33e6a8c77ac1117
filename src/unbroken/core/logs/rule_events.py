"""What the log rules are told and what they say.

Times are of the driver's one clock, in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from unbroken.core.tick import Tick
from unbroken.spec.job.log_rule_ranks import Scope
from unbroken.wire.agent import RuleState, RuleView


class Violation(Enum):
    """What a rule found; part of the agent's reason `Log<kind>_<rule>`."""

    HANG = "Hang"
    SLOW = "Slow"
    FAULT = "Fault"


@dataclass(frozen=True, slots=True)
class LogStarted:
    """Workers run: first or, after `Paused`, again."""


@dataclass(frozen=True, slots=True)
class Paused:
    """No worker runs for now (between stages); the time until `LogStarted` does not count."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a worker, as a `LineAssembler` gives them; of unknown ranks nothing is heard."""

    rank: int
    stream: str
    lines: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The rank's worker ended well; nothing more will come from it."""

    rank: int


LogRuleEvent = LogStarted | Paused | Lines | RankEnded | Tick


@dataclass(frozen=True, slots=True)
class RuleViolated:
    """The rule found a fault.

    `is_decisive` False: only this node's part of a rule that the job keeps as a whole; a fault if
    `hanging_rules` says so of all nodes."""

    rule: str
    kind: Violation
    at: float
    """When it came to be, which for a hang is the deadline."""
    why: str
    rank: int | None = None
    """The silent rank of a hang, or the rank that was heard last; None: none ever was."""
    stream: str | None = None
    line: str = ""
    """The newest matching one."""
    value: float | None = None
    is_decisive: bool = True

    @property
    def reason(self) -> str:
        """In the words of the HyperPod agent."""
        return f"Log{self.kind.value}_{self.rule}"


@dataclass(frozen=True, slots=True)
class RuleRecovered:
    """What was found is over: a line came, or a good value."""

    rule: str
    kind: Violation
    at: float
    rank: int | None = None


LogRuleEffect = RuleViolated | RuleRecovered


def hanging_rules(nodes: Sequence[Sequence[RuleView]]) -> tuple[str, ...]:
    """Rules kept by the job as a whole (`some`) that hang on all of it, from every node's views.

    Nodes that heard the rule must all have lost it; where none ever did, all must be past the start
    cut-off.  A node that never heard it says nothing against one that did."""
    by_rule: dict[tuple[str, int], list[RuleView]] = {}
    for views in nodes:
        seen: Counter[str] = Counter()
        for view in views:
            if view.ranks == Scope.JOB.value:
                by_rule.setdefault((view.name, seen[view.name]), []).append(view)
                seen[view.name] += 1
    return tuple(
        name
        for (name, _), views in by_rule.items()
        if len(views) == len(nodes)
        and all(v.state is RuleState.HANGING for v in [v for v in views if v.matches] or views)
    )
