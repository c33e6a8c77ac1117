"""Obstacles to the start of a job: their words, condition, events, and end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script, begun
from unbroken.core.job.events import PodHeld, PodName, PodSeen, PodUid, RecordEvent, WriteLedger
from unbroken.core.job.obstacles import (
    LINE_CHARACTERS,
    LINES_MAX,
    NOT_PROVEN,
    TEXT_CHARACTERS,
    Obstacle,
    container_lines,
    printable,
    split_wait,
    summary,
)
from unbroken.core.job.recovery.recovery import CRASHES
from unbroken.core.job.waiting import AGENT_SECONDS, CHANGE_SECONDS, EVENTS_MAX
from unbroken.spec.job.incident import Remedy
from unbroken.spec.job.ledger import PROVEN
from unbroken.spec.job.types import RunPolicy

LOOP = "CrashLoopBackOff"


def told(script: Script) -> list[RecordEvent]:
    """Return all warnings."""
    return [e for e in script.effects if isinstance(e, RecordEvent) and e.is_warning]


def wait(script: Script) -> list[str]:
    """Return the reasons for the wait in the newest condition."""
    return split_wait(script.condition.message)[1]


def test_a_condition_and_one_event_say_why_and_what_to_do() -> None:
    script = begun(2)
    for second in range(1, 4):
        script.run(f"{second} pod w-0 why=ErrImagePull says=no-such-image-{second}")
        script.run(f"{second} pod w-1 why=ImagePullBackOff says=back-off-{second}")
    (event,) = told(script)
    assert event.reason == "ImagePullBackOff"
    assert "correct the image's name" in event.message
    script.run("9 tick")
    (line,) = wait(script)
    assert line.startswith("pod j-w-0 (and 1 more): ErrImagePull: no-such-image-3; correct the")
    assert (script.condition.type, script.condition.reason) == ("Created", "ImagePullBackOff")


def test_it_is_unsaid_when_the_agents_are_heard() -> None:
    script = begun()
    script.run("1 pod w-0 why=ImagePullBackOff says=x\n2 ready w-0")
    assert [(c.type, c.reason) for c in script.status.conditions] == [
        ("Created", "Created"),
        ("PodsRunning", "PodsRunning"),
    ]
    assert script.status.conditions[0].message == "the job is created"


def test_a_pod_that_is_refused_is_told_until_it_is_created() -> None:
    script = begun(2)
    script.run("1 refused w-0 why=exceeded-quota")
    assert "pod j-w-0: PodRefused: it cannot be created: exceeded-quota" in wait(script)[0]
    script.run("6 pod w-0 node=n0")
    assert wait(script) == []


def test_what_a_node_says_of_a_pod_is_told_until_the_pod_runs() -> None:
    script = begun(2)
    uid = script.views["w-0"].uid
    script.give(PodHeld(uid, "FailedMount", 'secret "no"\x1b[2J not found'), 4.0)
    (line,) = wait(script)
    assert line.startswith('pod j-w-0: FailedMount: secret "no"\\x1b[2J not found; create')
    script.run("9 pod w-0 phase=Running")
    assert wait(script) == []
    script.give(PodHeld(uid, "FailedMount", "late"), 10.0)
    script.give(PodHeld(PodUid("stranger"), "FailedMount", "x"), 11.0)
    assert wait(script) == []


def test_a_thousand_pods_write_no_thousand_times() -> None:
    script = begun(50)
    script.run("1 pod w-0 why=Unschedulable says=x")
    before = len(script.effects)
    for number in range(1, 50):
        script.run(f"1.5 pod w-{number} why=Unschedulable says=x")
    assert script.effects[before:] == []
    assert script.job.deadline() == 1 + CHANGE_SECONDS
    script.run(f"{1 + CHANGE_SECONDS} tick")
    assert "(and 49 more)" in wait(script)[0]


def test_events_are_bounded_whatever_the_reasons() -> None:
    script = begun()
    for number in range(100):
        script.run(f"{number} pod w-0 why=R{number} says=x")
    assert len(told(script)) == EVENTS_MAX


def test_a_container_that_runs_without_an_agent_is_told_of() -> None:
    script = begun(2)
    script.run("1 pod w-0 phase=Running ->")
    assert script.job.deadline() == 1 + AGENT_SECONDS
    script.run(f"{1 + AGENT_SECONDS} tick")
    assert "no agent has answered at its port 8080 yet" in wait(script)[0]
    script.run("30 ready w-0")
    assert wait(script) == []


def test_hyperpods_agent_whose_port_is_in_use_is_told_of_with_the_option_that_helps() -> None:
    script = begun()
    script.run(f"1 pod w-0 why={LOOP} says=ended lines=Traceback|ValueError")
    assert "--server-host" not in script.condition.message
    last = "ValueError: Exception in launching HyperPodElasticAgentServer"
    script.give(PodSeen(replace(script.views["w-0"], last_lines=(last,))), 1 + CHANGE_SECONDS)
    assert "its port is in use: give the agent of each pod" in wait(script)[0]


def test_an_agent_that_is_not_believed_is_told_of_and_its_command_is_not_blamed() -> None:
    script = begun(2)
    uid = script.views["w-0"].uid
    script.run("1 pod w-0 phase=Running")
    script.give(PodHeld(uid, NOT_PROVEN, "the agent offers no proof"), 2.0)
    script.run(f"3 pod w-0 phase=Running\n{1 + AGENT_SECONDS} tick\n60 tick")
    assert wait(script) == ["pod j-w-0: AgentNotProven: the agent offers no proof"]
    script.run("70 ready w-0")
    assert wait(script) == []


def test_a_job_remembers_that_its_agents_have_proven_their_key() -> None:
    script = begun(1)
    script.run("1 pod w-0 phase=Running\n2 ready w-0")
    assert [e.ledger.agents for e in script.effects if isinstance(e, WriteLedger)] == [PROVEN]


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_container_that_ends_again_and_again_uses_up_the_budget(restarts: int) -> None:
    script = begun(1, RunPolicy(job_max_retry_count=restarts))
    for made in range(restarts + 1):
        for ends in range(1, CRASHES + 1):
            now = 10.0 * made + ends
            script.run(
                f"{now} pod w-0 uid=w-0.{made} why={LOOP} says=ended ends={ends} lines=a|bad-option"
            )
        script.run(f"{10.0 * made + 5} gone w-0")
    assert (script.condition.type, script.condition.reason) == ("Failed", "RetriesExhausted")
    assert script.condition.message.splitlines()[1:] == ["a", "bad-option"]
    remedies = [one.remedy for one in script.incidents.values()]
    assert remedies == [Remedy.POD] * restarts + [Remedy.FAIL]
    assert script.incidents[1].culprit.evidence == ("a", "bad-option")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2J\x07b\r\nc", "a\\x1b[2J\\x07b c"),
        ("\u202eevil\u0000", "\\u202eevil\\x00"),
        ("password=hunter2", "password=[removed]"),
        ("x" * 9999, "x" * (TEXT_CHARACTERS - 3) + "..."),
    ],
)
def test_messages_are_one_bounded_line_without_controls(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_last_lines_are_few_short_and_without_controls() -> None:
    text = "\n".join(["old", *(f"\x1b[31mline {n}\x1b[0m\u202e" for n in range(LINES_MAX)), ""])
    assert container_lines(text) == tuple(f"line {n}\\u202e" for n in range(LINES_MAX))
    assert container_lines('  File "x", line 1\n') == ('  File "x", line 1',)
    assert max(map(len, container_lines("y" * 100_000))) == LINE_CHARACTERS
    assert container_lines("") == container_lines("\x00\n \n") == ()
    assert "hunter2" not in "".join(container_lines("DB_PASSWORD=hunter2"))


def test_the_summary_names_each_cause_once_and_few_of_them() -> None:
    loops = [
        Obstacle(PodName(f"p-{n}"), LOOP, "ended", ("why",) if n == 7 else ()) for n in range(9)
    ]
    others = [Obstacle(PodName(f"q-{n}"), f"R{n}", "x") for n in range(9)]
    lines = summary([*loops, *others]).splitlines()
    assert lines[0].startswith("pod p-7 (and 8 more): CrashLoopBackOff: ended; ")
    assert lines[1:] == ["| why", "pod q-0: R0: x", "pod q-1: R1: x"]
