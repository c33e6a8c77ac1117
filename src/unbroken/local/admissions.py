"""What the embedded cluster's API server refuses of jobs, in the place of webhooks.

A job's pod templates are judged as its pods would be, so that a mistake shows where the job is
applied and not minutes later in a pod that cannot be created.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

from unbroken.core.logs.rule_config import rule_warnings
from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.kinds.builtin import BUILTINS
from unbroken.local.apiserver.schema import structural
from unbroken.local.apiserver.validation import rules
from unbroken.local.apiserver.validation.names import validate_metadata
from unbroken.local.apiserver.write.admission import Admit
from unbroken.local.apiserver.write.defaults import apply_defaults
from unbroken.spec.job.parse import parse_job
from unbroken.spec.job.queues import queue_warnings
from unbroken.spec.job.types import RESOURCE
from unbroken.spec.kubeflow.pytorchjob import GROUP as KUBEFLOW
from unbroken.spec.kubeflow.pytorchjob import PLURAL as PYTORCHJOBS
from unbroken.spec.kubeflow.pytorchjob import parse_pytorchjob
from unbroken.spec.problems import Problem, Verdict

POD: Final = next(kind for kind in BUILTINS if kind.resource == "pods")


def admit_job(job: Object) -> Verdict:
    """Everything wrong with a job and with the pods that it would make."""
    parsed = parse_job(job)
    problems = list(parsed.problems)
    broken = {problem.path for problem in problems}
    for index, replica in enumerate(parsed.spec.replica_specs):
        path = f"spec.replicaSpecs[{index}].template"
        if not any(place == path[:-9] or place.startswith(path) for place in broken):
            problems += _template_problems(replica.template, path)
    warnings = (*parsed.warnings, *rule_warnings(parsed.spec), *queue_warnings(job))
    return Verdict(tuple(problems), warnings)


def admit_pytorchjob(job: Object) -> Verdict:
    """The same of a PyTorchJob."""
    parsed = parse_pytorchjob(job)
    problems, warnings = list(parsed.problems), list(parsed.warnings)
    broken = {problem.path for problem in problems}
    for replica, one in parsed.spec.replicas().items():
        path = f"spec.pytorchReplicaSpecs.{replica.value}.template"
        if not any(place == path[:-9] or place.startswith(path) for place in broken):
            problems += _template_problems(one.template, path)
    policy = parsed.spec.elastic_policy
    if policy is not None and policy.metrics:
        warnings.append("spec.elasticPolicy.metrics: this cluster makes no autoscaler")
    return Verdict(tuple(problems), tuple(warnings))


ADMISSIONS: Final[Mapping[str, Admit]] = {
    RESOURCE: admit_job,
    f"{PYTORCHJOBS}.{KUBEFLOW}": admit_pytorchjob,
}
"""For `serving`."""


def _template_problems(template: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """What the API would say of a pod that is made from the template now."""
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
