"""Log rules of a job whose kind has no field for them, as an annotation in YAML or JSON.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from unbroken.errors import SpecError
from unbroken.spec.job.log_rules import check_log_rules
from unbroken.spec.job.types import LogRule
from unbroken.spec.keys import LOG_MONITORING
from unbroken.spec.problems import Problem, Report
from unbroken.spec.schema.read import read_record
from unbroken.spec.yaml_values import yaml_value

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
