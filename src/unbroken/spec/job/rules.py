"""Validation of a job beyond the type and range of each field.

Some values of a pod template are not of their field's kind (quantities, numbers, booleans). The API
server refuses such a pod while it decodes it, in a message that does not name the field. Fields are
known by their names in PodSpec of Kubernetes v1; other fields are left to the API.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from unbroken.foreign_numbers import whole_number
from unbroken.spec.problems import VARIABLE, Report, shown, unsubstituted
from unbroken.spec.schema.fields import INT_MAX

from .log_rules import check_log_rules
from .types import ElasticPolicy, JobSpec, ReplicaSpec, RunPolicy

DEPTH_MAX = 40
"""Levels of a template that are checked; PodSpec has about 15."""
QUANTITY_LENGTH = 100
QUANTITY = re.compile(
    r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}|[numkMGTPE]|[KMGTPE]i)?"
)
"""Kubernetes' quantities (apimachinery, pkg/api/resource/quantity.go)."""
QUANTITY_TEXT = "must be a quantity, such as 8, 500m or 64Gi"
RESOURCES = ("limits", "requests", "overhead")
"""Objects whose values are all quantities."""
QUANTITIES = ("sizeLimit", "divisor")
INTEGERS = frozenset(
    [
        "activeDeadlineSeconds",
        "containerPort",
        "defaultMode",
        "expirationSeconds",
        "failureThreshold",
        "fsGroup",
        "hostPort",
        "initialDelaySeconds",
        "maxSkew",
        "minDomains",
        "mode",
        "periodSeconds",
        "priority",
        "runAsGroup",
        "runAsUser",
        "successThreshold",
        "terminationGracePeriodSeconds",
        "timeoutSeconds",
        "tolerationSeconds",
        "ttlSecondsAfterFinished",
        "weight",
    ]
)
BOOLEANS = frozenset(
    [
        "allowPrivilegeEscalation",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "hostUsers",
        "optional",
        "privileged",
        "readOnly",
        "readOnlyRootFilesystem",
        "runAsNonRoot",
        "setHostnameAsFQDN",
        "shareProcessNamespace",
        "stdin",
        "stdinOnce",
        "tty",
    ]
)
FREE = frozenset(
    [
        "annotations",
        "args",
        "attributes",
        "command",
        "env",
        "labels",
        "matchLabels",
        "metadata",
        "nodeSelector",
        "options",
        "volumeAttributes",
    ]
)
"""Fields whose content is the user's own: keys there have no meaning here, and `${NAME}` may be
intended."""


def check_kinds(pod: Mapping[str, Any], path: str, report: Report) -> None:
    """Report each value of a PodSpec that is not of its field's kind."""
    _check_object(pod, path, report, DEPTH_MAX)


def _check_object(found: Mapping[str, Any], path: str, report: Report, depth: int) -> None:
    for key, value in found.items():
        name = str(key)
        place = f"{path}.{name}"
        if value is None or name in FREE:
            _check_sources(value if name == "env" else None, place, report, depth)
        elif name in RESOURCES and isinstance(value, Mapping):
            for resource, amount in value.items():
                _check_quantity(amount, f'{place}["{str(resource)[:80]}"]', report)
        elif name in QUANTITIES:
            _check_quantity(value, place, report)
        elif name in INTEGERS and not _is_integer(value):
            report.invalid(place, value, "must be a whole number")
        elif name in BOOLEANS and not isinstance(value, bool):
            report.invalid(place, value, "must be true or false")
        elif name == "image" and unsubstituted(value):
            report.invalid(place, value, "must be the name of an image")
        else:
            _check(value, place, report, depth - 1)


def _check(value: Any, path: str, report: Report, depth: int) -> None:
    if depth <= 0:
        return
    if isinstance(value, Mapping):
        _check_object(value, path, report, depth)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", report, depth - 1)
    elif isinstance(value, str) and VARIABLE.search(value):
        report.warn(f"{path}: {shown(value)}{unsubstituted(value)}")


def _check_sources(env: Any, path: str, report: Report, depth: int) -> None:
    """Check the sources of variables; their values are the user's own."""
    for index, entry in enumerate(env if isinstance(env, list | tuple) else ()):
        source = entry.get("valueFrom") if isinstance(entry, Mapping) else None
        if isinstance(source, Mapping):
            _check_object(source, f"{path}[{index}].valueFrom", report, depth - 1)


