"""Lists: common output forms, `--watch`, and completion in the shell."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.cli.test_cli_arguments import commands
from tests.cli_calls import Cli, read_until
from tests.e2e.control import api_of
from tests.operator.pytorchjobs import pytorchjob
from unbroken.cli import main
from unbroken.cli.listing import Listing, Shown, show_list
from unbroken.cli.options import ListOutput
from unbroken.errors import SpecError

LISTS = {
    *{("jobs",), ("incidents",), ("nodes",), ("nodes", "list")},
    *{("faults", "list"), ("cluster", "list")},
}
"""All commands that list things, except those that repeat HyperPod's own CLI."""
WATCHED = {("jobs",), ("incidents",), ("nodes",), ("nodes", "list")}
TABLE = Listing({"things": [{"name": "a"}]}, ["a"], ("NAME", "AGE"), [("a", "3s")], empty="none")


def options(command: Any) -> dict[str, Any]:
    """Return the parameters of a command by each of their options."""
    return {name: one for one in command.params for name in one.opts}


def choices(form: Any) -> set[str]:
    """Return the values that an option takes; empty if it takes any."""
    annotation = form.type_descriptor.annotation
    is_choice = isinstance(annotation, type) and issubclass(annotation, StrEnum)
    return {one.value for one in annotation} if is_choice else set()


def test_every_list_takes_the_same_forms() -> None:
    program = dict(commands(typer.main.get_command(main.app)))
    found = set()
    for words, command in program.items():
        form = options(command).get("--output")
        names = choices(form) if form is not None else set()
        is_list = "wide" in names or words[-1] == "list"
        if is_list:
            assert names == {one.value for one in ListOutput}, words
            assert "-o" in form.opts, words
            found.add(words)
    assert found == LISTS


def test_every_list_of_a_cluster_can_be_watched() -> None:
    program = dict(commands(typer.main.get_command(main.app)))
    found = {words for words, command in program.items() if "--watch" in options(command)}
    assert found == WATCHED
    assert all("-w" in options(program[words])["--watch"].opts for words in found)


@pytest.mark.parametrize("output", list(ListOutput))
def test_a_list_is_shown_in_each_form(
    output: ListOutput, capsys: pytest.CaptureFixture[str]
) -> None:
    show_list(TABLE, output)
    shown = capsys.readouterr().out
    if output is ListOutput.NAME:
        assert shown == "a\n"
    elif output in (ListOutput.JSON, ListOutput.YAML):
        assert yaml.safe_load(shown) == {"things": [{"name": "a"}]}
    else:
        assert shown == "NAME   AGE\na      3s\n"
    show_list(Listing({"things": []}, [], ("NAME",), [], empty="none"), output)
    shown = capsys.readouterr()
    if output in (ListOutput.TEXT, ListOutput.WIDE):
        assert (shown.out, shown.err) == ("", "none\n")
    elif output is ListOutput.NAME:
        assert shown.out == ""


def test_a_watch_prints_a_row_again_only_if_it_has_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def table(*rows: tuple[str, str, str]) -> Listing:
        names = [row[0] for row in rows]
        return Listing({}, names, ("NAME", "STATE", "AGE"), rows, empty="none")

    shown = Shown()
    shown.print(table(("a", "Created", "1s"), ("bb", "Running", "1s")))
    assert capsys.readouterr().out.splitlines() == [
        "NAME   STATE     AGE",
        "a      Created   1s",
        "bb     Running   1s",
    ]
    shown.print(table(("a", "Created", "2s"), ("bb", "Running", "2s")))
    assert capsys.readouterr().out == "", "only the age has changed"
    shown.print(table(("a", "Running", "3s"), ("bb", "Running", "3s")))
    assert capsys.readouterr().out == "a      Running   3s\n"
    shown.print(table(("bb", "Running", "4s")))
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "a: deleted\n")


