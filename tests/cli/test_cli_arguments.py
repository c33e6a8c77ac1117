"""Wrong command lines: one clear message for each, and no cluster is started."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.cli_calls import UNBROKEN, Cli, manifest
from unbroken.cli import main
from unbroken.cli.app import WIDEST, choices, help_parts
from unbroken.cli.main import app

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: far
contexts: [{name: far, context: {cluster: far, user: far, namespace: team}}]
clusters: [{name: far, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: far, user: {}}]
"""
NO_JOBS = "no jobs; start one with: unbroken run train.py\n"
BAD = manifest("bad", "true", replicas=0, jobMaxRetryCount=-1)
TWO = "\n---\n".join(map(json.dumps, (manifest("a", "true"), manifest("b", "true"))))


@pytest.fixture
def here(tmp_path: Path) -> Cli:
    """Return a CLI in a directory without a cluster."""
    found = Cli(tmp_path / "none", tmp_path)
    found.script("train.py", "")
    (tmp_path / "job.json").write_text(json.dumps(manifest("job", "true")))
    (tmp_path / "bad.json").write_text(json.dumps(BAD))
    (tmp_path / "two.yaml").write_text(TWO)
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "control.yaml").write_text("a: \x01")
    (tmp_path / "ray.yaml").write_text("kind: RayJob")
    kinds = "\n---\n".join(f"kind: Kind{number}" for number in range(9))
    (tmp_path / "kinds.yaml").write_text(kinds)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    (tmp_path / "list.yaml").write_text("- 1")
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "Missing argument"),
        (["run", "--bogus", "train.py"], "No such option: --bogus"),
        (["run", "nosuch.py"], "no such script: nosuch.py (in "),
        (["run", "--no-python", "nosuchprogram"], "no such program: nosuchprogram"),
        (["run", "--nnodes", "0", "train.py"], "--nnodes"),
        (["run", "--nnodes", "1:4", "train.py"], "--nnodes"),
        (["run", "--nproc-per-node", "some", "train.py"], "--nproc-per-node 'some' is neither a"),
        (["run", "--shutdown-signal", "SIGHUP", "train.py"], "shutdown-signal"),
        (["run", "nosuch.yaml"], "cannot read nosuch.yaml: No such file or directory\n"),
        (["run", "~nobody-here.yaml"], "cannot read ~nobody-here.yaml: No such file or directory"),
        (["run", "latin.yaml"], "cannot read latin.yaml: byte 3 is not UTF-8"),
        (["chaos", "kill-node"], "give a JOB (with --rank) or --node NODE"),
        (["chaos", "kill-node", "train", "--node", "n"], "give a JOB (with --rank) or --node NODE"),
        (["run", "broken.yaml"], "broken.yaml is not YAML: line 1, column 5: while parsing a flow"),
        (["run", "broken.yaml"], "but found the end of the file"),
        (["run", "control.yaml"], "control.yaml is not YAML: character U+0001 at position 4: "),
        (["run", "list.yaml"], "every document must be an object with a kind"),
        (["run", "ray.yaml"], "holds no HyperPodPyTorchJob, but RayJob; create it with: kubectl"),
        (["run", "kinds.yaml"], "but Kind0, Kind1, Kind2, Kind3, Kind4, others; create"),
        (["run", "two.yaml"], "two.yaml holds 2 objects of kind HyperPodPyTorchJob"),
        (["run", "--nnodes", "2", "job.json"], "which must contain sizes and arguments"),
        (["run", "--nnodes", "2", "job.json"], "write it to spec.replicaSpecs[].replicas"),
        (["run", "job.json", "--lr"], "--lr: not an option of `unbroken run`; write arguments"),
        (["run", "job.json", "--tee", "3"], "--tee: write it to the launch line in spec."),
        (["run", "bad.json", "--name", "good", "-o", "json"], "jobMaxRetryCount"),
        (["run", "--nproc", "2", "train.py"], "could match --nproc-per-node"),
        (["run", "bad.json"], "spec.runPolicy.jobMaxRetryCount"),
        (["run", "--name", "No Name", "train.py"], "metadata.name"),
        (
            ["run", "--dir", "x", "--context", "far", "train.py"],
            "--dir and --context name two clusters",
        ),
        (["jobs"], "no cluster runs from "),
        (["jobs", "-o", "xml"], "'--output': 'xml' is not one of 'text',"),
        (["explain"], "Missing argument 'JOB'"),
        (["stacks"], "Missing argument 'JOB'"),
        (["stacks", "job", "--seconds", "0"], "--seconds"),
        (["explain", "job", "--incident", "0"], "--incident"),
        (["logs", "job", "--rank", "-1"], "--rank"),
        (["chaos", "kill-worker", "job"], "start one with: unbroken up"),
    ],
)
def test_wrong_arguments_get_one_clear_message(here: Cli, arguments: list[str], said: str) -> None:
    done = here.call(*arguments, code=None)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not here.directory.exists()


