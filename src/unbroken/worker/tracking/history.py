"""The job's incidents and goodput, as tags and metrics of a run.

The agent's answer is that of the operator (`wire.agent.HistoryCommand`), without secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .entries import PREFIX


@dataclass(frozen=True)
class Story:
    """Tags and metrics of one version of the history."""

    version: int
    tags: Mapping[str, str]
    metrics: Mapping[str, float]


def story(told: Mapping[str, Any]) -> Story | None:
    """Return tags and metrics of an agent's answer; None: it has no incidents yet."""
    incidents, version = told.get("incidents"), told.get("version")
    if not isinstance(incidents, list) or not isinstance(version, int) or not incidents:
        return None
    tags = {f"{PREFIX}incident.{one['number']}": _sentence(one) for one in incidents}
    tags[f"{PREFIX}restarts"] = str(told["restarts"])
    tags[f"{PREFIX}last_fault"] = str(incidents[-1]["fault"])
    metrics = {
        f"{PREFIX}{name}": float(told[name])
        for name in ("restarts", "seconds_lost", "steps_lost", "goodput")
        if told.get(name) is not None
    }
    return Story(version, tags, metrics)


def is_behind(told: Mapping[str, Any], attempt: int) -> bool:
    """True if an answer lacks the incident that led to this attempt."""
    known = [one["attempt"] for one in told.get("incidents") or ()]
    return max(known, default=-1) < attempt - 1


def _sentence(one: Mapping[str, Any]) -> str:
    """Return an incident as one line: what failed, the remedy, the cost."""
    parts = [f"attempt {one['attempt']}: {one['culprit']}", f"remedy {one['remedy']}"]
    if one.get("seconds") is not None:
        parts.append(f"{one['seconds']:.1f} s lost")
    if one.get("steps_lost") is not None:
        parts.append(f"{one['steps_lost']} steps repeated")
    return "; ".join(parts)
