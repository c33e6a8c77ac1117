"""Users' patterns: RE2 alone, one pass for many."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.logs.patterns import PatternSet
from unbroken.errors import SpecError
from unbroken.spec.patterns import Pattern, pattern_facts

REFUSED = {
    "(?=loss)a": "(?= at character 1: RE2 does not know look-ahead; write",
    r"[(?!](?!x)": "(?! at character 6: RE2 does not know negative look-ahead; match",
    r"(?<=a)b": "(?<= at character 1: RE2 does not know look-behind; write",
    r"(?<!a)b": "(?<! at character 1: RE2 does not know negative look-behind; exclude",
    r"é(\d)\1": r"\1 at character 6: RE2 does not know a back-reference; write out",
    "(?P<x>a)(?P=x)": "(?P at character 9: RE2 does not know a named back-reference",
    r"(loss)\Z": r"\Z at character 7: RE2 does not know \Z; write `$`",
    "(x{1001})": "{1001} at character 3: RE2 does not know more than 1,000 repetitions",
    "((a{100}){100}){100}": "RE2 does not know more than 1,000 repetitions",
    "(a++)b": "++ at character 3: RE2 does not know a possessive repetition",
    "(?>a)b": "(?> at character 1: RE2 does not know an atomic group",
    "(a)(?(1)b|c)": "(?( at character 4: RE2 does not know a conditional group",
    "(?x)a": "RE2 knows the flags i, m, s and U",
    "(?#c)a": "a comment; leave it out",
    r"[\b]": r"\b at character 2: RE2 does not know \b inside [...]",
    r"\u0041": r"\u at character 1: RE2 does not know this escape",
    "(": "not a regular expression: missing )",
    "[a": "not a regular expression: missing ]",
    "a)": "not a regular expression: unexpected )",
    "*": "* at character 1: no argument for repetition operator",
    "\\": "trailing",
    "\ud800": "half a surrogate pair at character 1",
    "a" * 20_000: "at most 10000 characters",
    r"\pL{400}": "more than 16384 instructions",
}


@pytest.mark.parametrize(("source", "words"), REFUSED.items(), ids=str)
def test_what_re2_cannot_express_is_refused_with_place_and_remedy(source: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        Pattern(source)
    assert words in str(refused.value)
    assert pattern_facts(source).problem == str(refused.value)


def test_patterns_match_from_the_start_of_the_line() -> None:
    assert not Pattern("loss=").is_match(b"step 1 loss=3")
    assert Pattern("loss=").is_found(b"step 1 loss=3")
    assert Pattern("loss=").is_match(b"loss=3, step 1")
    assert not Pattern("loss=").is_whole(b"loss=3")


def test_a_pattern_that_stalls_a_backtracking_engine_takes_linear_time() -> None:
    pattern = Pattern(r"(a|a)*(a|a)*(a|a)*b")
    assert not pattern.is_match(b"a" * 60_000)  # the suite's timeout is the check


def test_an_optional_group_that_took_no_part_captured_nothing() -> None:
    assert Pattern(r"loss(=\d)?").first_group(b"loss") is None
    assert Pattern(r"loss(=\d)?").first_group(b"other") is None


def test_a_set_too_large_for_one_automaton_still_matches() -> None:
    sources = [f"[a-z]{{{n}}}" + "(?:xy){500}" * 40 for n in range(1, 61)]
    patterns = PatternSet([Pattern(source) for source in sources])
    assert patterns._set is None
    assert patterns.match(b"aa" + b"xy" * 20_000) == [1]


WORDS = ["loss", "=", "1.5", " ", "nan", "é", "step", "[", "\t", "2"]
SOURCES = [
    "loss", ".*loss", r".*loss=(\d+)", "$", "^.*nan$", "[^ ]+ step", "(?i)LOSS", r".*[^a-z]1\.5.*",
    r".* (.+)step.*", "é?loss", ".{3,5}2",
]  # fmt: skip


@given(st.lists(st.sampled_from(SOURCES), max_size=8), st.lists(st.sampled_from(WORDS)))
def test_a_set_says_what_each_pattern_says_and_python_too(
    sources: list[str], words: list[str]
) -> None:
    text = "".join(words)
    patterns = [Pattern(source) for source in sources]
    found = PatternSet(patterns).match(text.encode())
    assert found == [i for i, p in enumerate(patterns) if p.is_match(text.encode())]
    assert found == [i for i, source in enumerate(sources) if re.match(source, text)]
