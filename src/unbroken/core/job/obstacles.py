"""What keeps a pod from running, in words for people.

Text that pods have written is bounded, and its control characters are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unbroken.core.job.record.redaction import clean
from unbroken.core.logs.lines import LineAssembler
from unbroken.spec.job.types import Condition
from unbroken.spec.keys import ConditionType

from .events import PodName

MARK = "; it waits: "
"""Begins what a condition's message says about the wait."""
CAUSES_MAX = 3
"""Causes in the condition."""
TEXT_CHARACTERS = 400
LINES_MAX = 8
LINE_CHARACTERS = 160
"""Most characters of what a container wrote last."""
NO_AGENT = "NoAgent"
REFUSED = "PodRefused"
ENDED = "CrashLoopBackOff"

_FAMILIES = {
    "Error": ENDED,
    "Completed": ENDED,
    "OOMKilled": ENDED,
    "StartError": ENDED,
    "ContainerCannotRun": ENDED,
    "ErrImagePull": "ImagePullBackOff",
}
"""Reasons of one cause that follow each other."""
_ADVICE = {
    ENDED: "the container's command ends before its agent is up; see its whole output with "
    "`kubectl logs {pod} --all-containers --previous`",
    "Unschedulable": "make room, or correct the template's requests, nodeSelector and tolerations",
    "ImagePullBackOff": "correct the image's name, or give the pod the right to pull it",
    "ErrImageNeverPull": "correct the image's name, or allow the node to pull it",
    "InvalidImageName": "correct the image's name",
    "CreateContainerConfigError": "create what is missing: the container then starts by itself",
    "FailedMount": "create what is missing: the container then starts by itself",
    REFUSED: "the pod is created as soon as the API server accepts it",
    NO_AGENT: "its command must run hyperpodrun or unbrokenrun",
}
"""What to do, by reason."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why one pod does not come up."""

    pod: PodName
    reason: str
    text: str
    lines: tuple[str, ...] = ()
    """What the container wrote last."""

    @property
    def cause(self) -> str:
        """The reason that stands for all reasons of one cause."""
        return _FAMILIES.get(self.reason, self.reason)

    def sentence(self, others: int = 0) -> str:
        """Which pod, which reason, what to do."""
        also = f" (and {others} more)" if others else ""
        parts = [f"pod {self.pod}{also}", self.reason, self.text]
        said = ": ".join(part for part in parts if part).rstrip(".")
        advice = _ADVICE.get(self.cause, "").format(pod=self.pod)
        return f"{said}; {advice}" if advice else said

    def told(self, others: int = 0) -> str:
        """The sentence, and below it what the container wrote last."""
        return "\n".join([self.sentence(others), *(f"| {line}" for line in self.lines)])


def printable(text: str, most: int = TEXT_CHARACTERS) -> str:
    """One bounded line without control characters; secrets are removed."""
    text = clean(" ".join(text.split()))
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return safe if len(safe) <= most else f"{safe[: most - 3]}..."


def container_lines(text: str) -> tuple[str, ...]:
    """The last lines of what a container wrote, without colours and control characters."""
    assembler = LineAssembler()
    found = [*assembler.feed(text.encode("utf-8", "replace")), *assembler.close()]
    lines = clean("\n".join(line.decode("utf-8", "replace") for line in found)).split("\n")
    kept = [line for line in lines if line.strip()][-LINES_MAX:]
    return tuple(_escaped(line)[:LINE_CHARACTERS] for line in kept)


def _escaped(line: str) -> str:
    """The line with its indentation, which tells a traceback's frames apart."""
    line = line.expandtabs(4).rstrip()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def with_wait(conditions: Sequence[Condition], text: str, reason: str) -> tuple[Condition, ...]:
    """The conditions, of which the one that is true says why the job waits; empty: nothing does."""
    newest = max((n for n, one in enumerate(conditions) if one.status == "True"), default=-1)
    found = []
    for number, one in enumerate(conditions):
        base, _, _ = one.message.partition(MARK)
        is_created = one.type == ConditionType.CREATED.value
        own = ConditionType.CREATED.value if is_created else one.reason
        if text and number == newest:
            new = replace(one, message=f"{base}{MARK}{text}", reason=reason if is_created else own)
        else:
            new = replace(one, message=base, reason=own) if MARK in one.message else one
        found.append(new)
    return tuple(found)


def split_wait(message: str) -> tuple[str, list[str]]:
    """A condition's message without what it says about the wait, and that line by line."""
    base, _, wait = message.partition(MARK)
    return base, wait.splitlines()


def summary(obstacles: Iterable[Obstacle]) -> str:
    """Each cause once, with one of its pods."""
    causes: dict[str, list[Obstacle]] = {}
    for one in obstacles:
        causes.setdefault(one.cause, []).append(one)
    shown = [(_clearest(found), len(found)) for found in list(causes.values())[:CAUSES_MAX]]
    return "\n".join(one.told(count - 1) for one, count in shown)


def _clearest(found: Iterable[Obstacle]) -> Obstacle:
    """The one to be shown of those with one cause: with lines if any has some, then by name."""
    return min(found, key=lambda one: (not one.lines, len(one.pod), one.pod))
