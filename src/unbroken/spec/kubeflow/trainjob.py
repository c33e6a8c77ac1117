"""The spec of a TrainJob (trainer.kubeflow.org/v1alpha1), and the runtime `unbroken-torch`.

Names are those of Kubeflow Trainer 2.3 (`trainjob_types.go`, `trainingruntime_types.go`). Only the
fields are here that the HyperPodPyTorchJob of a TrainJob can follow: all others are problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from unbroken.errors import SpecError
from unbroken.spec.job_kinds import TRAIN_RUNTIME, TRAIN_RUNTIME_KIND
from unbroken.spec.keys import TRAINER_GROUP, TRAINER_MANAGER, TRAINER_STEP
from unbroken.spec.lookup import value_at
from unbroken.spec.problems import Report
from unbroken.spec.schema.fields import INT_MAX, Limits
from unbroken.spec.schema.read import blank_record, read_record

Object = Mapping[str, Any]
Positive = Annotated[int, Limits(minimum=1, maximum=INT_MAX)]
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
    num_proc_per_node: Annotated[str, Limits(min_length=1, is_int_or_string=True)] = "auto"
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
