"""The ledger comes back from its annotation as it was; whatever else is there is no error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.spec.job.ledger import (
    CHARACTERS_MAX,
    NAMES_MAX,
    NUMBER_MAX,
    OTHERS,
    PROVEN,
    UNPROVEN,
    DetectorRecord,
    Ledger,
    read_ledger,
    write_ledger,
)
from unbroken.spec.problems import Report

SECONDS = st.integers(0, 10**9).map(lambda n: n / 1000)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
RECORDS = st.builds(DetectorRecord, st.integers(0, 10**6), st.integers(0, 10**6))
LEDGERS = st.builds(
    Ledger,
    incidents=st.integers(0, 10**6),
    steps=st.integers(0, 10**9),
    uncharged=st.integers(0, 10**9),
    lease_seconds=SECONDS,
    nnodes=st.integers(0, 10**5),
    seconds=st.dictionaries(NAMES, SECONDS.filter(bool), max_size=NAMES_MAX - 1),
    active_seconds=SECONDS,
    startup_seconds=SECONDS,
    detectors=st.dictionaries(NAMES, RECORDS, max_size=NAMES_MAX),
    agents=st.sampled_from(["", PROVEN, UNPROVEN]),
    progress_at=st.none() | SECONDS.filter(bool),
)


@given(LEDGERS)
def test_what_is_written_is_read(ledger: Ledger) -> None:
    report = Report()
    assert read_ledger(write_ledger(ledger), report) == ledger
    assert not report.problems


def test_nothing_is_written_of_an_empty_ledger() -> None:
    assert write_ledger(Ledger()) == ""
    assert read_ledger("") == Ledger()


@pytest.mark.parametrize("text", ["{", "[1]", "null", "7", "[" * 9000, "x" * (CHARACTERS_MAX + 1)])
def test_a_garbled_ledger_is_empty_and_a_problem(text: str) -> None:
    report = Report()
    assert read_ledger(text, report) == Ledger()
    assert "unbroken.dev/ledger" in str(report.problems[0])


def test_what_is_well_in_a_garbled_ledger_counts() -> None:
    report = Report()
    text = (
        '{"incidents": 3, "steps": -1, "activeSeconds": NaN, "seconds": {"Oom": 2.5, "Bad": "x"},'
        ' "detectors": {"silent": {"right": 2}, "nan": 7}, "new": 1}'
    )
    found = read_ledger(text, report)
    assert (found.incidents, found.steps, found.active_seconds) == (3, 0, 0)
    assert found.seconds == {"Oom": 2.5}
    assert found.detectors == {"silent": DetectorRecord(2, 0), "nan": DetectorRecord()}
    places = {one.path.removeprefix("unbroken.dev/ledger.") for one in report.problems}
    assert places == {"steps", "activeSeconds", "seconds.Bad", "detectors.nan"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
)
KEYS = st.sampled_from(["incidents", "steps", "seconds", "activeSeconds", "detectors"]) | NAMES


@given(st.text(max_size=200) | st.dictionaries(KEYS, JSON).map(json.dumps))
def test_no_text_is_an_exception_and_all_numbers_are_usable(text: str) -> None:
    found = read_ledger(text)
    numbers = [found.incidents, found.steps, found.active_seconds, *found.seconds.values()]
    assert all(0 <= one <= NUMBER_MAX for one in numbers)
    assert read_ledger(write_ledger(found)).incidents == found.incidents


@given(st.dictionaries(st.text(max_size=300), st.floats(), max_size=60))
def test_a_ledger_is_bounded_and_keeps_the_sum(seconds: dict[str, float]) -> None:
    text = write_ledger(Ledger(seconds=seconds))
    assert len(text) <= CHARACTERS_MAX
    assert len(read_ledger(text).seconds) <= NAMES_MAX


def test_the_cheapest_causes_become_one() -> None:
    seconds = {f"cause-{n:02}": float(n) for n in range(1, NAMES_MAX + 3)}
    found = read_ledger(write_ledger(Ledger(seconds=seconds))).seconds
    assert len(found) == NAMES_MAX
    assert found[OTHERS] == 1 + 2 + 3
    assert sum(found.values()) == sum(seconds.values())


@pytest.mark.parametrize("agents", ["x", 1, None, ["proven"], {"a": 1}])
def test_an_unknown_word_about_the_agents_is_a_problem(agents: object) -> None:
    report = Report()
    assert read_ledger(json.dumps({"agents": agents, "steps": 2}), report) == Ledger(steps=2)
    assert "unbroken.dev/ledger.agents" in str(report.problems[0])
