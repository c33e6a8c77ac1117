"""The manifests of the HyperPod guides, applied with kubectl, and what kubectl shows of them.

What is changed in them: the script, where it may write, and how much a node must have.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.clusters import Cluster
from tests.operator.trained_jobs import until as until_it_holds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MANIFESTS = Path(__file__).parents[1] / "spec/manifests"
PROGRAM = Path(__file__).parent / "programs/guide_train.py"
EXAMPLE = Path(__file__).parents[2] / "examples/train_lm.py"
COLUMNS = ["NAME", "STATE", "READY", "SPARES", "RESTARTS"]
FSDP, PODS = "llama3-1-8b-fsdp-hpto", "llama3-1-8b-fsdp-hpto-pods"
Object = dict[str, Any]


@pytest.fixture(scope="module")
def hyperpod(tmp_path_factory: pytest.TempPathFactory, kubectl_path: str) -> Iterator[Cluster]:
    """Two nodes with all that the manifests ask of theirs, but real."""
    found = Cluster(tmp_path_factory.mktemp("hyperpod") / "state", kubectl_path)
    found.unbroken(
        *("up", "--detach", "--nodes", "2", "--gpu-per-node", "8", "--memory-per-node", "64Gi"),
        *("--resource", "vpc.amazonaws.com/efa=32", "--resource", "hugepages-2Mi=5120Mi"),
        *("--label", "beta.kubernetes.io/instance-type=ml.p5.48xlarge"),
        *("--label", "sagemaker.amazonaws.com/compute-type=ml.p5.48xlarge"),
    )
    yield found
    found.take_away()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script in a directory of its own."""
    return Path(shutil.copy(PROGRAM, tmp_path / "train.py"))


def fsdp(directory: Path, script: Path) -> str:
    """The main example, with its own command line for another script."""
    text = (MANIFESTS / "fsdp-llama3-8b.yaml").read_text()
    text = text.replace("/fsdp/train.py", str(script)).replace("/tmp/hyperpod", f"{directory}/logs")
    return text.replace("/mnt/k8s-disks/0", f"{directory}/disk")


def with_command(name: str, replicas: int, *command: str) -> Object:
    """One of the others: they leave the command to the image."""
    job: Object = yaml.safe_load((MANIFESTS / f"{name}.yaml").read_text())
    replica = job["spec"]["replicaSpecs"][0]
    replica["replicas"] = replicas
    container = replica["template"]["spec"]["containers"][0]
    container["command"] = ["hyperpodrun", *command]
    return job


def row(cluster: Cluster, name: str) -> dict[str, str]:
    """The job's cells in kubectl's table."""
    heads, cells = cluster.kubectl("get", "hyperpodpytorchjobs", name).stdout.splitlines()
    starts = [re.search(rf"\b{head}\b", heads) for head in ("LAST FAULT", *COLUMNS, "AGE")]
    at = sorted(found.start() for found in starts if found)
    slices = zip(at, [*at[1:], None], strict=True)
    pairs = [(heads[a:b].strip(), cells[a:b].strip()) for a, b in slices]
    return dict(pairs)


def events(cluster: Cluster, name: str) -> list[list[str]]:
    """Type, reason and message of each of the job's events, as `kubectl describe` shows them."""
    shown = cluster.kubectl("describe", "hyperpodpytorchjobs", name).stdout
    lines = shown.partition("\nEvents:\n")[2].splitlines()[2:]
    split = [re.split(r"\s{2,}", line.strip(), maxsplit=4) for line in lines if line.strip()]
    assert all(len(parts) == 5 for parts in split), shown
    return [[parts[0], parts[1], parts[4]] for parts in split]


def until(cluster: Cluster, name: str, standing: str) -> None:
    """Wait for a condition of the job."""
    cluster.wait(f"hyperpodpytorchjobs/{name}", f"condition={standing}", seconds=50)


def first_event(cluster: Cluster, name: str, reason: str) -> None:
    """Wait for an event of the job."""
    about = f"involvedObject.name={name},reason={reason}"
    command = [cluster.kubectl_path, "get", "events", "--watch", "--no-headers"]
    command += ["--field-selector", about]
    with subprocess.Popen(
        command, env=cluster.environment, stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        assert reason in watching.stdout.readline()
        watching.terminate()


def follow(cluster: Cluster, pod: str) -> subprocess.Popen[str]:
    """`kubectl logs -f`."""
    command = [cluster.kubectl_path, "logs", "-f", pod]
    return subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, text=True)


