"""The log rules in a document: a job, a fragment of one (`runPolicy`), or the bare list.

They are read on their own, so that rules can be tried before the rest of the job can be run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unbroken.errors import SpecError
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec.job.types import RuleWatch, read_watches, watch_of
from unbroken.spec.keys import LOG_RULE_RANKS
from unbroken.spec.lookup import value_at
from unbroken.spec.problems import ManifestError, Report

from .rule_config import CompiledRule, read_rules

KEY = "logMonitoringConfiguration"


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of one document, as they were written."""

    name: str
    """Name of the job; empty where it has none."""
    path: str
    """Path of the list in its document."""
    entries: tuple[Any, ...]
    nnodes: int | None = None
    nproc: int | None = None
    """Ranks of a node; None: the document has no number for it."""
    watches: Mapping[str, RuleWatch] | None = None

    def compiled(self) -> tuple[CompiledRule, ...]:
        """Return the rules compiled. Raises ManifestError with all errors."""
        report = Report()
        rules = read_rules(self.entries, report)
        if report.problems:
            raise ManifestError("the list of log rules", report.problems)
        return tuple(
            replace(rule, watch=watch_of(rule.spec.name, self.watches or {})) for rule in rules
        )


def rule_sets(documents: Sequence[Any]) -> list[RuleSet]:
    """Return the rules of all documents that have rules. Raises SpecError for a bad annotation."""
    result = []
    for document in documents:
        for path in ((), ("spec", "runPolicy"), ("runPolicy",)):
            entries = value_at(document, *path, KEY)
            if isinstance(entries, Sequence) and not isinstance(entries, str):
                result.append(_of(document, ".".join((*path, KEY)), entries))
                break
        else:
            if _is_list_of_rules(document):
                result.append(RuleSet("", KEY, tuple(document)))
    return result


def _is_list_of_rules(document: Any) -> bool:
    return isinstance(document, list) and any(value_at(item, "logPattern") for item in document)


def _of(document: Any, path: str, entries: Sequence[Any]) -> RuleSet:
    name, nproc = value_at(document, "metadata", "name"), value_at(document, "spec", "nprocPerNode")
    annotation = value_at(document, "metadata", "annotations", LOG_RULE_RANKS)
    replicas = value_at(document, "spec", "replicaSpecs")
    counts = [
        value_at(replica, "replicas") or 1
        for replica in replicas or ()
        if isinstance(replica, Mapping)
    ]
    return RuleSet(
        name=str(name or ""),
        path=path,
        entries=tuple(entries),
        nnodes=sum(counts) if all(isinstance(count, int) for count in counts) else None,
        nproc=whole_number(str(nproc), 1, INT32_MAX),
        watches=read_watches(str(annotation)) if annotation else {},
    )


def only_set(sets: Sequence[RuleSet], file: str) -> RuleSet:
    """Return the only rule set. Raises SpecError if there is none, or more than one."""
    if len(sets) == 1:
        return sets[0]
    what = f"has {len(sets)} documents with log rules; give one" if sets else f"has no {KEY}"
    raise SpecError(f"{file} {what}")
