"""Checks of a PyTorchJob by the API server of the local cluster."""

from __future__ import annotations

from unbroken.local.admissions import with_templates
from unbroken.local.apiserver.http.status import Object
from unbroken.spec.kubeflow.pytorchjob import parse_pytorchjob
from unbroken.spec.problems import Verdict


def admit_pytorchjob(job: Object) -> Verdict:
    """Check a PyTorchJob and the pods that it would make."""
    parsed = parse_pytorchjob(job)
    templates = (
        (f"spec.pytorchReplicaSpecs.{replica.value}.template", one.template)
        for replica, one in parsed.spec.replicas().items()
    )
    warnings, policy = parsed.warnings, parsed.spec.elastic_policy
    if policy is not None and policy.metrics:
        warnings += ("spec.elasticPolicy.metrics: this cluster makes no autoscaler",)
    return Verdict(with_templates(parsed.problems, templates), warnings)
