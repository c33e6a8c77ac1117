"""One run of MLflow and of Weights & Biases over the restarts of a real job.

The libraries are in an environment of their own (`make trackers-env`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.apiservers import free_port
from tests.e2e.clusters import Cluster
from tests.tiers import TRACKERS_ENV
from tests.watching import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guide/trackers.md"
PROGRAM = Path(__file__).parent / "programs/trackers/train.py"
PYTHON = TRACKERS_ENV / "bin/python"
STARTED_SECONDS = 600.0
"""Seconds that neither MLflow's server nor two attempts of the job take."""
SECRET = "hf_" + "s3cr3t" * 5
READ = """
import json, sys

def history(run, name):
    return [[one.step, one.value] for one in client.get_metric_history(run.info.run_id, name)]

from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
runs = client.search_runs([client.get_experiment_by_name(sys.argv[2]).experiment_id])
print(json.dumps([
    {
        "id": run.info.run_id, "name": run.info.run_name, "status": run.info.status,
        "tags": run.data.tags, "params": run.data.params,
        "metrics": {name: history(run, name) for name in run.data.metrics},
    }
    for run in runs
]))
"""


def environment(**values: str) -> dict[str, str]:
    """Return the environment of a person who has the trackers installed."""
    chosen = {"VIRTUAL_ENV": str(TRACKERS_ENV), "PYTHONPATH": str(ROOT / "src"), **values}
    return {**os.environ, "HF_TOKEN": SECRET, **chosen}


def run_job(cluster: Cluster, folder: Path, name: str, *words: str, **values: str) -> Any:
    """Start a job of two pods as a person does, and return the process of the command."""
    command = [
        *(sys.executable, "-m", "unbroken.cli.main", "run", "--dir", str(cluster.directory)),
        *("--nnodes", "2", "--name", name, str(PROGRAM), str(folder), *words),
    ]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**values),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """Wait for a job's success; return its output."""
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Return the URL of an MLflow server with a new SQLite store."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = [
        *(str(TRACKERS_ENV / "bin/mlflow"), "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"),
        *("--default-artifact-root", str(tmp_path / "artifacts")),
    ]
    with open(tmp_path / "mlflow.log", "wb") as log:
        process = subprocess.Popen(
            words,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
    try:
        wait_until(lambda: answers(url), logs=tmp_path / "mlflow.log", patience=STARTED_SECONDS)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def answers(url: str) -> bool:
    """Return whether the server answers."""
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, ConnectionError, TimeoutError):
        return False


