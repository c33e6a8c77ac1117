"""The column STATE: kubectl prints the state that the job is in, for every way to get there."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import yaml

from tests.apiclient import Api
from tests.clients.kubectl_program import Kubectl
from tests.samples import define
from unbroken import local as embedded
from unbroken.cli.job.views import state
from unbroken.core.job.record.conditions import advance
from unbroken.local.kubeflow.decisions import with_condition
from unbroken.spec.job.codec import job_status_to
from unbroken.spec.job.types import Condition, JobStatus
from unbroken.spec.keys import ConditionType
from unbroken.spec.kubeflow.pytorchjob import PyTorchJobStatus, status_to
from unbroken.spec.schema.crd import job_definition

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DEFINITION = Path(embedded.__file__).parent / "kubeflow/definition.yaml"
JOBS = "sagemaker.amazonaws.com/v1:hyperpodpytorchjobs"
OTHERS = "kubeflow.org/v1:pytorchjobs"
PATHS = [
    (ConditionType.CREATED, *rest)
    for size in (0, 1, 2)
    for rest in itertools.product(ConditionType, repeat=size)
]
"""Paths of up to two steps from the first state, among them a job that is resumed."""
TEMPLATE = {"spec": {"containers": [{"name": "pytorch", "image": "any"}]}}


def test_kubectl_shows_the_state_whatever_came_before_it(kubectl: Kubectl, api: Api) -> None:
    define(api, job_definition())
    wanted = {}
    for number, path in enumerate(PATHS):
        name = f"job-{number}"
        wanted[name] = path[-1].value
        conditions: tuple[Condition, ...] = ()
        for at, to in enumerate(path):
            conditions = advance(conditions, to, to.value, "m", 1795244800.0 + at)
        write(api, name, conditions)
    shown = dict(line.split()[:2] for line in kubectl("get", "hpj", "--no-headers").splitlines())
    assert shown == wanted
    items = json.loads(kubectl("get", "hpj", "-o", "json"))["items"]
    assert {one["metadata"]["name"]: state(one) for one in items} == wanted
    last = {one["metadata"]["name"]: one["status"]["conditions"][-1]["type"] for one in items}
    assert last == wanted


def write(api: Api, name: str, conditions: tuple[Condition, ...]) -> None:
    """Create a job with these conditions, as the operator leaves it."""
    job = {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": name},
        "spec": {"replicaSpecs": [{"name": "pods", "replicas": 1, "template": TEMPLATE}]},
    }
    api.post(JOBS, job).done()
    status = job_status_to(JobStatus(conditions=conditions))
    api.patch("merge", f"{JOBS}/{name}/status", {"status": status}).done()


SAID = {
    "created": [("Created", True)],
    "running": [("Created", True), ("Running", True)],
    "suspended": [("Created", True), ("Suspended", True)],
    "resumed": [("Created", True), ("Suspended", True), ("Suspended", False)],
    "suspended-later": [
        ("Created", True),
        ("Running", True),
        ("Running", False),
        ("Suspended", True),
    ],
    "admitted": [
        ("Created", True),
        ("Running", True),
        ("Running", False),
        ("Suspended", True),
        ("Suspended", False),
    ],
    "running-again": [
        ("Created", True),
        ("Suspended", True),
        ("Suspended", False),
        ("Running", True),
    ],
    "restarting": [("Created", True), ("Running", True), ("Restarting", True)],
    "succeeded": [("Created", True), ("Running", True), ("Succeeded", True)],
    "failed": [("Created", True), ("Running", True), ("Failed", True)],
}
"""Conditions of PyTorchJobs in the order in which the controller sets them."""
STATES = {
    "created": "Created",
    "running": "Running",
    "suspended": "Suspended",
    "resumed": "Created",
    "suspended-later": "Suspended",
    "admitted": "Created",
    "running-again": "Running",
    "restarting": "Restarting",
    "succeeded": "Succeeded",
    "failed": "Failed",
}


def test_kubectl_shows_the_state_of_pytorchjobs(kubectl: Kubectl, api: Api) -> None:
    define(api, yaml.safe_load(DEFINITION.read_text()))
    for name, said in SAID.items():
        status = PyTorchJobStatus()
        for at, (kind, is_true) in enumerate(said):
            value = "True" if is_true else "False"
            status = with_condition(status, kind, value, (kind + value, "m"), 1795244800.0 + at)
        spec = {"Worker": {"replicas": 1, "restartPolicy": "OnFailure", "template": TEMPLATE}}
        job = {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name},
            "spec": {"pytorchReplicaSpecs": spec},
        }
        api.post(OTHERS, job).done()
        api.patch("merge", f"{OTHERS}/{name}/status", {"status": status_to(status)}).done()
    lines = kubectl("get", "pytorchjobs", "--no-headers").splitlines()
    assert dict(line.split()[:2] for line in lines) == STATES
