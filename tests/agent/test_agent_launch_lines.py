"""Launch lines: the agent reads those of torchrun and hyperpodrun, or names what it refuses."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from unbroken.agent.options import (
    HYPERPOD,
    OPTIONS,
    LaunchOptions,
    Option,
    Script,
    kept_only,
    parse,
    read_arguments,
    torchrun_sizes,
)
from unbroken.errors import SpecError

SAMPLES = {
    "nnodes": "3",
    "nproc-per-node": "2",
    "max-restarts": "5",
    "monitor-interval": "0.5",
    "start-method": "fork",
    "redirects": "0:1,1:2",
    "tee": "3",
    "local-ranks-filter": "0,1",
    "node-rank": "1",
    "master-port": "29501",
    "numa-binding": "node",
    "signals-to-handle": "SIGTERM,SIGUSR1",
    "shutdown-timeout": "7",
    "shutdown-signal": "SIGTERM",
    "server-port": "8081",
    "server-log-level": "warning",
    "inprocess-timeout": "9",
}
"""A good value of each option that does not accept any text."""
NEAR = ("--shutdown-", "--shutdown_")
"""Prefixes of torchrun's --shutdown-timeout, and of hyperpodrun's --shutdown-signal too."""
DESTS = {option.dest: option for option in OPTIONS}


def version(text: str) -> tuple[int, ...]:
    """Return a release of torch as a pair of numbers."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


INSTALLED = version(torch.__version__)


def torchs(words: list[str], environ: dict[str, str] | None = None) -> argparse.Namespace | str:
    """Return the options that torchrun's own parser reads, or its error text."""
    said = io.StringIO()
    with mock.patch.dict(os.environ, environ or {}), contextlib.redirect_stderr(said):
        try:
            return torchrun.get_args_parser().parse_args(words)
        except SystemExit:
            return said.getvalue()


def ours(words: list[str], environ: dict[str, str] | None = None) -> LaunchOptions | str:
    """Return the options that the agent reads, or its error text."""
    try:
        return parse(words, environ or {})
    except SpecError as error:
        return str(error)


def prefixes() -> Iterator[tuple[str, argparse.Action]]:
    """Yield every spelling of every option of torchrun, and every prefix of each."""
    for action in torchrun.get_args_parser()._actions:
        for spelling in action.option_strings:
            lengths = range(3, len(spelling) + 1) if spelling.startswith("--") else [2]
            for length in lengths:
                yield spelling[:length], action


def same(words: list[str], action: argparse.Action, environ: dict[str, str]) -> None:
    """Assert that the agent reads the option as torchrun does, or names it in its error text."""
    theirs = torchs(words, environ)
    found = ours(words, environ)
    if isinstance(theirs, str):
        # torchrun refuses the line: unknown, or ambiguous.
        assert isinstance(found, str), (words, found)
        return
    option = DESTS[action.dest]
    if option.refused:
        assert isinstance(found, str), words
        assert f"--{option.name}" in found
        return
    if words[0].partition("=")[0] in NEAR:
        assert isinstance(found, str)
        assert f"could match --{option.name}" in found.replace("_", "-")
        return
    assert isinstance(found, LaunchOptions), (words, found)
    named = [text for text in found.notes if f"--{option.name}" in text]
    assert len(named) == bool(option.ignored), (words, found.notes)
    read = read_arguments(words, environ)
    assert str(getattr(read, action.dest)) == str(getattr(theirs, action.dest)), words
    assert read.training_script == theirs.training_script
    assert read.training_script_args == theirs.training_script_args


@pytest.mark.slow  # It asks torchrun's own parser thousands of times.
def test_every_option_and_prefix_means_what_it_means_to_torchrun() -> None:
    count = 0
    for written, action in prefixes():
        if action.dest == "help":
            continue
        value = SAMPLES.get(action.dest.replace("_", "-"), "x")
        script = ["train.py", "--tee", "1", "--", "-m"]
        if action.nargs == 0:
            forms = [[written]]
        elif written.startswith("--"):
            forms = [[written, value], [f"{written}={value}"]]
        else:
            forms = [[written, value], [f"{written}={value}"], [f"{written}{value}"]]
        for form in forms:
            same([*form, *script], action, {})
            count += 1
    assert count > 600


def test_short_options_may_be_joined_as_in_torchrun() -> None:
    actions = {action.dest: action for action in torchrun.get_args_parser()._actions}
    for words in (["-mr3"], ["-mt", "3"], ["-r3", "-t0:1"], ["-mr", "0:1"]):
        for dest in ("module", "redirects", "tee"):
            same([*words, "x"], actions[dest], {})


@pytest.mark.parametrize("value", [None, "", "x", "0", "1", "3", "-1"])
def test_variables_stand_in_for_options_as_in_torchrun(value: str | None) -> None:
    for action in torchrun.get_args_parser()._actions:
        if not action.option_strings or action.dest == "help":
            continue
        text = SAMPLES.get(action.dest.replace("_", "-"), "y") if value is None else value
        environ = {f"PET_{action.dest.upper()}": text}
        try:
            theirs = torchs(["train.py"], environ)
        except ValueError:
            theirs = ""
        found = ours(["train.py"], environ)
        option = DESTS[action.dest]
        if isinstance(found, str):
            # The agent may refuse more, for torchrun fails on such values later; it names which.
            assert option.variable in found or f"--{option.name}" in found, environ
        else:
            assert not isinstance(theirs, str) or not text, environ
            read = getattr(read_arguments(["train.py"], environ), action.dest)
            default = getattr(read_arguments(["train.py"], {}), action.dest)
            wanted = default if isinstance(theirs, str) else getattr(theirs, action.dest)
            if option.has_variable:
                assert str(read) == str(wanted), environ
            given = read is not None and read is not False
            assert bool(found.notes) is (given and bool(option.ignored))


