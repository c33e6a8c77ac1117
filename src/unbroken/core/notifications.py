"""Notifications: which states of incidents and of repairs are told, once each, and how many.  Pure.

A state is a stage of an incident (found, recovered, gave-up, ended) or of a repair of a node
(repair-began, repair-ended). Of an incident only the newest state is told: a fault that is repaired
within SETTLE_SECONDS is one message. The states that were told are noted in an annotation of the
object itself, so another operator does not repeat them. States older than OLDEST_SECONDS are never
told: neither those from before notifications were switched on, nor those that no receiver took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from unbroken.core.job.recovery.words import culprit_text, incident_line
from unbroken.core.wording import counted
from unbroken.spec.job.codec import seconds_lost
from unbroken.spec.job.incident import RECOVERED, Incident, Remedy
from unbroken.spec.job.rules import is_label
from unbroken.spec.nodes.kinds import NodeRecordSpec, RepairRecord
from unbroken.spec.times import time_text

SETTLE_SECONDS = 5.0
"""Seconds from a state to its message: most faults are repaired within them, and the last values of
an incident come after its end."""
OLDEST_SECONDS = 600.0
"""Age after which a state is not told any more; retries end then, too."""
WINDOW_SECONDS = 60.0
MESSAGES_MAX = 20
"""Messages in WINDOW_SECONDS. Slack takes one a second."""
BACKOFF_FIRST, BACKOFF_LONGEST = 1.0, 60.0
"""Seconds until a message is tried again, and the longest of these times."""
TEXT_SHOWN = 1000
"""Characters of a text in a message."""
WAITING_MAX = 1000
"""Objects with messages that wait; those of further objects are left out."""
NOTE_MAX = 64
"""States that an annotation names."""
VERSION = 1
"""Version of the form of the messages."""


class State(Enum):
    """The states that are told."""

    FOUND = "found"
    RECOVERED = "recovered"
    GAVE_UP = "gave-up"
    """The job has failed."""
    ENDED = "ended"
    """The incident ended in another way: its outcome says how."""
    REPAIR_BEGAN = "repair-began"
    REPAIR_ENDED = "repair-ended"
    LEFT_OUT = "left-out"
    """Messages were not sent: there were too many, or nobody took them."""


@dataclass(frozen=True, slots=True)
class ObjectName:
    """The object that a message is about."""

    uid: str
    name: str
    namespace: str = ""
    """Namespace of an Incident; empty: a NodeRecord."""
    job: str = ""
    """Job of an Incident."""


@dataclass(frozen=True, slots=True)
class Message:
    """One state of one object."""

    about: ObjectName | None
    """None: it is about messages that were left out."""
    key: str
    """Name of the state within the object, as the annotation notes it."""
    state: State
    at: float
    """Time of the state, in seconds since the epoch."""
    text: str
    incident: Incident | None = None
    repair: RepairRecord | None = None
    left_out: int = 0
    """Messages that were left out before this one."""

    @property
    def id(self) -> str:
        """The same for each try of this message, by any operator."""
        return f"{self.about.uid if self.about else 'operator'}/{self.key}"


def incident_messages(incident: Incident, about: ObjectName) -> list[Message]:
    """Return the newest state of an incident."""
    state, at = State.FOUND, incident.detected_at
    if incident.outcome:
        state = State.RECOVERED if incident.outcome == RECOVERED else State.ENDED
        state = State.GAVE_UP if incident.remedy is Remedy.FAIL else state
        at = incident.ended_at or incident.progress_at or incident.detected_at
    text = f"{state.value}: job {about.namespace}/{about.job}: {incident_line(incident)}"
    return [Message(about, state.value, state, at, _one_line(text), incident=incident)]


def repair_messages(record: NodeRecordSpec, about: ObjectName) -> list[Message]:
    """Return the newest state of each repair of a node that is kept, oldest first."""
    repairs = [*record.history, *([record.repair] if record.repair else [])]
    return [_repair_message(one, about) for one in repairs]


def _repair_message(repair: RepairRecord, about: ObjectName) -> Message:
    ended = repair.ended_at is not None
    state = State.REPAIR_ENDED if ended else State.REPAIR_BEGAN
    action = "burn-in" if repair.action.value == "none" else repair.action.value
    how = f" {repair.state.value}" if ended else ""
    place = f" by {repair.replacement}" if repair.replacement else ""
    why = f"{repair.reason}{f': {repair.message}' if repair.message else ''}"
    text = f"{state.value}: node {about.name}: {action}{place}{how}: {why}"
    key = f"{time_text(repair.began_at, has_microseconds=True)}/{state.value}"
    at = repair.began_at if repair.ended_at is None else repair.ended_at
    return Message(about, key, state, at, _one_line(text), repair=repair)


def _one_line(text: str) -> str:
    """A text without line breaks and invisible characters: a second line could be a false
    message."""
    shown = text[: 2 * TEXT_SHOWN]
    plain = "".join(one if one.isprintable() else " " for one in shown)
    return " ".join(plain.split())[:TEXT_SHOWN]


def sent_states(annotation: str) -> tuple[str, ...]:
    """The keys of the states that an object's annotation notes."""
    return tuple(filter(None, annotation.split(",")[-NOTE_MAX:]))


