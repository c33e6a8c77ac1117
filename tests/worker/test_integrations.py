"""Adapters of training frameworks, as far as no framework is needed; tests/e2e/test_frameworks.py
runs the real ones."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from unbroken.errors import SpecError
from unbroken.worker.integrations.parts import Late, claim
from unbroken.worker.integrations.transformers import STATE, newest_checkpoint


@pytest.mark.parametrize(
    ("module", "package"),
    [("transformers", "transformers[torch]"), ("lightning", "lightning"), ("accelerate",) * 2],
)
def test_a_framework_that_is_missing_is_named_with_the_command_to_install_it(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = import_module(f"unbroken.worker.integrations.{module}")
    for name in (module, "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SpecError) as raised:
        adapter.keep_steps(object())
    assert f"{module} needs the package {package}, which cannot be imported" in str(raised.value)
    assert str(raised.value).endswith(f": pip install '{package}'")


@pytest.mark.parametrize(
    ("states", "newest"),
    [
        ({}, None),
        ({"checkpoint-5": "{}", "checkpoint-10": "{}"}, 10),
        ({"checkpoint-9": "{}", "checkpoint-10": "{}"}, 10),
        ({"checkpoint-5": "{}", "checkpoint-10": None}, 5),
        ({"checkpoint-5": "{}", "checkpoint-10": '{"global_step": 1'}, 5),
        ({"checkpoint-5": "{}", "checkpoint-10": ""}, 5),
        ({"checkpoint-10": None}, None),
        ({"checkpoint-5": "{}", "checkpoint-best": "{}", "checkpoint-9.old": "{}"}, 5),
    ],
)
def test_a_checkpoint_that_was_interrupted_is_not_resumed_from(
    states: dict[str, str | None], newest: int | None, tmp_path: Path
) -> None:
    for name, text in states.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        if text is not None:
            (tmp_path / name / STATE).write_text(text)
    found = newest_checkpoint(str(tmp_path))
    assert found == (None if newest is None else (newest, str(tmp_path / f"checkpoint-{newest}")))


def test_there_is_no_checkpoint_before_the_first_start(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path / "not-yet")) is None


class Thing:
    """An object with a state, like an optimizer."""

    def __init__(self, state: str) -> None:
        self.state = state

    def state_dict(self) -> str:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: str) -> None:
        """Take a state."""
        self.state = state


def test_a_part_that_is_made_late_gets_the_state_that_was_restored_before() -> None:
    late = Late()
    assert late.state_dict() == {}
    late.load_state_dict("restored")
    thing, unwanted = Thing("new"), Thing("new")
    late.bind(thing)
    assert late.state_dict() == thing.state == "restored"
    late.load_state_dict("restored")
    late.bind(unwanted, is_wanted=False)
    assert late.state_dict() == unwanted.state == "new"
    late.bind(unwanted)
    assert unwanted.state == "new"


def test_two_trainings_of_a_script_need_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_RESTART_COUNT", "7")
    assert [claim("first stage"), claim("second stage")] == ["first stage", "second stage"]
    with pytest.raises(SpecError, match="'first stage' before: give each training a name"):
        claim("first stage")
    # The function of a restartable worker is called again in the same process.
    monkeypatch.setenv("JOB_RESTART_COUNT", "8")
    assert claim("first stage") == "first stage"
