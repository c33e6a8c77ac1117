"""Rights of each program of the chart: the audit log shows that all are used and suffice."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.apiservers import free_port
from tests.cluster_api.api_program import Running, credentials_file
from tests.cluster_logs import assert_no_errors
from tests.deploy.charts import NAMESPACE, Object, arguments, render
from tests.deploy.hands import FAILS, MACHINES, hands
from tests.deploy.planes import Plane, ended
from tests.deploy.rights import Right, granted, refused, used
from tests.e2e.clusters import UNBROKEN, Cluster, kill
from tests.operator.kueue.kueue_definitions import definitions
from tests.operator.pytorchjobs import BOTH, DEFINITION, pytorchjob
from tests.operator.realkube import Node
from tests.operator.resume.jobset_standin import definitions as job_set_definitions
from tests.operator.resume.jobset_standin import job_set, train_job
from tests.operator.trained_jobs import Job, until
from tests.train_jobs import train_job as run_as_job
from unbroken import local
from unbroken.spec.keys import AUTO_RESUME, MAX_RETRIES, RESULT, RESULT_LABEL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(600),
]

RAY_DEFINITIONS = Path(local.__file__).parent / "ray/definitions.json"
OPERATOR, CLUSTER_API = "unbroken-operator", "unbroken-cluster-api"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OURS = "/apis/unbroken.dev/v1"
INCIDENTS = f"{OURS}/namespaces/default/incidents"
LONG_AGO = "2020-01-01T00:00:00Z"
KEPT = 52
"""Number of incidents: two more than an operator keeps of a job (core/job/recovery/incidents)."""
JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs"
PYTORCHJOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
TRAINJOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs"
RUNTIMES = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
RAYCLUSTERS = "/apis/ray.io/v1/namespaces/default/rayclusters"
RAYJOBS = "/apis/ray.io/v1/namespaces/default/rayjobs"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
NODES = "/api/v1/nodes"
ROLE = "arn:aws:iam::123456789012:role/worker"

UNSEEN = {
    (
        "hyperpodpytorchjobs/finalizers.sagemaker.amazonaws.com",
        "update",
    ): "asked for by the admission plugin of owner references, inside the server",
    ("events", "list"): "of pods that a kubelet holds for seconds: there is none here",
    (
        "poddisruptionbudgets.policy",
        "delete",
    ): "of a budget that was found; Kubernetes 1.20 has none of policy/v1",
    (
        "trainjobs/finalizers.trainer.kubeflow.org",
        "update",
    ): "asked for by the same plugin, of the owner of a job",
    (
        "incidents.unbroken.dev",
        "create",
    ): "asked for by the server itself where an apply finds no object",
}
"""Rights that no request names, and the component that asks for each."""


@dataclass(frozen=True)
class World:
    """All programs that the chart has started, and a job of real processes."""

    plane: Plane
    job: Job
    api: Running
    operators: list[Program]

    def leader(self) -> Program:
        """Return the operator that holds the lease."""
        lease = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/unbroken-operator"
        holder = self.plane.wait(lease, lambda one: one["spec"]["holderIdentity"])
        pid = int(holder["spec"]["holderIdentity"].split("/")[-2])
        (found,) = (one for one in self.operators if one.process.pid == pid)
        return found


@dataclass(frozen=True)
class Program:
    """A program of the chart, started with the token of its ServiceAccount."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self, text: str) -> None:
        """Wait until it has logged a text."""
        until(lambda: text in self.log.read_text(), text)


