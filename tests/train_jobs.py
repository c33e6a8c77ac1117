"""TrainJobs of the runtime `unbroken-torch`, and the runtime as it is delivered."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from tests.apiservers import ROOT
from unbroken.spec.job_kinds import TRAIN_JOB, TRAIN_RUNTIME

Object = dict[str, Any]
RUNTIME: Object = yaml.safe_load((ROOT / "deploy/trainer-runtime.yaml").read_text())
COMMAND = ["torchrun", "--nproc-per-node=2", "train.py"]


def runtime() -> Object:
    """Return the runtime as it is delivered, to be changed."""
    return copy.deepcopy(RUNTIME)


def train_job(name: str = "lm", metadata: Object | None = None, **spec: Any) -> Object:
    """Return a TrainJob of the runtime with two nodes; `spec` entries overrule."""
    about = {"name": name, "namespace": "default", "uid": "u-1", **(metadata or {})}
    trainer = {"image": "any:1", "command": [*COMMAND], "numNodes": 2, "numProcPerNode": 2}
    return {
        "apiVersion": f"{TRAIN_JOB.group}/{TRAIN_JOB.version}",
        "kind": TRAIN_JOB.name,
        "metadata": about,
        "spec": {"runtimeRef": {"name": TRAIN_RUNTIME}, "trainer": trainer, **spec},
    }


def patch(pod: Object, job: str = "node", manager: str = "test.example/me", **more: Any) -> Object:
    """Return an entry of `runtimePatches` that changes the pods of a job of the runtime."""
    template = {"spec": {"template": {"spec": pod}}, **more}
    jobs = {"replicatedJobs": [{"name": job, "template": template}]}
    return {"manager": manager, "trainingRuntimeSpec": {"template": {"spec": jobs}}}
