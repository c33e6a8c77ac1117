"""Pods and scripts for the tests of a node's pure parts."""

from __future__ import annotations

from typing import Any

from unbroken.local.node.pods.events import (
    Create,
    Effect,
    Ended,
    Event,
    Exit,
    Note,
    Prepare,
    Prepared,
    Started,
)
from unbroken.local.node.pods.lifecycle import PodLifecycle

START = 1_000_000.0
"""Time at which the pods of these tests come to their node."""


def container(name: str, **fields: Any) -> dict[str, Any]:
    """Return a container with a command."""
    return {"name": name, "image": "any", "command": ["true"], **fields}


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return a pod of these containers; one named `main` if there are none."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "ns", "uid": "u1"},
        "spec": {"containers": list(containers) or [container("main")], **spec},
    }


def exit_of(code: int, at: float, reason: str = "", message: str = "") -> Exit:
    """Return an end at this time, a second after the start."""
    return Exit(code, reason, message, at - 1, at)


class Script:
    """Drives a machine through a story, with notes apart from other effects."""

    def __init__(self, pod: dict[str, Any]) -> None:
        self.machine = PodLifecycle(pod, START)
        self.now = START
        self.notes: list[Note] = []

    def step(self, event: Event, after: float = 0.0) -> list[Effect]:
        """Let time pass, then an event happen; return the effects."""
        self.now += after
        effects = self.machine.step(event, self.now)
        self.notes += [effect for effect in effects if isinstance(effect, Note)]
        return [effect for effect in effects if not isinstance(effect, Note)]

    def prepare(self) -> list[Effect]:
        """Prepare the pod until its first container is to be created."""
        from unbroken.core.tick import Tick

        assert self.step(Tick()) == [Prepare()]
        return self.step(Prepared())

    def start(self, name: str, attempt: int = 0, after: float = 0.0) -> list[Effect]:
        """Report the start of the container."""
        self.now += after
        return self.step(Started(name, attempt, f"{name}-{attempt}", self.now))

    def end(self, name: str, code: int, attempt: int = 0, after: float = 1.0) -> list[Effect]:
        """Report the end of the container."""
        self.now += after
        ended = exit_of(code, self.now)
        return self.step(Ended(name, attempt, f"{name}-{attempt}", ended))

    def reasons(self) -> list[str]:
        """Return the reasons of the recorded events."""
        return [note.reason for note in self.notes]


def created(*names: str) -> list[Effect]:
    """Return the first starts of these containers."""
    return [Create(name, 0) for name in names]
