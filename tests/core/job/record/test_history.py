"""The history of a job's incidents for the agent whose worker keeps a run of a tracker."""

from __future__ import annotations

from dataclasses import replace

from tests.core.job.drive_job import Script, restart, running
from unbroken.core.job.events import AgentReported, AskAgent
from unbroken.wire.agent import HistoryCommand


def asked(script: Script, now: float, history: int | None, name: str = "w-0") -> None:
    """Report an agent whose worker has asked, and which has this version."""
    report = replace(script.agents[name], history=history)
    script.agents[name] = report
    script.give(AgentReported(script.views[name].uid, report), now)


def sent(script: Script) -> list[HistoryCommand]:
    """Return what was sent since, and forget it."""
    found = [
        effect.request
        for effect in script.effects
        if isinstance(effect, AskAgent) and isinstance(effect.request, HistoryCommand)
    ]
    script.effects.clear()
    return found


def test_an_agent_gets_each_incident_once_with_its_cost() -> None:
    script = running()
    asked(script, 5, 0)
    assert sent(script) == []
    restart(script, 10, 0, fault="kind=Signal", then="told=8")
    asked(script, 11, 0)
    (first,) = sent(script)
    (incident,) = first.incidents
    assert (incident.number, incident.attempt, incident.remedy) == (1, 0, "process")
    assert "w-1" in incident.culprit
    assert first.restarts == 1
    assert first.seconds_lost > 0
    asked(script, 12, first.version)
    assert sent(script) == []
    restart(script, 20, 1, then="told=18")
    asked(script, 21, first.version)
    (second,) = sent(script)
    assert [one.number for one in second.incidents] == [1, 2]
    assert second.restarts == 2


def test_a_message_that_was_lost_is_sent_again_and_another_operator_sends_the_same() -> None:
    script = running()
    restart(script, 10, 0, then="told=8")
    asked(script, 11, 0)
    (first,) = sent(script)
    asked(script, 12, 0)
    (again,) = sent(script)
    assert again.version == first.version
    assert again.incidents[0] is first.incidents[0], "an incident is read once, not each second"


def test_an_incident_that_closes_is_sent_without_another_report_of_the_asking_agent() -> None:
    script = running()
    restart(script, 10, 0)
    asked(script, 10.3, 0)
    assert sent(script) == []
    script.run("10.5 runs w-1 1 told=9")
    (found,) = sent(script)
    assert found.incidents[0].seconds is not None


def test_an_agent_that_no_worker_has_asked_gets_nothing() -> None:
    script = running()
    restart(script, 10, 0, then="told=8")
    asked(script, 11, None)
    asked(script, 12, 0, "w-1")
    assert sent(script) == []


def test_secrets_in_an_error_do_not_leave_the_operator() -> None:
    script = running()
    token = "hf_" + "a" * 30
    restart(script, 10, 0, fault=f"text=token={token}", then="told=8")
    asked(script, 11, 0)
    (found,) = sent(script)
    assert token not in repr(found)
    assert "[removed]" in found.incidents[0].culprit
