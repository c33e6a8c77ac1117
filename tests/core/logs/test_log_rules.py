"""Log rules: what each field means, claim by claim.

A script is one step a word: `+` start, `-` pause, `=R` rank R ends well, `RTEXT` or `R!TEXT` a
line of rank R on stdout or stderr, `R~TEXT` a line without an end (underscores are spaces); `T:`
before it is the time.  Ticks come by themselves, at deadlines, before whatever happens later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.tables import cases
from unbroken.core.logs.rule_config import read_rules
from unbroken.core.logs.rule_events import (
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
from unbroken.core.logs.rules import LogRules
from unbroken.core.tick import Tick
from unbroken.spec.problems import Report
from unbroken.wire.agent import RuleState

RANKS = (4, 5)
END = 1000.0


def machine(*rules: Mapping[str, Any], nnodes: int = 2) -> LogRules:
    """The rules on a node with ranks 4 and 5."""
    report = Report()
    compiled = read_rules([{"name": f"r{i}", **rule} for i, rule in enumerate(rules)], report)
    assert report.problems == []
    return LogRules(compiled, RANKS, nnodes)


def run(rules: LogRules, script: str, end: float = END) -> list[LogRuleEffect]:
    """Return all effects of the script until `end`."""
    effects: list[LogRuleEffect] = []
    for at, event in [*_steps(script), (end, Tick())]:
        while (deadline := rules.deadline()) is not None and deadline < at:
            effects += rules.step(Tick(), deadline)
        effects += rules.step(event, at)
    return effects


def _steps(script: str) -> Iterator[tuple[float, LogRuleEvent]]:
    for word in script.split():
        at, text = word.split(":", 1)
        yield float(at), _event(text, float(at))


def _event(text: str, at: float) -> LogRuleEvent:
    if text in "+-":
        return LogStarted() if text == "+" else Paused()
    if text[0] == "=":
        return RankEnded(int(text[1:]))
    if text[1] == "~":
        return Unfinished(int(text[0]), text[2:].replace("_", " ").encode(), at)
    stream = "stderr" if text[1] == "!" else "stdout"
    return Lines(int(text[0]), stream, [text[1:].lstrip("!").replace("_", " ").encode()])


def told(effects: list[LogRuleEffect]) -> str:
    """Effects in one line: kind, rule, time and rank of each."""
    words = []
    for effect in effects:
        rank = "" if effect.rank is None else f"/{effect.rank}"
        sign = "-" if isinstance(effect, RuleRecovered) else ""
        soft = "?" if isinstance(effect, RuleViolated) and not effect.is_decisive else ""
        words.append(f"{sign}{effect.kind.value}:{effect.rule}@{effect.at:g}{rank}{soft}")
    return " ".join(words)


LOSS = {"logPattern": r".*loss=(\S+)"}
START = {**LOSS, "expectedStartCutOffInSeconds": 60}
OFTEN = {**LOSS, "expectedRecurringFrequencyInSeconds": 10}
HIGH = {**LOSS, "metricThreshold": 2.5, "operator": "gt", "metricEvaluationDataPoints": 2}
FAULT = {"logPattern": ".*(out of memory|loss)", "faultOnMatch": True}
ALL = "every"


@cases
def test_rules(rules: list[dict[str, Any]], script: str, expected: str) -> None:
    assert told(run(machine(*rules), script)) == expected


def test_on_a_single_node_the_job_as_a_whole_is_the_node() -> None:
    rules = machine({**START, "ranks": "some"}, nnodes=1)
    assert told(run(rules, "0:+")) == "Hang:r0@60"


def test_a_late_tick_still_tells_when_the_hang_came_to_be() -> None:
    rules = machine(START)
    rules.step(LogStarted(), 0)
    assert [effect.at for effect in rules.step(Tick(), 75)] == [60]


def test_lines_that_were_read_late_count() -> None:
    rules = machine(OFTEN)
    run(rules, "0:+ 5:4loss=1", end=5)
    assert rules.step(Lines(4, "stdout", [b"loss=1"]), 15.2) == []


def test_the_line_of_one_rank_does_not_overtake_that_of_another() -> None:
    rules = machine({**OFTEN, "ranks": ALL})
    run(rules, "0:+ 5:4loss=1 5:5loss=1", end=5)
    assert rules.step(Lines(4, "stdout", [b"loss=1"]), 15.2) == []
    assert rules.step(Lines(5, "stdout", [b"loss=1"]), 15.2) == []
    assert rules.step(Tick(), 15.2) == []


def test_a_violation_tells_the_story() -> None:
    hang, slow, fault = machine(START, OFTEN), machine(HIGH), machine(FAULT)
    (first, second) = run(hang, "0:+ 5:4epoch_1,_loss=1.5 70:-")[-1:] + run(machine(START), "0:+")
    assert isinstance(first, RuleViolated)
    assert isinstance(second, RuleViolated)
    assert (first.reason, first.why) == ("LogHang_r1", "no match for 10 s; last on rank 4")
    assert first.line == "epoch 1, loss=1.5"
    assert second.why == "no match for 60 s since the start"
    (effect,) = run(slow, "0:+ 1:4loss=3 2:4!loss=1 3:4loss=nan")
    assert isinstance(effect, RuleViolated)
    assert (effect.reason, effect.stream, effect.line) == ("LogSlow_r0", "stdout", "loss=nan")
    assert effect.why == "rank 4: last 2 values gt 2.5 or no number; newest: nan"
    (effect,) = run(fault, "0:+ 1:5!CUDA_out_of_memory")
    assert isinstance(effect, RuleViolated)
    assert (effect.reason, effect.rank, effect.stream) == ("LogFault_r0", 5, "stderr")


STATES = {
    "waiting": (START, "0:+", RuleState.WAITING),
    "healthy": (START, "0:+ 1:4loss=1", RuleState.HEALTHY),
    "slow": (HIGH, "0:+ 1:4loss=3 2:4loss=3", RuleState.SLOW),
    "slow no more": (HIGH, "0:+ 1:4loss=3 2:4loss=3 3:4loss=1", RuleState.HEALTHY),
    "hanging": ({**START, "expectedStartCutOffInSeconds": 1}, "0:+ 2:4x", RuleState.HANGING),
    "faulted for good": (FAULT, "0:+ 1:4loss 2:4x", RuleState.FAULTED),
    "stopped": ({**OFTEN, "stopPattern": "x"}, "0:+ 1:4loss=1 2:4x", RuleState.STOPPED),
    "one rank of all stopped": (
        {**OFTEN, "stopPattern": "x", "ranks": ALL},
        "0:+ 1:4loss=1 2:4x",
        RuleState.HEALTHY,
    ),
}


@pytest.mark.parametrize(("rule", "script", "state"), STATES.values(), ids=STATES)
def test_states(rule: dict[str, Any], script: str, state: RuleState) -> None:
    rules = machine(rule)
    run(rules, script, end=3)
    assert rules.views()[0].state is state


def test_a_view_shows_what_was_seen() -> None:
    rules = machine(HIGH)
    run(rules, "0:+ 1:4loss=1 2:5!loss=7 3:4hello", end=4)
    (view,) = rules.views()
    assert (view.name, view.ranks, view.matches, view.bad_points) == ("r0", "node", 2, 1)
    assert (view.last_match_at, view.last_rank, view.last_stream) == (2.0, 5, "stderr")
    assert (view.last_line, view.last_value, view.unreadable) == ("loss=7", "7", 0)


def test_long_lines_are_cut_where_they_are_shown() -> None:
    rules = machine(FAULT)
    rules.step(LogStarted(), 0)
    (effect,) = rules.step(Lines(4, "stdout", [b"loss" + "é".encode() * 30_000]), 1)
    assert isinstance(effect, RuleViolated)
    assert len(effect.line) == 500
    assert len(rules.views()[0].last_line) == 500


def test_a_late_tick_tells_the_earliest_hang_first() -> None:
    rules = machine(START, {**START, "expectedStartCutOffInSeconds": 30})
    rules.step(LogStarted(), 0)
    assert told(rules.step(Tick(), 75)) == "Hang:r1@30 Hang:r0@60"


def test_bad_values_of_a_rank_that_stopped_are_forgotten_and_no_others() -> None:
    rule = {**HIGH, "ranks": ALL, "stopPattern": ".*done"}
    rules = machine(rule)
    run(rules, "0:+ 1:4loss=9 2:4loss=9 3:5loss=9", 4)
    assert (rules.views()[0].state, rules.views()[0].bad_points) == (RuleState.SLOW, 2)
    run(rules, "5:4done", 6)
    assert (rules.views()[0].state, rules.views()[0].bad_points) == (RuleState.HEALTHY, 1)
