"""Lifecycle scripts on machines of the local cluster: real scripts, real nodes."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import Cluster, find_kubectl, processes
from tests.local.machines.test_machine_pool import all_end
from tests.watching import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

SOURCE = "s3://sagemaker-test/scripts"


class Scripts:
    """The directory that stands for the source, and a cluster that uses it."""

    def __init__(self, directory: Path, cluster: Cluster) -> None:
        self.directory = directory
        self.cluster = cluster

    def write(self, name: str, text: str) -> None:
        """Write a script."""
        (self.directory / name).write_text(text)

    def machine(self, name: str, **life_cycle: str) -> None:
        """Make a machine of the group `worker` with scripts."""
        spec: dict[str, Any] = {"instanceGroup": "worker", "cluster": "c"}
        spec["lifeCycle"] = {"source": SOURCE, **life_cycle}
        made = {"apiVersion": "unbroken.dev/v1", "kind": "Machine", "metadata": {"name": name}}
        self.cluster.apply({**made, "spec": spec})

    def until(self, name: str, **wanted: str) -> dict[str, Any]:
        """Wait until the machine's status has these values; return the whole status."""
        for field, value in wanted.items():
            self.cluster.wait(f"machine/{name}", f"jsonpath={{.status.{field}}}={value}")
        status: dict[str, Any] = self.cluster.get("machine", name)["status"]
        return status

    def log(self, instance: str) -> str:
        """Return the log of the scripts of an instance of the group."""
        stream = self.cluster.directory / "logs" / "LifecycleConfig" / "worker"
        return (stream / f"{instance}.log").read_text()

    def has_node(self, name: str) -> bool:
        """Return whether the machine's node has joined."""
        return self.cluster.kubectl("get", "node", name, check=False).returncode == 0


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    """Start a cluster without nodes, and a directory for scripts."""
    tmp_path = tmp_path_factory.mktemp("scripts")
    made = Cluster(tmp_path / "state", find_kubectl())
    directory = tmp_path / "scripts"
    directory.mkdir()
    mapping = f"--lifecycle-source={SOURCE}={directory}"
    made.unbroken("up", "--detach", "--nodes", "0", "--no-operator", mapping)
    yield Scripts(directory, made)
    made.take_away()