def _is_integer(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 and value == int(value)


def _check_quantity(value: Any, path: str, report: Report) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or (isinstance(value, str) and not is_quantity(value))
    ):
        report.invalid(path, value, QUANTITY_TEXT)


def is_quantity(text: str) -> bool:
    """True for text that Kubernetes reads as a quantity."""
    return len(text) <= QUANTITY_LENGTH and QUANTITY.fullmatch(text) is not None


PODS_MAX = 50_000
"""Most pods of a job, spares included: four times the largest job that is tested.  The operator
keeps some 30 kB of each pod, and its memory must not depend on what a user writes (judgement)."""
TEMPLATES_MAX = 256 << 20
"""Most characters of the templates of a job's pods together.  Without it, a job of 1 MiB with
50,000 pods costs the operator an hour to make them, and some six times their size in memory."""
PORT_MAX = 65_535
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL_LENGTH = 63
"""Most characters of a pod's host name, and of a label's value (RFC 1123)."""
NOT_A_LABEL = "must be lower case letters, digits and '-', and start and end with a letter or digit"
NPROC_WORDS = ("auto", "cpu", "gpu")
NOT_NPROC = "must be auto, cpu, gpu or a whole number of at least 1"
NO_REPLICAS = "at least one replica must train: set replicas"
TOO_MANY_PODS = f"a job has at most {PODS_MAX} pods, spares included"
TOO_LARGE = f"the templates of all pods have at most {TEMPLATES_MAX >> 20} MiB together"
RESTART_POLICIES = ("Always", "OnFailure", "Never")
POD_LISTS = ("initContainers", "volumes", "tolerations", "topologySpreadConstraints")
POD_OBJECTS = ("affinity", "nodeSelector")
POD_AFFINITIES = ("podAffinity", "podAntiAffinity")
REQUIRED, PREFERRED = (
    f"{name}DuringSchedulingIgnoredDuringExecution" for name in ("required", "preferred")
)
CONTAINER_LISTS = ("env", "ports", "volumeMounts")
CONTAINER_OBJECTS = ("resources", "securityContext")
CONTAINER_TEXTS = ("command", "args")
"""Parts of a template that the operator reads or adds to."""
NO_ELASTIC = "elastic jobs are not supported yet; remove "


def check_spec(spec: JobSpec, report: Report) -> JobSpec:
    """Report contradictions and impossible values; the spec in its plain form."""
    nproc = spec.nproc_per_node
    if nproc not in NPROC_WORDS and whole_number(nproc, 1, INT_MAX) is None:
        report.invalid("spec.nprocPerNode", nproc, NOT_NPROC)
    names: set[str] = set()
    for index, replica in enumerate(spec.replica_specs):
        path = f"spec.replicaSpecs[{index}]"
        if report.has(path):
            continue
        if replica.name in names:
            report.duplicate(f"{path}.name", replica.name)
        names.add(replica.name)
        _check_replicas(replica, path, report, is_elastic=spec.elastic_policy is not None)
    if spec.nnodes == 0 and not report.has_below("spec.replicaSpecs"):
        report.invalid("spec.replicaSpecs", spec.nnodes, NO_REPLICAS)
    pods = sum(replica.replicas + replica.spares for replica in spec.replica_specs)
    if pods > PODS_MAX:
        report.invalid("spec.replicaSpecs", pods, TOO_MANY_PODS)
    elif pods > TEMPLATES_MAX >> 20 and (size := _templates_size(spec)) > TEMPLATES_MAX:
        report.invalid("spec.replicaSpecs", f"{size >> 20} MiB", TOO_LARGE)
    if spec.elastic_policy is not None:
        _check_elastic(spec.elastic_policy, report)
        report.forbidden("spec.elasticPolicy", f"{NO_ELASTIC}spec.elasticPolicy and maxReplicas")
    return replace(spec, run_policy=_check_run_policy(spec.run_policy, report))


def _templates_size(spec: JobSpec) -> int:
    """Return the characters of the templates of all pods; no job has more than 1 MiB itself."""
    replicas = spec.replica_specs
    return sum(len(str(one.template)) * (one.replicas + one.spares) for one in replicas)


