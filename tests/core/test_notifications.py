"""Which states of incidents and repairs are told, once each, and how many."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from unbroken.core.notifications import (
    BACKOFF_LONGEST,
    MESSAGES_MAX,
    NOTE_MAX,
    OLDEST_SECONDS,
    SETTLE_SECONDS,
    TEXT_SHOWN,
    WAITING_MAX,
    WINDOW_SECONDS,
    Message,
    ObjectName,
    Outbox,
    State,
    incident_messages,
    message_value,
    note,
    repair_messages,
    sent_states,
    slack_value,
)
from unbroken.spec.job.incident import RECOVERED, Incident, Remedy, Symptom
from unbroken.spec.nodes.kinds import NodeRecordSpec, RepairRecord, RepairState
from unbroken.spec.nodes.values import Action

T = 10_000.0
CULPRIT = Symptom(T, "Signal", "killed by SIGKILL", "lm-1", "node-1", 3)
OPEN = Incident(2, 0, CULPRIT, (CULPRIT,), Remedy.PROCESS, "healthy pods", T, fault="SIGKILL")
RECOVERED_SOON = replace(
    OPEN, outcome=RECOVERED, started_at=T + 1, progress_at=T + 2, ended_at=T + 2
)
GAVE_UP = replace(OPEN, remedy=Remedy.FAIL, outcome="gave up", reason="no budget", ended_at=T)
PAGE = "http://127.0.0.1:1/"


def about(number: int = 0) -> ObjectName:
    """The name of an incident."""
    return ObjectName(f"uid-{number}", f"lm-{number}", "team", "lm")


def seen(outbox: Outbox, incident: Incident, now: float, number: int = 0, told: str = "") -> None:
    """Let the outbox look at an incident."""
    messages = incident_messages(incident, about(number))
    outbox.look(f"uid-{number}", messages, sent_states(told), now)


def found_at(at: float) -> Incident:
    """An open incident that was detected at a time."""
    return replace(OPEN, detected_at=at)


def test_a_fault_that_is_repaired_at_once_is_one_message() -> None:
    outbox = Outbox()
    seen(outbox, OPEN, T)
    assert outbox.next(T + 1) is None
    assert outbox.next_at(T + 1) == T + SETTLE_SECONDS
    seen(outbox, RECOVERED_SOON, T + 2)
    assert outbox.next(T + SETTLE_SECONDS) is None
    message = outbox.next(T + 2 + SETTLE_SECONDS)
    assert message is not None
    assert (message.id, message.state) == ("uid-0/recovered", State.RECOVERED)
    outbox.sent(message, T + 8)
    assert outbox.next(T + 100) is None
    assert outbox.next_at(T + 100) is None


def test_each_state_is_told_once_also_by_another_operator() -> None:
    outbox = Outbox()
    seen(outbox, OPEN, T)
    message = outbox.next(T + 5)
    assert message is not None
    assert message.state is State.FOUND
    outbox.sent(message, T + 5)
    seen(outbox, replace(OPEN, stopped_at=T + 6), T + 6)
    assert outbox.next(T + 20) is None, "it is still open"
    after = Outbox()
    kept = note(sent_states(""), message.key)
    seen(after, OPEN, T + 20, told=kept)
    assert after.next(T + 20) is None, "the annotation says so"
    ended = replace(OPEN, outcome=RECOVERED, ended_at=T + 21)
    for each in (outbox, after):
        seen(each, ended, T + 21, told=kept)
        message = each.next(T + 26)
        assert message is not None
        assert message.state is State.RECOVERED
    assert sent_states(note(sent_states(kept), "recovered")) == ("found", "recovered")


@pytest.mark.parametrize(
    ("incident", "state"),
    [
        (OPEN, State.FOUND),
        (RECOVERED_SOON, State.RECOVERED),
        (GAVE_UP, State.GAVE_UP),
        (replace(OPEN, outcome="the job was deleted", ended_at=T), State.ENDED),
        (replace(OPEN, outcome="damaged"), State.ENDED),
    ],
)
def test_an_incident_has_a_state(incident: Incident, state: State) -> None:
    (message,) = incident_messages(incident, about())
    assert message.state is state
    assert message.text.startswith(f"{state.value}: job team/lm: incident 2: rank 3 (lm-1 on ")


def test_what_is_old_is_never_told() -> None:
    outbox = Outbox()
    seen(outbox, OPEN, T + OLDEST_SECONDS + 1)
    assert outbox.next(T + OLDEST_SECONDS + 1) is None
    assert outbox.next_at(T + OLDEST_SECONDS + 1) is None, "and it does not count as left out"


def test_above_the_limit_messages_are_left_out_and_counted() -> None:
    outbox, now = Outbox(), T + SETTLE_SECONDS
    for number in range(MESSAGES_MAX + 30):
        seen(outbox, OPEN, T, number)
    seen(outbox, replace(GAVE_UP, ended_at=T + 1), T + 1, 999)
    told = []
    while (message := outbox.next(now)) is not None:
        outbox.sent(message, now)
        told.append(message)
    assert len(told) == MESSAGES_MAX
    assert outbox.next(now + 1) is None
    # A job that has failed is told, although later; it brings the count.
    at = outbox.next_at(now + 1)
    assert at == now + WINDOW_SECONDS
    message = outbox.next(at)
    assert message is not None
    assert (message.state, message.left_out) == (State.GAVE_UP, 30)
    outbox.sent(message, at)
    assert outbox.next(at) is None
    assert outbox.next_at(at) is None


def test_the_count_is_told_by_itself_if_nothing_else_happens() -> None:
    outbox, now = Outbox(), T + SETTLE_SECONDS
    for number in range(MESSAGES_MAX + 2):
        seen(outbox, OPEN, T, number)
    for _ in range(MESSAGES_MAX):
        message = outbox.next(now)
        assert message is not None
        outbox.sent(message, now)
    assert outbox.next(now) is None
    message = outbox.next(now + WINDOW_SECONDS)
    assert message is not None
    assert (message.state, message.text) == (State.LEFT_OUT, "2 notifications left out")
    assert message_value(message)["leftOut"] == 2
    outbox.sent(message, now + WINDOW_SECONDS)
    assert outbox.next(now + WINDOW_SECONDS) is None


def test_a_webhook_that_is_away_is_asked_ever_more_seldom_and_not_for_ever() -> None:
    outbox, now, tries = Outbox(), T, 0
    seen(outbox, OPEN, T)
    while (at := outbox.next_at(now)) is not None and at < T + 10 * OLDEST_SECONDS:
        now = at
        if outbox.next(now) is not None:
            tries += 1
            assert outbox.failed(now) <= BACKOFF_LONGEST
    assert 10 < tries < 40
    assert now <= T + 3 * OLDEST_SECONDS
    # The next message says that one was left out.
    seen(outbox, found_at(now), now, 1)
    message = outbox.next(now + BACKOFF_LONGEST)
    assert message is not None
    assert message.left_out == 1


def test_a_webhook_may_ask_for_more_time() -> None:
    outbox = Outbox()
    seen(outbox, OPEN, T)
    assert outbox.failed(T + 5, 90.0) == 90.0
    assert outbox.next(T + 94) is None
    assert outbox.next(T + 95) is not None
    assert outbox.failed(T + 95, 1e9) == OLDEST_SECONDS


def test_a_message_that_is_refused_is_not_sent_again() -> None:
    outbox = Outbox()
    seen(outbox, OPEN, T)
    message = outbox.next(T + 5)
    assert message is not None
    outbox.refused(message, T + 5)
    count = outbox.next(T + 5)
    assert count is not None
    assert count.state is State.LEFT_OUT
    outbox.refused(count, T + 5)
    assert outbox.next(T + 5) is None


def test_an_object_that_is_gone_is_not_told() -> None:
    outbox = Outbox()
    seen(outbox, OPEN, T)
    outbox.look("uid-0", [], (), T)
    assert outbox.next(T + 5) is None


def test_each_repair_of_a_node_is_told_at_its_beginning_and_end() -> None:
    repair = RepairRecord(Action.REPLACE, "XID 79", "daemon", RepairState.DRAINING, T)
    name = ObjectName("n", "node-1")
    outbox = Outbox()
    outbox.look("n", repair_messages(NodeRecordSpec(repair=repair), name), (), T)
    message = outbox.next(T + 5)
    assert message is not None
    assert message.text == "repair-began: node node-1: replace: XID 79"
    outbox.sent(message, T + 5)
    ended = replace(repair, state=RepairState.DONE, ended_at=T + 60, replacement="node-9")
    again = replace(repair, began_at=T + 61)
    record = NodeRecordSpec(history=(ended,), repair=again)
    outbox.look("n", repair_messages(record, name), sent_states(note((), message.key)), T + 61)
    texts = []
    while (message := outbox.next(T + 70)) is not None:
        texts.append(message.text)
        outbox.sent(message, T + 70)
    assert texts == [
        "repair-ended: node node-1: replace by node-9 Done: XID 79",
        "repair-began: node node-1: replace: XID 79",
    ]


def test_the_note_stays_short() -> None:
    kept = ""
    for number in range(10 * NOTE_MAX):
        kept = note(sent_states(kept), str(number))
    assert sent_states(kept) == tuple(map(str, range(9 * NOTE_MAX, 10 * NOTE_MAX)))
    assert sent_states("," * 100_000) == ()


def test_a_message_links_to_the_incident() -> None:
    (message,) = incident_messages(RECOVERED_SOON, about())
    value = message_value(message, PAGE)
    assert value["link"] == "http://127.0.0.1:1/jobs/team/lm/incidents/2"
    assert value["incident"]["lostSeconds"] == 2.0
    assert message_value(message)["link"] == ""
    assert slack_value(message, PAGE)["text"].endswith(f" <{value['link']}|incident>")


def test_hostile_texts_call_nobody_and_are_short() -> None:
    hostile = "<!channel> @channel <http://x|y> &\n\u202e\x1b[2J" * 1000
    culprit = replace(CULPRIT, text=hostile, pod=hostile)
    for one in (replace(OPEN, culprit=culprit), replace(GAVE_UP, culprit=culprit, reason=hostile)):
        (message,) = incident_messages(one, about())
        text = slack_value(message)["text"]
        assert "<" not in text
        assert ">" not in text
        assert "@channel" not in text
        assert message.text.isprintable()
        assert len(text) <= 6 * TEXT_SHOWN
        assert len(json.dumps(message_value(message))) < 500_000


@pytest.mark.parametrize("job", ["lm|x> <!channel> <http://evil/", "", "..", "a/b", "A"])
def test_what_is_no_name_of_a_job_is_in_no_link(job: str) -> None:
    (message,) = incident_messages(OPEN, ObjectName("u", "lm-1", "team", job))
    assert "<" not in slack_value(message, PAGE)["text"]
    assert message_value(message, PAGE)["link"] == ""


def test_so_many_objects_wait_at_most_and_others_are_counted() -> None:
    outbox = Outbox()
    for number in range(WAITING_MAX + 7):
        seen(outbox, GAVE_UP, T, number)
    seen(outbox, GAVE_UP, T, 0)
    message = outbox.next(T + SETTLE_SECONDS)
    assert message is not None
    assert message.left_out == 7
    seen(outbox, GAVE_UP, T, WAITING_MAX)
    outbox.sent(message, T + SETTLE_SECONDS)
    seen(outbox, GAVE_UP, T, WAITING_MAX + 9)
    message = outbox.next(T + SETTLE_SECONDS)
    assert message is not None
    assert message.left_out == 0


def test_a_count_is_about_no_object() -> None:
    message = Message(None, "left-out/x", State.LEFT_OUT, T, "3 notifications left out", left_out=3)
    assert message.id == "operator/left-out/x"
    assert slack_value(message, PAGE) == {"text": "3 notifications left out"}
    value = message_value(message, PAGE)
    assert (value["incident"], value["repair"], value["link"]) == (None, None, "")
