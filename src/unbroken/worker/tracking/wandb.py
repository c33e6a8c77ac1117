"""A run of Weights & Biases, whose ID is the job's. Tried with wandb 0.31, offline.

Weights & Biases drops what is logged for a step below its newest. So it counts the calls itself,
and the step is a metric of its own, which is the horizontal axis of all others. A step that is
written again has two points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .entries import Entry, RunPlan

STEP = "step"


class WandbRun:
    """One run, by the object that `wandb.init` returns."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self._library = plan, plan.library
        self._run: Any = None

    def open(self) -> str:
        """Begin the run, or resume it."""
        mine = {"id": self._plan.key, "resume": "allow"} if self._plan.key else {}
        if self._run is None:
            self._run = self._library.init(
                project=self._plan.project or None,
                name=self._plan.name or None,
                config=dict(self._plan.params),
                **mine,
            )
        self._run.define_metric("*", step_metric=STEP)
        self._run.config.update(dict(self._plan.tags), allow_val_change=True)
        return str(self._run.id)

    def write(self, entries: Sequence[Entry]) -> None:
        """Write metrics, each with its step."""
        for entry in entries:
            self._run.log({**entry.metrics, STEP: entry.step})

    def describe(self, tags: Mapping[str, str]) -> None:
        """Set values of the run's summary."""
        self._run.summary.update(dict(tags))

    def close(self, has_failed: bool) -> None:
        """End the run; the exit code is its state."""
        self._run.finish(exit_code=int(has_failed))

    def activate(self) -> None:
        """Do nothing: `wandb.init` has made it the run of the whole process."""

    def deactivate(self, has_failed: bool) -> None:
        """Do nothing: `close` has ended it."""
