"""Worlds in a file, one line of JSON each: those that once failed stay as they were, whatever the
scenario that is drawn for their seed today."""

from __future__ import annotations

import json
from dataclasses import dataclass

from unbroken.spec.problems import Report
from unbroken.spec.schema.fields import read_record, write_record

from .scenario import Scenario
from .simulation import ACTIONS


@dataclass(frozen=True, slots=True)
class RecordedWorld:
    """A world that once failed."""

    seed: int
    """Seed of the random numbers of its run."""
    cause: str
    """Reason of the failure: a machine was wrong, or a rule or the world itself."""
    scenario: Scenario


def write_line(world: RecordedWorld) -> str:
    """Return the line of a world. What is absent has the default of its class."""
    return json.dumps(write_record(world, is_minimal=True))


def read_worlds(text: str) -> list[RecordedWorld]:
    """Return the worlds of a file. Raises ValueError, whose text names the line and the field."""
    return [
        _read_line(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()
    ]


def _read_line(number: int, line: str) -> RecordedWorld:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number}: not JSON: {error}") from None
    report = Report()
    world = read_record(RecordedWorld, value, "", report)
    for index, fault in enumerate(world.scenario.faults):
        if fault.name not in ACTIONS:
            report.unsupported(f"scenario.faults[{index}].name", fault.name, sorted(ACTIONS))
    if report.problems:
        raise ValueError(f"line {number}: {report.problems[0]}")
    return world
