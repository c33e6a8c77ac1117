"""Checks of jobs by the API server of the local cluster, in place of webhooks.

A job's pod templates are checked as its pods would be. So the person who applies the job sees a
mistake at once, and not minutes later in a pod that cannot be created.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from unbroken.core.logs.rule_config import rule_warnings
from unbroken.kube.bounds import excess
from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.kinds.builtin import BUILTINS
from unbroken.local.apiserver.schema import structural
from unbroken.local.apiserver.store import encode
from unbroken.local.apiserver.validation import rules
from unbroken.local.apiserver.validation.names import validate_metadata
from unbroken.local.apiserver.write.defaults import apply_defaults
from unbroken.spec.job.parse import parse_job
from unbroken.spec.job.types import queue_warnings
from unbroken.spec.job_kinds import HYPERPOD_JOB, names_our_runtime
from unbroken.spec.problems import Problem, Verdict

POD: Final = next(kind for kind in BUILTINS if kind.resource == "pods")


def admit_job(job: Object) -> Verdict:
    """Check a HyperPodPyTorchJob and the pods that it would make."""
    if why := excess(encode(job)):
        return Verdict((Problem("", why, "FieldValueTooLong"),))
    parsed = parse_job(job)
    templates = (
        (f"spec.replicaSpecs[{index}].template", replica.template)
        for index, replica in enumerate(parsed.spec.replica_specs)
    )
    warnings = (*parsed.warnings, *rule_warnings(parsed.spec), *queue_warnings(job))
    return Verdict(with_templates(parsed.problems, templates), warnings)


def warn_no_controller(job: Object) -> Verdict:
    """Say that no controller acts on jobs of this kind, and what the operator does itself."""
    kind = job["kind"]
    if names_our_runtime(job):
        text = (
            f"{kind}: the operator runs it as a {HYPERPOD_JOB.name}; the {kind} itself does not "
            "end: Kubeflow Trainer's controller, which would end it, does not run here"
        )
        return Verdict(warnings=(text,))
    text = f"{kind}: the local cluster stores it and starts no pod: no controller runs {kind}s here"
    return Verdict(warnings=(text,))


def with_templates(
    problems: tuple[Problem, ...], templates: Iterable[tuple[str, Mapping[str, Any]]]
) -> tuple[Problem, ...]:
    """Add the problems of pod templates, given with their paths, to those of their job.

    A template that has problems of the job's own checks is left out.
    """
    broken = {problem.path for problem in problems}
    result = list(problems)
    for path, template in templates:
        replica = path.removesuffix(".template")
        if not any(place == replica or place.startswith(path) for place in broken):
            result += _template_problems(template, path)
    return tuple(result)


def _template_problems(template: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """List what the API would refuse in a pod made from the template."""
    metadata = {**(template.get("metadata") or {}), "name": "pod", "namespace": "default"}
    pod: Object = copy.deepcopy(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    )
    schema = POD.versions["v1"].schema
    pod = structural.without_nulls(pod, schema)
    wrong = structural.decode_errors(pod, schema)
    if wrong:
        yield Problem(path, f"Invalid value: {wrong}")
        return
    pod, unknown = structural.prune(pod, schema)
    for place in unknown:
        yield Problem(f"{path}.{place}", "Forbidden: unknown field", "FieldValueForbidden")
    apply_defaults(POD, pod)
    for cause in validate_metadata(pod["metadata"], POD) + rules.validate(POD, None, pod):
        yield Problem(f"{path}.{cause.field}", cause.message, cause.reason)
