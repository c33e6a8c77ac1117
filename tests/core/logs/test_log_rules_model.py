"""The evaluator against a plain model that looks at the whole history at once.

The model has one rule, walks the matches of each rank that must log, and counts the values of each
source. It shares no code with the evaluator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.logs.test_log_rules import RANKS, run
from unbroken.core.logs.rule_config import read_rules
from unbroken.core.logs.rule_events import Lines, LogStarted, RuleViolated
from unbroken.core.logs.rules import LogRules
from unbroken.spec.problems import Report
from unbroken.wire.agent import Violation

END = 100.0
TEXTS = [
    "loss=1",
    "loss=9",
    "loss=nan",
    "loss=oops",
    "loss=?",
    "loss",
    "noise",
    "done",
    "loss=2.done",
]
Found = tuple[Violation, float, int | None]


@dataclass(frozen=True)
class Said:
    """One line."""

    at: float
    rank: int
    stream: str
    text: str


def history(steps: list[tuple[int, str]]) -> tuple[list[Said], list[tuple[float, float]]]:
    """Return lines with their running time, and pauses as (wall start, wall end)."""
    wall, paused, lines, pauses = 0.0, None, [], []
    for gap, word in steps:
        wall += gap
        if word == "-":
            paused = wall if paused is None else paused
        elif word == "+":
            if paused is not None:
                pauses.append((paused, wall))
            paused = None
        else:
            at = wall if paused is None else paused
            stream = "stderr" if word[1] == "!" else "stdout"
            lines.append(Said(at, int(word[0]), stream, word[1:].lstrip("!")))
    if paused is not None:
        pauses.append((paused, END + 1000))
    return lines, pauses


def running(wall: float, pauses: list[tuple[float, float]]) -> float:
    """Return the seconds of `wall` in which workers ran."""
    return wall - sum(min(end, wall) - start for start, end in pauses if start < wall)


def on_the_wall(at: float, pauses: list[tuple[float, float]]) -> float:
    """Return the wall time at which `at` seconds of running were over."""
    for start, end in pauses:
        if at >= start:
            at += end - start
    return at


def hangs(rule: dict[str, Any], who: list[Said], pauses: list[tuple[float, float]]) -> list[float]:
    """Return when the ranks that must log together were late; `who` are their lines."""
    matched, stopped = [0.0], None
    for line in who:
        if re.match(rule["logPattern"], line.text):
            matched.append(running(line.at, pauses))
        if re.match(rule.get("stopPattern", r"\Zx"), line.text):
            stopped = running(line.at, pauses)
            break
    limits = [rule.get("expectedStartCutOffInSeconds")]
    limits += [rule.get("expectedRecurringFrequencyInSeconds")] * (len(matched) - 1)
    ends = [*matched[1:], running(END, pauses) if stopped is None else stopped]
    late = [s + n for s, n, e in zip(matched, limits, ends, strict=True) if n and s + n < e]
    if stopped is None and limits[-1] and matched[-1] + limits[-1] == ends[-1]:
        late.append(ends[-1])  # the last tick comes at the end
    return [at for at in (on_the_wall(moment, pauses) for moment in late) if at <= END]


def slow_points(rule: dict[str, Any], lines: list[Said]) -> list[tuple[float, int]]:
    """Return when a source had its last needed bad value, for `lines` before any stop."""
    counts: dict[tuple[int, str], int] = {}
    found, has_number = [], False
    for line in lines:
        match = re.match(rule["logPattern"], line.text)
        value = match[1] if match else None
        if value in (None, "?") or (value in ("oops", "2.done") and not has_number):
            continue
        has_number = has_number or value in ("1", "9")
        source = (line.rank, line.stream)
        counts[source] = 0 if value == "1" else counts.get(source, 0) + 1
        if counts[source] == rule["metricEvaluationDataPoints"]:
            found.append((line.at, line.rank))
    return found


def before_stop(rule: dict[str, Any], lines: list[Said]) -> list[Said]:
    """Return the lines up to the one that stops the rule."""
    for index, line in enumerate(lines):
        if re.match(rule.get("stopPattern", r"\Zx"), line.text):
            return lines[: index + 1]
    return lines


def expected(rule: dict[str, Any], steps: list[tuple[int, str]]) -> list[Found]:
    """Return all violations, by the model."""
    lines, pauses = history(steps)
    groups: list[tuple[int | None, list[Said]]] = [(None, lines)]
    if rule["ranks"] == "every":
        groups = [(rank, [line for line in lines if line.rank == rank]) for rank in RANKS]
    found: list[Found] = []
    for rank, said in groups:
        found += [(Violation.HANG, at, rank) for at in hangs(rule, said, pauses)]
    heard = [line for _, said in groups for line in before_stop(rule, said)]
    heard = [line for line in lines if any(line is other for other in heard)]
    if "metricThreshold" in rule:
        found += [(Violation.SLOW, at, rank) for at, rank in slow_points(rule, heard)]
    faulty = [line for line in heard if re.match(rule["logPattern"], line.text)]
    if rule["faultOnMatch"] and faulty:
        found.append((Violation.FAULT, faulty[0].at, faulty[0].rank))
    return sorted(found, key=str)


RULES = st.fixed_dictionaries(
    {
        "name": st.just("r"),
        "logPattern": st.just(r"loss(?:=(\S+))?"),
        "ranks": st.sampled_from(["node", "every"]),
        "faultOnMatch": st.booleans(),
        "metricEvaluationDataPoints": st.integers(1, 3),
    },
    optional={
        "expectedStartCutOffInSeconds": st.integers(1, 20),
        "expectedRecurringFrequencyInSeconds": st.integers(1, 20),
        "stopPattern": st.just(".*done"),
    },
)
METRICS = st.sampled_from([{}, {"metricThreshold": 5, "operator": "gt"}])
WORDS = st.builds(
    lambda rank, mark, text: f"{rank}{mark}{text}",
    st.sampled_from(RANKS),
    st.sampled_from(["", "!"]),
    st.sampled_from(TEXTS),
)
STEPS = st.lists(
    st.tuples(st.integers(0, 6), WORDS | WORDS | WORDS | st.sampled_from(["-", "+"])), max_size=15
)


@settings(max_examples=200)
@given(RULES, METRICS, STEPS)
@example(
    {"name": "r", "logPattern": "loss", "ranks": "node", "faultOnMatch": False}
    | {"metricEvaluationDataPoints": 1, "expectedRecurringFrequencyInSeconds": 10},
    {},
    [(0, "4loss"), (10, "-"), (5, "+")],
)
def test_the_evaluator_says_what_the_model_says(
    rule: dict[str, Any], metric: dict[str, Any], steps: list[tuple[int, str]]
) -> None:
    rule = rule | metric
    report = Report()
    rules = LogRules(read_rules([rule], report), RANKS)
    assert not report.problems
    wall, script = 0, ["0:+"]
    for gap, word in steps:
        wall += gap
        script.append(f"{wall}:{word}")
    found: list[Found] = []
    for effect in run(rules, " ".join(script), END):
        if isinstance(effect, RuleViolated):
            is_common = effect.kind is Violation.HANG and rule["ranks"] == "node"
            found.append((effect.kind, effect.at, None if is_common else effect.rank))
    assert sorted(found, key=str) == expected(rule, steps)


@given(RULES, METRICS, STEPS)
def test_lines_in_one_event_or_in_many_are_the_same(
    rule: dict[str, Any], metric: dict[str, Any], steps: list[tuple[int, str]]
) -> None:
    words = [word for _, word in steps if word not in "+-"]
    one, many = (LogRules(read_rules([rule | metric], Report()), RANKS) for _ in range(2))
    told: list[list[Any]] = [[], []]
    for machine in (one, many):
        machine.step(LogStarted(), 0)
    for (rank, stream), group in groupby(words, lambda w: (w[0], w[1] == "!")):
        lines = [word[1:].lstrip("!").encode() for word in group]
        told[0] += one.step(Lines(int(rank), str(stream), lines), 0)
        for line in lines:
            told[1] += many.step(Lines(int(rank), str(stream), [line]), 0)
    assert told[0] == told[1]
    assert one.views() == many.views()