@contextmanager
def started(plane: Plane, account: str, words: list[str], number: int = 0) -> Iterator[Program]:
    """Run a program; it must end well unless the block has killed it."""
    kubeconfig, log = plane.account(account), plane.folder / f"{account}-{number}.log"
    with log.open("wb") as output:
        command = [*UNBROKEN, *words, "--kubeconfig", str(kubeconfig)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield Program(process, log)
    finally:
        assert ended(process) in (0, -signal.SIGKILL), log.read_text()[-3000:]
        assert_no_errors(log)


@pytest.fixture(scope="module")
def world(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Install the chart with all its parts; its programs run here, since there is no image."""
    port = free_port()
    values: Object = {
        "nodes": {"provider": "machines", "share": 1},
        "checks": {"image": "checks:1"},
        "clusterApi": {"enabled": True, "credentialsSecret": "keys", "port": port},
        "kueue": {"enabled": True},
        "trainer": {"runtime": True},
        "metrics": {"enabled": False},
    }
    for one in job_set_definitions():
        plane.api.post(DEFINITIONS, one).done()
    plane.wait(RUNTIMES)
    plane.install(values)
    lines = RAY_DEFINITIONS.read_text().splitlines()
    kinds = (yaml.safe_load(DEFINITION.read_text()), *map(json.loads, lines))
    for one in (*kinds, *definitions("v1beta2")):
        plane.api.post(DEFINITIONS, one).done()
    found = render(values)
    with ExitStack() as stack:
        cluster = _nodes(plane, stack)
        stack.enter_context(hands(plane.cluster))
        key_file = plane.folder / "mounted/key"
        replaced = ("--webhook-port", "--key-file")
        words = [one for one in arguments(found) if not one.startswith(replaced)]
        words.append(f"--key-file={key_file}")
        operators = []
        for number in range(2):
            # Two pods have an address each, two programs of one host have not.
            given = [*words, f"--webhook-port={free_port()}"]
            operators.append(stack.enter_context(started(plane, OPERATOR, given, number)))
        _project(plane, key_file)
        mounted = ("--credentials", "--tls-")
        words = [one for one in arguments(found, CLUSTER_API) if not one.startswith(mounted)]
        words = [one.replace("0.0.0.0", "127.0.0.1") for one in words]
        words.append(f"--credentials={credentials_file(plane.folder)}")
        stack.enter_context(started(plane, CLUSTER_API, words)).said("cluster API serves address=")
        api = Running(plane.api)
        api.endpoint = f"http://127.0.0.1:{port}"
        yield World(plane, Job(cluster, "lm", tmp_path_factory.mktemp("job")), api, operators)


def _project(plane: Plane, file: Path) -> None:
    """Mount the Secret that an operator has made, as the kubelet does."""
    secret = plane.wait(f"/api/v1/namespaces/{NAMESPACE}/secrets/unbroken-operator-key")
    file.parent.mkdir()
    draft = file.with_name("draft")
    draft.write_bytes(base64.b64decode(secret["data"]["key"]))
    draft.chmod(0o440)
    draft.rename(file)


def _nodes(plane: Plane, stack: ExitStack) -> Cluster:
    """Start three nodes of processes, for jobs."""
    kubectl = shutil.which("kubectl", path=Path(sys.executable).parent) or shutil.which("kubectl")
    assert kubectl, "kubectl is missing; `make setup` installs it"
    cluster = Cluster(plane.folder / "state", str(kubectl))
    cluster.directory.mkdir()
    (cluster.directory / "kubeconfig").symlink_to(plane.cluster.kubeconfig)
    for number in range(3):
        stack.enter_context(Node(cluster, number))
    for number in range(3):
        cluster.kubectl("wait", "--for=create", f"node/n{number}", "--timeout=60s")
        cluster.wait(f"node/n{number}", "condition=Ready", seconds=60)
    return cluster


def merged(world: World, path: str, body: Object) -> Object:
    """Apply a merge patch to an object; return the result."""
    return world.plane.api.patch("merge", path, body).made


def label(world: World, node: str, health: str) -> None:
    """Label a node as its daemon would."""
    labels = {"sagemaker.amazonaws.com/node-health-status": health}
    merged(world, f"{NODES}/{node}", {"metadata": {"labels": labels}})


# --- jobs


def test_a_job_recovers_changes_operators_and_is_taken_away(world: World) -> None:
    job, plane = world.job, world.plane
    # Somebody else's pod is in the way until it is gone.
    plane.api.within("default").post("pods", stray("lm-pods-0")).done()
    job.apply(replicas=2, nproc=1)
    until(lambda: ("pods", "get") in seen(world), "the operator looks at what is in its way")
    plane.api.within("default").delete("pods/lm-pods-0", gracePeriodSeconds=0).done()
    first = job.started(0, size=2)
    kill(first[1].pid)
    job.started(1, size=2)
    job.incident(1)

    # A pod moves off a node that is said to be bad, and gets the key that the agents have.
    label(
        world,
        job.cluster.get("pod", "lm-pods-1")["spec"]["nodeName"],
        "UnschedulablePendingReplacement",
    )
    job.started(2, size=2)
    job.incident(2)

    # A change that cannot be is refused twice in the same words: one event, counted.
    bad = {"name": "bad", "logPattern": "("}
    for count in (1, 2):
        for rules in ([bad], []):
            policy = {"logMonitoringConfiguration": rules}
            merged(world, f"{JOBS}/lm", {"spec": {"runPolicy": policy}})
        until(partial(has_refused, world, count), f"{count} refusals are told")

    # An operator that takes over finds more incidents than are kept.
    old = plane.api.get(f"{INCIDENTS}/lm-1").made
    for number in range(3, 3 + KEPT):
        plane.api.post(INCIDENTS, numbered(old, number)).done()
    merged(world, f"{JOBS}/lm", {"spec": {"runPolicy": {"jobMaxRetryCount": 1000}}})
    # And the record of a node that has been gone for years.
    record = {"apiVersion": "unbroken.dev/v1", "kind": "NodeRecord"}
    record |= {"metadata": {"name": "long-gone"}, "spec": {"clearedAt": LONG_AGO}}
    plane.api.post(f"{OURS}/noderecords", record).done()
    first_leader = world.leader()
    first_leader.process.kill()
    (other,) = (one for one in world.operators if one is not first_leader)
    other.said("operator runs")
    assert not job.workers(3), "the job was touched"
    kill(job.workers(2)[0].pid)
    job.started(3, size=2)
    plane.gone(f"{INCIDENTS}/lm-1")
    plane.gone(f"{OURS}/noderecords/long-gone")
    plane.wait(f"{JOBS}/lm", lambda one: "unbroken.dev/ledger" in str(one["metadata"]))

    job.finish()
    job.wait("Completed")
    merged(world, f"{JOBS}/lm", {"spec": {"runPolicy": {"ttlSecondsAfterFinished": 1}}})
    plane.gone(f"{JOBS}/lm")


def stray(name: str) -> Object:
    """Create a pod that no node will run."""
    container = {"name": "main", "image": "any"}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [container], "schedulerName": "nobody"},
    }


def has_refused(world: World, count: int) -> bool:
    """Return whether the job's only event has this count of refused changes."""
    listed = world.plane.api.within("default").get("events").made["items"]
    told = [one["count"] for one in listed if "the change is not taken" in one["message"]]
    return told == [count]


def seen(world: World, account: str = OPERATOR) -> set[Right]:
    """Return the rights that a program has used."""
    return used(world.plane.audited(f"{NAMESPACE}:{account}"), known(world, account))


def known(world: World, account: str) -> set[Right]:
    """Return the rights of a program, as Helm has installed them."""
    manifest = str(world.plane.helm.status("unbroken")["manifest"])
    return granted([one for one in yaml.safe_load_all(manifest) if one], account)


def numbered(incident: Object, number: int) -> Object:
    """Return the same incident with another number."""
    kept = {
        key: incident["metadata"][key]
        for key in ("ownerReferences", "labels")
        if key in incident["metadata"]
    }
    return {
        **{key: incident[key] for key in ("apiVersion", "kind")},
        "metadata": {"name": f"lm-{number}", **kept},
        "spec": {**incident["spec"], "number": number},
    }


# --- nodes


def machine(world: World, name: str) -> None:
    """Create a machine, and its node."""
    body = {
        "apiVersion": "unbroken.dev/v1",
        "kind": "Machine",
        "metadata": {"name": name, "finalizers": ["unbroken.dev/machine"]},
        "spec": {},
    }
    world.plane.api.post(MACHINES, body).done()
    world.plane.wait(f"{NODES}/{name}", lambda one: one["status"].get("nodeInfo"))


def order(world: World, node: str, action: str) -> None:
    """Write the order of a person."""
    merged(world, f"{NODES}/{node}", {"metadata": {"annotations": {"unbroken.dev/repair": action}}})


def test_nodes_are_repaired_and_tested(world: World) -> None:
    plane = world.plane
    machine(world, "m0")
    machine(world, "m1")
    order(world, "m0", "reboot")
    plane.wait(f"{MACHINES}/m0", lambda one: one["spec"].get("boots") == 1)
    pods = "/api/v1/namespaces/unbroken-checks/pods"
    found = plane.wait(pods, lambda listed: listed["items"])["items"][0]["metadata"]["name"]
    merged(world, f"{pods}/{found}/status", {"status": {"phase": "Succeeded"}})
    until(lambda: ("pods/log@unbroken-checks", "get") in seen(world), "it reads what was found")

    order(world, "m1", "replace")
    plane.gone(f"{MACHINES}/m1")
    plane.wait(MACHINES, lambda listed: len(listed["items"]) == 2)


def test_the_webhook_keeps_its_registration(world: World) -> None:
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/unbroken-jobs"
    found = world.plane.wait(path)
    place = found["webhooks"][0]["clientConfig"]["service"]
    name = f"/api/v1/namespaces/{place['namespace']}/services/{place['name']}"
    service = world.plane.api.get(name).made
    assert [one["port"] for one in service["spec"]["ports"]] == [place["port"]]
    changed = {**found["webhooks"][0], "timeoutSeconds": 1}
    merged(world, path, {"webhooks": [changed]})
    world.plane.wait(path, lambda one: one["webhooks"][0]["timeoutSeconds"] != 1)


def test_a_pod_is_tried_for_a_user_who_may_create_it(world: World) -> None:
    """Send the review as the API server does, which does not reach Services of this network."""
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/unbroken-jobs"
    client = world.plane.wait(path)["webhooks"][0]["clientConfig"]
    place = client["service"]
    words = next(one.process.args for one in world.operators if one.process.poll() is None)
    port = next(int(word.partition("=")[2]) for word in words if "--webhook-port" in word)
    user = {"username": "admin", "groups": ["system:masters"]}
    job = {"apiVersion": "sagemaker.amazonaws.com/v1", "kind": "HyperPodPyTorchJob"}
    container = {"name": "main", "image": "any", "resources": {"limits": {"cpu": "-1"}}}
    replica = {"name": "pods", "replicas": 1, "template": {"spec": {"containers": [container]}}}
    job |= {"metadata": {"name": "tried"}, "spec": {"replicaSpecs": [replica]}}
    asked = {"uid": "1", "namespace": "default", "object": job, "userInfo": user}
    trusted = base64.b64decode(client["caBundle"]).decode()
    tls = ssl.create_default_context(cadata=trusted).wrap_socket(
        socket.create_connection(("127.0.0.1", port)),
        server_hostname=f"{place['name']}.{place['namespace']}.svc",
    )
    body = json.dumps({"kind": "AdmissionReview", "request": asked}).encode()
    with tls:
        head = f"POST {place['path']} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        tls.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: tls.recv(65536), b""))
    said = json.loads(answer.partition(b"\r\n\r\n")[2])["response"]
    assert not said["allowed"]
    assert "resources.limits[cpu]" in said["status"]["message"]


def test_a_check_that_is_long_over_is_deleted(world: World) -> None:
    plane = world.plane
    check = {
        "apiVersion": "unbroken.dev/v1",
        "kind": "NodeCheck",
        "metadata": {"name": "long-over"},
        "spec": {"nodes": ["long-gone"], "kinds": ["Basic"]},
    }
    plane.api.post(f"{OURS}/nodechecks", check).done()
    path = f"{OURS}/nodechecks/long-over"
    # There is no such node, which is soon found out.
    plane.wait(path, lambda one: one.get("status", {}).get("endedAt"))
    merged(world, f"{path}/status", {"status": {"endedAt": LONG_AGO}})
    plane.gone(path)


# --- PyTorchJobs


def test_a_pytorchjob_is_resumed(world: World) -> None:
    plane = world.plane
    job = plane.api.post(PYTORCHJOBS, pytorchjob("kf", workers=1)).made
    machine(world, "m2")
    metadata = job["metadata"]
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "controller": True}
    labels = {
        "training.kubeflow.org/job-name": "kf",
        "training.kubeflow.org/replica-type": "worker",
        "training.kubeflow.org/replica-index": "0",
    }
    pod = {
        "metadata": {
            "name": "kf-worker-0",
            "labels": labels,
            "ownerReferences": [{**owner, "name": "kf", "uid": metadata["uid"]}],
        },
        "spec": {"nodeName": "m2", "containers": [{"name": "pytorch", "image": "any"}]},
    }
    plane.api.within("default").post("pods", pod).done()
    merged(
        world,
        "/api/v1/namespaces/default/pods/kf-worker-0/status",
        {"status": {"phase": "Running"}},
    )
    label(world, "m2", "UnschedulablePendingReboot")
    plane.wait(
        "/api/v1/namespaces/default/pods/kf-worker-0",
        lambda one: one["metadata"].get("deletionTimestamp"),
    )
    plane.wait(f"{PYTORCHJOBS}/kf", lambda one: len(one["metadata"]["annotations"]) > 2)


@pytest.mark.parametrize(
    ("path", "job"),
    [(TRAINJOBS, train_job(annotations=BOTH)), (JOBSETS, job_set(1, 0, annotations=BOTH))],
    ids=["TrainJob", "JobSet"],
)
def test_jobs_are_suspended_for_their_restart(world: World, path: str, job: Object) -> None:
    """Act as the controllers of the jobs, until a pod exists that a batch Job owns."""
    plane, name = world.plane, f"{job['kind']}-0".lower()
    plane.api.post(path, {**job, "metadata": {**job["metadata"], "name": name}}).done()
    machine(world, name)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "x", "uid": "x", "controller": True}
    metadata = {"name": name, "labels": {"jobset.sigs.k8s.io/jobset-name": name}}
    metadata["ownerReferences"] = [owner]
    spec = {"nodeName": name, "containers": [{"name": "node", "image": "any"}]}
    plane.api.within("default").post("pods", {"metadata": metadata, "spec": spec}).done()
    label(world, name, "UnschedulablePendingReboot")
    plane.wait(f"{path}/{name}", lambda one: one["spec"].get("suspend"))
    plane.api.within("default").delete(f"pods/{name}", gracePeriodSeconds=0).done()
    plane.wait(f"{path}/{name}", lambda one: one["spec"].get("suspend") is False)


