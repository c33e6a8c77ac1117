"""Recorded worlds, and the story of one; `python -m unbroken.sim` runs new worlds."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.sim.__main__ import main, run_chunk
from unbroken.sim.probes import unreached
from unbroken.sim.recorded import RecordedWorld, read_worlds
from unbroken.sim.simulation import Simulation

REGRESSIONS = read_worlds((Path(__file__).parent / "regressions.jsonl").read_text())


@pytest.mark.parametrize("world", REGRESSIONS, ids=lambda world: f"{world.seed}-{world.cause}")
def test_what_was_once_wrong_stays_right(world: RecordedWorld) -> None:
    assert run_chunk([world])[2] == []


def test_one_seed_is_one_story() -> None:
    stories: list[list[str]] = []
    for _ in range(2):
        story: list[str] = []
        Simulation(7, tell=story.append).run()
        stories.append(story)
    assert stories[0] == stories[1]
    assert len(stories[0]) > 20


def test_a_seed_is_repeated_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "7", "--trace"]) == 0
    out = capsys.readouterr().out
    assert "operator" in out
    assert "AgentReported" in out
    assert "seed 7:" in out


def test_what_no_world_went_through_is_named() -> None:
    assert "adoption" in unreached({"fence": 3})
    assert "fence" not in unreached({"fence": 3})
    assert "island" in unreached({"fence": 3})
