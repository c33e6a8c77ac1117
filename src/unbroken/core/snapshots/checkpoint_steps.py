"""Checkpoint discovery of a node: the checkpoint of each prefix that all local ranks have written.

It follows the HyperPod agent 1.1.3, with one difference. The operator's choice at a start wins from
then on, even if no worker registers again. With the HyperPod agent, a node could then resume from a
later step than the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIXES_MAX = 64
STEPS_MAX = 64
"""Incomplete steps kept per prefix; the oldest are dropped."""


@dataclass(slots=True)
class _Prefix:
    expected: Mapping[str, int | None]
    """Number of local ranks that report each type; None: none will, and no step is ever
    complete."""
    best: tuple[int, str] | None = None
    """Newest complete step and its path."""
    reported: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    """Local ranks that have reported, by step and type."""
    is_over: bool = False
    """Another start has come since its clients registered."""


class CheckpointSteps:
    """The complete checkpoints, by prefix."""

    def __init__(self) -> None:
        self._prefixes: dict[str, _Prefix] = {}
        self._chosen: Mapping[str, Any] = {}

    def choose(self, progress: Mapping[str, Any]) -> None:
        """Set the checkpoint to resume from, as the operator has chosen; it may be an older one."""
        self._chosen = dict(progress)
        for name, known in self._prefixes.items():
            known.is_over = True
            known.reported.clear()
            known.best = _choice(progress.get(name)) or known.best

    def begin(self, prefix: str, expected: Mapping[str, int | None]) -> None:
        """Register what a client will report of a prefix; the operator's choice stays."""
        known = self._prefixes.get(prefix)
        if known is None and len(self._prefixes) >= PREFIXES_MAX:
            return
        if known is None or known.expected != expected or known.is_over:
            self._prefixes[prefix] = _Prefix(expected, _choice(self._chosen.get(prefix)))

    def report(self, prefix: str, kind: str, step: int, path: str, local_rank: int) -> None:
        """Note that a local rank has written its part of a step."""
        known = self._prefixes.get(prefix)
        if known is None or kind not in known.expected:
            return
        if known.best is not None and step <= known.best[0]:
            return
        told = known.reported.setdefault(step, {}).setdefault(kind, set())
        told.add(local_rank)
        if all(
            count is not None and len(known.reported[step].get(each, ())) == count
            for each, count in known.expected.items()
        ):
            known.best = step, path
            known.reported = {
                each: result for each, result in known.reported.items() if each > step
            }
        while len(known.reported) > STEPS_MAX:
            del known.reported[min(known.reported)]

    def path(self, prefix: str) -> str | None:
        """Return the path of the newest complete checkpoint."""
        known = self._prefixes.get(prefix)
        return known.best[1] if known is not None and known.best is not None else None

    def progress(self) -> dict[str, Any]:
        """Return the progress in the form of `/status`."""
        return {
            name: {"progressData": known.best[1], "progressCount": known.best[0]}
            for name, known in self._prefixes.items()
            if known.best is not None
        }


def _choice(value: object) -> tuple[int, str] | None:
    if not isinstance(value, Mapping):
        return None
    step, path = value.get("progressCount"), value.get("progressData")
    return (step, path) if type(step) is int and isinstance(path, str) else None