class Gate:
    """A named pipe at which a script waits, with its process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)

    def reached(self) -> str:
        """Wait until the script writes a line into the pipe."""
        found: list[str] = []

        def read() -> None:
            with self.path.open() as file:
                found.append(file.readline().strip())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(PATIENCE_SECONDS)
        assert found, "the script did not come so far"
        return found[0]


def test_scripts_run_before_and_after_the_joining_once_in_a_life(scripts: Scripts) -> None:
    get = f"kubectl --kubeconfig={scripts.cluster.directory}/kubeconfig get -o name node"
    scripts.write(
        "on_create.sh",
        '#!/bin/bash\nset -e\ncat beside.txt "$SAGEMAKER_RESOURCE_CONFIG_PATH"\n'
        f'echo; {get} "$UNBROKEN_NODE" || echo not yet\n',
    )
    scripts.write("beside.txt", "beside\n")
    arn = "arn:aws:sagemaker:us-west-2:123456789012:cluster/abcdefghij01"
    scripts.cluster.apply(
        {
            **{"apiVersion": "unbroken.dev/v1", "kind": "Cluster"},
            "metadata": {"name": "c", "annotations": {"unbroken.dev/cluster-arn": arn}},
            "spec": {"name": "C", "clusterId": "abcdefghij01", "request": {}},
        }
    )
    # Without a first line that says so, it is for the shell.
    scripts.write("after.sh", f'{get} "$UNBROKEN_NODE"\n')
    scripts.machine("hyperpod-i-0a", onCreate="on_create.sh", onInitComplete="after.sh")
    status = scripts.until("hyperpod-i-0a", phase="Running", lifeCycle="Succeeded")
    said = scripts.log("i-0a")
    assert status["lifeCycleLog"].endswith("logs/LifecycleConfig/worker/i-0a.log")
    lines = said.splitlines()
    config = json.loads(next(line for line in lines if line.startswith("{")))
    (group,) = config["InstanceGroups"]
    assert config["ClusterConfig"] == {"ClusterArn": arn, "ClusterName": "C"}
    assert (group["Name"], group["Instances"][0]["InstanceId"]) == ("worker", "i-0a")
    addresses = scripts.cluster.get("node", "hyperpod-i-0a")["status"]["addresses"]
    assert group["Instances"][0]["CustomerIpAddress"] == addresses[0]["address"]
    assert [line for line in lines if line in ("beside", "not yet", "node/hyperpod-i-0a")] == [
        "beside",
        "not yet",
        "node/hyperpod-i-0a",
    ]

    # Not again after a reboot, nor under another `up`.
    scripts.cluster.kubectl(
        *("patch", "machine", "hyperpod-i-0a", "--type=merge", '--patch={"spec":{"boots":1}}')
    )
    scripts.until("hyperpod-i-0a", boots="1", phase="Running")
    scripts.cluster.unbroken("down")
    scripts.cluster.unbroken("up", "--detach")
    scripts.until("hyperpod-i-0a", phase="Running")
    assert scripts.log("i-0a") == said

    # Another machine is another life.
    scripts.cluster.kubectl("delete", "machine", "hyperpod-i-0a")
    scripts.machine("hyperpod-i-0a", onCreate="on_create.sh")
    scripts.until("hyperpod-i-0a", phase="Running")
    assert scripts.log("i-0a").count("on_create.sh: attempt 1") == 2


@pytest.mark.heavy
def test_one_that_fails_is_tried_four_times_and_then_by_a_reboot(scripts: Scripts) -> None:
    scripts.write("on_create.sh", "echo no disk; exit 3\n")
    scripts.machine("fails", onCreate="on_create.sh")
    status = scripts.until("fails", phase="Failed")
    text = "OnCreate on_create.sh ended with 3 in attempt 4 of 4: no disk"
    assert (status["lifeCycle"], status["message"]) == ("Failed", text)
    assert scripts.log("fails").count("no disk") == 4
    assert not scripts.has_node("fails")

    scripts.write("on_create.sh", "echo fine\n")
    scripts.cluster.unbroken("down")
    scripts.cluster.unbroken("up", "--detach")
    scripts.until("fails", phase="Failed")
    scripts.cluster.kubectl(
        "patch", "machine", "fails", "--type=merge", '--patch={"spec":{"boots":1}}'
    )
    scripts.until("fails", phase="Running", lifeCycle="Succeeded")
    assert scripts.has_node("fails")


def test_one_that_hangs_is_killed_with_its_machine_and_with_up(scripts: Scripts) -> None:
    gate = Gate(scripts.directory.parent / "gate")
    mark = f"hangs-{os.getpid()}"
    scripts.write(
        "hang.sh",
        "#!/bin/bash\n"
        f"setsid {sys.executable} -c 'import time; time.sleep(600)' {mark} &\n"
        f"echo $$ > {gate.path}\nwait\n",
    )
    scripts.machine("hangs", onCreate="hang.sh")
    pid = int(gate.reached())
    scripts.until("hangs", phase="Starting", lifeCycle="Running")

    # A kill of `up` leaves it alone, and the next one finds it.
    handle = os.pidfd_open(scripts.cluster.up_pid)
    os.kill(scripts.cluster.up_pid, 9)
    all_end([handle])
    scripts.cluster.unbroken("up", "--detach")
    scripts.until("hangs", lifeCycle="Running")
    handles = [os.pidfd_open(one) for one in (pid, *processes(mark))]
    assert len(handles) == 2
    scripts.cluster.unbroken("down")
    all_end(handles)

    scripts.cluster.unbroken("up", "--detach")
    pid = int(gate.reached())
    handles = [os.pidfd_open(one) for one in (pid, *processes(mark))]
    scripts.cluster.kubectl("delete", "machine", "hangs")
    all_end(handles)
    assert scripts.log("hangs").count("attempt 1") == 2, "what was killed was no attempt"


def test_what_is_nowhere_is_skipped_and_what_is_missing_fails(scripts: Scripts) -> None:
    life_cycle = {"source": "s3://sagemaker-other/x", "onCreate": "a.sh"}
    made = {"apiVersion": "unbroken.dev/v1", "kind": "Machine", "metadata": {"name": "skipped"}}
    scripts.cluster.apply({**made, "spec": {"lifeCycle": life_cycle}})
    status = scripts.until("skipped", phase="Running", lifeCycle="Skipped")
    assert "--lifecycle-source s3://sagemaker-other/x=DIR" in status["message"]
    scripts.machine("missing", onCreate="no.sh")
    assert "no such file" in scripts.until("missing", phase="Failed")["message"]
    scripts.machine("leaves", onCreate="../state/cluster.json")
    said = scripts.until("leaves", phase="Failed")["message"]
    assert "each part between slashes must be the name of a folder or file" in said


def test_a_source_is_a_directory_and_is_remembered(scripts: Scripts, tmp_path: Path) -> None:
    options = json.loads((scripts.cluster.directory / "cluster.json").read_text())
    assert options["lifecycle_sources"] == {SOURCE: str(scripts.directory)}
    other = Cluster(tmp_path / "state", scripts.cluster.kubectl_path)
    for wrong, text in (
        ("s3://a/b=/nowhere/at/all", "/nowhere/at/all is not a directory"),
        ("b=/tmp", "write it as s3://BUCKET/PREFIX=DIR"),
    ):
        done = other.unbroken("up", "-d", "--lifecycle-source", wrong, check=False)
        assert done.returncode != 0
        assert text in done.stderr
        assert "Traceback" not in done.stderr
