"""The picture and the figures of the README and of its promises are those of the result file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recovery_picture

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROMISES = (ROOT / "docs/explanation/promises.md").read_text()
RUN = json.loads(recovery_picture.RESULT.read_text())
ROWS = recovery_picture.rows(RUN["cells"][0])


def test_the_pictures_are_what_the_script_draws() -> None:
    for path, text in recovery_picture.files().items():
        assert path.read_text() == text, "run benchmarks/recovery_picture.py"
        assert path.name in README


def test_the_picture_is_in_words_beside_it() -> None:
    assert f'alt="{recovery_picture.words_of(RUN)}"' in " ".join(README.split())


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("warm", "next step of all ranks: {0:.2f} s, and"),
        ("torchrun-fresh-store", "{0:.2f} s under torchrun"),
        ("in-process+snapshots", "lost: {0:.2f} s, {1} of {2} kills"),
        ("in-process", "| {0:.2f} to 0.28 s |"),
        ("ft_launcher", "| {0:.2f} s |"),
        ("torchft", "| {0:.2f} s |"),
    ],
)
def test_a_figure_of_the_pages_is_that_of_the_run(mode: str, sentence: str) -> None:
    (row,) = (one for one in ROWS if one["mode"] == mode)
    said = sentence.format(row["p50_seconds"], row["recovered"], row["kills"])
    assert said in " ".join(f"{README} {PROMISES}".split())


def test_a_mode_without_a_figure_is_last_and_says_why() -> None:
    row = {"mode": "torchrun", "p50_seconds": None, "recovered": 0, "kills": 2}
    assert recovery_picture.figure({**row, "not_recovered": {"no step in 45 s": 2}}) == (
        "no step in 45 s (0 of 2 kills recovered)"
    )
    found = recovery_picture.rows({"results": [row, {"mode": "warm", "p50_seconds": 1.0}]})
    assert [one["mode"] for one in found] == ["warm", "torchrun"]