def test_a_train_job_of_the_runtime_gets_a_job_and_a_result(world: World) -> None:
    plane, here = world.plane, world.plane.api.within("default")
    good = run_as_job("good")
    for one in (good, run_as_job("bad", initializer={"dataset": {"storageUri": "hf://a/b"}})):
        del one["metadata"]["uid"], one["metadata"]["namespace"]
        plane.api.post(TRAINJOBS, one).done()
    plane.wait(f"{JOBS}/good", lambda one: one["metadata"]["ownerReferences"])
    template = {"spec": {"restartPolicy": "Never", **stray("x")["spec"]}}
    body = {"metadata": {"name": "bad-result"}, "spec": {"template": template}}
    uid = here.post("batch/v1:jobs", body).made["metadata"]["uid"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "bad-result", "uid": uid}
    owner["controller"] = True
    labels = {"jobset.sigs.k8s.io/jobset-name": "bad", RESULT_LABEL: "true"}
    metadata = {"name": "bad-result", "labels": labels, "ownerReferences": [owner]}
    here.post("pods", {**stray("bad-result"), "metadata": metadata}).done()
    pod = "/api/v1/namespaces/default/pods/bad-result"
    plane.wait(pod, lambda one: RESULT in (one["metadata"].get("annotations") or {}))
    plane.api.delete(f"{TRAINJOBS}/good").done()
    plane.gone(f"{JOBS}/good")


