"""Checks of KubeRay's kinds by the API server of the local cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from unbroken.foreign_numbers import PORT_MAX, whole_number
from unbroken.local.admissions import with_templates
from unbroken.local.apiserver.http.status import ApiError, Object
from unbroken.local.apiserver.validation.names import dns_1035_label
from unbroken.spec.auto_resume import resume_of
from unbroken.spec.keys import AUTO_RESUME, MAX_RETRIES
from unbroken.spec.log_monitoring import PATH, log_monitoring_of
from unbroken.spec.problems import Problem, Verdict

from .decisions.pods import SUFFIX_LENGTH, service_name
from .decisions.rayjob import read_map
from .decisions.values import MODE, VARIABLES, is_autoscaled, wrong_options

NOT_RUN: Final = ("rayservices.ray.io",)
"""Kinds that are stored, so that their definitions can be used, and that nothing runs."""
NOT_OFFERED: Final = {
    "gcsFaultToleranceOptions": "a head that ends loses its state",
    "authOptions": "Ray asks for the token of this cluster",
    "tlsOptions": "Ray uses no TLS",
    "networkPolicy": "all pods reach each other",
}
"""Fields of a RayCluster that have no effect, and what holds instead."""
PORTS: Final = ("port", "dashboard-port")
"""Parameters of a head that this cluster reads itself."""
NAME_MAX = 63


def admit_raycluster(cluster: Object) -> Verdict:
    """Check a RayCluster and the pods that it would make."""
    name = cluster["metadata"].get("name") or ""
    return _verdict(cluster, "spec", cluster["spec"], tuple(_bad_name(name, "")))


def admit_rayjob(job: Object) -> Verdict:
    """Check a RayJob, its cluster and the pods that it would make."""
    spec, name = job["spec"], job["metadata"].get("name") or ""
    problems = (*_bad_name(name, "-" + "x" * SUFFIX_LENGTH), *_job_problems(spec))
    if not spec.get("rayClusterSpec"):
        missing = Problem("spec.rayClusterSpec", "Required value", "FieldValueRequired")
        return Verdict((*problems, missing))
    return _verdict(job, "spec.rayClusterSpec", spec["rayClusterSpec"], problems)


def _job_problems(spec: Mapping[str, Any]) -> Iterator[Problem]:
    if not spec.get("entrypoint"):
        yield Problem("spec.entrypoint", "Required value", "FieldValueRequired")
    if spec.get("clusterSelector"):
        text = "Forbidden: this cluster runs a RayJob on a RayCluster of its own"
        yield Problem("spec.clusterSelector", text, "FieldValueForbidden")
    if spec.get("submissionMode") == "InteractiveMode":
        yield Problem(
            "spec.submissionMode", "Unsupported value: this cluster submits the job itself"
        )
    for field in ("runtimeEnvYAML", "entrypointResources"):
        try:
            read_map(spec.get(field))
        except ApiError as error:
            yield Problem(f"spec.{field}", f"Invalid value: must be a map in YAML: {error}")


def warn_not_run(thing: Object) -> Verdict:
    """Say that nothing runs objects of this kind."""
    kind = thing["kind"]
    text = f"{kind}: this cluster stores it and runs nothing; it runs RayClusters and RayJobs"
    return Verdict(warnings=(text,))


def _verdict(
    thing: Object, path: str, spec: Mapping[str, Any], problems: tuple[Problem, ...]
) -> Verdict:
    """Check annotations of a RayCluster or a RayJob, and the spec of a RayCluster at `path`; add
    the problems to those found before."""
    annotations = thing["metadata"].get("annotations") or {}
    warnings = tuple(
        f"{path}.{field}: this cluster does not offer it; {instead}"
        for field, instead in NOT_OFFERED.items()
        if spec.get(field)
    )
    warnings += tuple(_token_warnings(path, spec))
    rules = log_monitoring_of(annotations)
    problems = (*problems, *rules.problems)
    if rules.rules and not resume_of(annotations).is_wanted:
        warnings += (f'{PATH}: has no effect without {AUTO_RESUME}: "true" and {MAX_RETRIES}',)
    templates = ((f"{place}.template", group["template"]) for place, group in _groups(path, spec))
    return Verdict(with_templates((*problems, *_problems(path, spec)), templates), warnings)


def _groups(path: str, spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield f"{path}.headGroupSpec", spec["headGroupSpec"]
    for index, group in enumerate(spec.get("workerGroupSpecs") or ()):
        yield f"{path}.workerGroupSpecs[{index}]", group


def _token_warnings(path: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """Name the variables that replace the token of this cluster."""
    for place, group in _groups(path, spec):
        containers: Any = (group["template"].get("spec") or {}).get("containers") or ({},)
        for one in containers[0].get("env") or ():
            if one["name"] == MODE and one.get("value") != "token":
                what = "without a token, every user of this machine can run programs as you"
            elif one["name"].startswith(VARIABLES) and one["name"] != MODE:
                what = "the operator does not know this token: it starts no job there"
            else:
                continue
            yield f"{place}.template.spec.containers[0].env: {one['name']}: {what}"


def _bad_name(name: str, suffix: str) -> Iterator[Problem]:
    """Refuse a name of which no service can be named; `suffix` is what is added to it first.

    KubeRay 1.7 checks the same (`ValidateRayClusterMetadata`, `ValidateRayJobMetadata`).
    """
    if name:
        for why in dns_1035_label(name[:NAME_MAX].rstrip("-")):
            yield Problem("metadata.name", f'Invalid value: "{name}": {why}')
    limit = NAME_MAX - len(service_name(suffix))
    if len(name) > limit:
        yield Problem("metadata.name", f"Too long: may not be more than {limit} bytes")


def _problems(path: str, spec: Mapping[str, Any]) -> Iterator[Problem]:
    """List what KubeRay refuses with the event InvalidRayClusterSpec."""
    if is_autoscaled(spec):
        for field, why in wrong_options(spec):
            yield Problem(f"{path}.autoscalerOptions.{field}", f"Invalid value: {why}")
    given = spec["headGroupSpec"].get("rayStartParams") or {}
    for field in PORTS:
        if field in given and whole_number(str(given[field]), 1, PORT_MAX) is None:
            why = f"Invalid value: must be a number from 1 to {PORT_MAX}"
            yield Problem(f"{path}.headGroupSpec.rayStartParams.{field}", why)
    names = set()
    for place, group in _groups(path, spec):
        if not (group["template"].get("spec") or {}).get("containers"):
            yield Problem(
                f"{place}.template.spec.containers", "Required value", "FieldValueRequired"
            )
        least, most = group.get("minReplicas"), group.get("maxReplicas")
        if least is not None and most is not None and least > most:
            yield Problem(f"{place}.minReplicas", f"Invalid value: {least}: more than maxReplicas")
        if (group_name := group.get("groupName")) in names:
            yield Problem(f"{place}.groupName", f'Duplicate value: "{group_name}"')
        names.add(group_name or place)
