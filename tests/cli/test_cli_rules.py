"""The rule workbench as a person calls it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from unbroken.cli.rules.commands import app
from unbroken.local.node.logs import DROPPED_LINES

HANG = """
spec:
  nprocPerNode: 2
  replicaSpecs: [{name: pods, replicas: 1}]
  runPolicy:
    logMonitoringConfiguration:
      - {name: Hang, logPattern: ".*Train Epoch.*", expectedRecurringFrequencyInSeconds: 10}
      - {name: Memory, logPattern: ".*out of memory", faultOnMatch: true}
"""


class Cli:
    """The command in a folder of files, in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def script(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name

    def call(self, *arguments: str, code: int = 0, stdin: str = "") -> Result:
        done = CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "200"})
        assert done.exit_code == code, done.output
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.call(*arguments, "-o", "json", code=code).stdout)


def line(second: int, text: str = "Train Epoch: 5") -> str:
    return f"2025-06-17 05:{51 + second // 60}:{second % 60:02},300 [INFO] {text}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A folder with rules and logs, without a cluster."""
    monkeypatch.chdir(tmp_path)
    found = Cli(tmp_path)
    found.script("job.yaml", HANG)
    found.script("good.log", "".join(map(line, range(60))))
    found.script("hung.log", "".join(map(line, [*range(20), *range(50, 60)])))
    return found


def fired(found: Any) -> list[tuple[str, float, int | None, str | None]]:
    return [
        (one["reason"], one["afterSeconds"], one["rank"], one["place"])
        for attempt in found["attempts"]
        for one in attempt["fired"]
    ]


@pytest.mark.parametrize("stamp", ["", "1970-01-01T00:00:00.000000000Z "])
def test_a_log_with_lines_dropped_is_said_to_lack_them(here: Cli, stamp: str) -> None:
    gap = f"{stamp}{DROPPED_LINES}: 7000\n"
    times = "".join(f"2025-06-17T05:51:{n:02}.000000000Z Train Epoch: 5\n" for n in range(60))
    here.script("cut.log", gap + times + gap)
    done = here.call("test", "job.yaml", "cut.log")
    assert "cut.log:62: 14000 lines gone from this log; live rules read all" in done.stderr
    assert "earlier time" not in done.stderr
    assert here.json("test", "job.yaml", "cut.log")["attempts"][0]["lines"] == 60
    here.script("good.log", line(0, f"I say {gap}"))
    assert "gone" not in here.call("test", "job.yaml", "good.log").stderr


def test_what_would_have_fired_is_told_with_its_line(here: Cli) -> None:
    assert fired(here.json("test", "job.yaml", "good.log")) == []
    found = here.json("test", "job.yaml", "hung.log", code=1)
    assert fired(found) == [("LogHang_Hang", 29, 0, "hung.log:20")]
    text = here.call("test", "job.yaml", "hung.log", code=1).stdout
    assert "LogHang_Hang at 2025-06-17 05:51:29.300 (after 29 s) rank 0: no match for 10 s" in text
    assert "hung.log:20 (stdout): 2025-06-17 05:51:19,300" in text


def test_a_folder_of_torchrun_is_read_rank_by_rank_and_attempt_by_attempt(here: Cli) -> None:
    for attempt, rank, text in ((0, 0, line(1)), (0, 1, line(5, "x")), (1, 1, line(9, "x"))):
        folder = here.folder / f"logs/run/attempt_{attempt}/{rank}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(text)
    error = line(8, "RuntimeError: CUDA out of memory").encode()
    (here.folder / "logs/run/attempt_1/1/stderr.log.gz").write_bytes(gzip.compress(error))
    found = here.json("test", "job.yaml", "logs", code=1)
    assert [one["ranks"] for one in found["attempts"]] == [[0, 1], [1]]
    place = "logs/run/attempt_1/1/stderr.log.gz:1"
    assert fired(found) == [("LogFault_Memory", 0, 1, place)]


def test_lines_without_times_are_replayed_at_a_pace(here: Cli) -> None:
    text = "Train Epoch\n" * 5 + "x\n" * 30 + "Train Epoch\n"
    assert "no line has a time" in here.call(
        "test", "job.yaml", "-", stdin=text, code=3
    ).stderr  # fmt: skip
    found = here.json("test", "job.yaml", here.script("x", text), "--pace", "2", code=1)
    assert fired(found) == [("LogHang_Hang", 12, 0, "x:5")]
    pace = ("--seconds-per-line", "0.1")
    here.call("test", "job.yaml", "-", *pace, stdin=text)
    here.call("test", "job.yaml", "-", *pace, "--tail-seconds", "11", stdin=text, code=1)


