"""Events and effects of the log rules.

Times are of the driver's one clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.core.tick import Tick
from unbroken.wire.agent import Violation, rule_reason


@dataclass(frozen=True, slots=True)
class LogStarted:
    """Workers run: first or, after `Paused`, again."""


@dataclass(frozen=True, slots=True)
class Paused:
    """No worker runs for now (between stages); the time until `LogStarted` does not count."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a worker, as a `LineAssembler` returns them; lines of unknown ranks are ignored."""

    rank: int
    stream: str
    lines: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Text of a line whose end has not come, and when it came.

    A match shows that the rank works. Values and faults wait for the end of the line.
    """

    rank: int
    text: bytes
    at: float


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The rank's worker ended well; nothing more will come from it."""

    rank: int


LogRuleEvent = LogStarted | Paused | Lines | Unfinished | RankEnded | Tick


@dataclass(frozen=True, slots=True)
class RuleViolated:
    """The rule found a fault.

    `is_decisive` False: only this node's part of a rule that the job keeps as a whole. It is a
    fault if all nodes that had a match have lost it (`core.job.watch.hangs`).
    """

    rule: str
    kind: Violation
    at: float
    """Time of the violation; for a hang, the deadline."""
    why: str
    rank: int | None = None
    """The silent rank of a hang, or the rank that logged last; None: none ever did."""
    stream: str | None = None
    line: str = ""
    """The newest matching line."""
    value: float | None = None
    is_decisive: bool = True

    @property
    def reason(self) -> str:
        """Return the reason in the words of the HyperPod agent."""
        return rule_reason(self.kind.value, self.rule)


@dataclass(frozen=True, slots=True)
class RuleRecovered:
    """A violation is over: a line came, or a good value."""

    rule: str
    kind: Violation
    at: float
    rank: int | None = None


LogRuleEffect = RuleViolated | RuleRecovered
