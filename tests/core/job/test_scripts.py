"""The scripts of a job's machine, in `scripts/`: every effect of each event.

Beside the events of `drive_job` a line may be:

- `spec 2 spares=1 job_max_retry_count=3`: the job, of two pods if there is no such line.
- `up` or `up ready`: bring it to where every agent runs, or is ready, at 4 s.
- `operator 100`: another operator takes over, and has received no report. `operator 100 unwritten`:
  the one before could not write its last incident.
- `unwritten`: the incidents of this operator were not written; `unwritten status`: its last status.
- `vanished w-0`: the pod is gone, and this operator has not seen it.
- `show incident 1 remedy culprit.pod`: what is known; also of `status`, `condition` and `job`.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest

from tests.core.job.drive_job import Script, spec
from tests.core.job.transcripts import Case, play, read_cases, rewrite
from unbroken.core.job.events import JobEffect, WriteIncident, WriteStatus
from unbroken.spec.job.types import CleanPodPolicy, JobSpec, RestartPolicy, RunPolicy

CASES = [
    case
    for path in sorted((Path(__file__).parent / "scripts").rglob("*.txt"))
    for case in read_cases(path)
]


class Player:
    """Gives the lines of a script to the machines of one job, one operator after the other."""

    def __init__(self) -> None:
        self.script = Script()

    def say(self, line: str) -> str:
        """Carry out a line; return what it shows."""
        name, *words = line.split()
        match name:
            case "spec":
                self.script = Script(_spec(words))
            case "up":
                self.script.up(*words)
            case "operator":
                at, *rest = words
                self.script = self.script.successor(float(at), is_incident_written=not rest)
            case "unwritten":
                self._lose(WriteStatus if words else WriteIncident, last=bool(words))
            case "vanished":
                self.script.views = {n: v for n, v in self.script.views.items() if n not in words}
            case "show":
                return _shown(self.script, words)
            case _:
                return self.script.say(line)
        return ""

    def _lose(self, kind: type[JobEffect], *, last: bool) -> None:
        """Forget the last write of a kind, or all of them."""
        effects = self.script.effects
        lost = [one for one in effects if isinstance(one, kind)][-1 if last else 0 :]
        self.script.effects = [one for one in effects if all(one is not other for other in lost)]


def _spec(words: list[str]) -> JobSpec:
    """Return the job of `2 spares=1 restart_policy=3600/3/0 clean_pod_policy=None`."""
    replicas, *options = words
    given = dict(word.split("=", 1) for word in options)
    spares = int(given.pop("spares", 0))
    fields: dict[str, object] = {}
    for name, value in given.items():
        if name == "clean_pod_policy":
            fields[name] = CleanPodPolicy(value)
        elif name == "restart_policy":
            fields[name] = RestartPolicy(*map(int, value.split("/")))
        else:
            fields[name] = int(value)
    return spec(int(replicas), spares, RunPolicy(**fields))  # type: ignore[arg-type]


def _shown(script: Script, words: list[str]) -> str:
    """Return the fields of the thing that is named before them."""
    subject, *fields = words
    thing: object
    match subject:
        case "incident":
            thing = script.incidents[int(fields.pop(0))]
        case "status" | "condition" | "job":
            thing = getattr(script, subject)
        case "incidents":
            every = script.incidents.items()
            return ", ".join(
                " ".join([str(number), *(_word(_field(one, field)) for field in fields)])
                for number, one in every
            )
        case "unclear":
            return " ".join(sorted(script.job.state.gang.unclear))
        case _:
            thing, fields = {"it": getattr(script, subject)}, ["it"]
    return ", ".join(_word(_field(thing, field)) for field in fields)


def _field(thing: object, path: str) -> object:
    name, _, rest = path.partition(".")
    if isinstance(thing, tuple):
        return tuple(_field(one, path) for one in thing)
    found = getattr(thing, name)
    found = found() if callable(found) else found
    return _field(found, rest) if rest else found


def _word(value: object) -> str:
    """Return a value as one word, or a text as it is."""
    match value:
        case None:
            return "none"
        case Enum():
            return str(value.value)
        case float():
            return f"{value:.12g}"
        case dict():
            return " ".join(f"{_word(key)}={_word(one)}" for key, one in value.items()) or "-"
        case tuple() | list():
            return " | ".join(map(_word, value)) or "-"
        case _:
            return str(value).replace("\n", "\\n") or "-"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.path.stem}: {case.title}")
def test_a_script_shows_all_that_happens(case: Case, request: pytest.FixtureRequest) -> None:
    found = play(case, Player().say)
    if found != case.lines and request.config.getoption("rewrite"):
        rewrite(case, found)
    else:
        assert found == case.lines, "pytest tests/core/job --rewrite writes what happens"


BEFORE = """The theme.

== first
spec 1
0 job ->
0 synced -> create w-0,
    event Created

== second
0 tick ->
"""


def test_what_happens_is_written_into_the_file_and_nothing_else_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "life.txt"
    path.write_text(BEFORE)
    first, second = read_cases(path)
    assert play(second, Player().say) == second.lines
    found = play(first, Player().say)
    assert found != first.lines
    rewrite(first, found)
    happened = "0 synced -> create w-0, status Created 0, event Created\n"
    assert path.read_text() == BEFORE.replace(
        "0 synced -> create w-0,\n    event Created\n", happened
    )
    assert play(read_cases(path)[0], Player().say) == found
