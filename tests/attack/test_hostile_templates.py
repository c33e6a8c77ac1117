"""Pod templates that are made to break the operator, which puts its agent into them.

The attack: a command that was no list, or resources that were a list, passed all checks. The pod
could not be built: the job's runner failed with a traceback, again and again, and its user heard
nothing. A job of 1 MiB with 50,000 pods took the operator 60 ms for each, only to copy it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.operator.conftest import job
from unbroken.core.job.events import CreatePod, NodeName, PodName
from unbroken.local.admissions import with_templates
from unbroken.operator.jobs.pods import AgentToInject, JobIdentity, build_pod
from unbroken.spec.job.parse import parse_job
from unbroken.spec.job.rules import PODS_MAX, TOO_LARGE
from unbroken.spec.job.types import JobSpec
from unbroken.spec.keys import AGENT

Object = dict[str, Any]
REQUIRED, PREFERRED = (
    f"{name}DuringSchedulingIgnoredDuringExecution" for name in ("required", "preferred")
)
GARBAGE = (5, "text", [None], ["x"], [["x"]], [{"x": 5}], {"x": 5}, {"x": {"y": 5}})
ORDER = CreatePod(PodName("lm-pods-0"), "pods", 0, frozenset({NodeName("a"), NodeName("b")}))


def template() -> Object:
    """Return the specification of a pod with all parts that the operator reads or adds to."""
    term = {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}
    near = {"topologyKey": "rack", "labelSelector": {}}
    pods = {REQUIRED: [near], PREFERRED: [{"weight": 1, "podAffinityTerm": near}]}
    nodes = {
        REQUIRED: {"nodeSelectorTerms": [term]},
        PREFERRED: [{"weight": 1, "preference": term}],
    }
    main = {
        "name": "pytorch",
        "image": "i",
        "command": ["torchrun", "a.py"],
        "args": ["--x"],
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        "ports": [{"containerPort": 5}],
        "securityContext": {"runAsUser": 7, "seccompProfile": {"type": "Unconfined"}},
        "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}},
    }
    return {
        "containers": [main, {"name": "side", "image": "i"}],
        "initContainers": [{"name": "first", "image": "i", "command": ["x"]}],
        "ephemeralContainers": [{"name": "debug", "image": "i"}],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "affinity": {"nodeAffinity": nodes, "podAffinity": pods, "podAntiAffinity": pods},
        "tolerations": [{"key": "a"}],
        "topologySpreadConstraints": [{"topologyKey": "x", "maxSkew": 1}],
        "nodeSelector": {"a": "b"},
        "serviceAccountName": "s",
    }


def manifest(pod: Object, annotations: dict[str, str], **replica: Any) -> Object:
    """Return a job of such pods."""
    made = job("lm")
    made["metadata"]["annotations"] = annotations
    made["spec"]["replicaSpecs"][0] |= {"template": {"metadata": {}, "spec": pod}, **replica}
    return made


def built(spec: JobSpec, annotations: dict[str, str]) -> Object:
    """Build a pod as the operator does, with every addition."""
    identity = JobIdentity("default", "lm", "uid", annotations)
    agent, zones = AgentToInject("unbroken:1"), ["topology.kubernetes.io/zone"]
    return build_pod(identity, spec, ORDER, "secret", {NodeName("b")}, agent, zones)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """List the path of each value inside a value."""
    items = enumerate(value) if isinstance(value, list) else value.items()
    for key, inside in items:
        yield (*path, key)
        if isinstance(inside, dict | list):
            yield from places(inside, (*path, key))


@pytest.mark.parametrize("annotations", [{}, {AGENT: "injected"}], ids=["by itself", "asked"])
def test_a_template_of_any_shape_makes_a_pod_or_is_refused_with_its_place(
    annotations: dict[str, str],
) -> None:
    refused = 0
    for path in places(template()):
        for garbage in GARBAGE:
            pod: Any = template()
            place = pod
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = copy.deepcopy(garbage)
            parsed = parse_job(manifest(pod, annotations))
            if parsed.problems:
                refused += 1
                where = "spec.replicaSpecs[0].template.spec"
                assert all(one.path.startswith(where) for one in parsed.problems), parsed.problems
            else:
                json.dumps(built(parsed.spec, annotations))
    assert refused > 100


def test_a_pod_shares_the_large_parts_of_the_template_and_changes_none() -> None:
    annotations = {AGENT: "injected"}
    parsed = parse_job(manifest(template(), annotations))
    before = copy.deepcopy(parsed.spec)
    given = parsed.spec.replica_specs[0].template["spec"]
    pod = built(parsed.spec, annotations)["spec"]
    for kind, part in (
        ("containers", "args"),
        ("containers", "resources"),
        ("volumes", "emptyDir"),
    ):
        assert pod[kind][0][part] is given[kind][0][part]
    assert pod["tolerations"] is given["tolerations"]
    assert pod["containers"][0]["env"][-1] is given["containers"][0]["env"][-1]
    assert parsed.spec == before


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_the_templates_of_all_pods_are_bounded_together(size: int) -> None:
    pod = {"containers": [{"name": "main", "image": "i", "args": ["x" * size]}]}
    for replicas in ({"replicas": PODS_MAX}, {"replicas": 1, "spares": PODS_MAX - 1}):
        messages = [one.message for one in parse_job(manifest(pod, {}, **replicas)).problems]
        assert [TOO_LARGE in one for one in messages] == ([True] if size == 100_000 else [])


COLLISIONS: dict[str, tuple[Object, str]] = {
    "an init container": (
        {"initContainers": [{"name": "unbroken-agent", "image": "evil"}]},
        "initContainers[1].name",
    ),
    "a container": (
        {"containers": [{"name": "unbroken-agent", "image": "i", "command": ["torchrun", "a"]}]},
        "initContainers[0].name",
    ),
    "the volume of the agent": (
        {"volumes": [{"name": "unbroken-agent", "hostPath": {"path": "/"}}]},
        "volumes[3].name",
    ),
    "the volume of the key": (
        {"volumes": [{"name": "unbroken-agent-key", "emptyDir": {}}]},
        "volumes[2].name",
    ),
    "the place of the agent": (
        {"containers": [{"volumeMounts": [{"name": "v", "mountPath": "/unbroken"}]}]},
        "containers[0].volumeMounts[2].mountPath",
    ),
    "the place of the key": (
        {"containers": [{"volumeMounts": [{"name": "v", "mountPath": "/var/run/unbroken"}]}]},
        "containers[0].volumeMounts[1].mountPath",
    ),
}


@pytest.mark.parametrize("what", COLLISIONS)
def test_what_takes_a_name_or_a_place_of_the_agent_is_refused_by_the_api_server(what: str) -> None:
    changes, place = COLLISIONS[what]
    main = {"name": "main", "image": "i", "command": ["torchrun", "a.py"]}
    pod: Object = {"containers": [main], "volumes": [{"name": "v", "emptyDir": {}}]}
    for kind, items in changes.items():
        known = pod.get(kind, [])
        pod[kind] = [{**known[0], **items[0]}] if kind == "containers" else [*known, *items]
    parsed = parse_job(manifest(pod, {}))
    assert parsed.problems == ()
    made = built(parsed.spec, {})
    (problem,) = with_templates((), [("pod", {"spec": made["spec"]})])
    assert problem.path == f"pod.spec.{place}"
    assert "uplicate" in problem.message or "unique" in problem.message


def test_the_copier_of_the_agent_has_nothing_of_the_user_but_its_identity() -> None:
    context = {"privileged": True, "runAsUser": 7, "capabilities": {"add": ["SYS_ADMIN"]}}
    main = {
        **template()["containers"][0],
        "securityContext": context,
        "env": [{"name": "LD_PRELOAD", "value": "/v/evil.so"}],
        "envFrom": [{"configMapRef": {"name": "evil"}}],
        "lifecycle": {"postStart": {"exec": {"command": ["/v/evil"]}}},
    }
    parsed = parse_job(manifest({**template(), "containers": [main]}, {}))
    first = built(parsed.spec, {})["spec"]["initContainers"][0]
    assert first["image"] == "unbroken:1"
    assert not {"env", "envFrom", "lifecycle", "volumeDevices"} & first.keys()
    assert first["volumeMounts"] == [{"name": "unbroken-agent", "mountPath": "/unbroken"}]
    assert first["securityContext"] == {
        "runAsUser": 7,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