def test_all_problems_of_a_manifest_are_told_at_once(here: Cli) -> None:
    problems = here.call("run", "bad.json", code=1).stderr
    assert "spec.runPolicy.jobMaxRetryCount: Invalid value: -1" in problems
    assert "spec.replicaSpecs" in problems


def test_a_variable_left_in_a_quantity_is_told_with_its_field(here: Cli) -> None:
    job = manifest("left", "true")
    container = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"nvidia.com/gpu": "${GPU_PER_NODE}"}}
    (here.folder / "left.json").write_text(json.dumps(job))
    said = here.call("run", "left.json", code=1).stderr
    field = "spec.replicaSpecs[0].template.spec.containers[0].resources.limits"
    assert f'{field}["nvidia.com/gpu"]: Invalid value: "${{GPU_PER_NODE}}": must be a q' in said
    assert "${GPU_PER_NODE} was left unsubstituted" in said


def elsewhere(here: Cli, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a person whose KUBECONFIG names a cluster elsewhere."""
    (here.folder / "kubeconfig").write_text(KUBECONFIG)
    environment = {**here.environment, "KUBECONFIG": str(here.folder / "kubeconfig")}
    del environment["UNBROKEN_DIR"]
    return {**environment, "HOME": str(tmp_path)}


def test_other_clusters_are_spared_drills_and_scripts(here: Cli, tmp_path: Path) -> None:
    environment = elsewhere(here, tmp_path)
    for drill in ("kill-worker", "freeze-worker", "kill-agent", "kill-node"):
        asked = ("chaos", drill, "job", "--context", "far")
        done = here.call(*asked, code=1, environment=environment)
        assert "this drill is for a local cluster" in done.stderr
        assert "unbroken chaos kill-pod JOB --pod POD" in done.stderr
    done = here.call("run", "--context", "far", "train.py", code=1, environment=environment)
    assert "a script runs on a local cluster only" in done.stderr
    # Commands that any cluster supports are tried on this one, which does not answer.
    named = ("--kubeconfig", str(here.folder / "kubeconfig"))
    for command in (["jobs"], ["chaos", "kill-pod", "job", "--pod", "x", *named]):
        done = here.call(*command, code=1, environment=environment)
        assert "127.0.0.1:1" in done.stderr
    for option in (named, ("--context", "far")):
        for words in ((*option, "job.json"), ("job.json", *option)):
            done = here.call("run", *words, code=1, environment=environment)
            assert "127.0.0.1:1" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["delete", "job"],
        ["suspend", "job"],
        ["resume", "job"],
        ["restart", "job"],
        ["chaos", "kill-pod", "job", "--pod", "x"],
        ["nodes", "reboot", "n1"],
        ["nodes", "replace", "n1", "--yes"],
        ["nodes", "clear", "n1", "--why", "x"],
        ["check"],
        ["hyperpod", "cancel-job", "--job-name", "job"],
    ],
)
def test_nothing_is_changed_where_only_kubeconfig_says_so(
    here: Cli, tmp_path: Path, command: list[str]
) -> None:
    done = here.call(*command, code=1, environment=elsewhere(here, tmp_path))
    assert "name it with --context NAME or --kubeconfig FILE" in done.stderr
    assert "127.0.0.1:1" not in done.stderr


@pytest.mark.slow
def test_a_script_runs_here_whatever_kubeconfig_names(here: Cli, tmp_path: Path) -> None:
    environment = elsewhere(here, tmp_path)
    script = here.script("says.py", "print('ran here')")
    try:
        done = here.call("run", "--name", "says", script, environment=environment)
        assert done.stdout == "ran here\n"
        folder = tmp_path / ".unbroken"
        said = f"unbroken: uses the local cluster in {folder} and not that of KUBECONFIG"
        assert done.stderr.startswith(f"{said}; --context or --kubeconfig names another\n")
        # Later commands use the same cluster, and say so; the answer is the answer alone.
        for command in (["jobs"], ["explain", "says"], ["delete", "says"]):
            done = here.call(*command, environment=environment)
            assert done.stderr.startswith(said)
            assert "says" in done.stdout
        # One that is named in words is that one.
        done = here.call("jobs", "--context", "far", code=1, environment=environment)
        assert "127.0.0.1:1" in done.stderr
        own = {**environment, "KUBECONFIG": f"{tmp_path}/.unbroken/kubeconfig"}
        assert here.call("jobs", environment=own).stderr == NO_JOBS
    finally:
        here.call("down", "--dir", f"{tmp_path}/.unbroken", "--purge", code=None)


def test_a_context_that_is_not_there_is_named(here: Cli) -> None:
    (here.folder / "kubeconfig").write_text(KUBECONFIG)
    environment = {**here.environment, "KUBECONFIG": str(here.folder / "kubeconfig")}
    del environment["UNBROKEN_DIR"]
    done = here.call("jobs", "--context", "near", code=1, environment=environment)
    assert "Context 'near' not found" in done.stderr


def commands(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command and group below this one, with the words that lead to it."""
    for name in getattr(found, "commands", {}):
        each = found.commands[name]
        yield (*path, name), each
        yield from commands(each, (*path, name))


def test_every_command_and_group_has_a_name_and_a_sentence() -> None:
    found = dict(commands(typer.main.get_command(main.app)))
    assert {("chaos",), ("nodes", "reboot"), ("hyperpod", "start-job")} <= found.keys()
    for words, command in found.items():
        assert command.name == words[-1], words
        first = (command.help or "").strip()
        assert first[:1].isupper(), words
        assert "." in first, words


def test_the_help_names_every_command_in_its_group(here: Cli) -> None:
    shown = here.call("--help").stdout
    panels = dict(re.findall(r"^(\S.+):\n((?:  .*\n)+)", shown, re.MULTILINE))
    for name, group in main.COMMANDS.items():
        assert re.search(rf"^  {name} +[A-Z]", panels[group], re.MULTILINE), name


@pytest.mark.parametrize("columns", [80, 100, 300])
def test_help_breaks_no_name_and_has_one_pair_of_brackets(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    program = typer.main.get_command(main.app)
    for words, command in [((), program), *commands(program)]:
        done = CliRunner().invoke(app, [*words, "--help"])
        assert done.exit_code == 0, words
        usage, *lines = done.stdout.splitlines()
        usage += lines[0].strip()
        assert not re.search(r"[{}<>]|\[\[|\]\.\.\.\.", usage.partition("{JOB.yaml")[0]), usage
        text = "\n".join(lines)
        for wrong in ("…", "(default", "default: (", "<str", "<int", "\x1b", "\N{NO-BREAK SPACE}"):
            assert wrong not in text, (words, wrong)
        for option in command.get_params(command.make_context("x", [], resilient_parsing=True)):
            for name in (*option.opts, *option.secondary_opts) if option.opts[0][0] == "-" else ():
                assert re.search(rf"(?m)^  (\S+ )*{name}\b", text), (words, name)
        examples = {line.strip() for line in re.findall(r"(?m)^  unbroken .+$", text)}
        wide = [
            line
            for line in lines
            if len(line) > min(columns, WIDEST) and line.strip() not in examples
        ]
        assert not wide, words


def test_every_command_has_an_example_that_its_options_accept() -> None:
    program = typer.main.get_command(main.app)
    for words, command in commands(program):
        examples = help_parts(command)[1]
        assert examples, words
        for example in examples:
            given = shlex.split(example)
            assert tuple(given[: len(words) + 1]) == ("unbroken", *words)
            assert_is_read(command, given[len(words) + 1 :])


def assert_is_read(command: Any, given: list[str]) -> None:
    """Have a command read words, and run nothing; a wrong option or a missing value raises."""
    below = getattr(command, "commands", {})
    if given and given[0] in below:
        assert_is_read(below[given[0]], given[1:])
    else:
        command.make_context(command.name, given)


def test_help_shows_no_type_for_an_option_without_a_value(here: Cli) -> None:
    for words in [(), ("nodes",), ("up",), ("rules", "check"), ("hyperpod", "get-job")]:
        assert "bool" not in here.call(*words, "--help").stdout


def test_the_command_alone_says_what_to_do_next(here: Cli) -> None:
    shown = here.call().stdout
    assert shown.startswith(main.FIRST_STEPS)
    assert "No local cluster is running." in shown
    named = set(re.findall(r"unbroken ([a-z]+)", main.FIRST_STEPS)) - {"keeps"}
    assert {"run", "jobs", "explain", "top", "ui", "chaos", "down"} == named
    assert named <= main.COMMANDS.keys()


def loaded(*arguments: str) -> set[str]:
    """Return the modules that a command has imported by its end."""
    code = f"""
import atexit, sys
from unbroken.cli import main
from unbroken.cli.app import WIDEST, choices, help_parts
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
main.app({list(arguments)!r})"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_loads_neither_client_nor_cluster() -> None:
    modules = loaded("--help")
    assert {"unbroken.cli.local.chaos", "unbroken.cli.job.describe"} <= modules
    heavy = {"lightkube", "aiohttp", "yaml", "unbroken.local.up", "unbroken.operator.driver"}
    assert not heavy & modules


def test_a_command_loads_no_other() -> None:
    modules = loaded("down", "--help")
    assert "unbroken.cli.local.down" in modules
    assert (
        not {"unbroken.cli.local.chaos", "unbroken.cli.job.describe", "unbroken.cli.run.commands"}
        & modules
    )


def test_every_command_with_json_has_yaml_with_the_same_values(here: Cli) -> None:
    outputs = [
        choices(one)
        for _, command in commands(typer.main.get_command(main.app))
        for one in command.params
        if "--output" in one.opts
    ]
    assert len(outputs) > 40
    assert all({"json", "yaml"} <= set(one) for one in outputs)
    for words in (["faults", "explain", "79"], ["faults", "list"]):
        shown = {form: here.call(*words, "-o", form).stdout for form in ("json", "yaml")}
        assert yaml.safe_load(shown["yaml"]) == json.loads(shown["json"]), words
        assert shown["yaml"] != shown["json"]


def test_every_job_command_offers_json_and_a_cluster() -> None:
    every = ["run", "jobs", "describe", "logs", "explain", "stacks", "restart", "suspend", "resume"]
    every.append("delete")
    drills = ["kill-worker", "freeze-worker", "kill-agent", "kill-pod", "kill-node"]
    for command in (*([one] for one in every), *(["chaos", one] for one in drills)):
        done = CliRunner().invoke(app, [*command, "--help"])
        for option in ("--output", "--dir", "--context", "--namespace"):
            assert option in done.stdout, f"{command} has no {option}"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_takes_ends_a_command_without_a_traceback(
    here: Cli, unbuffered: str
) -> None:
    def run(stdout: int) -> tuple[int, str]:
        done = subprocess.run(
            [*UNBROKEN, "--version"],
            env={**here.environment, "PYTHONUNBUFFERED": unbuffered},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(stdout)
        return done.returncode, done.stderr

    full = os.open("/dev/full", os.O_WRONLY)
    assert run(full) == (1, "error: cannot write the output: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    assert run(writer) == (1, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_whose_caller_closed_a_stream_works(here: Cli, closed: str) -> None:
    def run(arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            ["/bin/sh", "-c", f"{shlex.join(UNBROKEN)} {arguments} {closed}"],
            env=here.environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    assert run("--version") == (0, "")
    status, said = run("jobs --context missing")
    assert status == 1
    assert "Traceback" not in said