def test_a_rayjob_is_resumed(world: World) -> None:
    plane = world.plane
    machine(world, "m3")
    annotations = {AUTO_RESUME: "true", MAX_RETRIES: "1"}
    container = {"name": "ray", "image": "any"}
    group = {"rayStartParams": {}, "template": {"spec": {"containers": [container]}}}
    spec = {"headGroupSpec": group}
    about = {"apiVersion": "ray.io/v1", "kind": "RayJob"}
    body = {
        **about,
        "metadata": {"name": "count", "annotations": annotations},
        "spec": {"entrypoint": "python count.py", "rayClusterSpec": spec},
    }
    job = plane.api.post(RAYJOBS, body).made
    owner = {**about, "controller": True, "name": "count", "uid": job["metadata"]["uid"]}
    about = {"apiVersion": "ray.io/v1", "kind": "RayCluster"}
    body = {**about, "metadata": {"name": "ray", "ownerReferences": [owner]}, "spec": spec}
    cluster = plane.api.post(RAYCLUSTERS, body).made
    status = {"jobDeploymentStatus": "Running", "rayClusterName": "ray"}
    merged(world, f"{RAYJOBS}/count/status", {"status": status})
    owner = {**about, "controller": True, "name": "ray", "uid": cluster["metadata"]["uid"]}
    labels = {"ray.io/cluster": "ray", "ray.io/node-type": "head"}
    pod = {
        "metadata": {"name": "ray-head", "labels": labels, "ownerReferences": [owner]},
        "spec": {"nodeName": "m3", "containers": [container]},
    }
    plane.api.within("default").post("pods", pod).done()
    path = "/api/v1/namespaces/default/pods/ray-head"
    merged(world, f"{path}/status", {"status": {"phase": "Running"}})
    label(world, "m3", "UnschedulablePendingReboot")
    plane.wait(path, lambda one: one["metadata"].get("deletionTimestamp"))
    plane.wait(f"{RAYCLUSTERS}/ray", lambda one: one["spec"].get("suspend"))
    plane.api.within("default").delete("pods/ray-head", gracePeriodSeconds=0).done()
    merged(world, f"{RAYCLUSTERS}/ray/status", {"status": {"state": "suspended"}})
    plane.wait(f"{RAYJOBS}/count", lambda one: one["status"]["jobDeploymentStatus"] == "Retrying")


