"""`unbroken hyperpod`: the commands of the older HyperPod CLI, on a local cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli_calls import Cli
from tests.e2e.clusters import find_kubectl
from tests.watching import wait_until

pytestmark = pytest.mark.slow
AUTO_RESUME = "sagemaker.amazonaws.com/enable-job-auto-resume"
MAX_RETRIES = "sagemaker.amazonaws.com/job-max-retry-count"


def write_config(cli: Cli, **config: Any) -> None:
    """A config.yaml for one node without accelerators, with a torchrun of the test's own."""
    tools = cli.folder / "tools"
    tools.mkdir(exist_ok=True)
    torchrun = tools / "torchrun"
    torchrun.write_text(f'#!/bin/sh\necho "torchrun $@"\nexec {sys.executable} "$5"\n')
    torchrun.chmod(0o755)
    script = cli.folder / "train.py"
    script.write_text('import os\nprint("trained with", os.environ["NCCL_DEBUG"])\n')
    path = f"{tools}:{os.environ['PATH']}"
    whole = {
        "training_cfg": {
            "entry_script": str(script),
            "run": {"name": "old", "nodes": 1, "ntasks_per_node": 1},
        },
        "cluster": {
            "cluster_type": "k8s",
            "instance_type": "ml.c5.2xlarge",
            "cluster_config": {"namespace": "default", "pullPolicy": "Always", **config},
        },
        "container": "any",
        "env_vars": {"NCCL_DEBUG": "INFO", "PATH": path},
    }
    (cli.folder / "config.yaml").write_text(yaml.safe_dump(whole))