def _check_replicas(replica: ReplicaSpec, path: str, report: Report, *, is_elastic: bool) -> None:
    most = replica.max_replicas
    if most is not None and most < replica.replicas:
        report.invalid(
            f"{path}.maxReplicas", most, f"must be at least replicas, {replica.replicas}"
        )
    elif most is not None and most > replica.replicas and not is_elastic:
        why = f"{NO_ELASTIC}maxReplicas, or set it to replicas, {replica.replicas}"
        report.forbidden(f"{path}.maxReplicas", why)
    if not report.has_below(f"{path}.template"):
        _check_template(replica.template, f"{path}.template", report)


def _check_template(template: Mapping[str, Any], path: str, report: Report) -> None:
    """Check the parts that a pod needs; the API checks the rest when the pod is created."""
    for key in template:
        if key not in ("metadata", "spec"):
            report.unknown(path, str(key), ("metadata", "spec"))
    metadata = template.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        report.invalid(f"{path}.metadata", metadata, "must be an object")
    elif metadata is not None:
        _check_shape(metadata, f"{path}.metadata", (), ("labels", "annotations"), report)
    if isinstance(metadata, Mapping) and "creationTimestamp" in metadata:
        report.warn(
            f"{path}.metadata.creationTimestamp: sagemaker-hyperpod 3.12 cannot list jobs that "
            "have it; remove it"
        )
    spec = template.get("spec")
    if spec is None:
        report.required(f"{path}.spec")
    elif not isinstance(spec, Mapping):
        report.invalid(f"{path}.spec", spec, "must be an object")
    else:
        _check_places(spec, f"{path}.spec", report)
        _check_pod(spec, f"{path}.spec", report)
        check_kinds(spec, f"{path}.spec", report)


def port_number(text: str) -> int | None:
    """Return the port that a text names; None: it names none."""
    return whole_number(text, 1, PORT_MAX)


def _check_places(pod: Mapping[str, Any], path: str, report: Report) -> None:
    _check_shape(pod, path, POD_LISTS, POD_OBJECTS, report)
    affinity = pod.get("affinity")
    if isinstance(affinity, Mapping):
        path = f"{path}.affinity"
        _check_shape(affinity, path, (), ("nodeAffinity", *POD_AFFINITIES), report)
        if isinstance(by_node := affinity.get("nodeAffinity"), Mapping):
            place = f"{path}.nodeAffinity"
            _check_shape(by_node, place, (PREFERRED,), (REQUIRED,), report)
            if isinstance(terms := by_node.get(REQUIRED), Mapping):
                _check_shape(terms, f"{place}.{REQUIRED}", ("nodeSelectorTerms",), (), report)
        for kind in POD_AFFINITIES:
            if isinstance(rules := affinity.get(kind), Mapping):
                _check_pod_affinity(rules, f"{path}.{kind}", report)


def _check_pod_affinity(rules: Mapping[str, Any], path: str, report: Report) -> None:
    _check_shape(rules, path, (REQUIRED, PREFERRED), (), report)
    wishes = rules.get(PREFERRED)
    for index, wish in enumerate(wishes if isinstance(wishes, list | tuple) else ()):
        if isinstance(wish, Mapping):
            _check_shape(wish, f"{path}.{PREFERRED}[{index}]", (), ("podAffinityTerm",), report)


def _check_pod(pod: Mapping[str, Any], path: str, report: Report) -> None:
    containers, policy = pod.get("containers"), pod.get("restartPolicy")
    if policy is not None and policy not in RESTART_POLICIES:
        report.unsupported(f"{path}.restartPolicy", policy, RESTART_POLICIES)
    if containers is None or containers == []:
        report.required(f"{path}.containers")
        return
    if not isinstance(containers, list | tuple):
        report.invalid(f"{path}.containers", containers, "must be a list")
        return
    names: set[str] = set()
    for index, container in enumerate(containers):
        place = f"{path}.containers[{index}]"
        name = container.get("name") if isinstance(container, Mapping) else None
        if not isinstance(container, Mapping):
            report.invalid(place, container, "must be an object")
        elif name is None or name == "":
            report.required(f"{place}.name")
        elif not isinstance(name, str) or not is_label(name):
            report.invalid(f"{place}.name", name, NOT_A_LABEL)
        elif name in names:
            report.duplicate(f"{place}.name", name)
        else:
            names.add(name)
        if isinstance(container, Mapping):
            _check_container(container, place, report)


