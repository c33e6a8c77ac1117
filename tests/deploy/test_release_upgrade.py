"""The upgrade of a release that an older commit's chart has made, on a real API server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.apiservers import ROOT
from tests.deploy.charts import CHART, NAMESPACE
from tests.deploy.planes import Plane
from tests.deploy.test_release import DEFINITIONS, MACHINES, OPERATOR, ROLE, is_established

pytestmark = [pytest.mark.slow, pytest.mark.realkube]

OLDER = "0830e8133777673ecbf357cd8c15f94960e139bc"
"""A commit of 2026-11-24, before TrainJobs, JobSets and Ray: fewer values, rights and columns."""
JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs"
JOB = {
    "apiVersion": "sagemaker.amazonaws.com/v1",
    "kind": "HyperPodPyTorchJob",
    "metadata": {"name": "kept", "namespace": "default"},
    "spec": {
        "nprocPerNode": "1",
        "replicaSpecs": [
            {
                "name": "pods",
                "replicas": 1,
                "template": {"spec": {"containers": [{"name": "pytorch", "image": "x"}]}},
            }
        ],
    },
}
MACHINE = {
    "apiVersion": "unbroken.dev/v1",
    "kind": "Machine",
    "metadata": {"name": "kept"},
    "spec": {},
}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the chart of an older commit."""
    command = ["git", "archive", OLDER, "deploy/helm/unbroken"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()
        pytest.skip(f"commit {OLDER[:8]} is not in this clone, which may be shallow: {reason}")
    folder = tmp_path_factory.mktemp("older")
    subprocess.run(["tar", "-x", "-C", folder], input=done.stdout, check=True)
    return folder / "deploy/helm/unbroken"


def test_an_older_release_is_upgraded_with_all_that_people_made(plane: Plane, older: Path) -> None:
    values = {"operator": {"replicas": 3}, "networkPolicy": {"enabled": False}}
    made = plane.helm.install(
        str(older), "unbroken", values, namespace=NAMESPACE, create_namespace=True
    )
    assert made["status"] == "deployed"
    for name in ("hyperpodpytorchjobs.sagemaker.amazonaws.com", "machines.unbroken.dev"):
        plane.wait(f"{DEFINITIONS}/{name}", is_established)
    first = plane.api.get(OPERATOR).made
    kept = [plane.api.post(JOBS, JOB).made, plane.api.post(MACHINES, MACHINE).made]
    rules = plane.api.get(ROLE).made["rules"]

    # The values that the user gave for the older chart are valid for this one.
    assert plane.helm.upgrade(str(CHART), "unbroken", values)["revision"] == 2
    assert [one["status"] for one in plane.helm.history("unbroken")][-1] == "deployed"
    operator = plane.api.get(OPERATOR).made
    assert operator["metadata"]["uid"] == first["metadata"]["uid"], "made again, not upgraded"
    assert operator["spec"]["replicas"] == 3
    assert plane.api.get(ROLE).made["rules"] != rules
    for file in sorted((CHART / "files/crds").glob("*.yaml")):
        wanted = yaml.safe_load(file.read_text())
        found = plane.wait(f"{DEFINITIONS}/{wanted['metadata']['name']}", is_established)
        (version,), (served,) = wanted["spec"]["versions"], found["spec"]["versions"]
        assert served["schema"].keys() == version["schema"].keys()
        columns = [
            [one["name"] for one in each["additionalPrinterColumns"]] for each in (version, served)
        ]
        assert columns[0] == columns[1], file.name
    for path, one in zip((JOBS, MACHINES), kept, strict=True):
        now = plane.api.get(f"{path}/kept").made
        assert (now["metadata"]["uid"], now["spec"]) == (one["metadata"]["uid"], one["spec"])
    # Objects are still writable, so the new definitions accept what was valid before.
    labelled = {"metadata": {"labels": {"seen": "yes"}}}
    for path in (JOBS, MACHINES):
        plane.api.patch("merge", f"{path}/kept", labelled).done()

    plane.helm.rollback("unbroken", version=1)
    assert plane.api.get(ROLE).made["rules"] == rules
    assert plane.api.get(f"{JOBS}/kept").made["metadata"]["uid"] == kept[0]["metadata"]["uid"]
