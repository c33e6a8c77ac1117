"""Obstacles that keep a pod from running, in words for people.

Text that pods have written is bounded, and its control characters are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unbroken.core.job.record.redaction import clean
from unbroken.core.logs.lines import LineAssembler
from unbroken.spec.job.types import Condition
from unbroken.spec.keys import AGENT, ConditionType

from .events import PodName

MARK = "; it waits: "
"""Marks, in a condition's message, the beginning of the part about the wait."""
CAUSES_MAX = 3
"""Number of causes shown in the condition."""
TEXT_CHARACTERS = 400
LINES_MAX = 8
LINE_CHARACTERS = 160
"""Characters kept of a line that a container wrote last."""
NO_AGENT = "NoAgent"
AGENT_SHARED = "AgentShared"
NOT_PROVEN = "AgentNotProven"
NOT_READY = "WorkersNotReady"
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
"""Reasons that follow each other and share a cause."""
_OWN_ADDRESS = (
    "give the agent of each pod the address of its pod, by the option --server-host=$(AGENT_HOST): "
    "without it HyperPod's agent listens on all addresses of its machine"
)
_CANNOT_LISTEN = "Exception in launching HyperPodElasticAgentServer"
"""Text in the last lines of HyperPod's agent whose port is in use (agent 1.1.3)."""
_ADVICE = {
    AGENT_SHARED: _OWN_ADDRESS,
    ENDED: "the container's command ends before its agent is up; see its whole output with "
    "`kubectl logs {pod} --all-containers --previous`",
    "Unschedulable": "make room, or correct the template's requests, nodeSelector and tolerations",
    "ImagePullBackOff": "correct the image's name, or give the pod the right to pull it",
    "ErrImageNeverPull": "correct the image's name, or allow the node to pull it",
    "InvalidImageName": "correct the image's name",
    "CreateContainerConfigError": "create what is missing: the container then starts by itself",
    "FailedMount": "create what is missing: the container then starts by itself",
    REFUSED: "the pod is created as soon as the API server accepts it",
    NOT_READY: "see what they wrote with `kubectl logs {pod} --all-containers`",
    NO_AGENT: "its command must run hyperpodrun or unbrokenrun: see what it wrote with `kubectl "
    f"logs {{pod}}`; or let the operator add an agent, by the annotation {AGENT}: injected",
}
"""Advice to the user, by reason."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why one pod does not start."""

    pod: PodName
    reason: str
    text: str
    lines: tuple[str, ...] = ()
    """The last lines that the container wrote."""

    @property
    def cause(self) -> str:
        """Return the reason that represents all reasons of one cause."""
        return _FAMILIES.get(self.reason, self.reason)

    def sentence(self, others: int = 0) -> str:
        """Return one sentence: the pod, the reason, the advice."""
        also = f" (and {others} more)" if others else ""
        parts = [f"pod {self.pod}{also}", self.reason, self.text]
        said = ": ".join(part for part in parts if part).rstrip(".")
        advice = _ADVICE.get(self.cause, "").format(pod=self.pod)
        if any(_CANNOT_LISTEN in line for line in self.lines):
            advice = f"its port is in use: {_OWN_ADDRESS}"
        return f"{said}; {advice}" if advice else said

    def full_text(self, others: int = 0) -> str:
        """Return the sentence, followed by the last lines that the container wrote."""
        return "\n".join([self.sentence(others), *(f"| {line}" for line in self.lines)])


def printable(text: str, most: int = TEXT_CHARACTERS) -> str:
    """One bounded line without control characters; secrets are removed."""
    text = clean(" ".join(text.split()))
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return safe if len(safe) <= most else f"{safe[: most - 3]}..."


def container_lines(text: str) -> tuple[str, ...]:
    """Return the last lines of a container's output, without colours and control characters."""
    assembler = LineAssembler()
    found = [*assembler.feed(text.encode("utf-8", "replace")), *assembler.close()]
    lines = clean("\n".join(line.decode("utf-8", "replace") for line in found)).split("\n")
    kept = [line for line in lines if line.strip()][-LINES_MAX:]
    return tuple(_escaped(line)[:LINE_CHARACTERS] for line in kept)


def _escaped(line: str) -> str:
    """Return the line escaped, with its indentation: that distinguishes the frames of a
    traceback."""
    line = line.expandtabs(4).rstrip()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def with_wait(conditions: Sequence[Condition], text: str, reason: str) -> tuple[Condition, ...]:
    """Return the conditions with the job's wait in the true one; an empty `text` removes the
    wait."""
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
    """Return a condition's message without its part about the wait, and the lines of that part."""
    base, _, wait = message.partition(MARK)
    return base, wait.splitlines()


def summary(obstacles: Iterable[Obstacle]) -> str:
    """Each cause once, with one of its pods."""
    causes: dict[str, list[Obstacle]] = {}
    for one in obstacles:
        causes.setdefault(one.cause, []).append(one)
    shown = [(_clearest(found), len(found)) for found in list(causes.values())[:CAUSES_MAX]]
    return "\n".join(one.full_text(count - 1) for one, count in shown)


def _clearest(found: Iterable[Obstacle]) -> Obstacle:
    """Return the obstacle to show among those with one cause: with lines if any has some, then by
    name."""
    return min(found, key=lambda one: (not one.lines, len(one.pod), one.pod))