# --- queues


def queued(name: str, labels: Object, **pod: object) -> Object:
    """Return a job that waits in a queue, and after its admission runs until it is stopped."""
    command = ["unbrokenrun", "--no-python", "sleep", "600"]
    container = {"name": "main", "image": "any", "command": command}
    template = {"spec": {"containers": [container], **pod}}
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "team-a", **labels}},
        "spec": {
            "nprocPerNode": "1",
            "replicaSpecs": [{"name": "pods", "replicas": 1, "template": template}],
        },
    }


def test_jobs_wait_in_queues(world: World) -> None:
    api, wait = world.plane.api, world.plane.wait
    for job in (
        queued("q0", {}),
        queued("q1", {"kueue.x-k8s.io/priority-class": "none"}),
        queued("q2", {}, priorityClassName="none"),
    ):
        api.post(JOBS, job).done()
    (made,) = wait(WORKLOADS, lambda listed: listed["items"])["items"]
    path = f"{WORKLOADS}/{made['metadata']['name']}"
    merged(world, f"{JOBS}/q0", {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-b"}}})
    wait(path, lambda one: one["spec"]["queueName"] == "team-b")
    admitted = {
        "admission": {
            "clusterQueue": "cluster",
            "podSetAssignments": [{"name": "pods", "flavors": {}}],
        },
        "conditions": [condition("QuotaReserved"), condition("Admitted")],
    }
    merged(world, f"{path}/status", {"status": admitted})
    until(lambda: ("workloads/status.kueue.x-k8s.io", "update") in seen(world), "it reports")
    for name in ("q0", "q1", "q2"):
        merged(world, f"{JOBS}/{name}", {"spec": {"runPolicy": {"suspend": True}}})
    world.plane.gone(path)


def condition(type: str) -> Object:
    """Return a condition that Kueue sets."""
    told = {"type": type, "status": "True", "reason": type, "message": "by the test"}
    return {**told, "lastTransitionTime": LONG_AGO}


# --- clusters


def group(name: str, count: int) -> Object:
    """Return an instance group."""
    return {
        "InstanceGroupName": name,
        "InstanceType": "ml.p5.48xlarge",
        "InstanceCount": count,
        "ExecutionRole": ROLE,
    }


def test_clusters_are_made_changed_and_deleted(world: World) -> None:
    api, name = world.api, "Rights"
    api.ok("CreateCluster", ClusterName=name, InstanceGroups=[group("workers", 2)])
    api.until_phase(name, "InService")
    assert [one["ClusterName"] for one in api.ok("ListClusters")["ClusterSummaries"]] == [name]
    # All or nothing: what cannot be had is taken back.
    api.ok("UpdateCluster", ClusterName=name, InstanceGroups=[group(FAILS, 1)])
    api.until(
        lambda: ("clusters.unbroken.dev", "update") in seen(world), lambda has_changed: has_changed
    )
    api.until_phase(name, "InService")
    nodes = api.ok("ListClusterNodes", ClusterName=name)["ClusterNodeSummaries"]
    ids = [one["InstanceId"] for one in nodes if one["InstanceGroupName"] == "workers"]
    api.ok("DescribeClusterNode", ClusterName=name, NodeId=ids[0])
    api.ok("BatchDeleteClusterNodes", ClusterName=name, NodeIds=[ids[1]])
    api.until_phase(name, "InService")
    api.ok("BatchRebootClusterNodes", ClusterName=name, NodeIds=[ids[0]])
    api.ok(
        "StartClusterHealthCheck",
        ClusterName=name,
        DeepHealthCheckConfigurations=[
            {"InstanceGroupName": "workers", "DeepHealthChecks": ["InstanceStress"]}
        ],
    )
    world.plane.wait(f"{OURS}/nodechecks", lambda listed: listed["items"])
    api.gone(name)
    world.plane.gone(f"{OURS}/clusters/{name.lower()}")


def test_a_node_that_never_joined_is_replaced(world: World) -> None:
    api, name = world.api, "Broken"
    given = {"InstanceGroups": [group(FAILS, 1)], "NodeProvisioningMode": "Continuous"}
    api.ok("CreateCluster", ClusterName=name, **given)

    def failed() -> list[str]:
        nodes = api.ok("ListClusterNodes", ClusterName=name)["ClusterNodeSummaries"]
        return [n["InstanceId"] for n in nodes if n["InstanceStatus"]["Status"] == "Failure"]

    ids = api.until(failed, bool)
    api.ok("BatchReplaceClusterNodes", ClusterName=name, NodeIds=ids)
    api.until(failed, lambda now: ids[0] not in now)
    api.gone(name)


# --- the proof


@pytest.mark.parametrize("account", [OPERATOR, CLUSTER_API])
def test_no_right_is_missing_and_none_is_idle(world: World, account: str) -> None:
    entries = world.plane.audited(f"{NAMESPACE}:{account}")
    assert refused(entries) == []
    rights = known(world, account)
    assert set(UNSEEN) <= known(world, OPERATOR)
    assert seen(world, account) - rights == set()
    assert rights - seen(world, account) - set(UNSEEN) == set()
