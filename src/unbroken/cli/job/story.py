"""An incident as a report: culprit, evidence, stacks, timeline, remedy, cost.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from unbroken.cli.show import FIELD, Paper
from unbroken.core.diagnosis.rank_activity import is_library
from unbroken.core.diagnosis.stacks import CERTAIN, LIKELY, UNSURE
from unbroken.core.job.record.timeline import lost_steps, redo_seconds
from unbroken.core.job.recovery.symptoms import LAST_OUTPUT
from unbroken.core.job.recovery.words import (
    culprit_text,
    ends_with_a_line,
    remedy_words,
    until_text,
)
from unbroken.core.wording import counted, plural
from unbroken.spec.job.codec import is_cost_unknown, lost_since, seconds_known_lost
from unbroken.spec.job.incident import Incident, StackGroup, Symptom

from .views import RESUMED, span, stages

GROUPS_SHOWN = 5
FRAMES_SHOWN = 3
"""Frames shown of a group that is not an outlier."""
OUTLIER_FRAMES_SHOWN = 5
ALSO_SHOWN = 6
PATTERN_LEAST = 3
"""Incidents at least for `common` to look for a pattern."""
PLAIN = Paper()
COLOURS = {CERTAIN: "red", LIKELY: "red", UNSURE: "yellow"}
"""Colours of culprits by confidence."""


def story(
    incident: Incident,
    paper: Paper = PLAIN,
    *,
    now: float | None = None,
    is_full: bool = False,
) -> Iterator[str]:
    """Lines of the report; `is_full` shows every group, frame and signal."""
    culprit, field = incident.culprit, paper.field
    when = f"{datetime.fromtimestamp(incident.detected_at).astimezone():%Y-%m-%d %H:%M:%S}"
    head = f"incident {incident.number} (attempt {incident.attempt}): {culprit.fault}"
    yield from paper.wrap(f"{head}, {when}", 2, "bold", "")
    sure = f", {incident.confidence}" if incident.confidence else ""
    colour = COLOURS.get(incident.confidence, "red")
    yield from field("culprit", culprit_text(culprit) + sure, colour)
    what = without_blame(culprit.text, incident.blame)
    if because := because_text(incident):
        yield from field("because", because)
    if what:
        yield from field("what", what)
    for index, line in enumerate(unseen(incident, is_full=is_full)):
        yield from field("" if index else "evidence", f"| {line}")
    yield from _groups(incident.groups, paper, is_full=is_full)
    yield from field("remedy", f"{incident.remedy.value}: {remedy_words(incident)[0]}")
    yield from field("why", incident.reason)
    yield from _timeline(incident, paper)
    yield from _restored(incident, paper, is_full=is_full)
    yield from _also(incident, paper, is_full=is_full)
    yield from field("cost", cost_text(incident, now), "yellow")
    if incident.outcome:
        yield from field("outcome", incident.outcome)


def without_blame(text: str, blame: str) -> str:
    """The text without the blame at its beginning."""
    return text.removeprefix(blame).lstrip("; ") if blame else text


def because_text(incident: Incident) -> str:
    """Why this rank is the culprit; empty if the text of the culprit says it."""
    culprit = incident.culprit
    is_said = incident.blame == f"rank {culprit.rank} {culprit.text}"
    return "" if is_said else incident.blame


def unseen(incident: Incident, *, is_full: bool) -> Sequence[str]:
    """The evidence, without a stack that is shown with its group."""
    evidence = incident.culprit.evidence
    stacks = [one.stack for one in incident.groups if one.stack]
    if is_full or not any(evidence[: len(one)] == one for one in stacks):
        return evidence
    return [line for line in evidence if line.startswith(LAST_OUTPUT)]


def cost_text(incident: Incident, now: float | None = None) -> str:
    """Lost seconds, and lost steps if they are known."""
    cost, steps = seconds_known_lost(incident), lost_steps(incident)
    if cost is None:
        so_far = "" if now is None else f", {span(max(now - lost_since(incident), 0.0))} so far"
        return f"still open{so_far}"
    text = f"{cost:.3f} s"
    if is_cost_unknown(incident):
        if incident.step is not None:
            return f"not known yet: no step since then; {until_text(incident)}"
        rest = "no later sign of training (steps that the script reports are one)"
        return f"not known; {until_text(incident)}, and {rest}"
    if steps is None:
        return f"{text} at most, until a line of training" if ends_with_a_line(incident) else text
    if steps == 0:
        return f"{text}, no step lost"
    again = redo_seconds(incident)
    work = f", about {span(again)} of work" if again else ""
    # Steps are lost only where this one is known.
    last = incident.step or 0
    which = str(last) if steps == 1 else f"{last - steps + 1} to {last}"
    return f"{text} until training resumed, then {counted(steps, 'step')} repeated ({which}{work})"


def common(incidents: Sequence[Incident]) -> str:
    """The node, rank or fault of most incidents; empty if there is none or too few incidents."""
    if len(incidents) < PATTERN_LEAST:
        return ""
    culprits = [one.culprit for one in incidents]
    shares = []
    for name, values in (
        ("on {}", [one.node for one in culprits]),
        ("by rank {}", ["" if one.rank is None else str(one.rank) for one in culprits]),
        ("{}", [one.fault for one in culprits]),
    ):
        value, count = Counter(values).most_common(1)[0]
        if value and count * 2 > len(incidents):
            shares.append(f"{count} {name.format(value)}")
    return f"of {len(incidents)} incidents: {', '.join(shares)}" if shares else ""


def folded(stack: Sequence[str], most: int) -> list[str]:
    """The innermost frame and the user's frames, up to `most`; dots replace frames between."""
    if len(stack) <= most:
        return list(stack)
    own = [index for index, frame in enumerate(stack) if not is_library(frame)]
    kept = sorted({0, *own[: most - 1]})
    spare = (index for index in range(1, len(stack)) if index not in kept)
    kept = sorted(
        {*kept, *(index for index, _ in zip(spare, range(most - len(kept)), strict=False))}
    )
    lines, last = [], -1
    for index in [*kept, len(stack)]:
        hidden = index - last - 1
        if hidden:
            lines.append(stack[last + 1] if hidden == 1 else f"... {counted(hidden, 'frame')}")
        if index < len(stack):
            lines.append(stack[index])
        last = index
    return lines


