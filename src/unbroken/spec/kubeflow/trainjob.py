"""The TrainJob (trainer.kubeflow.org/v1alpha1), the runtime `unbroken-torch`, and the
HyperPodPyTorchJob that runs it.

Names are those of Kubeflow Trainer 2.3 (`trainjob_types.go`, `trainingruntime_types.go`). Only the
fields are here that the HyperPodPyTorchJob of a TrainJob can follow: all others are problems.

The fields of the TrainJob change the runtime's pod template as Kubeflow Trainer changes its JobSet
(kubeflow/trainer 2.3, pkg/runtime/framework/plugins/jobset/builder.go, `Trainer`).

Changes of a pod template are merged as Kubeflow Trainer merges the `runtimePatches` of a TrainJob:
it uses Kubernetes' strategic merge (kubeflow/trainer 2.3, pkg/runtime/core/trainingruntime.go,
`mergeRuntimePatches`): objects are merged, and lists by the keys below. All other lists are
replaced. A variable or a volume is replaced as a whole, so that it never has two sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.errors import SpecError
from unbroken.spec import keys
from unbroken.spec.auto_resume import resume_of, resume_problems
from unbroken.spec.job.launch import EXPECTED, training_name
from unbroken.spec.job.parse import parse_job
from unbroken.spec.job.types import AgentSource
from unbroken.spec.job_kinds import HYPERPOD_JOB, TRAIN_JOB, TRAIN_RUNTIME, TRAIN_RUNTIME_KIND
from unbroken.spec.keys import TRAINER_GROUP, TRAINER_MANAGER, TRAINER_STEP
from unbroken.spec.lookup import value_at
from unbroken.spec.problems import Problem, Report
from unbroken.spec.schema.fields import (
    IntOrString,
    Positive,
    blank_record,
    read_record,
    write_record,
)

Object = Mapping[str, Any]
TRAINER, NODE = "trainer", "node"
"""Step of the job that trains, and name of its container that trains (`constants.go`)."""


@dataclass(frozen=True, slots=True)
class RuntimeKind:
    """The kind of the runtimes of a whole cluster."""

    group: str = TRAINER_GROUP
    version: str = "v1alpha1"
    name: str = TRAIN_RUNTIME_KIND
    plural: str = "clustertrainingruntimes"

    @property
    def resource(self) -> str:
        """The plural with its group, which is also the name of the kind's definition."""
        return f"{self.plural}.{self.group}"


RUNTIME_KIND = RuntimeKind()


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of the container that trains."""

    limits: Object = field(default_factory=dict)
    requests: Object = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trainer:
    """The container that trains, and the number of its pods; None: as the runtime has it."""

    image: str | None = None
    command: tuple[str, ...] | None = None
    args: tuple[str, ...] | None = None
    env: tuple[Object, ...] = ()
    num_nodes: Positive | None = None
    num_proc_per_node: IntOrString = "auto"
    resources_per_node: Resources = Resources()


@dataclass(frozen=True, slots=True)
class PodPatch:
    """Changes of a pod template."""

    metadata: Object = field(default_factory=dict)
    spec: Object = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobPatchSpec:
    """Changes of the spec of a Job."""

    template: PodPatch = PodPatch()


@dataclass(frozen=True, slots=True)
class JobTemplatePatch:
    """Changes of a Job."""

    metadata: Object = field(default_factory=dict)
    spec: JobPatchSpec = JobPatchSpec()


@dataclass(frozen=True, slots=True)
class JobPatch:
    """Changes of one job of the runtime."""

    name: str
    template: JobTemplatePatch = JobTemplatePatch()


@dataclass(frozen=True, slots=True)
class JobSetPatchSpec:
    """Changes of the jobs of the runtime."""

    replicated_jobs: tuple[JobPatch, ...] = ()


@dataclass(frozen=True, slots=True)
class JobSetPatch:
    """Changes of the JobSet that Trainer makes; `metadata` is the JobSet's own."""

    metadata: Object = field(default_factory=dict)
    spec: JobSetPatchSpec = JobSetPatchSpec()


@dataclass(frozen=True, slots=True)
class RuntimeSpecPatch:
    """Changes of the runtime."""

    template: JobSetPatch = JobSetPatch()


@dataclass(frozen=True, slots=True)
class RuntimePatch:
    """Changes of the runtime by one manager: a user, or a controller such as Kueue."""

    manager: str = ""
    time: str = ""
    training_runtime_spec: RuntimeSpecPatch = RuntimeSpecPatch()