def note(before: Iterable[str], key: str) -> str:
    """The annotation with one more state."""
    return ",".join([*(one for one in before if one != key), key][-NOTE_MAX:])


class Outbox:
    """Messages that wait, and the decision which is sent when."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Message]] = {}
        """By uid of the object."""
        self._told: dict[str, float] = {}
        """Ids of messages that need no more tries, with the time of their state."""
        self._sent: deque[float] = deque()
        """Times of the messages of the last WINDOW_SECONDS."""
        self._left_out = 0
        self._left_out_at = 0.0
        self._failures = 0
        self._again_at = float("-inf")

    def look(self, uid: str, messages: Sequence[Message], told: Iterable[str], now: float) -> None:
        """Take all states of the object of this uid; `told`: those that its annotation notes."""
        done = set(told)
        waiting = [
            one
            for one in messages
            if one.key not in done and one.id not in self._told and now - one.at <= OLDEST_SECONDS
        ]
        is_new = self._waiting.pop(uid, None) is None
        if is_new and len(self._waiting) >= WAITING_MAX:
            for one in waiting:
                self._leave_out(one, now)
        elif waiting:
            self._waiting[uid] = waiting

    def told(self, uid: str) -> list[str]:
        """Keys of the states of an object that need no more tries, oldest first."""
        return [one.removeprefix(f"{uid}/") for one in self._told if one.startswith(f"{uid}/")]

    def next(self, now: float) -> Message | None:
        """The message to send now; None: there is none.

        Messages above the limit are left out. Those of jobs that have failed wait instead.
        """
        self._expire(now)
        due = [one for one in self._every() if now >= one.at + SETTLE_SECONDS]
        if self._is_full(now):
            for one in due:
                if one.state is not State.GAVE_UP:
                    self._leave_out(one, now)
            return None
        if now < self._again_at:
            return None
        if due:
            return replace(min(due, key=lambda one: one.at), left_out=self._left_out)
        if self._is_count_due(now):
            text = f"{counted(self._left_out, 'notification')} left out"
            key = f"{State.LEFT_OUT.value}/{time_text(now, has_microseconds=True)}"
            return Message(None, key, State.LEFT_OUT, now, text, left_out=self._left_out)
        return None

    def next_at(self, now: float) -> float | None:
        """The earliest time at which there may be something to do; None: not before `look`."""
        free = self._sent[0] + WINDOW_SECONDS if self._is_full(now) else now
        times = [
            max(one.at + SETTLE_SECONDS, free if one.state is State.GAVE_UP else now)
            for one in self._every()
        ]
        times += [free] if self._is_count_due(now) else []
        return max(min(times), self._again_at) if times else None

    def sent(self, message: Message, now: float) -> None:
        """Note that the receiver has taken a message."""
        self._failures = 0
        self._sent.append(now)
        self._left_out -= message.left_out
        self._done(message)

    def refused(self, message: Message, now: float) -> None:
        """Note that the receiver will never take a message."""
        self._sent.append(now)
        if message.about is None:
            self._left_out = 0
        else:
            self._leave_out(message, now)

    def failed(self, now: float, seconds: float = 0.0) -> float:
        """Note a failed try; return the seconds until the next one.

        `seconds`: least time that the receiver asks for.
        """
        self._failures += 1
        grown = BACKOFF_FIRST * 2.0 ** min(self._failures - 1, 16)
        wait = max(min(grown, BACKOFF_LONGEST), min(seconds, OLDEST_SECONDS))
        self._again_at = now + wait
        return wait

    def _every(self) -> Iterator[Message]:
        return (one for messages in self._waiting.values() for one in messages)

    def _is_full(self, now: float) -> bool:
        while self._sent and now - self._sent[0] >= WINDOW_SECONDS:
            self._sent.popleft()
        return len(self._sent) >= MESSAGES_MAX

    def _expire(self, now: float) -> None:
        for one in [one for one in self._every() if now - one.at > OLDEST_SECONDS]:
            self._leave_out(one, now)
        self._told = {key: at for key, at in self._told.items() if now - at <= 2 * OLDEST_SECONDS}

    def _is_count_due(self, now: float) -> bool:
        """True if the number of messages that were left out is to be sent by itself."""
        return self._left_out > 0 and now - self._left_out_at <= OLDEST_SECONDS

    def _leave_out(self, message: Message, now: float) -> None:
        self._left_out += 1
        self._left_out_at = now
        self._done(message)

    def _done(self, message: Message) -> None:
        if message.about is None:
            return
        self._told[message.id] = message.at
        rest = [one for one in self._waiting.pop(message.about.uid, ()) if one.key != message.key]
        if rest:
            self._waiting[message.about.uid] = rest


def message_value(message: Message, page: str = "") -> dict[str, Any]:
    """A message as JSON.  `page`: address of the live page, with a slash at its end."""
    return {
        "version": VERSION,
        "id": message.id,
        "state": message.state.value,
        "time": time_text(message.at, has_microseconds=True),
        "text": message.text,
        "link": page_link(message, page),
        "leftOut": message.left_out,
        "incident": _incident_value(message),
        "repair": _repair_value(message),
    }


def page_link(message: Message, page: str) -> str:
    """The address of the incident on the live page; empty: there is none."""
    if not page or message.incident is None or message.about is None:
        return ""
    about = message.about
    # The name of the job is that of an owner reference, which may be any text.
    if not all(map(is_label, about.job.split("."))):
        return ""
    return f"{page}jobs/{about.namespace}/{about.job}/incidents/{message.incident.number}"


def _incident_value(message: Message) -> dict[str, Any] | None:
    incident, about = message.incident, message.about
    if incident is None or about is None:
        return None
    culprit = incident.culprit
    return {
        "namespace": about.namespace,
        "job": about.job,
        "number": incident.number,
        "attempt": incident.attempt,
        "fault": incident.fault or culprit.fault,
        "culprit": culprit_text(culprit),
        "rank": culprit.rank,
        "pod": culprit.pod,
        "node": culprit.node,
        "remedy": incident.remedy.value,
        "outcome": incident.outcome,
        "lostSeconds": seconds_lost(incident),
    }


def _repair_value(message: Message) -> dict[str, Any] | None:
    repair, about = message.repair, message.about
    if repair is None or about is None:
        return None
    return {
        "node": about.name,
        "action": repair.action.value,
        "state": repair.state.value,
        "reason": repair.reason,
        "message": repair.message,
        "replacement": repair.replacement,
        "began": time_text(repair.began_at, has_microseconds=True),
    }


_ESCAPES = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord("@"): "@\u200b"}
"""Characters with a meaning: `<!channel>` would call everybody in Slack, and `@channel` in
Mattermost, but not with an invisible character after `@`."""


def slack_value(message: Message, page: str = "") -> Mapping[str, Any]:
    """A message in the form of Slack's incoming webhooks, which Mattermost and others take, too."""
    text = message.text.translate(_ESCAPES)
    if link := page_link(message, page):
        text = f"{text} <{link}|incident>"
    if message.left_out and message.about is not None:
        text = f"{text} ({counted(message.left_out, 'earlier notification')} left out)"
    return {"text": text}
