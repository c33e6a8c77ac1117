"""Times at which the rules on an agent's logs are reported."""

from __future__ import annotations

from tests.agent.running import start
from unbroken.agent.evidence.log_watch import LogWatch
from unbroken.core.agent.events import RulesRead
from unbroken.wire.agent import RuleState

LOSS = {
    "name": "loss",
    "logPattern": r"loss=(\S+)",
    "ranks": "every",
    "expectedStartCutOffInSeconds": 20,
}


def test_a_match_late_in_a_long_line_or_without_an_end_of_line_is_no_hang() -> None:
    told: list[RulesRead] = []
    now = 0.0
    rule = {**LOSS, "logPattern": r".*loss=(\S+)"}
    often = {"expectedRecurringFrequencyInSeconds": 20}
    watch = LogWatch.make(start(log_rules=[{**rule, **often}]), 1, lambda: now, told.append)
    read = watch.reader(0, "stdout")
    watch.start()

    def hangs(until: float) -> int:
        """Tick at each deadline up to a time, and return the hangs so far."""
        nonlocal now
        while (due := watch.deadline()) is not None and due < until:
            now = due
            watch.tick()
        now = until
        return sum(len(one.violations) for one in told)

    read(b"weights " * 14_000 + b"loss=1\n", True)
    for second in range(15, 60, 15):
        assert hangs(second) == 0
        read(b"loss=2 ", True)
    assert hangs(64) == 0
    read(b"no number ", True)
    assert hangs(80) == 1, "20 s after the last match, whatever came after it"


def test_a_rule_that_stopped_with_its_last_rank_is_told_although_no_line_is_new() -> None:
    told: list[RulesRead] = []
    watch = LogWatch.make(start(log_rules=[LOSS]), 2, lambda: 10.0, told.append)
    for rank in (0, 1):
        watch.reader(rank, "stdout")(b"loss=1\n", False)
    watch.start()
    watch.end_rank(0)
    watch.end_rank(1)
    watch.pause()
    assert [view.state for view in told[-1].views] == [RuleState.STOPPED]