def test_a_variable_that_is_refused_is_named() -> None:
    found = ours(["train.py"], {"PET_MAX_RESTARTS": "many"})
    assert "invalid int value: 'many' (set in the environment: PET_MAX_RESTARTS)" in str(found)


def test_the_table_is_the_installed_torchs() -> None:
    theirs = {
        action.dest: action
        for action in torchrun.get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    }
    table = {
        option.dest: option
        for option in OPTIONS
        if option.since != HYPERPOD and version(option.since) <= INSTALLED
    }
    assert theirs.keys() == table.keys()
    for dest, action in theirs.items():
        option = table[dest]
        assert tuple(action.option_strings) == option.spellings
        assert (action.nargs == 0) is option.is_flag
        assert option.has_variable is (type(action).__name__ in ("env", "check_env"))


HISTORY = {
    "2.6": 23,
    "2.7": 23,
    "2.8": 24,
    "2.9": 25,
    "2.10": 29,
    "2.11": 29,
    "2.12": 30,
    "2.13": 30,
}
"""Options of each release, counted in `torch/distributed/run.py` of its package on PyPI."""


@pytest.mark.parametrize("release", HISTORY)
def test_prefixes_of_older_releases_are_taken(release: str) -> None:
    known = [
        option
        for option in OPTIONS
        if option.since != HYPERPOD and version(option.since) <= version(release)
    ]
    assert len(known) == HISTORY[release]
    parser = argparse.ArgumentParser()
    for option in known:
        if option.is_flag:
            parser.add_argument(*option.spellings, action="store_true")
        else:
            parser.add_argument(*option.spellings)
    for option in known:
        for written in written_forms(option, parser):
            found = ours([*written, "train.py"])
            if isinstance(found, str):
                assert option.refused or written[0] in NEAR, (written, found)
                assert f"--{option.name}" in found.replace("_", "-"), written


def written_forms(option: Option, parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    """Yield the option with each prefix that is unambiguous in a parser."""
    value = [] if option.is_flag else [SAMPLES.get(option.name, "x")]
    for spelling in option.spellings:
        for length in range(3, len(spelling) + 1):
            words = [spelling[:length], *value]
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    read = parser.parse_args(words)
            except SystemExit:
                continue
            assert getattr(read, option.dest) in (True, *value)
            yield words


@pytest.mark.parametrize(
    "option", [one for one in OPTIONS if one.since == HYPERPOD], ids=lambda one: one.name
)
def test_hyperpodruns_options_are_taken_in_every_spelling(option: Option) -> None:
    value = SAMPLES.get(option.name, "x")
    for spelling in option.spellings:
        forms = [[spelling]] if option.is_flag else [[spelling, value], [f"{spelling}={value}"]]
        for form in forms:
            found = ours([*form, "train.py", "--x"])
            assert isinstance(found, LaunchOptions), found
            assert found.script == Script("train.py", ("--x",))
            assert bool(found.notes) is bool(option.ignored)


LINES = [
    line
    for line in (Path(__file__).parent / "launch_lines.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize("line", LINES)
def test_launch_lines_of_public_manifests_are_accepted(line: str) -> None:
    program, *words = shlex.split(line)
    assert Path(program).name in ("hyperpodrun", "torchrun")
    found = ours(words)
    assert isinstance(found, LaunchOptions), found
    assert found.script.path.endswith((".py", ".sh"))
    assert found.is_inprocess is ("--inprocess-restart" in words)
    if "--redirect" in words:
        assert found.redirects == "3"


@pytest.mark.parametrize("tee", ["0", "3", "2", "0:1,1:3"])
@pytest.mark.parametrize("redirects", ["0", "3", "1", "0:2,2:3"])
def test_the_console_shows_the_streams_that_torchrun_shows(
    tmp_path: Path, redirects: str, tee: str
) -> None:
    asked = {"redirects": Std.from_str(redirects), "tee": Std.from_str(tee)}
    theirs = DefaultLogsSpecs(str(tmp_path), **asked).reify({rank: {} for rank in range(3)})
    found = parse([f"--redirect={redirects}", "--tee", tee, "train.py"], {})
    for rank in range(3):
        shown = [not theirs.stdouts[rank] or rank in theirs.tee_stdouts]
        shown.append(not theirs.stderrs[rank] or rank in theirs.tee_stderrs)
        hidden = kept_only(found, rank)
        assert [not hidden & bit for bit in (1, 2)] == shown


def test_sizes_are_read_from_lines_whose_other_options_only_torchrun_has() -> None:
    words = ["--standalone", "--numa-binding=node", "--nproc_per=3", "--nno=2:4", "train.py"]
    assert torchrun_sizes(words, {}) == (3, 2)
    assert torchrun_sizes(["train.py"], {"PET_NPROC_PER_NODE": "5"}) == (5, 1)
    with pytest.raises(SpecError, match="--bogus"):
        torchrun_sizes(["--bogus", "train.py"], {})


def test_names_of_ignored_options_come_with_their_reason() -> None:
    found = parse(["--max-r=3", "--rdzv-b", "c10d", "--node-rank=0", "train.py"], {})
    assert found.notes == (
        "no effect: --rdzv-backend, --node-rank (the operator assigns ranks and addresses)",
        "no effect: --max-restarts (spec.runPolicy.jobMaxRetryCount of the job limits restarts)",
    )
