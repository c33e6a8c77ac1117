"""A HyperPodPyTorchJob from a manifest: the spec, the options, every problem, the warnings.

Every accepted field has an effect. All others are refused here with place and reason, or named in a
warning if a job can run without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from unbroken.errors import SpecError
from unbroken.foreign_numbers import finite_number
from unbroken.spec import keys
from unbroken.spec.problems import ManifestError, Problem, Report, Verdict, shown
from unbroken.spec.schema.fields import blank_record, read_record
from unbroken.spec.times import time_seconds

from .detectors import DEFAULTS, Detector, Mode, read_detectors
from .launch import check_launches
from .log_rules import check_watches
from .rules import check_names, check_spec
from .types import (
    GROUP,
    KIND,
    LEASE_SECONDS,
    LEASE_SECONDS_MAX,
    LEASE_SECONDS_MIN,
    POD_SETS_MAX,
    VERSION,
    AgentAuth,
    AgentSource,
    FenceBy,
    JobOptions,
    JobSpec,
    RuleWatch,
    SameError,
    Switch,
    queue_of,
    read_preload,
    read_watches,
)

OTHER_KIND = "HyperPodPytorchJob"
"""Spelling of older samples; the API has one kind, `KIND`."""
TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec", "status")
OPTIONS = (
    *(keys.AGENT, keys.AGENT_AUTH, keys.BUDDY, keys.DETECTORS, keys.FENCE_BY, keys.IN_PROCESS),
    *(keys.LEASE_SECONDS, keys.LOG_RULE_RANKS, keys.PACKING, keys.PLANNED_MOVES, keys.PRELOAD),
    keys.RESTART,
    *(keys.SAME_ERROR, keys.WARM),
)
E = TypeVar("E", bound=Enum)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A manifest as understood. With `problems`, the values are the best that could be read."""

    name: str
    """Name; empty if the API is to make one of `metadata.generateName`."""
    namespace: str
    """Namespace; empty if the manifest names none."""
    spec: JobSpec
    options: JobOptions
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    """Warnings for the user: accepted values with an unexpected effect."""


def parse_job(manifest: Any) -> Parsed:
    """Read a manifest or an object of the API; never raises for bad input."""
    report = Report()
    if not isinstance(manifest, Mapping):
        report.invalid("", manifest, f"must be an object of kind {KIND}")
        return Parsed("", "", blank_record(JobSpec), JobOptions(), tuple(report.problems))
    _check_identity(manifest, report)
    metadata = _mapping(manifest.get("metadata"), "metadata", report)
    spec = _spec(manifest.get("spec"), report)
    options = _options(metadata, spec, report)
    _check_queue(manifest, spec, report)
    name, prefix = (_name(metadata, key, report) for key in ("name", "generateName"))
    if name or prefix:
        # The API adds five characters to a prefix.
        check_names(name or f"{prefix}xxxxx", spec, report)
    elif not report.has_below("metadata"):
        report.required("metadata.name", "name or generateName is required")
    namespace = _name(metadata, "namespace", report)
    return Parsed(name, namespace, spec, options, tuple(report.problems), tuple(report.warnings))


def load_job(manifest: Any) -> Parsed:
    """Return `parse_job` of a good manifest. Raises ManifestError with all problems."""
    parsed = parse_job(manifest)
    if parsed.problems:
        raise ManifestError(f"{KIND} {shown(parsed.name)}", parsed.problems)
    return parsed


def admit_job(job: Mapping[str, Any]) -> Verdict:
    """Return whether the API may store a job; for an API server's admission."""
    parsed = parse_job(job)
    return Verdict(parsed.problems, parsed.warnings)