def group_lines(groups: Iterable[StackGroup], paper: Paper) -> Iterator[str]:
    """Lines of all groups of ranks, with whole stacks."""
    for group in groups:
        yield f"\n{paper.paint(_group_text(group), 'red' if group.is_outlier else 'green')}"
        yield from (f"    {frame}" for frame in group.stack)


def _group_text(group: StackGroup, size: str = "") -> str:
    does = group.doing if group.count == 1 else plural(group.doing)
    return f"{_ranks_text(group.ranks, group.count)}{size}: {does}"


def _ranks_text(ranks: str, count: int) -> str:
    return f"{'rank' if count == 1 else 'ranks'} {ranks}"


def _groups(groups: Sequence[StackGroup], paper: Paper, *, is_full: bool) -> Iterator[str]:
    has_outliers = any(one.is_outlier for one in groups)
    shown = groups if is_full else groups[:GROUPS_SHOWN]
    previous = ""
    for group in shown:
        name = ("differs" if group.is_outlier else "others") if has_outliers else "ranks"
        size = f" ({group.count})" if group.count > 2 else ""
        colour = "red" if group.is_outlier else ""
        yield from paper.field("" if name == previous else name, _group_text(group, size), colour)
        most = OUTLIER_FRAMES_SHOWN if group.is_outlier else FRAMES_SHOWN
        for frame in group.stack if is_full else folded(group.stack, most):
            yield from paper.wrap(f"| {frame}", FIELD + 4, "dim")
        previous = name
    if len(shown) < len(groups):
        yield from paper.field(
            "", f"and {counted(len(groups) - len(shown), 'group')} more: --stacks"
        )


def _timeline(incident: Incident, paper: Paper) -> Iterator[str]:
    for index, (name, at, since) in enumerate(stages(incident)):
        after = "" if name == "detected" else f"  {since:+.3f} s"
        of_stage = {"last progress": incident.step, RESUMED: incident.resumed_step}.get(name)
        step = "" if of_stage is None else f" (step {of_stage})"
        shown = "first step" if name == RESUMED and step else name
        last = incident.slowest.get(name)
        pod = f" ({last} last)" if last else ""
        text = f"{_clock(at)}  {shown:<13}{after}{step}{pod}".rstrip()
        yield from paper.field("" if index else "timeline", text)


def _restored(incident: Incident, paper: Paper, *, is_full: bool) -> Iterator[str]:
    """The state that the next attempt started with, and the rank that restored it last."""
    found = incident.restored
    if not found:
        if incident.resumed:
            yield from paper.field("data", incident.resumed)
        return
    agree = incident.replicas_agree
    text = f"{incident.resumed}; the replicas agree" if agree else incident.resumed
    yield from paper.field("state", text, "red" if agree is False else "")
    last = max(found, key=lambda one: one.seconds)
    slowest = f"; rank {last.slowest} took longest" if sum(one.count for one in found) > 1 else ""
    yield from paper.field("", f"restored in {last.seconds:.3f} s{slowest}")
    for one in found if is_full else ():
        ranks = _ranks_text(one.ranks, one.count)
        name = f"{one.name} " if one.name else ""
        checksum = f", checksum {one.checksum}" if one.checksum else ""
        text = f"| {ranks}: {name}after step {one.step} from {one.source}"
        yield from paper.wrap(f"{text}, {one.seconds:.3f} s{checksum}", FIELD + 4, "dim")


def _also(incident: Incident, paper: Paper, *, is_full: bool) -> Iterator[str]:
    others = [one for one in incident.signals if one != incident.culprit]
    shown = others if is_full else others[:ALSO_SHOWN]
    for index, one in enumerate(shown):
        yield from paper.field("" if index else "also seen", sign_text(one, incident.detected_at))
    if len(shown) < len(others):
        yield from paper.field("", f"and {len(others) - len(shown)} more: --stacks")


def sign_text(symptom: Symptom, detected_at: float) -> str:
    """A symptom in a line, with its distance from the detection."""
    since = symptom.at - detected_at
    return f"{since:+.3f} s  {culprit_text(symptom)}: {symptom.fault}: {symptom.text}"


def _clock(at: float) -> str:
    """Local time of day with milliseconds."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S.%f")[:-3]
