"""An incident in words for people: its culprit, its remedy, its cost."""

from __future__ import annotations

from unbroken.core.job.record.timeline import lost_steps
from unbroken.core.wording import counted
from unbroken.spec.job.codec import is_cost_unknown, seconds_known_lost
from unbroken.spec.job.incident import RECOVERED, Incident, Remedy, Symptom
from unbroken.spec.job.types import KIND

from .ladder import rung_of


def culprit_text(culprit: Symptom) -> str:
    """The culprit as `rank 3 (train-pods-1 on node-1)`."""
    place = " on ".join(part for part in (culprit.pod, culprit.node) if part)
    if culprit.rank is None:
        return f"pod {place}" if culprit.pod else (f"node {culprit.node}" if place else KIND)
    return f"rank {culprit.rank} ({place})" if place else f"rank {culprit.rank}"


def incident_line(incident: Incident) -> str:
    """An incident in a line: fault, remedy, cost."""
    cost = seconds_known_lost(incident)
    text = incident.culprit.text.removeprefix(f"rank {incident.culprit.rank} ")
    what = f"incident {incident.number}: {culprit_text(incident.culprit)}: {text}"
    plan, did = remedy_words(incident)
    if cost is None:
        return f"{what}; next: {plan}"
    if incident.remedy is Remedy.FAIL or incident.outcome not in ("", RECOVERED):
        why = incident.reason if incident.remedy is Remedy.FAIL else incident.outcome
        return f"{what}; {did}: {why}"
    steps = lost_steps(incident)
    again = f", {counted(steps, 'step')} repeated" if steps else ""
    wrong = "; REPLICAS DISAGREE" if incident.replicas_agree is False else ""
    lost = until_text(incident) if is_cost_unknown(incident) else f"{cost:.3f} s lost"
    return f"{what}; {did}; {lost}{again}{wrong}"


def ends_with_a_line(incident: Incident) -> bool:
    """True if the job reports no steps, and a line of its output showed that it trains again: it
    may have made steps before."""
    has_steps = incident.step is not None or incident.resumed_step is not None
    return incident.progress_at is not None and not has_steps


def until_text(incident: Incident) -> str:
    """The seconds that are known of an incident after which nothing has shown when training
    resumed."""
    seconds = seconds_known_lost(incident) or 0.0
    has_output = incident.first_output_at is not None
    return f"{seconds:.3f} s until {'the first output' if has_output else 'the workers ran'}"


def remedy_words(incident: Incident) -> tuple[str, str]:
    """The remedy of an incident as a plan and as done."""
    rung = rung_of(incident.remedy)
    if not rung.plan_kept or not incident.kept:
        return rung.plan, rung.done
    whose = "its process" if incident.kept == 1 else "their processes"
    others = f"{counted(incident.kept, 'rank')} kept {whose}"
    return rung.plan_kept, f"{rung.done}, {others}"
