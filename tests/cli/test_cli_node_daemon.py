"""One look at a node, and what is wrong with the command, as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from unbroken.cli.app import App
from unbroken.cli.nodes.daemon import command
from unbroken.errors import SpecError

app = App()
app.command()(command)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"NODE_NAME": None})


def test_one_look_says_what_is_found_and_ends_with_1_for_a_repair(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    done = call("--once", "--kernel-log", log, "--root", tmp_path, "-o", "json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert [one["reason"] for one in told["findings"]] == ["Xid79"]
    assert told["unknown"] == {"GPUs": "there is no NVIDIA driver"}
    assert "Xid79   replace" in call("--once", "--kernel-log", log, "--root", tmp_path).stdout


def test_one_look_at_a_good_node_ends_with_0(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("NVRM: Xid (PCI:0000:3b:00): 31, MMU Fault\n")
    assert call("--once", "--kernel-log", log, "--root", tmp_path).exit_code == 0
    log.write_text("")
    done = call("--once", "--kernel-log", log, "--root", tmp_path)
    assert (done.exit_code, done.stdout) == (0, "no fault found\n")


def test_gpus_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text("9000 1\n")
    options = ("--once", "--root", tmp_path, "--kernel-log", tmp_path / "no")
    done = call(*options, "--nvml-library", tmp_path / "no.so", "--gpus", 8, "-o", "json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["findings"]) == (0, [])
    assert told["unknown"]["GPUs"] == f"there is no {tmp_path / 'no.so'}"
    assert told["unknown"]["kernel log"] == f"there is no file {tmp_path / 'no'}"


def test_a_mistake_is_told_without_a_traceback(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text("version = 1\n[fault.Xid79]\naction = 'explode'\n")
    for arguments, told in (
        ((), "the node is not named: give --node NAME, or set NODE_NAME"),
        (("--node", "a", "--table", table), "fault.Xid79.action: Unsupported value"),
        (("--node", "a", "--kubeconfig", tmp_path / "no"), "no usable kubeconfig"),
    ):
        done = call(*arguments)
        assert isinstance(done.exception, SpecError)
        assert told in str(done.exception)
