"""The command line: torchrun's and hyperpodrun's options, and what is refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from unbroken.agent.options import Script, parse, streams_of, visible_gpus, workers_per_node
from unbroken.agent.workers.environment import argv
from unbroken.errors import SpecError


def test_the_documented_entrypoint_of_hyperpod_is_understood() -> None:
    found = parse(
        [
            "--server-host=10.0.0.7",
            "--server-port=8080",
            "--tee=3",
            "--log_dir=/tmp/hyperpod",
            "--nnodes=2",
            "--nproc-per-node=8",
            "train.py",
            "--lr",
            "0.1",
        ],
        {},
    )
    assert (found.host, found.port, found.log_dir) == ("10.0.0.7", 8080, "/tmp/hyperpod")
    assert (found.nnodes, found.nproc) == (2, 8)
    assert found.script == Script("train.py", ("--lr", "0.1"))
    assert (found.stop_signal, found.shutdown_timeout_seconds) == (signal.SIGKILL, 15.0)
    assert found.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@pytest.mark.parametrize(
    ("arguments", "pod", "host"),
    [
        ([], "127.64.0.2", "127.64.0.2"),
        (["--server-host=0.0.0.0"], "127.64.0.2", "127.64.0.2"),
        (["--server-host=127.0.0.1"], "127.64.0.2", "127.0.0.1"),
        ([], "10.0.0.7", "0.0.0.0"),
        ([], "", "0.0.0.0"),
    ],
)
def test_agents_that_share_a_machine_listen_each_at_its_pods_address(
    arguments: list[str], pod: str, host: str
) -> None:
    found = parse([*arguments, "train.py"], {"AGENT_HOST": pod, "AGENT_PORT": "8081"})
    assert (found.host, found.port) == (host, 8081)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--standalone", "--nnodes=2", "x.py"], "--standalone: each of the 2 nodes"),
        (["--inprocess-timeout=0", "x.py"], "inprocess-timeout"),
        (["--nnodes=1:4", "x.py"], "elasticPolicy"),
        (["--nnodes=$NUM_NODES", "x.py"], "NUM_NODES was left unsubstituted"),
        (["--nproc-per-node=${GPUS}", "x.py"], "GPUS} was left unsubstituted"),
        (["--server-port=" + "9" * 5000, "x.py"], "not a number from 0 to 65535"),
        (["--nproc-per-node=0", "x.py"], "neither a number"),
        (["--nproc-per-node=many", "x.py"], "neither a number"),
        (["--server-port=99999", "x.py"], "not a number from 0 to 65535"),
        (["--shutdown-timeout=-1", "x.py"], "shutdown-timeout"),
        (["--shutdown-signal=SIGINT", "x.py"], "invalid choice"),
        (["--signals-to-handle=SIGFOO", "x.py"], "no signal 'SIGFOO'"),
        (["--signals-to-handle=SIGKILL", "x.py"], "SIGKILL cannot be handled"),
        (["--redirects=7", "x.py"], "--redirects"),
        (["--local-ranks-filter=a", "x.py"], "--local-ranks-filter"),
        (["--no-python", "-m", "x.py"], "exclude each other"),
        (["--pre-train-script=p", "--pre-train-args='", "x.py"], "arguments of p"),
        (["--server-log-level=loud", "x.py"], "not a level"),
        (["--bogus", "x.py"], "unrecognized arguments: --bogus"),
        (["--nproc", "2", "x.py"], "ambiguous option: --nproc could match --nproc-per-node"),
        ([], "training_script"),
    ],
)
def test_what_is_refused_says_why(arguments: list[str], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        parse(arguments, {})


@pytest.mark.parametrize(
    ("environ", "arguments", "nproc", "nnodes"),
    [
        ({}, [], 1, 1),
        ({"NNODES": "4", "NPROC_PER_NODE": "3"}, [], 3, 4),
        ({"NPROC_PER_NODE": "3", "PET_NPROC_PER_NODE": "5"}, [], 5, 1),
        ({"PET_NPROC_PER_NODE": "5", "NNODES": "4"}, ["--nproc_per_node=2", "--nnodes=2:2"], 2, 2),
    ],
)
def test_the_environment_stands_in_for_options(
    environ: dict[str, str], arguments: list[str], nproc: int, nnodes: int
) -> None:
    found = parse([*arguments, "x.py"], environ)
    assert (found.nproc, found.nnodes) == (nproc, nnodes)


def test_flags_may_come_from_the_environment() -> None:
    assert parse(["x"], {"PET_MODULE": "1"}).script.is_module
    assert not parse(["x"], {"PET_MODULE": "0"}).script.is_module
    with pytest.raises(SpecError, match="--standalone"):
        parse(["x"], {"PET_STANDALONE": "1", "PET_NNODES": "2"})
    with pytest.raises(SpecError, match="PET_MODULE='yes' is not a number"):
        parse(["x"], {"PET_MODULE": "yes"})


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0,1,2", 3),
        ("", 0),
        ("0,-1,2", 1),
        ("GPU-8932f937-d72c,MIG-1a2b", 2),
        (" 3 , 4", 2),
        ("none", 0),
    ],
)
def test_visible_gpus_are_counted_as_cuda_does(visible: str, count: int) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_gpus_are_the_device_files_where_nothing_is_said(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 2


def test_auto_is_gpus_or_else_processors() -> None:
    assert workers_per_node("auto", {"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 3
    assert workers_per_node("auto", {"CUDA_VISIBLE_DEVICES": ""}) == len(os.sched_getaffinity(0))
    assert workers_per_node("cpu", {"CUDA_VISIBLE_DEVICES": "0"}) == len(os.sched_getaffinity(0))
    with pytest.raises(SpecError, match="no GPU"):
        workers_per_node("gpu", {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("selection", "expected"), [("3", [3, 3]), ("0:1,1:2", [1, 2]), ("1:3", [0, 3]), ("0", [0, 0])]
)
def test_streams_are_selected_as_torchrun_does(selection: str, expected: list[int]) -> None:
    assert [streams_of(selection, rank) for rank in (0, 1)] == expected


def test_the_python_of_the_user_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert argv(Script("x.py", ("a",)), 0) == ("/opt/python", "-u", "x.py", "a")
    assert argv(Script("./x", is_program=True), 0) == ("./x",)