def test_the_fsdp_manifest_runs_and_kubectl_shows_it(
    hyperpod: Cluster, tmp_path: Path, script: Path
) -> None:
    applied = hyperpod.kubectl("apply", "-f", "-", stdin=fsdp(tmp_path, script))
    assert applied.stdout == f"hyperpodpytorchjob.sagemaker.amazonaws.com/{FSDP} created\n"
    until(hyperpod, FSDP, "Running")
    shown = row(hyperpod, FSDP)
    assert re.fullmatch(r"\d+s", shown.pop("AGE"))
    running = {"NAME": FSDP, "STATE": "Running", "READY": "2/2", "SPARES": "0", "RESTARTS": "0"}
    assert shown == {**running, "LAST FAULT": ""}
    listed = hyperpod.kubectl("get", "pods", "-l", f"HPJob={FSDP}", "-o", "wide").stdout
    pods = [line.split() for line in listed.splitlines()[1:]]
    assert [pod[:3] for pod in pods] == [[f"{PODS}-{n}", "1/1", "Running"] for n in (0, 1)]
    assert {pod[6] for pod in pods} == {"node-0", "node-1"}
    with follow(hyperpod, f"{PODS}-1") as following:
        assert following.stdout is not None
        wanted = {f"[default{rank}]:Batch 3 Loss: 2.5\n" for rank in range(8)}
        for line in following.stdout:
            wanted.discard(line)
            if not wanted:
                (tmp_path / "finish").touch()
        assert following.wait() == 0
    until(hyperpod, FSDP, "Completed")
    assert row(hyperpod, FSDP)["STATE"] == "Completed"
    assert [event for event in events(hyperpod, FSDP) if event[1] != "SpecWarning"] == [
        ["Normal", "Created", "the job is created"],
        ["Normal", "Running", "attempt 0 runs on 2 nodes"],
        ["Normal", "Completed", "all 2 agents completed attempt 0"],
    ]
    logs = list((tmp_path / "logs").glob("*/attempt_0/*/stdout.log"))
    assert len(logs) == 16, "of each rank what --log_dir and --tee=3 ask for"
    hyperpod.kubectl("delete", "hyperpodpytorchjobs", FSDP)


def test_a_fault_is_told_in_a_line_and_the_count_of_ready_pods_stays_true(
    hyperpod: Cluster, tmp_path: Path, script: Path
) -> None:
    (tmp_path / "fail").touch()
    hyperpod.kubectl("apply", "-f", "-", stdin=fsdp(tmp_path, script))
    until(hyperpod, FSDP, "Faulted=False")
    until(hyperpod, FSDP, "Running")
    shown = row(hyperpod, FSDP)
    assert (shown["STATE"], shown["READY"], shown["RESTARTS"]) == ("Running", "2/2", "1")
    assert shown["LAST FAULT"] == "PythonException"
    told = {reason: message for _, reason, message in events(hyperpod, FSDP)}
    assert f"rank 0, pod {PODS}-0, node node-" in told["Faulted"]
    assert (
        "PythonException: ValueError: bad batch; process: all pods are healthy" in told["Faulted"]
    )
    assert re.search(r"ValueError: bad batch; remediated in \d+ milliseconds", told["Running"])
    job = hyperpod.get("hyperpodpytorchjobs", FSDP)
    messages = [one["message"] for one in job["status"]["conditions"]]
    assert all("\n" not in text and len(text) < 500 for text in messages), messages
    incident = hyperpod.get("incidents.unbroken.dev", f"{FSDP}-1")["spec"]
    assert any("Traceback" in line for line in incident["culprit"]["evidence"])
    hyperpod.unbroken("suspend", FSDP)
    until(hyperpod, FSDP, "Suspended")
    shown = row(hyperpod, FSDP)
    assert (shown["STATE"], shown["READY"]) == ("Suspended", "0/2")
    hyperpod.kubectl("delete", "hyperpodpytorchjobs", FSDP)


def test_a_job_that_fits_nowhere_says_why(hyperpod: Cluster, tmp_path: Path, script: Path) -> None:
    text = fsdp(tmp_path, script).replace("efa: 32", "efa: 64")
    hyperpod.kubectl("apply", "-f", "-", stdin=text)
    first_event(hyperpod, FSDP, "Unschedulable")
    for number in (0, 1):
        hyperpod.wait(f"pod/{PODS}-{number}", "condition=PodScheduled=False")
    told = {reason: message for _, reason, message in events(hyperpod, FSDP)}
    assert "0/2 nodes are available: 2 Insufficient vpc.amazonaws.com/efa" in told["Unschedulable"]
    wait = f"pod {PODS}-0 (and 1 more): Unschedulable: 0/2 nodes are available"
    until_it_holds(lambda: wait in hyperpod.unbroken("describe", FSDP).stdout, wait)
    described = hyperpod.unbroken("describe", FSDP).stdout
    assert "Pending (Unschedulable)" in described
    assert "--resource vpc.amazonaws.com/efa" in described
    hyperpod.kubectl("delete", "hyperpodpytorchjobs", FSDP)