def normalized(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with the kind's exact name; for commands that send users' manifests."""
    return {**manifest, "kind": KIND} if manifest.get("kind") == OTHER_KIND else dict(manifest)


def _check_identity(manifest: Mapping[str, Any], report: Report) -> None:
    kind, api_version = manifest.get("kind"), manifest.get("apiVersion")
    if kind is None:
        report.required("kind", f"must be {KIND}")
    elif kind not in (KIND, OTHER_KIND):
        report.unsupported("kind", kind, [KIND])
    if api_version is None:
        report.required("apiVersion", f"must be {GROUP}/{VERSION}")
    elif api_version != f"{GROUP}/{VERSION}":
        report.unsupported("apiVersion", api_version, [f"{GROUP}/{VERSION}"])
    for key in manifest:
        if key not in TOP_LEVEL:
            report.unknown("", str(key), TOP_LEVEL)


def _spec(given: Any, report: Report) -> JobSpec:
    if given is None:
        report.required("spec")
        return blank_record(JobSpec)
    if not isinstance(given, Mapping):
        return read_record(JobSpec, given, "spec", report)
    nproc = given.get("nprocPerNode")
    if isinstance(nproc, int | float):
        report.warn(
            "spec.nprocPerNode: sagemaker-hyperpod 3.12 cannot list jobs with a number here; write "
            f'"{shown(nproc)}"'
        )
    return check_spec(read_record(JobSpec, given, "spec", report), report)


def _mapping(value: Any, path: str, report: Report) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if value is not None:
        report.invalid(path, value, "must be an object")
    return {}


def _name(metadata: Mapping[str, Any], key: str, report: Report) -> str:
    value = metadata.get(key)
    if isinstance(value, str):
        return value
    if value is not None:
        report.invalid(f"metadata.{key}", value, "must be text")
    return ""


def _options(metadata: Mapping[str, Any], spec: JobSpec, report: Report) -> JobOptions:
    path = "metadata.annotations"
    annotations = _mapping(metadata.get("annotations"), path, report)
    for key in annotations:
        if str(key).startswith(keys.OWN_PREFIX) and key not in (*OPTIONS, keys.LEDGER):
            known = f"known annotations are {', '.join(OPTIONS)}"
            report.forbidden(f"{path}[{str(key)[:80]}]", f"unknown; {known}")
    agent = _choice(annotations, keys.AGENT, AgentSource.IMAGE, report)
    if agent is AgentSource.INJECTED and not report.problems:
        check_launches(spec, report)
    auth = _choice(annotations, keys.AGENT_AUTH, AgentAuth.TOKEN, report)
    same_error = _choice(annotations, keys.SAME_ERROR, SameError.STOP, report)
    in_process = _choice(annotations, keys.IN_PROCESS, Switch.ON, report)
    restart = None
    asked = annotations.get(keys.RESTART)
    if asked is not None:
        try:
            restart = time_seconds(str(asked))
        except (ValueError, OverflowError):
            why = "must be an RFC 3339 time with a zone, such as 2026-01-31T12:00:00Z"
            report.invalid(f"{path}[{keys.RESTART}]", asked, why)
    ranks = annotations.get(keys.LOG_RULE_RANKS)
    place = f"{path}[{keys.LOG_RULE_RANKS}]"
    watches = {} if ranks is None else _watches(ranks, place, spec, report)
    detectors = _detectors(annotations.get(keys.DETECTORS), path, report)
    warm = _choice(annotations, keys.WARM, Switch.ON, report)
    preload = _preload(annotations.get(keys.PRELOAD), path, report)
    buddy = _choice(annotations, keys.BUDDY, Switch.ON, report)
    fence_by = _choice(annotations, keys.FENCE_BY, FenceBy.LEASE, report)
    lease = _lease(annotations.get(keys.LEASE_SECONDS), path, report)
    return JobOptions(
        agent=agent,
        agent_auth=auth,
        restart=restart,
        log_rule_ranks=watches,
        detectors=detectors,
        same_error=same_error,
        in_process=in_process,
        warm=warm,
        preload=preload,
        buddy=buddy,
        packing=_choice(annotations, keys.PACKING, Switch.ON, report),
        planned_moves=_choice(annotations, keys.PLANNED_MOVES, Switch.ON, report),
        fence_by=fence_by,
        lease_seconds=lease,
    )


def _lease(given: Any, path: str, report: Report) -> float:
    if given is None:
        return LEASE_SECONDS
    seconds = finite_number(str(given), LEASE_SECONDS_MIN, LEASE_SECONDS_MAX)
    if seconds is None:
        why = f"must be seconds, {LEASE_SECONDS_MIN:g} to {LEASE_SECONDS_MAX:g}"
        report.invalid(f"{path}[{keys.LEASE_SECONDS}]", given, why)
        return LEASE_SECONDS
    return seconds


def _choice(given: Mapping[str, Any], key: str, default: E, report: Report) -> E:
    choices: dict[str, E] = {str(member.value): member for member in type(default)}
    value = given.get(key)
    if isinstance(value, str) and value in choices:
        return choices[value]
    if value is not None:
        report.unsupported(f"metadata.annotations[{key}]", value, choices)
    return default


def _detectors(given: Any, path: str, report: Report) -> Mapping[Detector, Mode]:
    try:
        return read_detectors("" if given is None else str(given))
    except SpecError as error:
        report.invalid(f"{path}[{keys.DETECTORS}]", given, str(error))
        return dict(DEFAULTS)


def _preload(given: Any, path: str, report: Report) -> tuple[str, ...]:
    try:
        return read_preload("" if given is None else str(given))
    except SpecError as error:
        report.invalid(f"{path}[{keys.PRELOAD}]", given, str(error))
        return ()


def _watches(given: Any, path: str, spec: JobSpec, report: Report) -> Mapping[str, RuleWatch]:
    try:
        watches = read_watches(str(given))
    except SpecError as error:
        report.invalid(path, given, str(error))
        return {}
    check_watches(watches, spec, path, report)
    return watches


def _check_queue(manifest: Mapping[str, Any], spec: JobSpec, report: Report) -> None:
    count = len(spec.replica_specs)
    if count > POD_SETS_MAX and queue_of(manifest):
        why = f"{count} of them; a job with the label {keys.QUEUE} has {POD_SETS_MAX} at most"
        report.forbidden("spec.replicaSpecs", why)
