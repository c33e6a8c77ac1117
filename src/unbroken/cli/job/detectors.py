"""`unbroken detectors`: the detectors of a job, their record and their modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from unbroken.cli.completion import JobName
from unbroken.cli.connection import JOBS, Cluster
from unbroken.cli.options import CommonOptions
from unbroken.cli.place import Use
from unbroken.cli.show import note, print_table
from unbroken.errors import SpecError
from unbroken.spec.job.detectors import DEFAULTS, Detector, Mode, read_detectors
from unbroken.spec.job.ledger import DetectorRecord, Ledger
from unbroken.spec.keys import DETECTORS

from .agents import bound_lines, reports, watch_value
from .views import ENDED, Object, ledger_of, state

PROVEN = 3
"""Right alarms, without a wrong one, after which the command suggests a stronger mode."""
NEXT = {Mode.SHADOW: Mode.WARN, Mode.WARN: Mode.ACT}
MEANINGS = {
    Detector.STOPPED: "a process is stopped by a signal",
    Detector.SILENT: "the whole job is silent for longer than ever before",
    Detector.SPINNING: "the whole job is silent, and a rank computes in one place",
    Detector.STUCK: "a process hangs in the kernel",
    Detector.SLOW: "steps take much longer than before",
    Detector.NAN: "a metric is not a finite number",
    Detector.SPIKE: "the loss has left its range",
    Detector.CHECKPOINT: "no checkpoint for several times the usual interval",
}


def _complete(incomplete: str) -> list[str]:
    name, has_mode, _ = incomplete.partition("=")
    names = [name] if has_mode else [*(one.value for one in Detector), "*"]
    words = [f"{one}={mode.value}" for one in names for mode in Mode]
    return [word for word in words if word.startswith(incomplete)]


def command(
    job: JobName,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DETECTOR=MODE...",
            help="New mode of a detector: off, shadow, warn or act; * sets all others.",
            autocompletion=_complete,
            show_default=False,
        ),
    ] = None,
    *,
    options: CommonOptions,
) -> None:
    """Show the detectors of a job, their right and wrong alarms, and set their modes.

    Modes: shadow counts alarms, warn also records an event, act opens an incident and recovers.
    A change takes effect when the workers start the next time. For a running job of a local
    cluster, the last lines show how soon a hang of each rank is detected.

    Example: `unbroken detectors train 'spike=act'`
    """

    ranks: list[dict[str, Any]] = []

    async def act(cluster: Cluster) -> dict[str, Any]:
        found = await cluster.job(job)
        if not changes:
            answers = await reports(cluster, await cluster.pods(job))
            ranks.extend(watch_value(one) for each in answers.values() for one in each.watch)
            ranks.sort(key=lambda one: int(one["rank"]))
            return found
        return await set_modes(cluster, found, changes)

    value = detector_values(options.run(act, Use.CHANGE if changes else Use.READ))
    if options.output.is_data:
        options.output.print({"job": job, "detectors": value, "ranks": ranks})
        return
    titles = ["DETECTOR", "MODE", "RIGHT", "WRONG", "LOOKS FOR"]
    keys = ("detector", "mode", "right", "wrong", "means")
    print_table(titles, ([one[key] for key in keys] for one in value))
    for line in bound_lines(ranks):
        print(line)
    if changes:
        note(f"takes effect at the next start; to restart now: unbroken restart {job}")
    elif hint := promotion(job, value):
        note(hint)


async def set_modes(cluster: Cluster, job: Object, changes: Sequence[str]) -> dict[str, Any]:
    """Set modes of a job's detectors by DETECTOR=MODE, and return the job.  Raises SpecError."""
    name = job["metadata"]["name"]
    if state(job) in ENDED:
        raise SpecError(f"job {name} has ended ({state(job)}); its detectors no longer run")
    text = changed(_annotation(job), changes)
    # Another job may have this name by now: Kubernetes refuses to change that one.
    metadata = {"annotations": {DETECTORS: text}, "uid": job["metadata"]["uid"]}
    return await cluster.patch(JOBS, name, {"metadata": metadata})


def changed(annotation: str, changes: Sequence[str]) -> str:
    """The annotation after these DETECTOR=MODE changes.  Raises SpecError."""
    read_detectors("; ".join(changes))
    words = [word.strip() for word in annotation.split(";") if word.strip()]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    given |= dict(word.split("=", 1) for word in changes)
    return "; ".join(f"{name.strip()}={mode.strip()}" for name, mode in given.items())


def detector_values(job: Object) -> list[dict[str, Any]]:
    """Each detector's mode in a job, and its right and wrong alarms there."""
    return [
        {
            "detector": one.value,
            "mode": mode.value,
            "right": record.right,
            "wrong": record.wrong,
            "means": MEANINGS[one],
        }
        for one, mode, record in _records(_modes(job), ledger_of(job))
    ]


def promotion(job: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The command that promotes detectors without a wrong alarm; empty if there are none."""
    words = [
        f"{one['detector']}={NEXT[Mode(one['mode'])].value}"
        for one in found
        if Mode(one["mode"]) in NEXT and one["right"] >= PROVEN and not one["wrong"]
    ]
    return (
        f"no wrong alarm so far; to promote: unbroken detectors {job} {' '.join(words)}"
        if words
        else ""
    )


def _records(
    modes: Mapping[Detector, Mode], ledger: Ledger
) -> list[tuple[Detector, Mode, DetectorRecord]]:
    return [
        (one, modes[one], ledger.detectors.get(one.value, DetectorRecord())) for one in Detector
    ]


def _annotation(job: Object) -> str:
    return str((job["metadata"].get("annotations") or {}).get(DETECTORS) or "")


def _modes(job: Object) -> Mapping[Detector, Mode]:
    try:
        return read_detectors(_annotation(job))
    except SpecError:
        return DEFAULTS  # as the operator does, which has refused the job or warned
