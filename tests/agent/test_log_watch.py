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
