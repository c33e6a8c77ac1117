"""Worlds in a file are read as they were written, and an error names its line and field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unbroken.sim.__main__ import begin, main
from unbroken.sim.draw import draw
from unbroken.sim.recorded import RecordedWorld, read_worlds, write_line


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_a_scenario_that_is_written_is_read_again(first: int) -> None:
    worlds = [
        RecordedWorld(seed, f"it was {seed}", draw(seed)) for seed in range(first, first + 100)
    ]
    assert read_worlds("\n".join(map(write_line, worlds))) == worlds


def test_a_recorded_world_is_the_same_story_as_the_drawn_one() -> None:
    stories: list[list[str]] = []
    for start in (7, RecordedWorld(7, "", draw(7))):
        story: list[str] = []
        begin(start, story.append).run()
        stories.append(story)
    assert stories[0] == stories[1]


def changed(*path: str | int, value: object = None) -> str:
    """The line of a world in which one value is another, or is missing."""
    world = json.loads(write_line(RecordedWorld(7, "it was hot", draw(7))))
    place = world
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(world)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("[]", "line 2: Invalid value"),
        (
            changed("scenario", "spec", "replicaSpecs"),
            "line 2: scenario.spec.replicaSpecs: Required",
        ),
        (changed("scenario", "nodes", value="some"), "line 2: scenario.nodes: Invalid value"),
        (changed("scenario", "colour", value=1), "line 2: scenario.colour: Forbidden"),
        (
            changed("scenario", "faults", 0, "name", value="rain"),
            "line 2: scenario.faults[0].name: ",
        ),
        (
            changed("scenario", "faults", 0, "moment", value="x"),
            "line 2: scenario.faults[0].moment: ",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_place(line: str, told: str) -> None:
    good = write_line(RecordedWorld(8, "", draw(8)))
    with pytest.raises(ValueError, match="line") as caught:
        read_worlds(f"{good}\n{line}\n")
    assert str(caught.value).startswith(told)


def test_a_world_is_recorded_and_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--seed", "7", "--record", "it was hot"]) == 0
    file = tmp_path / "worlds.jsonl"
    file.write_text(capsys.readouterr().out)
    assert read_worlds(file.read_text()) == [RecordedWorld(7, "it was hot", draw(7))]
    assert main(["--worlds", str(file), "--processes", "1"]) == 0
    assert "\n1 seeds in " in "\n" + capsys.readouterr().out
    assert main(["--worlds", str(file), "--seed", "7", "--trace"]) == 0
    assert "AgentReported" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--record", "x"], "--record needs --seed"),
        (["--worlds", "one", "--fresh", "c0ffee"], "--worlds runs the worlds of its file only"),
        (["--worlds", "nowhere"], "nowhere: No such file or directory"),
        (["--worlds", "empty"], "empty: no world"),
        (["--worlds", "one", "--seed", "8"], "one: no world of seed 8"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("\n")
    Path("one").write_text(write_line(RecordedWorld(7, "", draw(7))))
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert f"error: {told}" in capsys.readouterr().err
