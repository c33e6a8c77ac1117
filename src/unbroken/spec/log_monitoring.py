"""Log rules of a job whose kind has no field for them, as an annotation in YAML or JSON; and YAML
values in general.  Pure.

Aliases are refused: they let a short text stand for a huge one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from unbroken.errors import SpecError
from unbroken.spec.job.log_rules import check_log_rules
from unbroken.spec.job.types import LogRule
from unbroken.spec.keys import LOG_MONITORING
from unbroken.spec.problems import Problem, Report

from .schema.fields import read_record


class _Loader(yaml.CSafeLoader):
    """YAML with JSON's types only: a date stays text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
    for first, found in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def yaml_value(text: str, most: int) -> Any:
    """Return the value of a text of at most `most` characters; None: it is empty.

    Raises SpecError, whose text follows the name of the field: "is not YAML: ...".
    """
    if len(text) > most:
        raise SpecError(f"is longer than {most} characters")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)):
            raise SpecError("has aliases (*name): write the values out")
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError(f"is not YAML: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"[:200]
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


TEXT_CHARACTERS_MAX = 16 * 1024
"""Longest annotation that is read."""
RULES_MAX = 16
"""Most rules of one job: the operator itself reads the logs of jobs of other kinds."""
PROGRAMS_SIZE_MAX = 4096
"""The most instructions of RE2's programs for all patterns of one job.  A line takes time in
proportion to it: 8 KiB of the worst text take 40 ms; with the 32,768 of other jobs, whose agents
match their own lines, 0.5 s.  `.*loss=(\\S+)` has 30."""
LIST = "logMonitoringConfiguration"
PATH = f"metadata.annotations[{LOG_MONITORING}]"


@dataclass(frozen=True, slots=True)
class LogMonitoring:
    """The log rules of an annotation, or the problems with them."""

    rules: tuple[LogRule, ...] = ()
    """Empty if there is a problem."""
    problems: tuple[Problem, ...] = ()


def log_monitoring_of(annotations: Mapping[str, str]) -> LogMonitoring:
    """Read the log rules of a job from its annotations."""
    return read_log_monitoring(annotations.get(LOG_MONITORING, ""))


@lru_cache(maxsize=256)
def read_log_monitoring(text: str) -> LogMonitoring:
    """Read the text of the annotation; an empty text has no rules."""
    try:
        found = yaml_value(text, TEXT_CHARACTERS_MAX)
    except SpecError as error:
        return _refused(f"the text {error}")
    if isinstance(found, dict) and found.keys() == {LIST}:
        found = found[LIST]
    if found is None:
        return LogMonitoring()
    if not isinstance(found, list) or len(found) > RULES_MAX:
        return _refused(f"must be a list of at most {RULES_MAX} rules, as {LIST} is")
    report = Report()
    rules = tuple(
        read_record(LogRule, one, f"{PATH}.{LIST}[{index}]", report)
        for index, one in enumerate(found)
    )
    if not report.problems:
        check_log_rules(rules, PATH, report, PROGRAMS_SIZE_MAX)
    names = [rule.name for rule in rules]
    for index, name in enumerate(names):
        if name in names[:index]:
            report.duplicate(f"{PATH}.{LIST}[{index}].name", name)
    return LogMonitoring(() if report.problems else rules, tuple(report.problems))


def _refused(why: str) -> LogMonitoring:
    return LogMonitoring(problems=(Problem(PATH, f"Invalid value: {why}"),))
