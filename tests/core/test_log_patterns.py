"""Patterns: RE2 where it can, `re` where it must, one pass for many."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.log_patterns import PatternSet, compile_pattern
from unbroken.errors import SpecError

ON_RE = {
    "look-ahead": (r"(?=loss)(\w+)", b"loss"),
    "back-reference": (r"(\d)\1", b"22"),
    "end of text as Python spells it": (r"(loss)\Z", b"loss"),
    "repetition over 1000": (r"(x{1001})", b"x" * 1001),
    "possessive": (r"(a++)b", b"aab"),
}


@pytest.mark.parametrize(("source", "line"), ON_RE.values(), ids=ON_RE)
def test_what_re2_cannot_express_runs_on_re(source: str, line: bytes) -> None:
    pattern = compile_pattern(source)
    assert not pattern.is_linear
    assert pattern.groups == 1
    assert PatternSet([compile_pattern("zzz"), pattern]).match(line) == [1]
    assert pattern.first_group(line) == re.match(source, line.decode())[1]  # type: ignore[index]


@pytest.mark.parametrize("source", ["(", "[a", "*", "a" * 20_000, "\\"])
def test_what_is_no_expression_is_refused(source: str) -> None:
    with pytest.raises(SpecError):
        compile_pattern(source)


def test_patterns_match_from_the_start_of_the_line() -> None:
    assert not compile_pattern("loss=").is_match(b"step 1 loss=3")
    assert compile_pattern("loss=").is_match(b"loss=3, step 1")


def test_a_pattern_that_stalls_a_backtracking_engine_takes_linear_time() -> None:
    pattern = compile_pattern(r"(a|a)*(a|a)*(a|a)*b")
    assert not pattern.is_match(b"a" * 60_000)  # the suite's timeout is the check


def test_an_optional_group_that_took_no_part_captured_nothing() -> None:
    assert compile_pattern(r"loss(=\d)?").first_group(b"loss") is None
    assert compile_pattern(r"loss(=\d)?").first_group(b"other") is None


def test_a_set_too_large_for_one_automaton_still_matches() -> None:
    sources = [f"[a-z]{{{n}}}" + "(?:xy){500}" * 40 for n in range(1, 61)]
    patterns = PatternSet([compile_pattern(source) for source in sources])
    assert patterns._set is None
    assert patterns.match(b"aa" + b"xy" * 20_000) == [1]


WORDS = ["loss", "=", "1.5", " ", "nan", "é", "step", "[", "\t", "2"]
SOURCES = [
    "loss", ".*loss", r".*loss=(\d+)", "$", "^.*nan$", "[^ ]+ step", "(?i)LOSS", r".*[^a-z]1\.5.*",
    r"(?=.*nan).*loss", r".* (.+)step.*", "é?loss", ".{3,5}2",
]  # fmt: skip


@given(st.lists(st.sampled_from(SOURCES), max_size=8), st.lists(st.sampled_from(WORDS)))
def test_a_set_says_what_each_pattern_says_and_python_too(
    sources: list[str], words: list[str]
) -> None:
    text = "".join(words)
    patterns = [compile_pattern(source) for source in sources]
    found = PatternSet(patterns).match(text.encode())
    assert found == [i for i, p in enumerate(patterns) if p.is_match(text.encode())]
    assert found == [i for i, source in enumerate(sources) if re.match(source, text)]
