"""Command lines of the benchmarks: what would measure nothing is refused."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from arguments import count, durations, output_file, words
from frameworks import parse

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MAY_BE_ZERO = {"--torchrun", "--late", "--agent"}
"""Whole numbers that are no counts, or of which none is a choice."""


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((count, text) for text in ("0", "-1", "1.5", "", "three", "\u0663", "1_0")),
        *((durations, text) for text in ("", "5,", "-1", "nan", "5,inf", "soon")),
        (words(["torchrun", "first"]), "first,third"),
    ],
)
def test_a_value_that_measures_nothing_is_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"unknown: third|whole number|list of seconds"
    ):
        read(text)


def test_a_value_that_measures_something_is_read() -> None:
    assert (count("3"), durations("0,15.5"), words(["a", "b"])("b,a")) == (3, [0, 15.5], ["b", "a"])


def test_no_round_is_an_error_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([f"--env={sys.prefix}", "--frameworks=accelerate", "--rounds=0"])
    assert ended.value.code == 2
    assert "--rounds: '0' is no whole number of at least 1" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "old.json").write_text("{}")
    for name in ("new.json", "old.json"):
        assert output_file(f"{tmp_path}/{name}") == tmp_path / name
    for name in ("none/new.json", "", "old.json/new.json"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"folder|written"):
            output_file(f"{tmp_path}/{name}")
    pattern = re.compile(r'"--json",(?!\s+type=output_file)')
    others = [path.name for path in BENCHMARKS.glob("*.py") if pattern.search(path.read_text())]
    assert others == []


def test_every_count_of_a_benchmark_is_read_so() -> None:
    pattern = re.compile(r'add_argument\(\s*"(--[a-z-]+)",\s*type=int')
    found = {
        (path.name, name)
        for path in BENCHMARKS.glob("*.py")
        for name in pattern.findall(path.read_text())
    }
    assert {(path, name) for path, name in found if name not in MAY_BE_ZERO} == set()
