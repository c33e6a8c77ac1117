"""Lifecycle scripts: when they run, when they run again, and their inputs."""

from __future__ import annotations

import pytest

from unbroken.core.tick import Tick
from unbroken.errors import SpecError
from unbroken.local.machines.decisions.machine import FAILED, RUNNING, SKIPPED, SUCCEEDED
from unbroken.local.machines.decisions.scripts import (
    ATTEMPTS_MAX,
    RETRY_SECONDS,
    Ended,
    Event,
    Keep,
    LocalSource,
    Looked,
    Member,
    ScriptKind,
    ScriptRecord,
    ScriptRun,
    Start,
    Unmapped,
    Unusable,
    after_boot,
    local_source,
    resource_config,
    source_mapping,
)


class Script:
    """A machine for one script, and its effects."""

    def __init__(self, record: ScriptRecord | None = None) -> None:
        known = record or ScriptRecord()
        self.machine = ScriptRun(ScriptKind.ON_CREATE, "on_create.sh", known)
        self.now = 100.0

    def told(self, event: Event, seconds: float = 0.0) -> str:
        """Return the effects of the event, in short words."""
        self.now += seconds
        words = []
        for effect in self.machine.step(event, self.now):
            match effect:
                case Keep(record):
                    words.append(f"{record.state}:{record.attempts}")
                case Start(attempt):
                    words.append(f"start:{attempt}")
        return " ".join(words)


def test_a_script_that_succeeds_runs_once() -> None:
    script = Script()
    assert script.told(Looked()) == "Running:1 start:1"
    assert script.told(Ended(0)) == "Succeeded:1"
    assert Script(script.machine.record).told(Looked()) == ""


def test_one_that_fails_is_tried_again_later_and_later_and_given_up() -> None:
    script = Script()
    script.told(Looked())
    for attempt, seconds in enumerate(RETRY_SECONDS, start=1):
        assert script.told(Ended(3, "no disk")) == f"Running:{attempt}"
        assert script.machine.deadline() == script.now + seconds
        assert script.told(Tick(), seconds / 2) == "", "not before its time"
        assert script.told(Tick(), seconds) == f"Running:{attempt + 1} start:{attempt + 1}"
        assert script.machine.deadline() is None
    assert script.told(Ended(3, "no disk")) == f"Failed:{ATTEMPTS_MAX}"
    text = script.machine.record.message
    assert text == "OnCreate on_create.sh ended with 3 in attempt 4 of 4: no disk"
    assert script.told(Looked()) == ""


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (Looked(is_alive=True), ""),
        (Looked(exit_code=0), "Succeeded:2"),
        (Looked(exit_code=1), "Running:2"),
        # Killed with its pool or its machine: the same attempt starts again.
        (Looked(), "Running:2 start:2"),
    ],
)
def test_a_new_pool_goes_on_with_the_attempt_that_it_finds(found: Looked, wanted: str) -> None:
    assert Script(ScriptRecord(RUNNING, 2)).told(found) == wanted


def test_what_cannot_run_is_skipped_or_given_up_at_once() -> None:
    script = Script()
    script.told(Looked())
    assert script.told(Unmapped("s3://b/p")) == "Skipped:1"
    assert "unbroken up --lifecycle-source s3://b/p=DIR" in script.machine.record.message
    script = Script()
    script.told(Looked())
    assert script.told(Unusable("there is no such file")) == "Failed:1"


def test_a_reboot_gives_new_attempts_to_what_was_given_up_only() -> None:
    assert after_boot(ScriptRecord(FAILED, 4, "why")) == ScriptRecord()
    for state in (SUCCEEDED, SKIPPED, RUNNING):
        assert after_boot(ScriptRecord(state, 2)) == ScriptRecord(state, 2)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("s3://b/p", LocalSource("/one", ())),
        ("s3://b/p/", LocalSource("/one", ())),
        ("s3://b/p/q/r", LocalSource("/one", ("q", "r"))),
        ("s3://b/p/deep/x", LocalSource("/two/", ("x",))),
        ("s3://b/prefix", None),
        ("s3://b", None),
        ("", None),
    ],
)
def test_the_nearest_mapped_address_counts(source: str, wanted: LocalSource | None) -> None:
    mapped = {"s3://b/p": "/one", "s3://b/p/deep": "/two/"}
    assert local_source(source, mapped) == wanted


def test_a_mapping_is_read_or_refused_with_how_to_write_it() -> None:
    assert source_mapping(["s3://b/p/=/d=e", "s3://c=x"]) == {"s3://b/p": "/d=e", "s3://c": "x"}
    for wrong in ("s3://b/p", "https://b/p=/d", "s3://=/d", "s3://b="):
        with pytest.raises(SpecError, match="s3://BUCKET/PREFIX=DIR"):
            source_mapping([wrong])


def test_scripts_are_told_of_every_instance_by_group() -> None:
    members = [
        Member("hyperpod-i-0a", "head", "ml.c5.xlarge", "127.64.0.1"),
        Member("hyperpod-i-0b", "worker", "ml.p5.48xlarge", "127.64.1.1"),
        Member("node-7", "worker", "ml.p5.48xlarge", "127.64.2.1"),
    ]
    found = resource_config("c", "arn:c", members)
    assert found["ClusterConfig"] == {"ClusterArn": "arn:c", "ClusterName": "c"}
    head, workers = found["InstanceGroups"]
    assert (head["Name"], head["InstanceType"]) == ("head", "ml.c5.xlarge")
    assert workers["Instances"] == [
        {
            **{"InstanceName": "worker-1", "InstanceId": "i-0b"},
            **{"AgentIpAddress": "127.64.1.1", "CustomerIpAddress": "127.64.1.1"},
        },
        {
            **{"InstanceName": "worker-2", "InstanceId": "node-7"},
            **{"AgentIpAddress": "127.64.2.1", "CustomerIpAddress": "127.64.2.1"},
        },
    ]
