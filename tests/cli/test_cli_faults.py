"""The table of faults as a person asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from unbroken.cli.nodes.faults import app
from unbroken.errors import SpecError


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def asked(*arguments: str) -> Any:
    done = call(*arguments, "-o", "json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_list_has_every_entry() -> None:
    views = {view["name"]: view for view in asked("list")}
    assert len(views) > 150
    assert views["Xid79"]["action"] == "replace"
    assert views["Xid79"]["condition"] == "NvidiaGPUUnhealthy"
    assert views["Xid31"]["condition"] is None
    lines = call("list").stdout.splitlines()
    assert len(lines) == len(views) + 1
    assert lines[0].split() == ["NAME", "CLASS", "ACTION", "WHAT", "SYMPTOM"]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("79", ["Xid79"]),
        ("xid79", ["Xid79"]),
        ("XID 79", ["Xid79"]),
        ("154", ["Xid154Imex", "Xid154None", "Xid154Reboot", "Xid154ResetGpu"]),
        ("999", ["Xid999"]),
        ("readonlyremount", ["ReadOnlyRemount"]),
        ("[  1.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off", ["Xid79"]),
        ("4,12,345,-;EXT4-fs (sda1): Remounting filesystem read-only", ["ReadOnlyRemount"]),
        ("a line that says nothing", []),
    ],
)
def test_explain_takes_numbers_names_and_lines(what: str, names: list[str]) -> None:
    assert sorted(view["name"] for view in asked("explain", what)) == names


def test_explain_tells_it_in_words() -> None:
    text = call("explain", "48").stdout
    assert "reset-gpu: jobs leave the node, then its GPUs are reset" in text
    assert "after that repair: replace" in text
    assert "XID 94: restart-job" in text
    assert "system: disk-space below 5%" in call("explain", "DiskSpace").stdout
    assert "system: blocked-process for 60 s" in call("explain", "BlockedProcess").stdout


def test_a_file_of_the_user_s_has_the_last_word(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('version = 1\n[fault.Xid31]\naction = "reset-gpu"\n')
    (view,) = asked("explain", "31", "--table", str(file))
    assert (view["action"], view["table"]) == ("reset-gpu", str(file))


def test_a_mistake_is_told_without_a_traceback(tmp_path: Path) -> None:
    for arguments, told in (
        (("explain", "Xdi79"), "no fault named Xdi79; give the number of an XID"),
        (("list", "--table", str(tmp_path / "no")), "cannot read the table of faults"),
    ):
        done = call(*arguments)
        assert isinstance(done.exception, SpecError)
        assert told in str(done.exception)