def test_ranks_stand_in_names_prefixes_or_options(here: Cli) -> None:
    memory = "RuntimeError: out of memory"
    here.script("mixed.log", "[default1]:" + line(0, memory))
    found = here.json("test", "job.yaml", "mixed.log", code=1)
    assert fired(found)[0][2] == 1
    here.script("plain.log", line(0, memory))
    found = here.json("test", "job.yaml", "plain.log", "--rank", "plain.log=1", code=1)
    assert fired(found)[0][2] == 1
    here.script("job-pods-1.log", "[default1]:" + line(0, memory))
    found = here.json("test", "job.yaml", "job-pods-1.log", code=1)
    assert fired(found)[0][2] == 3


def test_garbage_long_lines_and_cut_gzips_are_read_as_far_as_they_go(here: Cli) -> None:
    data = line(0).encode() + bytes(range(256)) * 40_000 + b"\n" + line(3, "out of memory").encode()
    (here.folder / "bin.log").write_bytes(data + b"x" * 10_000_000 + b"\n")
    found = here.json("test", "job.yaml", "bin.log", code=1)
    assert fired(found)[0][:3] == ("LogFault_Memory", 3, 0)
    packed = gzip.compress(b"".join(line(n % 60).encode() for n in range(9000)))
    (here.folder / "cut.log.gz").write_bytes(packed[: len(packed) // 2])
    done = here.call("test", "job.yaml", "cut.log.gz")
    assert "cut.log.gz: the gzip is damaged" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch.yaml", "good.log"], "cannot read nosuch.yaml"),
        (["job.yaml", "nosuch.log"], "no such file: nosuch.log"),
        (["job.yaml", "good.log", "good.log"], "given twice"),
        (["job.yaml", "good.log", "--rank", "good.log"], "must be FILE=RANK"),
        (["job.yaml", "good.log", "--rank", "other.log=1"], "not one of the logs"),
        (["job.yaml", "good.log", "--pace", "1", "--seconds-per-line", "1"], "exclude each other"),
        (["job.yaml", "good.log", "--time-format", "none"], "none of auto"),
        (["bad.yaml", "good.log"], "logMonitoringConfiguration[0].operator"),
        (["none.yaml", "good.log"], "has no logMonitoringConfiguration"),
    ],
)
def test_what_gives_no_result_ends_with_3(here: Cli, arguments: list[str], said: str) -> None:
    bad = {"name": "r", "logPattern": "x", "metricThreshold": 1, "operator": "above"}
    here.script("bad.yaml", json.dumps([bad]))
    here.script("none.yaml", "kind: Pod")
    assert said in here.call("test", *arguments, code=3).stderr
    assert "Missing argument" in here.call("test", "job.yaml", code=2).stderr


def test_check_tells_what_to_write_instead(here: Cli) -> None:
    assert here.json("check", "job.yaml")["findings"][0]["severity"] == "note"
    here.script(
        "bad.yaml", json.dumps([{"name": "r", "logPattern": ".*x^y", "faultOnMatch": True}])
    )
    (found,) = here.json("check", "bad.yaml", code=1)["findings"]
    assert found["path"] == "logMonitoringConfiguration[0].logPattern"
    text = here.call("check", "bad.yaml", code=1).stdout
    assert "error: rule r: no line can match" in text
    assert "1 error, 0 warnings, 0 notes" in text


def test_check_holds_limits_against_logs(here: Cli) -> None:
    assert "silence" not in here.call("check", "job.yaml", "good.log").stdout
    text = here.call("check", "job.yaml", "hung.log").stdout
    assert "warning: rule Hang: 10 s, and the logs have a silence of 31 s" in text
    assert "give at least 62" in text
    here.call("check", "job.yaml", "hung.log", "--strict", code=1)


def test_check_shows_patterns_that_miss_their_line(here: Cli) -> None:
    rule = {"name": "r", "logPattern": r"Train Epoch: (\w)", "expectedStartCutOffInSeconds": 9}
    here.script("miss.yaml", json.dumps([rule, {**rule, "name": "d", "logPattern": r".*: (\d)$"}]))
    here.script("wide.log", line(0) + line(1, "Train Epoch: \uff15"))
    found = here.json("check", "miss.yaml", "wide.log")["findings"]
    said = {(one["rule"], one["what"]): one["why"] for one in found}
    assert said["r", "matches none of 2 lines of the logs"].startswith("1 have it, but not at")
