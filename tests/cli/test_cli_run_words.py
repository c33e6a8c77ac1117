"""The words of `unbroken run`: whose option each is, in every order."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed.run as torchrun
from typer.testing import CliRunner

from unbroken.agent.options import read_arguments
from unbroken.cli.main import app
from unbroken.cli.run.commands import FIELDS, in_manifest, split
from unbroken.errors import SpecError
from unbroken.spec.job.launch import read_launch

OWN = [
    (("--nnodes",), False),
    (("--nproc-per-node",), False),
    (("--max-restarts",), False),
    (("--name",), False),
    (("--dir",), False),
    (("--output", "-o"), False),
    (("--namespace", "-n"), False),
    (("--detach", "-d"), True),
    (("--help", "-h"), True),
]


@pytest.mark.parametrize(
    ("words", "own", "passed", "rest"),
    [
        ("a.py --tee 3", "", "", "a.py --tee 3"),
        ("--tee 3 --nnodes 2 a.py", "--nnodes=2", "--tee=3", "a.py"),
        ("--nnodes=2 --log_dir=x a.py", "--nnodes=2", "--log-dir=x", "a.py"),
        ("-m --detach pkg.mod -m", "--detach", "--module", "pkg.mod -m"),
        ("-mr3 -t1 pkg.mod", "", "--module --redirects=3 --tee=1", "pkg.mod"),
        ("-ojson -dn team a.py", "--output=json --detach --namespace=team", "", "a.py"),
        ("--standalone --name tee a.py", "--name=tee", "", "a.py"),
        ("--stand --redirect 3 a.py", "", "--redirects=3", "a.py"),
        ("--nproc_ 4 --max-r 3 a.py", "--nproc-per-node=4 --max-restarts=3", "", "a.py"),
        ("--rdzv_backend c10d --rdzv-id=7 a.py", "", "--rdzv-backend=c10d --rdzv-id=7", "a.py"),
        ("-- a.py --dir x", "", "", "a.py --dir x"),
        ("a.py --dir D job.yaml", "", "", "a.py --dir D job.yaml"),
        ("job.yaml --dir D", "--dir=D", "", "job.yaml"),
        ("--dir D job.yaml -o json -d", "--dir=D --output=json --detach", "", "job.yaml"),
        ("job.yaml --nnodes 2 x --tee 3 y", "--nnodes=2", "--tee=3", "job.yaml x y"),
        ("- --dir D", "--dir=D", "", "-"),
    ],
)  # fmt: skip
def test_each_option_goes_to_whom_it_belongs(words: str, own: str, passed: str, rest: str) -> None:
    found = split(words.split(), OWN, {})
    assert (found.own, found.passed) == (own.split(), passed.split())
    assert found.rest == ["--", *rest.split()]


def test_words_after_a_script_are_the_scripts_as_with_torchrun() -> None:
    parser = torchrun.get_args_parser()
    for rest in (["--dir", "x"], ["--", "--tee", "1"], ["x", "--", "-m"], ["-m"], ["job.yaml"]):
        theirs = parser.parse_args(["a.py", *rest])
        found = split(["--name", "n", "a.py", *rest], OWN, {})
        assert found.rest == ["--", "a.py", *theirs.training_script_args]
        assert (found.own, found.passed) == (["--name=n"], [])


@pytest.mark.parametrize("word", ["--in", "--p", "--i=3", "--pre", "--na=3", "--r=16", "-n", "-h"])
def test_a_word_after_a_script_is_never_an_abbreviated_option(word: str) -> None:
    for before in ([], ["--tee", "3"], ["-m"], ["--nnodes=2", "--name", "n"], ["--"]):
        found = split([*before, "a.py", word, "data.bin"], OWN, {})
        assert found.rest == ["--", "a.py", word, "data.bin"]
        read = read_arguments([*found.passed, *found.rest], {})
        assert (read.training_script, read.training_script_args) == ("a.py", [word, "data.bin"])
        assert read_arguments(["a.py", word], {}).training_script_args == [word]


def test_one_separator_alone_is_no_argument_of_a_script() -> None:
    for rest in (["--", "--r=16"], ["--", "--", "x"], ["x", "--"]):
        theirs = torchrun.get_args_parser().parse_args(["a.py", *rest]).training_script_args
        assert split(["a.py", *rest], OWN, {}).rest == ["--", "a.py", *theirs]
        assert read_arguments(["a.py", *rest], {}).training_script_args == theirs
    assert read_arguments(read_launch(["python", "a.py", "--", "x"]).arguments, {}) == (
        read_arguments(["--", "a.py", "--", "x"], {})
    )


def test_options_of_a_manifest_may_stand_anywhere() -> None:
    options = (["--dir", "D"], ["-o", "json"], ["--detach"])
    for order in itertools.permutations(options):
        for at in range(len(order) + 1):
            words = [*itertools.chain(*order[:at]), "job.yaml", *itertools.chain(*order[at:])]
            found = split(words, OWN, {})
            assert sorted(found.own) == ["--detach", "--dir=D", "--output=json"]
            assert found.rest == ["--", "job.yaml"]


def test_unknown_options_are_left_to_the_command_and_ambiguous_ones_refused() -> None:
    assert split(["--unknown", "a.py"], OWN, {}).own == ["--unknown"]
    assert split(["job.yaml", "--lr", "1"], OWN, {}).rest == ["--", "job.yaml", "--lr", "1"]
    assert split([], OWN, {}).rest == []
    with pytest.raises(SpecError, match="--nproc could match --nproc-per-node"):
        split(["--nproc", "2", "a.py"], OWN, {})
    with pytest.raises(SpecError, match="--tee: expected one argument"):
        split(["--tee"], OWN, {})


def test_every_prefix_of_torchrun_is_taken_here_too() -> None:
    for action in torchrun.get_args_parser()._actions:
        for spelling in action.option_strings:
            if action.dest == "help":
                continue
            value = [] if action.nargs == 0 else ["fork" if action.choices else "1"]
            for length in range(3, len(spelling) + 1):
                words = [spelling[:length], *value, "a.py"]
                try:
                    found = split(words, OWN, {})
                except SpecError as error:
                    assert "could match" in str(error) or "expected" in str(error)
                    continue
                if not (found.own or found.passed):
                    assert "--standalone".startswith(spelling[:length])
                    continue
                name = f"--{action.dest.replace('_', '-')}"
                if found.rest:
                    assert [*found.own, *found.passed] == ["=".join([name, *value])]


def test_torchruns_variables_count_for_scripts_alone() -> None:
    environ = {"PET_NPROC_PER_NODE": "4", "PET_TEE": "3", "PET_MODULE": "1", "PET_STANDALONE": "1"}
    found = split(["--tee", "1", "a.py"], OWN, environ)
    assert found.own == ["--nproc-per-node=4"]
    assert found.passed == ["--tee=1", "--module"]
    found = split(["job.yaml"], OWN, environ)
    assert (found.own, found.passed) == ([], [])
    assert split(["--nproc-per-node=2", "a.py"], OWN, environ).own == ["--nproc-per-node=2"]
    assert "--module" not in split(["a.py"], OWN, {"PET_MODULE": "0"}).passed


def test_what_a_manifest_has_itself_is_refused_with_the_place_to_write_it() -> None:
    in_manifest("job.yaml", [], [], [])
    for name, field in FIELDS.items():
        with pytest.raises(SpecError, match="is a manifest") as caught:
            in_manifest("job.yaml", [name], [], [])
        assert f"{name}: write it to {field}" in str(caught.value)
    with pytest.raises(SpecError) as caught:
        in_manifest("job.yaml", [], ["--tee=3"], ["--lr", "1"])
    place = "spec.replicaSpecs[].template.spec.containers[].command"
    assert f"--tee: write it to the launch line in {place}" in str(caught.value)
    assert "--lr 1: not an option of `unbroken run`; write arguments" in str(caught.value)


def test_the_help_shows_both_forms() -> None:
    shown = CliRunner().invoke(app, ["run", "--help"]).stdout
    flat = " ".join(shown.split())
    assert "`unbroken run JOB.yaml` takes its options before or after the manifest" in flat
    assert "SCRIPT.py [ARGS...]" in flat