@dataclass(frozen=True, slots=True)
class TrainJobSpec:
    """The spec of a TrainJob."""

    runtime_ref: Object = field(default_factory=dict)
    trainer: Trainer = Trainer()
    runtime_patches: tuple[RuntimePatch, ...] = ()
    suspend: bool = False
    active_deadline_seconds: Positive | None = None
    """Enforced by Trainer's controller."""
    managed_by: str = TRAINER_MANAGER
    initializer: Object = field(default_factory=dict)


def read_train_job(train: Object, report: Report) -> TrainJobSpec:
    """Read the spec of a TrainJob; `report` gets every field that cannot be followed."""
    given = train.get("spec")
    if not isinstance(given, Mapping):
        report.required("spec")
        return blank_record(TrainJobSpec)
    spec = read_record(TrainJobSpec, given, "spec", report)
    if spec.initializer:
        why = "unbroken runs no initializers: let the script load the dataset and the model"
        report.forbidden("spec.initializer", why)
    return spec


@dataclass(frozen=True, slots=True)
class Runtime:
    """The part of a runtime that the training pods are made from."""

    job: str
    """Name of the job that trains, in the runtime."""
    template: Object
    """The template of its pods: `metadata` and `spec`."""
    num_nodes: int = 1


def read_runtime(runtime: Object) -> Runtime:
    """Read a ClusterTrainingRuntime. Raises SpecError if it has no pods that train."""
    for job in _listed(value_at(runtime, "spec", "template", "spec", "replicatedJobs")):
        if value_at(job, "template", "metadata", "labels", TRAINER_STEP) != TRAINER:
            continue
        template = value_at(job, "template", "spec", "template")
        containers = _listed(value_at(template, "spec", "containers"))
        if isinstance(template, Mapping) and any(one.get("name") == NODE for one in containers):
            nodes = value_at(runtime, "spec", "mlPolicy", "numNodes")
            is_number = isinstance(nodes, int) and not isinstance(nodes, bool) and nodes > 0
            name = job.get("name")
            if isinstance(name, str):
                return Runtime(name, template, nodes if is_number else 1)
    raise SpecError(
        f"{TRAIN_RUNTIME_KIND} {TRAIN_RUNTIME}: expected a job in "
        f"spec.template.spec.replicatedJobs with the label {TRAINER_STEP}: {TRAINER} "
        f"and a container named {NODE}; apply deploy/trainer-runtime.yaml again"
    )


def _listed(given: Any) -> Iterator[Object]:
    """Yield the objects of a list; nothing for anything else."""
    for one in given if isinstance(given, list | tuple) else ():
        if isinstance(one, Mapping):
            yield one