def test_faults_are_listed_in_each_form() -> None:
    def call(form: str) -> str:
        done = CliRunner().invoke(main.app, ["faults", "list", "-o", form])
        assert done.exit_code == 0, done.output
        return str(done.stdout)

    names = call("name").split()
    assert len(names) > 20
    assert [one["name"] for one in yaml.safe_load(call("yaml"))] == names
    assert [one["name"] for one in yaml.safe_load(call("json"))] == names
    assert "SOURCE" in call("wide").splitlines()[0]
    assert "SOURCE" not in call("text").splitlines()[0]


def test_a_watch_is_a_table() -> None:
    for words in WATCHED:
        done = CliRunner().invoke(main.app, [*words, "--watch", "-o", "name"])
        assert isinstance(done.exception, SpecError), words
        assert str(done.exception) == (
            "--watch prints a table: use -o text or -o wide, not -o name"
        )


def test_a_mistyped_command_or_option_gets_a_suggestion() -> None:
    def said(*words: str) -> str:
        done = CliRunner().invoke(main.app, list(words))
        assert done.exit_code == 2
        return " ".join(done.output.split())

    assert "Did you mean" in said("statsu")
    assert "'status'" in said("statsu")
    assert "--namespace" in said("jobs", "--namspace", "x")
    assert "'drain'" in said("nodes", "drian")


def completed(line: str, environment: dict[str, str]) -> list[str]:
    """Return the completions of bash at the end of a line."""
    bash = shutil.which("bash")
    assert bash is not None
    words = line.split(" ")
    script = f"""
eval "$(_UNBROKEN_COMPLETE=source_bash unbroken)"
COMP_WORDS=({" ".join(repr(one) for one in words)}); COMP_CWORD={len(words) - 1}
_unbroken_completion unbroken {words[-1]!r} {words[-2]!r}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        [bash, "--norc", "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "UNBROKEN_DIR": str(tmp_path / "none")}
    assert set(completed("unbroken nodes d", environment)) == {"describe", "drain"}
    assert completed("unbroken jobs --wat", environment) == ["--watch"]


@pytest.mark.slow
def test_a_watch_of_jobs_shows_those_of_other_kinds(cli: Cli) -> None:
    job = pytorchjob("watched-kind")
    job["spec"]["runPolicy"] = {"suspend": True}
    with cli.start("jobs", "--watch") as watch, closing(api_of(cli)) as api:
        try:
            read_until(watch, lambda line: line.startswith("no jobs; start one with"))
            api.post("kubeflow.org/v1:pytorchjobs", job).done()
            read_until(watch, lambda line: line.split()[:3] == ["KIND", "NAME", "STATE"])
            read_until(watch, lambda line: line.split()[:2] == ["PyTorchJob", "watched-kind"])
            api.delete("kubeflow.org/v1:pytorchjobs/watched-kind").done()
            read_until(watch, lambda line: line == "pytorchjob/watched-kind: deleted")
        finally:
            watch.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_a_watch_of_incidents_shows_them_as_they_come(cli: Cli) -> None:
    script = cli.script("raises.py", "raise ValueError('a bad record')")
    with cli.start("incidents", "--watch") as watch:
        try:
            read_until(watch, lambda line: line == "no incidents so far")
            cli.call("run", "--name", "raises", "--max-restarts", "0", script, code=1)
            read_until(watch, lambda line: " raises " in line and " PythonException " in line)
        finally:
            watch.send_signal(signal.SIGINT)
    cli.call("delete", "raises")


@pytest.mark.slow
def test_a_watch_of_jobs_and_nodes_shows_what_happens(cli: Cli) -> None:
    nodes = cli.call("nodes", "-o", "name").stdout.split()
    assert len(nodes) == 2
    assert [one["name"] for one in yaml.safe_load(cli.call("nodes", "-o", "yaml").stdout)["nodes"]]
    script = cli.script("short.py", "print('done')")
    with cli.start("jobs", "--watch") as watch:
        try:
            read_until(watch, lambda line: line.startswith("no jobs; start one with"))
            cli.call("run", "--name", "short", script)
            read_until(watch, lambda line: line.startswith("short ") and "Completed" in line)
            cli.call("delete", "short")
            read_until(watch, lambda line: line == "short: deleted")
        finally:
            watch.send_signal(signal.SIGINT)
    assert watch.returncode == 130
