"""Screens of `unbroken top`: many ranks, hostile texts, narrow windows, keys."""

from __future__ import annotations

from typing import Any

import pytest

from tests.attack.test_terminal_escapes import ODD
from unbroken.cli.job.agents import differing, watch_value
from unbroken.cli.page.node_values import node_value
from unbroken.cli.page.values import heat_map_value, rank_value
from unbroken.cli.top.browsing import UNFINISHED_MAX, Browsing, read_keys
from unbroken.cli.top.views import OVERVIEW, Line, Target, fitted, lines, rank_lines, width_of
from unbroken.core.page.heat_map import heat_map
from unbroken.wire.observation import Alarm, RankWatch

NOW = 1000.0
HOSTILE = "\x1b]0;t\x07\x1b[2J\nn\r\u202e\u6f22\u5b57"
CREATED = "1970-01-01T00:00:00Z"


def ranks_of(watches: list[RankWatch]) -> dict[str, Any]:
    """The values of ranks in the contents of a job's page."""
    ranks = [{**watch_value(one), "pod": f"pod-{one.rank // 8}"} for one in watches]
    odd = differing(ranks, NOW)
    return {
        "heatMap": heat_map_value(heat_map(watches, NOW)),
        "different": [rank_value(one) for one in odd[:32]],
        "differentCount": len(odd),
        "unreached": "",
    }


def watched(rank: int, **more: Any) -> RankWatch:
    """A rank that trains."""
    usual = {"phase": "train", "step": 7, "step_seconds": 0.5, "sign_at": NOW - 1}
    return RankWatch(rank, **{**usual, "allowed_seconds": 10.0, **more})


def texts(found: Any) -> list[str]:
    """The texts of lines."""
    return [one.text for one in found]