def runs(url: str, experiment: str = "trackers") -> list[dict[str, Any]]:
    """Return all runs of an experiment, by MLflow's own client."""
    done = subprocess.run(
        [PYTHON, "-c", READ, url, experiment], capture_output=True, text=True, check=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_mlflow_shows_one_run_with_three_restarts(
    cluster: Cluster, tmp_path: Path, server: str
) -> None:
    job = run_job(cluster, tmp_path, "tracked", "mlflow", "1", MLFLOW_TRACKING_URI=server)
    wait_until((tmp_path / "waits").exists, patience=STARTED_SECONDS)
    cluster.kubectl("delete", "pod", "tracked-pods-0", "--grace-period=0", "--force")
    output = ended(job)
    (run,) = runs(server)
    assert (run["name"], run["status"], run["params"]) == ("tracked", "FINISHED", {"lr": "0.1"})
    tags, metrics = run["tags"], run["metrics"]
    assert tags["unbroken.job"] == "tracked"
    assert tags["unbroken.restarts"] == "3", output
    assert [number for number in "1234" if f"unbroken.incident.{number}" in tags] == [*"123"]
    first, second, third = (tags[f"unbroken.incident.{number}"] for number in "123")
    assert re.match(r"attempt 0: rank 1, pod .*SIGKILL.*; remedy in-process; [\d.]+ s lost", first)
    assert re.match(r"attempt 1: rank 0, pod .*SIGKILL.*; remedy (in-)?process", second)
    assert re.match(r"attempt 2: .*pod tracked-pods-0.*; remedy pod", third)
    # A process of rank 0 that is killed has not written its last second.
    attempts = [value for _, value in metrics["unbroken.attempt"]]
    assert (attempts[0], attempts[-1]) == (0, 3)
    assert attempts == sorted(set(attempts))
    assert all(step % 5 == 0 for step, _ in metrics["unbroken.attempt"])
    assert {*range(12), *range(30, 40)} <= {step for step, _ in metrics["loss"]}
    assert all(value == 1 / (step + 1) for step, value in metrics["loss"])
    assert metrics["unbroken.restarts"][-1][1] == 3
    assert 0 < metrics["unbroken.goodput"][-1][1] < 1
    assert metrics["unbroken.seconds_lost"][-1][1] > 0
    assert SECRET not in json.dumps(run)


def test_weights_and_biases_has_one_id_in_the_folders_of_all_its_processes(
    cluster: Cluster, tmp_path: Path
) -> None:
    values = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    ended(run_job(cluster, tmp_path, "offline", "wandb", "0", **values))
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    ids = {name.split("-", 3)[3] for name in folders}
    uid = cluster.get("hyperpodpytorchjob", "offline")["metadata"]["uid"]
    assert ids == {uid}
    # Rank 0 has kept its process over the death of rank 1, and was killed once.
    assert len(folders) == 2


def test_the_script_of_the_guide_writes_its_run(tmp_path: Path, server: str) -> None:
    (text,) = re.findall(r"```python\n(import .*?)```", GUIDE.read_text(), re.S)
    done = run_plain(text, tmp_path, MLFLOW_TRACKING_URI=server)
    assert done.returncode == 0, done.stderr
    (run,) = runs(server, "llama")
    assert (run["status"], run["params"]) == ("FINISHED", {"lr": "0.0003"})
    assert len(run["metrics"]["loss"]) == 1000


SCRIPT = """
import mlflow
from unbroken import worker

with worker.track(mlflow, project="plain") as run:
    for step in range(50):
        run.log(step, loss=1 / (step + 1))
    run.finish(seconds={seconds})
print("trained")
"""


def run_plain(text: str, folder: Path, **values: str) -> subprocess.CompletedProcess[str]:
    """Run a script without unbroken."""
    return subprocess.run(
        [PYTHON, "-c", text],
        cwd=folder,
        env=environment(**values),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_script_without_unbroken_has_a_run_of_its_own_each_time(
    tmp_path: Path, server: str
) -> None:
    for _ in range(2):
        done = run_plain(SCRIPT.format(seconds=300), tmp_path, MLFLOW_TRACKING_URI=server)
        assert done.returncode == 0, done.stderr
    found = runs(server, "plain")
    assert [one["status"] for one in found] == ["FINISHED"] * 2
    assert all(len(one["metrics"]["loss"]) == 50 for one in found)


def test_a_server_that_is_away_costs_metrics_and_no_training(tmp_path: Path) -> None:
    uri = f"http://someone:{SECRET}@127.0.0.1:{free_port()}"
    done = run_plain(SCRIPT.format(seconds=1), tmp_path, MLFLOW_TRACKING_URI=uri)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "metrics lost: the tracker does not answer count=50" in done.stderr
    assert SECRET not in done.stderr


FAILING = """
import mlflow
from unbroken import worker

run = worker.track(mlflow, project="failing")
run.log(0, loss=1.0)
assert run.activate(300)
mlflow.log_metric("own", 2.0, step=0)
{end}
"""


@pytest.mark.parametrize(("end", "status"), [("", "FINISHED"), ("raise ValueError", "FAILED")])
def test_the_end_of_a_script_ends_the_run_and_mlflow_itself_writes_into_it(
    tmp_path: Path, server: str, end: str, status: str
) -> None:
    done = run_plain(FAILING.format(end=end), tmp_path, MLFLOW_TRACKING_URI=server)
    assert ("ValueError" in done.stderr) == (status == "FAILED"), done.stderr
    (run,) = runs(server, "failing")
    assert run["status"] == status
    assert run["metrics"]["own"] == [[0, 2.0]]
    assert run["metrics"]["loss"] == [[0, 1.0]]