def _check_container(container: Mapping[str, Any], path: str, report: Report) -> None:
    _check_shape(container, path, CONTAINER_LISTS, CONTAINER_OBJECTS, report)
    if isinstance(resources := container.get("resources"), Mapping):
        _check_shape(resources, f"{path}.resources", (), ("requests", "limits"), report)
    for key in CONTAINER_TEXTS:
        words = container.get(key)
        if words is None or (
            isinstance(words, list | tuple) and all(isinstance(word, str) for word in words)
        ):
            continue
        report.invalid(f"{path}.{key}", words, "must be a list of texts")
    env = container.get("env")
    for index, entry in enumerate(env if isinstance(env, list | tuple) else ()):
        if not isinstance(entry, Mapping):
            continue
        name, value = entry.get("name"), entry.get("value")
        if not isinstance(name, str):
            report.required(f"{path}.env[{index}].name")
        elif name == "AGENT_PORT" and isinstance(value, str) and port_number(value) is None:
            why = f"must be a port from 1 to {PORT_MAX}: the operator speaks to the agent there"
            report.invalid(f"{path}.env[{index}].value", value, why)


def _check_shape(
    found: Mapping[str, Any],
    path: str,
    lists: Iterable[str],
    objects: Iterable[str],
    report: Report,
) -> None:
    """Check the types of the parts that the operator adds to: the CRD allows anything here."""
    for key in objects:
        if found.get(key) is not None and not isinstance(found[key], Mapping):
            report.invalid(f"{path}.{key}", found[key], "must be an object")
    for key in lists:
        value = found.get(key)
        if value is not None and not isinstance(value, list | tuple):
            report.invalid(f"{path}.{key}", value, "must be a list")
            continue
        for index, entry in enumerate(value or ()):
            if not isinstance(entry, Mapping):
                report.invalid(f"{path}.{key}[{index}]", entry, "must be an object")


def _check_elastic(policy: ElasticPolicy, report: Report) -> None:
    path = "spec.elasticPolicy"
    if policy.replica_increment_step is not None and policy.replica_discrete_values:
        why = "replicaIncrementStep and replicaDiscreteValues exclude each other"
        report.forbidden(f"{path}.replicaDiscreteValues", why)
    least, most = policy.min_replicas, policy.max_replicas
    if least is not None and most is not None and least > most:
        report.invalid(f"{path}.maxReplicas", most, f"must be at least minReplicas, {least}")
    for index, value in enumerate(policy.replica_discrete_values):
        if not (least or 1) <= value <= (most or INT_MAX):
            why = "must be between minReplicas and maxReplicas"
            report.invalid(f"{path}.replicaDiscreteValues[{index}]", value, why)


def _check_run_policy(policy: RunPolicy, report: Report) -> RunPolicy:
    path = "spec.runPolicy"
    if policy.workload_mode:
        # "Workload deployment mode for elastic training" (sagemaker-hyperpod 3.12)
        report.forbidden(f"{path}.workloadMode", f"{NO_ELASTIC}workloadMode")
    if policy.restart_policy and policy.restart_policy.scale_up_snooze_time_in_seconds:
        place = f"{path}.restartPolicy.scaleUpSnoozeTimeInSeconds"
        report.warn(f"{place}: jobs do not grow yet: it has no effect")
    check_log_rules(policy.log_monitoring_configuration, path, report)
    if policy.ttl_seconds_after_finished == 0:
        report.warn(
            f"{path}.ttlSecondsAfterFinished: 0 keeps the finished job, as -1 does; 1 deletes it "
            "at once"
        )
        return replace(policy, ttl_seconds_after_finished=-1)
    return policy


def check_names(job: str, spec: JobSpec, report: Report) -> None:
    """Check that pods can be named after the job: `<job>-<replica spec>-<index>`."""
    if not is_label(job):
        report.invalid("metadata.name", job, NOT_A_LABEL)
    for index, replica in enumerate(spec.replica_specs):
        path = f"spec.replicaSpecs[{index}].name"
        if not replica.name:
            continue
        if not LABEL.fullmatch(replica.name):
            report.invalid(path, replica.name, NOT_A_LABEL)
            continue
        last = max(replica.replicas + replica.spares - 1, 0)
        over = len(f"{job}-{replica.name}-{last}") - LABEL_LENGTH
        if over > 0:
            why = (
                f"pods would be called {job}-{replica.name}-{last}, {over} characters more than "
                f"the {LABEL_LENGTH} that there may be"
            )
            report.invalid("metadata.name", job, why)


def is_label(text: str) -> bool:
    """True if a text is a DNS label."""
    return len(text) <= LABEL_LENGTH and LABEL.fullmatch(text) is not None
