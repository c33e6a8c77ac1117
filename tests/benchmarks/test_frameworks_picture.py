"""The README's picture of kills under frameworks, and its figures, are those of the result file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import frameworks_picture as picture
import pytest
from frameworks import FIRST, SECOND, TORCHRUN

README = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
RUN = json.loads(picture.RESULT.read_text())


def test_the_pictures_are_what_the_script_draws() -> None:
    for path, text in picture.files().items():
        assert path.read_text() == text, "run benchmarks/frameworks_picture.py"
        assert path.name in README


def test_the_picture_is_in_words_beside_it() -> None:
    assert f'alt="{picture.words_of(RUN)}"' in README


def test_each_framework_has_a_bar_for_each_mode_and_ours_are_marked() -> None:
    bars = picture.bars(RUN, picture.delay_of(RUN))
    assert len(bars) == 6
    assert [one.is_ours for one in bars] == [True, True, False] * 2
    for text in picture.files().values():
        assert text.count("<rect") == 6


@pytest.mark.parametrize(
    ("framework", "mode", "sentence"),
    [
        ("hf-trainer", FIRST, "in the first run: {:.2f} s for the Trainer"),
        ("lightning", FIRST, "{:.2f} s for Lightning, which was not learned yet"),
        ("hf-trainer", TORCHRUN, "(torchrun: {:.2f} s and"),
        ("lightning", TORCHRUN, "and {:.2f} s)"),
    ],
)
def test_a_figure_beside_the_picture_is_that_of_the_run(
    framework: str, mode: str, sentence: str
) -> None:
    (row,) = (
        one
        for one in picture.rows(RUN, 15.0)
        if (one["framework"], one["mode"]) == (framework, mode)
    )
    assert sentence.format(row["p50_seconds"]) in README


def test_kills_that_were_not_survived_are_in_the_bar_and_in_the_words() -> None:
    lost = {"framework": "lightning", "delay_seconds": 5.0, "kills": 3, "load": [1, 2]}
    figures = [
        {**lost, "mode": SECOND, "recovered": 2, "p50_seconds": 1.0},
        {**lost, "mode": TORCHRUN, "recovered": 0, "p50_seconds": None},
    ]
    document = {**RUN, "figures": figures}
    assert [one.text for one in picture.bars(document, 5.0)] == [
        "1.00 s (2 of 3 kills recovered)",
        "no step (0 of 3 kills recovered)",
    ]
    text = picture.drawn(document, picture.COLOURS["light"])
    assert len(re.findall("<rect", text)) == 1
    assert "no step (0 of 3 kills recovered)" in text


def test_a_run_without_any_recovery_is_drawn_without_bars() -> None:
    lost = [{**one, "recovered": 0, "p50_seconds": None} for one in RUN["figures"]]
    assert "<rect" not in picture.drawn({**RUN, "figures": lost}, picture.COLOURS["dark"])
