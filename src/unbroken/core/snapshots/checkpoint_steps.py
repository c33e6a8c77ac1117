"""Which checkpoint of each prefix all local ranks have written: checkpoint discovery of a node.

As the HyperPod agent 1.1.3 does it, but for one thing: what the operator chooses at a start wins
from then on, also where no worker introduces itself anew.  There a node could resume from a later
step than the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIXES_MAX = 64
STEPS_MAX = 64
"""Incomplete ones of a prefix; the oldest are forgotten."""


@dataclass(slots=True)
class _Prefix:
    expected: Mapping[str, int | None]
    """How many local ranks tell of each type; None: nobody will, and no step is ever complete."""
    best: tuple[int, str] | None = None
    """Newest complete step and its path."""
    told: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    """Local ranks, by step and type."""
    is_over: bool = False
    """Another start has come since its clients introduced themselves."""


class CheckpointSteps:
    """What is complete, by prefix."""

    def __init__(self) -> None:
        self._prefixes: dict[str, _Prefix] = {}
        self._chosen: Mapping[str, Any] = {}

    def choose(self, progress: Mapping[str, Any]) -> None:
        """The operator says where to resume from; it may go back."""
        self._chosen = dict(progress)
        for name, known in self._prefixes.items():
            known.is_over = True
            known.told.clear()
            known.best = _choice(progress.get(name)) or known.best

    def begin(self, prefix: str, expected: Mapping[str, int | None]) -> None:
        """A client says what will be told of a prefix; the operator's choice stands."""
        known = self._prefixes.get(prefix)
        if known is None and len(self._prefixes) >= PREFIXES_MAX:
            return
        if known is None or known.expected != expected or known.is_over:
            self._prefixes[prefix] = _Prefix(expected, _choice(self._chosen.get(prefix)))

    def tell(self, prefix: str, kind: str, step: int, path: str, local_rank: int) -> None:
        """A local rank has written its part of a step."""
        known = self._prefixes.get(prefix)
        if known is None or kind not in known.expected:
            return
        if known.best is not None and step <= known.best[0]:
            return
        told = known.told.setdefault(step, {}).setdefault(kind, set())
        told.add(local_rank)
        if all(
            count is not None and len(known.told[step].get(each, ())) == count
            for each, count in known.expected.items()
        ):
            known.best = step, path
            known.told = {each: found for each, found in known.told.items() if each > step}
        while len(known.told) > STEPS_MAX:
            del known.told[min(known.told)]

    def path(self, prefix: str) -> str | None:
        """Path of the newest complete one."""
        known = self._prefixes.get(prefix)
        return known.best[1] if known is not None and known.best is not None else None

    def progress(self) -> dict[str, Any]:
        """As `/status` has it."""
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