LIST_KEYS = {
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "schedulingGates": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Keys of the items of lists that are merged (`patchMergeKey` in Kubernetes' core/v1 types.go)."""
REPLACED = ("env", "volumes")
"""Lists whose items are replaced as a whole."""
DEPTH_MAX = 40
"""Levels that are merged; a pod template has about 15. Deeper values are replaced."""


def merged(base: Object, patch: Object, depth: int = DEPTH_MAX) -> dict[str, Any]:
    """Return an object with the changes of a patch; both stay as they are."""
    result = dict(base)
    for key, value in patch.items():
        old = result.get(key)
        if depth <= 0 or value is None:
            result[key] = value if value is not None else old
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = merged(old, value, depth - 1)
        elif key in LIST_KEYS and isinstance(old, list | tuple) and isinstance(value, list | tuple):
            result[key] = merged_list(str(key), old, value, depth - 1)
        else:
            result[key] = value
    return result


def merged_list(
    field: str,
    base: list[Any] | tuple[Any, ...],
    patch: list[Any] | tuple[Any, ...],
    depth: int = DEPTH_MAX,
) -> list[Any]:
    """Return a list of LIST_KEYS with the changes of a patch: known items in their places, new ones
    at the end."""
    key, result = LIST_KEYS[field], list(base)
    places: dict[str, int] = {}
    for number, item in enumerate(result):
        if (name := _named(item, key)) is not None:
            places.setdefault(name, number)
    for item in patch:
        name = _named(item, key)
        place = None if name is None else places.setdefault(name, len(result))
        if place is None or place == len(result):
            result.append(item)
        elif field in REPLACED:
            result[place] = item
        else:
            result[place] = merged(result[place], item, depth)
    return result


def _named(item: Any, key: str) -> str | None:
    """Return the text by which an item of a list is found; None: it has none."""
    name = item.get(key) if isinstance(item, Mapping) else None
    return name if isinstance(name, str) else None


ANNOTATIONS, LABELS = "metadata.annotations", "metadata.labels"
OF_AUTO_RESUME = f"{keys.OWN_PREFIX}auto-resume-"
"""Prefix of annotations that auto-resume writes."""
PREFIXES = (keys.OWN_PREFIX, keys.HYPERPOD_PREFIX)
"""Prefixes of the labels that the HyperPodPyTorchJob has, too. Other labels belong to tools that
made the TrainJob, and could take the job for an object of their own."""
RESULTING = "the HyperPodPyTorchJob made from it would be invalid: "


@dataclass(frozen=True, slots=True)
class MappedJob:
    """The HyperPodPyTorchJob of a TrainJob, to be created; with problems it must not be."""

    body: dict[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def map_train_job(train: Object, runtime: Runtime) -> MappedJob:
    """Return the job that runs a TrainJob; never raises for a bad one."""
    report = Report()
    spec = read_train_job(train, report)
    metadata = _mapping(train.get("metadata"))
    annotations = _texts(metadata.get("annotations"), ANNOTATIONS, report)
    template = _template(spec, runtime, report)
    options = _options(annotations)
    _check_launch(template, options, report)
    name, uid, namespace = (_text(metadata.get(key)) for key in ("name", "uid", "namespace"))
    labels = _texts(metadata.get("labels"), LABELS, report)
    nodes = runtime.num_nodes if spec.trainer.num_nodes is None else spec.trainer.num_nodes
    body = {
        "apiVersion": f"{HYPERPOD_JOB.group}/{HYPERPOD_JOB.version}",
        "kind": HYPERPOD_JOB.name,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {key: labels[key] for key in labels if key.startswith(PREFIXES)},
            "annotations": options,
            "ownerReferences": [TRAIN_JOB.owner_reference(name, uid)],
        },
        "spec": {
            "nprocPerNode": spec.trainer.num_proc_per_node,
            "runPolicy": {"suspend": spec.suspend, **_run_policy(annotations, report)},
            "replicaSpecs": [{"name": NODE, "replicas": nodes, "template": template}],
        },
    }
    if report.problems:
        return MappedJob(problems=tuple(report.problems))
    wrong = parse_job(body).problems
    told = tuple(Problem("", f"{RESULTING}{one}", one.reason) for one in wrong)
    return MappedJob({} if told else body, told)


def _mapping(given: Any) -> Object:
    return given if isinstance(given, Mapping) else {}


def _text(given: Any) -> str:
    return given if isinstance(given, str) else ""


def _texts(given: Any, path: str, report: Report) -> dict[str, str]:
    """Return labels or annotations; a value that is no text is a problem."""
    found = {}
    for key, value in _mapping(given).items():
        if isinstance(key, str) and isinstance(value, str):
            found[key] = value
        else:
            report.invalid(f"{path}[{str(key)[:80]}]", value, "must be text")
    return found


# --- the options of the job


def _options(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return the annotations of the job: unbroken's own, and by default an injected agent."""
    own = {
        key: value
        for key, value in annotations.items()
        if key.startswith(keys.OWN_PREFIX)
        and not key.startswith(OF_AUTO_RESUME)
        and key != keys.LOG_MONITORING
    }
    return {keys.AGENT: AgentSource.INJECTED.value, **own}


def _run_policy(annotations: Mapping[str, str], report: Report) -> dict[str, Any]:
    """Return the parts of the run policy that annotations give: a TrainJob has no fields for
    them."""
    result: dict[str, Any] = {}
    report.problems += [Problem(ANNOTATIONS, text) for text in resume_problems(annotations)]
    resume = resume_of(annotations)
    if resume.is_wanted:
        result["jobMaxRetryCount"] = resume.retries_max
    from unbroken.spec.log_monitoring import LIST, log_monitoring_of  # YAML is slow to load

    monitoring = log_monitoring_of(annotations)
    report.problems += monitoring.problems
    if monitoring.rules:
        result[LIST] = [write_record(rule, is_minimal=True) for rule in monitoring.rules]
    return result


# --- the pods


def _template(spec: TrainJobSpec, runtime: Runtime, report: Report) -> dict[str, Any]:
    """Return the pod template: the runtime's, with the changes by the TrainJob."""
    metadata = _mapping(runtime.template.get("metadata"))
    pod = dict(_mapping(runtime.template.get("spec")))
    about = {key: metadata[key] for key in ("labels", "annotations") if metadata.get(key)}
    known = {name: _names(pod.get(name)) for name in ("containers", "initContainers")}
    for number, patch in enumerate(spec.runtime_patches):
        about, pod = _patched(about, pod, patch, runtime.job)
        _check_patch(patch, runtime.job, known, f"spec.runtimePatches[{number}]", report)
    gates = pod.get("schedulingGates")
    if isinstance(gates, list | tuple):
        pod["schedulingGates"] = [one for one in gates if _name(one) != keys.RUNTIME_GATE]
        if not pod["schedulingGates"]:
            del pod["schedulingGates"]
    # The operator gives the pods of its jobs their own.
    pod.pop("restartPolicy", None)
    _equip(pod, spec.trainer, report)
    return {"metadata": about, "spec": pod}


def _patched(
    about: Object, pod: Object, patch: RuntimePatch, job: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metadata and spec of the pod template with the changes of one manager."""
    about, pod = dict(about), dict(pod)
    for one in patch.training_runtime_spec.template.spec.replicated_jobs:
        if one.name == job:
            change = one.template.spec.template
            about, pod = merged(about, change.metadata), merged(pod, change.spec)
    return about, pod


def _check_patch(
    patch: RuntimePatch, job: str, known: Mapping[str, list[str]], path: str, report: Report
) -> None:
    """Report the changes of the job that trains which its pods cannot have."""
    jobs = patch.training_runtime_spec.template.spec.replicated_jobs
    for number, one in enumerate(jobs):
        place = f"{path}.trainingRuntimeSpec.template.spec.replicatedJobs[{number}].template"
        if one.name != job:
            continue  # Trainer makes the pods of other jobs
        if one.template.metadata:
            why = "the operator makes no Job for the pods that train; use template.metadata below"
            report.forbidden(f"{place}.metadata", why)
        place = f"{place}.spec.template"
        change = one.template.spec.template
        for key in change.metadata:
            if key not in ("labels", "annotations"):
                report.unknown(f"{place}.metadata", str(key), ("labels", "annotations"))
        for field_name, names in known.items():
            for name in _names(change.spec.get(field_name)):
                if name not in names:
                    report.unsupported(f"{place}.spec.{field_name}", name, names)


def _name(thing: Any) -> Any:
    return thing.get("name") if isinstance(thing, Mapping) else None


def _names(things: Any) -> list[str]:
    """Return the names of listed objects."""
    found = [_name(one) for one in things] if isinstance(things, list | tuple) else []
    return [name for name in found if isinstance(name, str)]


def _equip(pod: dict[str, Any], trainer: Trainer, report: Report) -> None:
    """Put the fields of the trainer into the container that trains, which becomes the first."""
    containers = pod.get("containers")
    listed = list(containers) if isinstance(containers, list | tuple) else []
    others = [one for one in listed if _name(one) != NODE]
    container = dict(next((one for one in listed if _name(one) == NODE), {"name": NODE}))
    if trainer.image is not None:
        container["image"] = trainer.image
    for key, words in (("command", trainer.command), ("args", trainer.args)):
        if words is not None:
            container[key] = list(words)
    resources = trainer.resources_per_node
    given = {"limits": dict(resources.limits), "requests": dict(resources.requests)}
    if any(given.values()):
        container["resources"] = {key: value for key, value in given.items() if value}
    if trainer.env:
        old = container.get("env")
        env = old if isinstance(old, list | tuple) else []
        container["env"] = merged_list("env", env, trainer.env)
    pod["containers"] = [container, *others]
    if training_name(names := _names(pod["containers"])) != NODE:
        why = f"the operator would take {training_name(names)[:80]} for the container that trains"
        report.forbidden("spec.runtimeRef", f"the runtime's containers: {why}")


def _check_launch(template: Object, options: Mapping[str, str], report: Report) -> None:
    """Report an image or a command that neither the TrainJob nor the runtime has."""
    container = template["spec"]["containers"][0]
    if not container.get("image"):
        report.required("spec.trainer.image", "the runtime has no default image")
    if not container.get("command") and options[keys.AGENT] == AgentSource.INJECTED.value:
        report.required("spec.trainer.command", f"write {EXPECTED}")
