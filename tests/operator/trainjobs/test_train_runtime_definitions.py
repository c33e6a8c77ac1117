"""The runtime, its JobSet and an example are accepted by the definitions of Trainer and JobSet."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiclient import Api
from tests.apiservers import ROOT, Cluster, embedded_cluster
from tests.operator.resume.jobset_standin import CRDS
from tests.operator.trainjobs.trainer_standin import job_set_of
from tests.samples import define
from tests.train_jobs import RUNTIME
from unbroken.local.admissions import admit_job
from unbroken.spec.job_kinds import JOB_SET, TRAIN_JOB
from unbroken.spec.kubeflow.trainjob import RUNTIME_KIND, map_train_job, read_runtime

Object = dict[str, Any]
EXAMPLE: Object = yaml.safe_load((ROOT / "examples/trainjob.yaml").read_text())


def definitions() -> Iterator[Object]:
    """Yield the whole definitions; skips without their files."""
    for file in ("trainer.crds.yaml.gz", "jobset.crds.yaml.gz"):
        if not (CRDS / file).exists():
            pytest.skip(f"no {file} in {CRDS}")
        for one in yaml.load_all(gzip.decompress((CRDS / file).read_bytes()), yaml.CSafeLoader):
            one["spec"].pop("conversion", None)  # its certificate is a placeholder
            yield one


@pytest.fixture(params=[pytest.param("crds", marks=pytest.mark.realkube), "embedded"])
def api(
    request: pytest.FixtureRequest, clusters: Callable[[str], Cluster], tmp_path: Path
) -> Iterator[Api]:
    """Provide the server of Kubernetes 1.36 and a local one, with the definitions."""
    if request.param == "crds":
        with closing(Api(clusters("crds"))) as api:
            yield _defined(api)
        return
    # One of its own: other tests need these kinds with another schema.
    with embedded_cluster(tmp_path / "server") as cluster, closing(Api(cluster)) as api:
        yield _defined(api)


def _defined(api: Api) -> Api:
    for one in definitions():
        define(api, one)
    return api


def test_what_is_delivered_is_accepted_without_an_unknown_field(api: Api) -> None:
    strict = {"fieldValidation": "Strict", "dryRun": "All"}
    runtimes = f"/apis/{RUNTIME_KIND.group}/{RUNTIME_KIND.version}/{RUNTIME_KIND.plural}"
    api.post(runtimes, RUNTIME, **strict).done()
    here = api.within("default")
    trains = f"{TRAIN_JOB.group}/{TRAIN_JOB.version}:{TRAIN_JOB.plural}"
    made = here.post(trains, EXAMPLE, **strict).made
    job_set = job_set_of(made, RUNTIME)
    del job_set["metadata"]["ownerReferences"]
    here.post(f"{JOB_SET.group}/{JOB_SET.version}:{JOB_SET.plural}", job_set, **strict).done()
    # With the defaults of the definitions, too, the example is one that the operator runs.
    found = map_train_job(made, read_runtime(RUNTIME))
    assert [str(one) for one in found.problems] == []
    assert [str(one) for one in admit_job(found.body).problems] == []


def test_the_runtime_obeys_the_rules_of_trainers_webhook() -> None:
    """Trainer 2.3, pkg/webhooks/trainingruntime_webhook.go, and JobSet, jobset_webhook.go."""
    jobs = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    assert [one["replicas"] for one in jobs] == [1, 1]
    names: list[str] = []
    for one in jobs:
        assert {wanted["name"] for wanted in one.get("dependsOn") or ()} <= set(names)
        names.append(one["name"])
    assert "dependsOn" not in jobs[0], "the first job of a JobSet depends on no other"
    (container,) = jobs[1]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    assert set(RUNTIME["spec"]["template"]["spec"]["successPolicy"]["targetReplicatedJobs"]) <= set(
        names
    )


def test_no_container_of_the_result_pod_takes_the_image_of_a_train_job() -> None:
    result, node = job_set_of({**EXAMPLE, "metadata": {"name": "llm", "uid": "u-1"}}, RUNTIME)[
        "spec"
    ]["replicatedJobs"]
    (waits,) = result["template"]["spec"]["template"]["spec"]["containers"]
    assert waits["command"][0] == "/bin/sh"
    assert "nvidia.com/gpu" not in str(waits["resources"])
    assert node["template"]["spec"]["completions"] == 2
    pod = result["template"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod
