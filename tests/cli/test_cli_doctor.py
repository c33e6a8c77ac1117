"""`unbroken doctor` says what is wrong with this machine, and nothing where nothing is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli_calls import Cli, read_until
from tests.watching import PATIENCE_SECONDS

pytestmark = pytest.mark.slow


def test_a_machine_that_is_well(make_cli: Callable[..., Cli], tmp_path: Path) -> None:
    cli = make_cli()
    done = cli.call("doctor", "--disk", str(tmp_path))
    assert "no fault found: " in done.stderr
    assert any(line.startswith("ok       loopback") for line in done.stdout.splitlines())
    assert "FAULT" not in done.stdout


def test_a_fault_is_named_and_ends_with_1(make_cli: Callable[..., Cli], tmp_path: Path) -> None:
    cli = make_cli()
    arguments = ("doctor", "--deep", "--seconds", "0.1", "--disk", str(tmp_path))
    planted = cli.environment | {"UNBROKEN_CHECK_PLANT": "memory-flip:0x40"}
    done = cli.call(*arguments, "-o", "json", code=1, environment=planted)
    said = json.loads(done.stdout)
    assert said["isWell"] is False
    wrong = [one for one in said["results"] if one["outcome"] == "fail"]
    assert [one["test"] for one in wrong] == ["memory-pattern"]
    assert "offset 0x40" in wrong[0]["message"]


def test_an_interrupt_ends_it_without_a_traceback(
    make_cli: Callable[..., Cli], tmp_path: Path
) -> None:
    process = make_cli().start("doctor", "--deep", "--seconds", "60", "--disk", str(tmp_path))
    read_until(process, lambda line: "limits" in line)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert [name for name in os.listdir(tmp_path) if name.startswith("unbroken-check")] == []


def test_a_wrong_plant_is_refused_in_words(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli()
    planted = cli.environment | {"UNBROKEN_CHECK_PLANT": "memory-flop:1"}
    done = cli.call("doctor", code=1, environment=planted)
    assert "no plant 'memory-flop'" in done.stderr