def test_the_log_monitoring_manifest_runs(hyperpod: Cluster, tmp_path: Path, script: Path) -> None:
    command = ("--nnodes=2", "--nproc-per-node=8", f"--log-dir={tmp_path}/logs", str(script))
    hyperpod.apply(with_command("log-monitoring", 2, *command))
    until(hyperpod, "monitored", "Running")
    (tmp_path / "finish").touch()
    until(hyperpod, "monitored", "Completed")
    assert row(hyperpod, "monitored")["RESTARTS"] == "0"
    hyperpod.kubectl("delete", "hyperpodpytorchjobs", "monitored")


def test_the_spares_manifest_runs_without_kueue_and_shows_its_spare(
    hyperpod: Cluster, tmp_path: Path, script: Path
) -> None:
    job = with_command("spares", 1, "--nnodes=1", "--nproc-per-node=1", str(script))
    applied = hyperpod.kubectl("apply", "-f", "-", stdin=json.dumps(job))
    assert "no Kueue is known to this operator" in applied.stderr
    until(hyperpod, "hyperpodpytorchjob-sample", "Running")
    shown = row(hyperpod, "hyperpodpytorchjob-sample")
    assert (shown["READY"], shown["SPARES"]) == ("1/1", "1")
    (tmp_path / "finish").touch()
    until(hyperpod, "hyperpodpytorchjob-sample", "Completed")
    pods = hyperpod.get("pods", "-l", "HPJob=hyperpodpytorchjob-sample")["items"]
    assert len(pods) == 2, "cleanPodPolicy None"
    hyperpod.kubectl("delete", "hyperpodpytorchjobs", "hyperpodpytorchjob-sample")


def test_what_cannot_be_done_is_refused_at_apply(hyperpod: Cluster) -> None:
    elastic = hyperpod.kubectl("apply", "-f", str(MANIFESTS / "elastic.yaml"), check=False)
    assert elastic.returncode == 1
    assert "spec.elasticPolicy: Forbidden: elastic jobs are not supported yet" in elastic.stderr


@pytest.mark.heavy
def test_the_example_trains_by_the_fsdp_manifest(hyperpod: Cluster, tmp_path: Path) -> None:
    # DDP of torch 2.13.0 for CPUs dies of SIGSEGV with DETAIL, under any launcher.
    text = fsdp(tmp_path, EXAMPLE).replace("DETAIL", "INFO")
    job = yaml.safe_load(text)
    job["spec"]["nprocPerNode"] = "1"
    container = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    launch = container["command"][: container["command"].index(str(EXAMPLE)) + 1]
    small = ["--steps=8", "--batch=2", "--print-every=1", f"--checkpoint-dir={tmp_path}"]
    container["command"] = ["--nproc_per_node=1" if "nproc" in w else w for w in launch] + small
    container["env"].append({"name": "OMP_NUM_THREADS", "value": "1"})
    hyperpod.apply(job)
    until(hyperpod, FSDP, "Running")
    with follow(hyperpod, f"{PODS}-0") as following:
        assert following.stdout is not None
        said = following.stdout.read()
    until(hyperpod, FSDP, "Completed")
    losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", said)]
    assert len(losses) == 8, hyperpod.kubectl("get", "incidents", "-o", "yaml").stdout
    assert losses[-1] < losses[0]
    assert row(hyperpod, FSDP)["RESTARTS"] == "0"
    hyperpod.kubectl("delete", "hyperpodpytorchjobs", FSDP)


def test_the_first_job_of_the_installation_guide_survives_its_own_fault(
    cluster: Cluster,
) -> None:
    """Run the job as written, but without an image registry, and with fewer steps."""
    manifest = EXAMPLE.with_name("first_job.yaml").read_text()
    assert "--steps=2000" in manifest
    cluster.kubectl("create", "configmap", "train-lm", f"--from-file={EXAMPLE}")
    text = manifest.replace("--steps=2000", "--steps=10")
    cluster.kubectl("apply", "-f", "-", stdin=text)
    until(cluster, "first", "Running")
    assert row(cluster, "first")["READY"] == "2/2"
    cluster.kubectl("delete", "pod", "first-worker-1")
    cluster.wait("hyperpodpytorchjobs/first", "condition=Completed", seconds=55)
    assert "recovered" in cluster.kubectl("get", "incidents").stdout
    cluster.kubectl("delete", "hpj", "first")
    cluster.kubectl("delete", "configmap", "train-lm")
