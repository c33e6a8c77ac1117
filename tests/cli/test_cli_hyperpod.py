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
    kubectl = find_kubectl()
    condition = ["--for=condition=Succeeded", "--timeout=60s"]
    environment = {**os.environ, "KUBECONFIG": str(cli.directory / "kubeconfig")}
    subprocess.run(
        [kubectl, "wait", f"pytorchjob/{name}", *condition],
        env=environment,
        check=True,
        capture_output=True,
        timeout=90,
    )


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
