"""Commands and metrics show jobs of other kinds with auto-resume, on a cluster of their own."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.apiclient import Api
from tests.cli_calls import Cli
from tests.e2e.control import api_of
from tests.operator.pytorchjobs import pytorchjob
from tests.watching import PATIENCE_SECONDS
from unbroken.core.auto_resume import Record
from unbroken.core.losses import Loss
from unbroken.operator.resume.record import write_record
from unbroken.spec.job_kinds import JOB_SET, PYTORCHJOB, RAY_CLUSTER, RAY_JOB, TRAIN_JOB, JobKind
from unbroken.spec.keys import AUTO_RESUME, FENCE, MAX_RETRIES, OUT_OF_SERVICE, RESUME_LOSSES

pytestmark = pytest.mark.slow
Object = dict[str, Any]
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
LOSS = Loss(1e9, 1e9 + 2, "node n1", "node n1 is gone", "deletes 1 of 3 pods", 1, 3, 1e9 + 24.5)
GROUP = {"rayStartParams": {}, "template": {"spec": {"containers": [{"name": "r", "image": "x"}]}}}
RAY = {"headGroupSpec": GROUP}
SPECS: dict[JobKind, Object] = {
    RAY_CLUSTER: {**RAY, "suspend": True},
    RAY_JOB: {
        "entrypoint": "true",
        "rayClusterSpec": RAY,
        "suspend": True,
        "shutdownAfterJobFinishes": True,
    },
    TRAIN_JOB: {"runtimeRef": {"name": "torch"}},
    JOB_SET: {},
}


def collection(kind: JobKind) -> str:
    """A kind's objects, as the client of the tests names them."""
    return f"{kind.group}/{kind.version}:{kind.plural}"