def test_a_job_from_a_file_to_its_end(cli: Cli) -> None:
    write_config(cli)
    start = ("hyperpod", "start-job", "--config-file", "./config.yaml")
    started = cli.call(*start, "--auto-resume", "true", "--max-retry", "2")
    assert started.stdout == "old: started in namespace default\n"
    again = cli.call(*start, code=1)
    assert again.stderr == 'error: PyTorchJob "old" already exists in namespace default\n'

    described = cli.call("hyperpod", "get-job", "--job-name", "old", "--verbose")
    job = json.loads(described.stdout)
    assert job["Annotations"][AUTO_RESUME] == "true"
    assert job["Annotations"][MAX_RETRIES] == "2"
    assert job["Spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"

    wait_succeeded(cli, "old")
    (listed,) = json.loads(cli.call("hyperpod", "list-jobs").stdout)["jobs"]
    assert (listed["Name"], listed["Namespace"], listed["State"]) == ("old", "default", "Succeeded")
    (pod,) = json.loads(cli.call("hyperpod", "list-pods", "--job-name", "old").stdout)["pods"]
    assert (pod["Pod Name"], pod["Status"]) == ("old-worker-0", "Succeeded")
    log = ("hyperpod", "get-log", "--job-name", "old", "--pod")
    said = cli.call(*log, "old-worker-0").stdout
    assert "torchrun --nproc_per_node 1 --nnodes 1" in said
    assert "trained with INFO" in said
    wrong = cli.call(*log, "old-worker-1", code=1).stderr
    assert wrong == "error: job old has no pod old-worker-1; it has: old-worker-0\n"
    assert cli.call("hyperpod", "cancel-job", "--job-name", "old").stdout == "old: cancelled\n"
    gone = cli.call("hyperpod", "get-job", "--job-name", "old", code=1).stderr
    assert gone.startswith('error: no PyTorchJob "old" in namespace default')


def hyperpod(cli: Cli, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program `hyperpod` as it is installed."""
    (program,) = entry_points(group="console_scripts", name="hyperpod")
    module, _, function = program.value.partition(":")
    code = f"import sys; sys.argv[0] = 'hyperpod'; from {module} import {function} as run; run()"
    command = [sys.executable, "-c", code, *arguments]
    # Otherwise typer asks which shell is among its parents, and there may be none.
    environment = cli.environment | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    return subprocess.run(
        command, cwd=cli.folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_program_of_the_documents_works_as_they_type_it(cli: Cli) -> None:
    write_config(cli, namespace="kubeflow")
    words = "start-job --config-file ./config.yaml --auto-resume true --max-retry 2"
    started = hyperpod(cli, *words.split())
    assert (started.returncode, started.stdout) == (0, "old: started in namespace kubeflow\n")
    listed = json.loads(hyperpod(cli, "list-jobs", "-n", "kubeflow").stdout)["jobs"]
    assert [one["Name"] for one in listed] == ["old"]
    cancelled = hyperpod(cli, "cancel-job", "--job-name", "old", "-n", "kubeflow")
    assert cancelled.stdout == "old: cancelled\n"
    again = hyperpod(cli, "get-job", "--job-name", "old", "-n", "kubeflow")
    assert (again.returncode, again.stderr[:6]) == (1, "error:")
    shown = hyperpod(cli, "--help").stdout
    for name in ("start-job", "get-job", "list-jobs", "list-pods", "get-log", "cancel-job"):
        assert name in shown
    completion = hyperpod(cli, "--show-completion", "bash").stdout
    assert "_HYPERPOD_COMPLETE" in completion


def wait_succeeded(cli: Cli, name: str) -> None:
    """Wait for a job's end with kubectl."""
    kubectl(cli, "wait", f"pytorchjob/{name}", "--for=condition=Succeeded", "--timeout=60s")


def kubectl(cli: Cli, *arguments: str) -> str:
    """Run kubectl on the cluster; return its output."""
    environment = {**os.environ, "KUBECONFIG": str(cli.directory / "kubeconfig")}
    command = [find_kubectl(), *arguments]
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=90
    )
    return done.stdout


def test_a_command_runs_in_the_pods_of_a_job_that_is_suspended_then(cli: Cli) -> None:
    write_config(cli)
    (cli.folder / "train.py").write_text("import signal\nsignal.pause()\n")
    job = ("--job-name", "runs")
    start = ("hyperpod", "start-job", "--config-file", "./config.yaml", *job)
    cli.call(*start, "--node-count", "2")
    patch = ("hyperpod", "patch-job")

    def pods() -> list[str]:
        listed = json.loads(cli.call("hyperpod", "list-pods", *job).stdout)["pods"]
        return [one["Pod Name"] for one in listed]

    names = wait_until(pods, lambda found: len(found) == 2)
    for name in names:
        kubectl(cli, "wait", f"pod/{name}", "--for=condition=Ready", "--timeout=60s")
    said = hyperpod(cli, "exec", *job, "--all-pods", "--", "echo", "-n", "I am; echo $0")
    assert said.stdout == "".join(f"{name}\nI am/bin/bash\n" for name in names)
    one = hyperpod(cli, "exec", *job, "-p", names[0], "--", "exit", "7")
    assert (one.returncode, one.stdout) == (7, "")
    wrong = cli.call("hyperpod", "exec", *job, "--", "ls", code=1).stderr
    assert wrong == "error: give one of --pod POD and --all-pods\n"

    assert cli.call(*patch, "suspend", *job).stdout == "runs: suspended\n"
    kubectl(cli, "wait", "pytorchjob/runs", "--for=condition=Suspended", "--timeout=60s")
    wait_until(pods, lambda found: found == [])
    none = cli.call("hyperpod", "exec", *job, "--all-pods", "--", "ls", code=1).stderr
    assert none == "error: job runs has no pods\n"
    assert cli.call(*patch, "unsuspend", *job).stdout == "runs: unsuspended\n"
    kubectl(cli, "wait", "pytorchjob/runs", "--for=condition=Running", "--timeout=60s")
    kubectl(cli, "label", "pytorchjob/runs", "kueue.x-k8s.io/queue-name=team")
    refused = cli.call(*patch, "suspend", *job, code=1).stderr
    assert refused.startswith("error: job runs is in the queue team, and Kueue decides")
    cli.call("hyperpod", "cancel-job", *job)


def test_clusters_that_are_absent_are_said_to_be(cli: Cli) -> None:
    empty = cli.call("hyperpod", "get-clusters", "--clusters", "ml")
    assert empty.stdout == "[]\n"
    hint = "make a cluster with: unbroken cluster create\n"
    assert empty.stderr == f"no nodes of clusters of ml; {hint}"
    connect = ("hyperpod", "connect-cluster", "--cluster-name", "ml")
    assert cli.call(*connect, code=1).stderr == (f"error: no node belongs to a cluster ml; {hint}")
    kubectl(cli, "label", "node", "node-0", "sagemaker.amazonaws.com/cluster-name=ml")
    found = cli.call(*connect, "--region", "us-west-2")
    assert found.stdout == "ml: commands reach this cluster\n"
    assert "--region us-west-2 has no effect" in found.stderr
    refused = cli.call(*connect, "--namespace", "team", code=1).stderr
    assert "kubectl config set-context --current --namespace=team" in refused


def test_what_is_wrong_in_the_file_is_said_with_its_place(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli()
    write_config(cli, restartPolicy="Sometimes", priority_class_name="high")
    start = ("hyperpod", "start-job", "--config-file", "./config.yaml")
    said = cli.call(*start, code=1).stderr
    assert said.startswith("error: config.yaml is invalid:\n")
    assert "  cluster.cluster_config.restartPolicy: Unsupported value" in said
    assert "  cluster.cluster_config.priority_class_name: " in said
    write_config(cli)
    assert "--auto-resume true" in cli.call(*start, "--max-retry", "2", code=1).stderr
    Path(cli.folder, "config.yaml").write_text("a: [")
    assert cli.call(*start, code=1).stderr.startswith("error: config.yaml is not YAML: ")


def test_a_job_from_options_alone(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli()
    start = ("hyperpod", "start-job", "--dry-run", "--instance-type", "ml.p5.48xlarge")
    said = cli.call(*start, code=1).stderr
    assert "training_cfg.run.name: Required value (give --job-name)" in said
    assert "training_cfg.run.nodes: Required value (give --node-count)" in said
    made = cli.call(
        *(*start, "--job-name", "x", "--image", "any", "--entry-script", "train.py"),
        *("--node-count", "2", "--auto-resume", "true", "--script-args", "--lr 0.1"),
        *("--environment", '{"A": "1"}', "--volumes", "data:/mnt/data:/data"),
        *("--persistent-volume-claims", "fsx:/fsx"),
    )
    job = json.loads(made.stdout)
    assert job["metadata"]["annotations"] == {AUTO_RESUME: "true", MAX_RETRIES: "1"}
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert "--nproc_per_node 8 --nnodes 2 train.py --lr 0.1" in pod["containers"][0]["command"][2]
    assert [one["name"] for one in pod["volumes"]] == ["fsx", "data", "shm"]
    assert "nodeAffinity" in pod["affinity"]
    assert pod["containers"][0]["env"] == [{"name": "A", "value": "1"}]
    wrong = cli.call(*start, "--volumes", "data:/x", code=1).stderr
    assert wrong == "error: --volumes data:/x: must be volumeName:hostPath:mountPath\n"
    wrong = cli.call(*start, "--environment", "A", code=1).stderr
    assert wrong.startswith("error: --environment A: must be KEY=VALUE")
    unknown = cli.call(
        *("hyperpod", "start-job", "--dry-run", "--instance-type", "ml.p5.49xlarge"),
        *("--job-name", "x", "--image", "any", "--entry-script", "t.py", "--node-count", "1"),
        code=1,
    )
    assert "ml.p5.48xlarge" in unknown.stderr
