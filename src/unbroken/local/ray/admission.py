"""Checks of KubeRay's kinds by the API server of the local cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from unbroken.local.admissions import with_templates
from unbroken.local.apiserver.http.status import Object
from unbroken.spec.problems import Problem, Verdict

from .decisions.pods import service_name

NOT_RUN: Final = ("rayjobs.ray.io", "rayservices.ray.io")
"""Kinds that are stored, so that their definitions can be used, and that nothing runs."""
NOT_OFFERED: Final = {
    "enableInTreeAutoscaling": "groups keep the number of replicas that is written",
    "gcsFaultToleranceOptions": "a head that ends loses its state",
    "authOptions": "Ray asks for no token",
    "tlsOptions": "Ray uses no TLS",
    "networkPolicy": "all pods reach each other",
}
"""Fields of a RayCluster that have no effect, and what holds instead."""
NAME_MAX = 63


def admit_raycluster(cluster: Object) -> Verdict:
    """Check a RayCluster and the pods that it would make."""
    spec = cluster["spec"]
    problems = tuple(_problems(cluster["metadata"].get("name") or "", spec))
    warnings = tuple(
        f"spec.{field}: this cluster does not offer it; {instead}"
        for field, instead in NOT_OFFERED.items()
        if spec.get(field)
    )
    templates = ((path, group["template"]) for path, group in _groups(spec))
    return Verdict(with_templates(problems, ((f"{a}.template", b) for a, b in templates)), warnings)


def warn_not_run(thing: Object) -> Verdict:
    """Say that nothing runs objects of this kind."""
    kind = thing["kind"]
    text = f"{kind}: this cluster stores it and runs nothing; it runs RayClusters"
    return Verdict(warnings=(text,))


def _groups(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "spec.headGroupSpec", spec["headGroupSpec"]
    for index, group in enumerate(spec.get("workerGroupSpecs") or ()):
        yield f"spec.workerGroupSpecs[{index}]", group


def _problems(name: str, spec: Mapping[str, Any]) -> Iterator[Problem]:
    """List what KubeRay refuses with the event InvalidRayClusterSpec."""
    service = service_name(name)
    if len(service) > NAME_MAX:
        limit = NAME_MAX - len(service_name(""))
        yield Problem("metadata.name", f"Too long: may not be more than {limit} bytes")
    names = set()
    for path, group in _groups(spec):
        if not (group["template"].get("spec") or {}).get("containers"):
            yield Problem(
                f"{path}.template.spec.containers", "Required value", "FieldValueRequired"
            )
        least, most = group.get("minReplicas"), group.get("maxReplicas")
        if least is not None and most is not None and least > most:
            yield Problem(f"{path}.minReplicas", f"Invalid value: {least}: more than maxReplicas")
        if (group_name := group.get("groupName")) in names:
            yield Problem(f"{path}.groupName", f'Duplicate value: "{group_name}"')
        names.add(group_name or path)