def definition(kind: JobKind) -> Object:
    """A definition of a kind that allows every field."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": kind.version, "served": True, "storage": True}
    names = {"kind": kind.name, "plural": kind.plural, "singular": kind.name.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.resource},
        "spec": {
            "group": kind.group,
            "names": names,
            "scope": "Namespaced",
            "versions": [{**version, "schema": {"openAPIV3Schema": anything}}],
        },
    }


def has_condition(found: Object, type: str) -> bool:
    """True if a condition of an object is True."""
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any((one["type"], one["status"]) == (type, "True") for one in conditions)


def post(api: Api, kind: JobKind, name: str, *losses: Loss, **metadata: Any) -> Object:
    """Create a job with auto-resume and this record."""
    record = Record(len(losses), losses[-1].fault if losses else "", losses=losses)
    texts = {key: text for key, text in write_record(record).items() if text is not None}
    annotations = {AUTO_RESUME: "true", MAX_RETRIES: "3", **texts}
    about = {"apiVersion": f"{kind.group}/{kind.version}", "kind": kind.name}
    body = {
        **about,
        "metadata": {"name": name, "annotations": annotations, **metadata},
        "spec": SPECS[kind],
    }
    return api.post(collection(kind), body).made


@pytest.fixture(scope="module")
def listed(cli: Cli) -> Iterator[Api]:
    """Jobs of four kinds with a loss, which nothing runs."""
    with closing(api_of(cli)) as api:
        for kind in (TRAIN_JOB, JOB_SET):
            api.post(DEFINITIONS, definition(kind)).done()
            api.until(DEFINITIONS, kind.resource, lambda one: has_condition(one, "Established"))
        post(api, RAY_JOB, "count", LOSS)
        post(api, RAY_CLUSTER, "rayml", replace(LOSS, culprit="pod \x1b[31mred", fault="a\nb"))
        train = post(api, TRAIN_JOB, "llm", LOSS)
        owner = {
            "apiVersion": TRAIN_JOB.path.removeprefix("apis/"),
            **{"kind": "TrainJob", "name": "llm", "uid": train["metadata"]["uid"]},
            "controller": True,
        }
        post(api, JOB_SET, "llm", LOSS, ownerReferences=[owner])
        post(api, JOB_SET, "count", replace(LOSS, ran=None))
        yield api


def test_jobs_of_every_kind_are_listed(cli: Cli, listed: Api) -> None:
    found = {(one["kind"], one["name"]): one for one in cli.json("jobs")["resumed"]}
    assert set(found) == {
        ("RayJob", "count"),
        ("RayCluster", "rayml"),
        ("TrainJob", "llm"),
        ("JobSet", "count"),
    }
    assert found["RayJob", "count"]["lastLoss"] == {
        **{"restart": 1, "culprit": "node n1", "fault": "node n1 is gone"},
        "remedy": "deletes 1 of 3 pods",
        "detectedAt": "2001-09-09T01:46:40.000000Z",
        "decidedAt": "2001-09-09T01:46:42.000000Z",
        "ranAgainAt": "2001-09-09T01:47:04.500000Z",
        "seconds": 24.5,
    }
    assert yaml.safe_load(cli.call("jobs", "-o", "yaml").stdout)["resumed"][0]["kind"]
    lines = cli.call("jobs").stdout.splitlines()
    titles = "KIND +NAME +STATE +RESTARTS +LAST FAULT +RAN AGAIN +AGE"
    assert re.fullmatch(titles, lines[0])
    row = r"RayJob +count +Suspended +1 of 3 +node n1 is gone +after 24\.5 s +\d+s"
    assert [line for line in lines if re.fullmatch(row, line)]
    assert [line for line in lines if re.match("JobSet +count +Restarting .* not yet ", line)]
    names = cli.call("jobs", "-o", "name").stdout.split()
    assert sorted(names) == ["jobset/count", "raycluster/rayml", "rayjob/count", "trainjob/llm"]
    wide = cli.call("jobs", "-A", "-o", "wide").stdout.splitlines()
    assert wide[0].split("AGE")[1].split() == ["CULPRIT", "REMEDY"]
    assert any(re.search(r"default +RayJob .* node n1 +deletes 1 of 3 pods$", one) for one in wide)


def test_a_job_is_explained_and_described_by_its_name(cli: Cli, listed: Api) -> None:
    text = cli.call("explain", "rayjob/count").stdout
    assert text.startswith("RayJob count: Suspended, 1 restart of at most 3\n\nrestart 1, ")
    assert "outcome    ran again after 24.5 s\n" in text
    assert cli.json("explain", "llm")["kind"] == "TrainJob"
    assert cli.json("explain", "rayjobs.ray.io/count")["losses"][0]["seconds"] == 24.5
    refused = cli.call("explain", "count", code=1).stderr
    assert "write one of" in refused
    assert "jobset/count" in refused
    assert "rayjob/count" in refused
    assert "is no kind of job" in cli.call("describe", "pod/count", code=1).stderr
    assert 'no job "rayjob/absent"' in cli.call("describe", "rayjob/absent", code=1).stderr
    described = cli.call("describe", "rayml").stdout
    assert re.search(r"^kind: +RayCluster$", described, re.MULTILINE)
    assert "restart 1: a b; deletes 1 of 3 pods; ran again after 24.5 s" in described


def test_a_job_that_waits_for_a_dead_node_says_what_frees_it(cli: Cli, listed: Api) -> None:
    """The local cluster fences its own machines; of this one it knows nothing."""
    silent = {"type": "Ready", "status": "Unknown", "reason": "Test", "message": ""}
    asked = {"name": "dead", "annotations": {FENCE: "pod rayml-w"}}
    listed.post("/api/v1/nodes", {"metadata": asked, "status": {"conditions": [silent]}}).done()
    labels = {RAY_CLUSTER.pod_label: "rayml"}
    spec = {"nodeName": "dead", "containers": [{"name": "c", "image": "any"}]}
    listed.post("pods", {"metadata": {"name": "rayml-w", "labels": labels}, "spec": spec}).done()
    command = "kubectl taint node dead node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    assert command not in cli.call("explain", "rayml").stdout
    listed.delete("pods/rayml-w").done()
    for words in (("explain", "rayml"), ("describe", "rayml")):
        told = cli.call(*words).stdout
        assert "node dead does not answer" in told
        assert f"  {command}\n" in told
        assert cli.json(*words)["waiting"][-1] == command
    taint = {"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"}
    listed.patch("merge", "/api/v1/nodes/dead", {"spec": {"taints": [taint]}}).done()
    assert "does not answer" not in cli.call("explain", "rayml").stdout


def test_a_garbled_record_hides_no_other_job(cli: Cli, listed: Api) -> None:
    for text in ("[" * 50_000, '[{"at": 1e308}]', "null"):
        body = {"metadata": {"annotations": {RESUME_LOSSES: text}}}
        listed.patch("merge", f"{collection(TRAIN_JOB)}/llm", body).done()
        found = {one["name"]: one for one in cli.json("jobs")["resumed"]}
        assert found["llm"]["lastLoss"] is None
        assert len(found) == 3


def test_incidents_of_all_kinds_are_in_one_list(cli: Cli, listed: Api) -> None:
    found = [one for one in cli.json("incidents")["incidents"] if one["job"] == "rayjob/count"]
    assert [(one["number"], one["culprit"], one["seconds"]) for one in found] == [
        (1, "node n1", 24.5)
    ]
    lines = cli.call("incidents", "-A", "-o", "wide").stdout.splitlines()
    titles = "NAMESPACE +TIME +JOB +NUMBER +CULPRIT +FAULT +REMEDY +COST +OUTCOME"
    assert re.fullmatch(titles, lines[0])
    assert [line for line in lines if re.search(r"rayjob/count +1 +node n1 .*24\.5 s +rec", line)]
    assert "rayjob/count 1" in cli.call("incidents", "-o", "name").stdout
    assert "no incidents so far" in cli.call("incidents", "-n", "elsewhere").stderr


def test_a_lost_node_is_shown_with_the_time_until_the_job_ran_again(
    make_cli: Callable[..., Cli],
) -> None:
    cli = make_cli(3)
    job = pytorchjob("moves")
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    template["containers"][0]["command"] = ["sleep", "100000"]
    template["terminationGracePeriodSeconds"] = 1
    with closing(api_of(cli)) as api:
        api.post(collection(PYTORCHJOB), job).done()

        api.until(collection(PYTORCHJOB), "moves", lambda found: has_condition(found, "Running"))
        node = api.get("pods/moves-worker-1").made["spec"]["nodeName"]
        off = {"metadata": {"annotations": {"unbroken.dev/power": "off"}}}
        api.patch("merge", f"/api/v1/nodes/{node}", off).done()

        def has_run_again(found: Object) -> bool:
            text = found["metadata"]["annotations"].get(RESUME_LOSSES, "[]")
            return any("ran" in one for one in json.loads(text))

        api.until(collection(PYTORCHJOB), "moves", has_run_again)
    (shown,) = cli.json("jobs")["resumed"]
    assert (shown["state"], shown["restarts"]) == ("Active", 1)
    assert shown["lastLoss"]["culprit"] == f"node {node}"
    assert 2.0 <= shown["lastLoss"]["seconds"] < 120.0
    found = cli.json("describe", "moves")
    assert sorted(pod["phase"] for pod in found["pods"]) == ["Running", "Running"]
    assert node not in {pod["node"] for pod in found["pods"]}
    assert "PyTorchJobRestarting" in {one["reason"] for one in found["events"]}
    text = cli.call("explain", "moves").stdout
    assert f"culprit    node {node}\n" in text
    assert "remedy     deletes all 2 pods\n" in text
    with urllib.request.urlopen(cli.json("status")["metrics"], timeout=PATIENCE_SECONDS) as answer:
        metrics = answer.read().decode()
    labels = '{job="moves",kind="PyTorchJob",namespace="default"}'
    for line in (
        f"unbroken_resumed_job_restarts{labels} 1.0",
        f"unbroken_resumed_job_loss_open{labels} 0.0",
        'unbroken_resumed_jobs{kind="PyTorchJob",state="Active"} 1.0',
        'unbroken_resumed_job_restart_seconds_count{kind="PyTorchJob"} 1.0',
    ):
        assert line in metrics