def test_of_thousands_of_ranks_those_that_differ_come_first() -> None:
    watches = [watched(rank) for rank in range(16_384)]
    alarm = Alarm("step", NOW - 5, 7, "no step for 300 s")
    watches[9_000] = watched(9_000, sign_at=NOW - 300, alarms=(alarm,))
    watches[100] = watched(100, step=3)
    contents = ranks_of(watches)
    shown = texts(rank_lines(contents, NOW, 100))
    assert shown[0] == "16384 ranks, of which 2 differ"
    title = next(number for number, line in enumerate(shown) if line.startswith("RANK"))
    assert shown[title + 1].split()[:5] == ["9000", "7", "0.500", "s", "5m"]
    assert shown[title + 1].endswith("pod-1125; step: no step for 300 s")
    assert shown[title + 2].split()[:2] == ["100", "3"]
    assert shown[title + 3].split()[0] == "8992-9007", "the worst group of the others"
    marks = "".join(line.strip() for line in shown[2:title])
    assert len(marks) == 1024
    assert (marks[9_000 // 16], marks[100 // 16], marks[0]) == ("!", "-", ".")
    assert shown[-1] == "1008 other groups of ranks have no row"
    assert len(shown) < 60
    assert max(map(len, texts(rank_lines(contents, NOW, 80)))) <= 80


def test_all_of_a_few_ranks_have_a_row() -> None:
    shown = texts(rank_lines(ranks_of([watched(rank) for rank in range(16)]), NOW, 80))
    assert [line.split()[0] for line in shown[1:]] == ["RANK", *map(str, range(16))]
    shown = texts(rank_lines(ranks_of([watched(0), watched(3)]), NOW, 80))
    assert [line.split()[0] for line in shown[1:]] == ["RANK", "0", "3"], "1 and 2 do not report"


def test_a_rank_without_values_is_shown() -> None:
    shown = texts(rank_lines(ranks_of([RankWatch(0)]), NOW, None))
    assert shown[2].split() == ["0", "-", "-", "-", "learning", "-"]
    job = {"heatMap": None, "unreached": ""}
    assert texts(rank_lines(job, NOW, 80)) == ["no rank reports yet"]
    job["unreached"] = "why " * 30
    assert texts(rank_lines(job, NOW, 60)) == ["why " * 14 + "why", "why " * 14 + "why"]


def overview(name: str, *nodes: str) -> dict[str, Any]:
    """Contents with a job and nodes."""
    job = {
        **{"name": name, "namespace": name, "state": "Running", "worldSize": 4, "step": None},
        **{"stepsPerSecond": 1.5, "restarts": 0, "goodput": {"share": 0.5}, "lastFault": name},
        "created": CREATED,
    }
    resumed = {
        **{"kind": "RayJob", "name": name, "namespace": "default", "state": name, "restarts": 1},
        **{"lastFault": "", "created": CREATED},
    }
    condition = {"type": "Ready", "status": "False", "message": name}
    found = [
        node_value(
            {"metadata": {"name": one}, "status": {"conditions": [condition]}}, None, [], NOW
        )
        for one in nodes
    ]
    return {"jobs": [job], "resumed": [resumed], "nodes": found, "missing": []}


@pytest.mark.parametrize("width", [None, 9, 20, 80, 200])
def test_hostile_texts_stay_text(width: int | None) -> None:
    contents = overview(HOSTILE, HOSTILE)
    targets: list[Target] = [OVERVIEW, ("nodes", HOSTILE), ("nodes", "gone\x1b[2J")]
    for target in targets:
        for line in lines(target, contents, NOW, width):
            assert not ODD.search(line.text)
            assert "\n" not in line.text
    story = lines(("jobs", "a", "b", "incidents", "1"), {"lines": [HOSTILE]}, NOW, width)
    assert not ODD.search(story[0].text.replace("\n", ""))


def test_jobs_that_run_and_nodes_with_a_fault_come_first() -> None:
    contents = overview("train", "b", "a")
    contents["jobs"].insert(0, {**contents["jobs"][0], "name": "old", "state": "Completed"})
    healthy = {"metadata": {"name": "0"}, "status": {"conditions": [
        {"type": "Ready", "status": "True"}]}}  # fmt: skip
    contents["nodes"].insert(0, node_value(healthy, None, [], NOW))
    found = lines(OVERVIEW, contents, NOW, 80)
    opened = [one.target for one in found if one.target]
    assert opened == [
        *(("jobs", "train", "train"), ("jobs", "train", "old")),
        *(("nodes", "a"), ("nodes", "b"), ("nodes", "0")),
    ]
    assert "1 of 3 nodes ready" in texts(found)
    contents["missing"] = ["Not shown: x\x1b[2J"]
    assert "Not shown: x\\x1b[2J" in texts(lines(OVERVIEW, contents, NOW, 80))


def test_a_text_takes_the_columns_that_it_is_given() -> None:
    for text in ("", "abc", "abcdefgh", "\u6f22\u5b57\u6f22\u5b57\u6f22", "e\u0301" * 9):
        for width in range(1, 9):
            assert width_of(fitted(text, width)) == width


def test_keys_arrive_in_any_pieces() -> None:
    data = b"\x1b[A\x1bOBjk\r\x1b[5~\x1b[6~\x7f\x1b[1;5Az\xffq"
    names = ["up", "down", "down", "up", "open", "page up", "page down", "back", "quit"]
    for size in range(1, len(data) + 1):
        found, left = list[str](), b""
        for start in range(0, len(data), size):
            keys, left = read_keys(left + data[start : start + size])
            found += keys
        assert (found, left) == (names, b""), size
    assert read_keys(b"\x1bq") == (["quit"], b""), "Escape, then q"
    assert read_keys(b"\x1b[" + b"1" * UNFINISHED_MAX) == ([], b"")


def test_screens_open_one_from_another() -> None:
    shown = [Line("head"), Line("job", target=("jobs", "a", "b")), Line("end")]
    browsing = Browsing()
    assert browsing.window(shown, 10) == (0, 1), "the first line that opens a screen is marked"
    browsing.press("up", shown, 10)
    browsing.press("open", shown, 10)
    assert browsing.target == OVERVIEW
    browsing.press("down", shown, 10)
    browsing.press("open", shown, 10)
    assert browsing.target == ("jobs", "a", "b")
    for _ in range(3):
        browsing.press("back", shown, 10)
    assert browsing.target == OVERVIEW
    assert browsing.window(shown, 10) == (0, 1), "the mark stays where it was"
    browsing.press("quit", shown, 10)
    assert browsing.has_ended
    first = Browsing(("jobs", "a", "b"))
    first.press("back", shown, 10)
    assert first.target == OVERVIEW


def test_the_window_follows_the_mark() -> None:
    shown = [Line(str(number)) for number in range(20)]
    browsing = Browsing()
    assert browsing.window(shown, 5) == (0, 0)
    for _ in range(5):
        browsing.press("down", shown, 5)
    assert browsing.window(shown, 5) == (1, 5)
    browsing.press("page down", shown, 5)
    browsing.press("page down", shown, 5)
    browsing.press("page down", shown, 5)
    assert browsing.window(shown, 5) == (15, 19)
    assert browsing.window(shown[:3], 5) == (0, 2), "most lines are gone"
    assert browsing.window(shown[:1], 1) == (0, 0)
    browsing.press("page up", shown, 50)
    assert browsing.window(shown, 50) == (0, 0)
