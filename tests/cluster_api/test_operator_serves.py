"""`unbroken operator --cluster-api-port --metrics-port`: the cluster API and metrics anywhere."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.apiclient import Api
from tests.apiservers import Cluster, free_port
from tests.cli_calls import UNBROKEN, Cli, read_until
from tests.cluster_api.api_program import Running, credentials_file
from tests.watching import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow
GROUP = {
    "InstanceGroupName": "workers",
    "InstanceType": "ml.p5.48xlarge",
    "InstanceCount": 1,
    "ExecutionRole": "arn:aws:iam::111122223333:role/hyperpod-role",
}


def page(url: str) -> str:
    """Text of a page."""
    with urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        text: str = answer.read().decode()
        return text


def test_the_operator_serves_the_cluster_api_and_metrics(
    clusters: Callable[[str], Cluster], tmp_path: Path
) -> None:
    cluster = clusters("embedded")
    keys = ["--cluster-api-credentials", str(credentials_file(tmp_path))]
    command = ["operator", "--kubeconfig", str(cluster.kubeconfig), *keys, "--cluster-api-port"]
    metrics = str(free_port())
    process = subprocess.Popen(
        [*UNBROKEN, *command, str(free_port()), "--metrics-port", metrics],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        # It leads once our kinds are installed, which the API needs as well.
        lines = read_until(process, lambda line: "operator runs" in line)
        [address] = [
            line.partition("cluster API serves address=")[2]
            for line in lines
            if "cluster API serves address=" in line
        ]
        api = Api(cluster)
        running = Running(api)
        running.endpoint = address
        assert running.call("DescribeCluster", ClusterName="nobody").code == "ResourceNotFound"
        refused = running.call("CreateCluster", ClusterName="new", InstanceGroups=[GROUP])
        assert refused.code == "ResourceLimitExceeded"
        # Other tests leave nodes on this server, too.
        api.post("/api/v1/nodes", {"metadata": {"name": "counted"}}).done()
        count = len(api.get("/api/v1/nodes").made["items"])
        # The operator counts nodes once it has read them, which may be later than it leads.
        wait_until(
            lambda: page(f"http://127.0.0.1:{metrics}/metrics"),
            lambda text: (
                sum(map(float, re.findall(r"^unbroken_nodes{.*} (\S+)", text, re.M))) == count
            ),
        )
        api.delete("/api/v1/nodes/counted").done()
        api.close()
    finally:
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, said
    assert "Traceback" not in said


def test_the_cluster_api_runs_without_an_operator(
    clusters: Callable[[str], Cluster], tmp_path: Path
) -> None:
    cluster = clusters("embedded")
    process = subprocess.Popen(
        [
            *(*UNBROKEN, "cluster-api", "--kubeconfig", str(cluster.kubeconfig)),
            *("--port", str(free_port()), "--credentials", str(credentials_file(tmp_path))),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        [line] = read_until(process, lambda line: "cluster API serves address=" in line)
        with closing(Api(cluster)) as api:
            running = Running(api)
            running.endpoint = line.partition("cluster API serves address=")[2]
            found = running.call("DescribeCluster", ClusterName="nobody")
            refused = running.call("CreateCluster", ClusterName="new", InstanceGroups=[GROUP])
        assert found.code == "ResourceNotFound"
        assert refused.code == "ResourceLimitExceeded"
    finally:
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, "Traceback" in said) == (0, False), said


@pytest.mark.parametrize("program", ["operator", "cluster-api"])
def test_without_keys_it_does_not_start(
    clusters: Callable[[str], Cluster], tmp_path: Path, program: str
) -> None:
    kubeconfig = str(clusters("embedded").kubeconfig)
    option = "--port" if program == "cluster-api" else "--cluster-api-port"
    done = Cli(tmp_path / "none", tmp_path).call(
        *(program, "--kubeconfig", kubeconfig, option, str(free_port())), code=1
    )
    assert done.stderr.splitlines()[-1] == (
        "error: the cluster API needs credentials: write [default], aws_access_key_id = ... and "
        "aws_secret_access_key = ... to a file of mode 0600 and name it with "
        "--cluster-api-credentials FILE"
    )


def test_up_refuses_keys_that_it_cannot_read(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "cluster", tmp_path)
    done = cli.call("up", "--detach", "--cluster-api-credentials", "absent", code=1)
    assert "cannot read the credentials of the cluster API" in done.stderr
