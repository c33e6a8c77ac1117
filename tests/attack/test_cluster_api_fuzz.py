"""The cluster API under garbage: from untrusted clients, changed calls, and signed calls.

It must refuse them with a status below 500, keep its memory, and answer an honest boto3 meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.apiservers import Cluster, free_port
from tests.attack.listeners import DIGITS, Recorder, Siege, besiege, fuzzed, requests
from tests.attack.raw_calls import signed
from tests.cli_calls import UNBROKEN, read_until
from tests.cluster_api.api_program import KEY, credentials_file, running_api
from tests.watching import PATIENCE_SECONDS
from unbroken.cluster_api.server import HANDLERS

pytestmark = pytest.mark.slow
GROUP = {
    "InstanceGroupName": "workers",
    "InstanceType": "ml.c5.large",
    "InstanceCount": 1,
    "ExecutionRole": "arn:aws:iam::123456789012:role/worker",
}
HONEST = """
import boto3, sys
client = boto3.client("sagemaker", region_name="us-west-2", endpoint_url=sys.argv[1],
                      aws_access_key_id=sys.argv[2], aws_secret_access_key=sys.argv[3])
for line in sys.stdin:
    print(len(client.list_clusters(NameContains=line.strip())["ClusterSummaries"]), flush=True)
"""
COMMANDS = [
    ["list-clusters", "--max-results", "5", "--creation-time-after", "2026-01-01T00:00:00Z"],
    ["create-cluster", "--cluster-name", "fuzz", "--instance-groups", json.dumps([GROUP])],
    ["describe-cluster", "--cluster-name", "fuzz"],
    ["list-cluster-nodes", "--cluster-name", "fuzz"],
    ["update-cluster", "--cluster-name", "fuzz", "--instance-groups", json.dumps([GROUP])],
    ["batch-reboot-cluster-nodes", "--cluster-name", "x", "--node-ids", "i-0123456789abcdef0"],
    ["delete-cluster", "--cluster-name", "fuzz"],
]
HUGE = [
    *('{"MaxResults":1e999}', '{"MaxResults":2147483648}', f'{{"MaxResults":{DIGITS[:4000]}}}'),
    f'{{"CreationTimeAfter":{DIGITS[:4000]}}}',
    *('{"CreationTimeAfter":-1e308}', '{"CreationTimeBefore":"9999-12-31T23:59:59-23:59"}'),
    *('{"CreationTimeAfter":"0001-01-01T00:00:00+23:59"}', '{"NextToken":"W10="}'),
    *('{"NextToken":"\\u00e9"}', '{"ClusterName":"\\u0000"}', '{"ClusterName":"a\\ud800"}'),
    '{"ClusterName":"c","InstanceGroups":[' + "{}," * 20_000 + "{}]}",
    '{"ClusterName":"c","InstanceGroups":[{"InstanceCount":' + DIGITS[:4000] + "}]}",
    '{"ClusterName":"c","NodeIds":[' + '"i-0123456789abcdef0",' * 20_000 + '""]}',
    '{"ClusterName":"c","NodesToAdd":[{"InstanceGroupName":"g","IncrementTargetCountBy":1e15}]}',
    '{"ClusterName":"c","Tags":[' + '{"Key":"a","Value":"b"},' * 20_000 + "{}]}",
    '{"ClusterName":"' + "-" * 900_000 + '"}',
    '{"' + "a" * 900_000 + '":1}',
    '{"ResourceArn":"arn:aws:sagemaker:' + "a" * 500_000 + '"}',
]
"""Bodies with counts, times and texts that are too large or no counts, times or texts."""


class Programs:
    """`unbroken cluster-api` in a process of its own, and boto3 in another one."""

    def __init__(self, endpoint: str, pid: int, honest: subprocess.Popen[str]) -> None:
        self.endpoint = endpoint
        self.pid = pid
        self._honest = honest

    def ask(self) -> None:
        """One call of boto3."""
        assert self._honest.stdin is not None
        assert self._honest.stdout is not None
        self._honest.stdin.write("nobody\n")
        self._honest.stdin.flush()
        assert self._honest.stdout.readline() == "0\n"

    def siege(self) -> Siege:
        """The server under attack."""
        place = urlsplit(self.endpoint)
        return Siege((str(place.hostname), place.port or 0), self.pid, self.ask)


@pytest.fixture(scope="module")
def aws_folder() -> Path:
    named = os.environ.get("UNBROKEN_AWS")
    folder = Path(named) if named else Path(sys.prefix) / "aws/bin"
    if not (folder / "aws").exists():
        pytest.skip(f"no aws CLI in {folder} (tools/setup.sh installs it; or set UNBROKEN_AWS)")
    return folder


@pytest.fixture(scope="module")
def programs(
    clusters: Callable[[str], Cluster],
    aws_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Programs]:
    folder, cluster = tmp_path_factory.mktemp("fuzz"), clusters("embedded")
    keys = credentials_file(folder)
    # It installs the definitions, and its controller takes away what the inputs create.
    with (
        running_api(cluster),
        _running(
            *(*UNBROKEN, "cluster-api", "--port", str(free_port()), "--credentials", str(keys)),
            *("--kubeconfig", str(cluster.kubeconfig), "--node-provider", "machines"),
        ) as server,
    ):
        [line] = read_until(server, lambda line: "cluster API serves address=" in line)
        endpoint = line.partition("cluster API serves address=")[2]
        python = str(aws_folder / "python")
        with _running(python, "-c", HONEST, endpoint, KEY.key_id, KEY.secret) as honest:
            yield Programs(endpoint, server.pid, honest)
        server.terminate()
        said, _ = server.communicate(timeout=PATIENCE_SECONDS)
        assert "Traceback" not in said
        assert " ERROR " not in said


@contextmanager
def _running(*command: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as found:
        try:
            yield found
        finally:
            found.kill()


def recorded(siege: Siege, folder: Path) -> list[bytes]:
    """Requests of the real aws CLI, one of each operation."""
    keys = {"AWS_ACCESS_KEY_ID": KEY.key_id, "AWS_SECRET_ACCESS_KEY": KEY.secret}
    more = {"AWS_DEFAULT_REGION": "us-west-2", "AWS_EC2_METADATA_DISABLED": "true"}
    with Recorder(siege) as recorder:
        for command in COMMANDS:
            subprocess.run(
                [str(folder / "aws"), "sagemaker", *command, "--endpoint-url", recorder.url],
                env={**keys, **more, "PATH": os.environ["PATH"]},
                capture_output=True,
                timeout=60,
                check=False,
            )
    found = b"".join(recorder.requests).split(b"POST / HTTP/1.1\r\n")[1:]
    return [b"POST / HTTP/1.1\r\n" + one for one in found]


def test_garbage_is_refused_and_honest_clients_are_served(
    programs: Programs, aws_folder: Path
) -> None:
    siege = programs.siege()
    real = recorded(siege, aws_folder)
    assert len(real) == len(COMMANDS)
    besiege(siege, real)
    siege.check()


def test_signed_garbage_is_refused_too(programs: Programs) -> None:
    siege = programs.siege()
    calls = [signed(programs.endpoint, "CreateCluster", json.dumps(one).encode()).data for one in (
        {"ClusterName": "fuzz", "InstanceGroups": [GROUP]},
        {"ClusterName": "fuzz", "NodeIds": ["i-0123456789abcdef0"]},
        {"CreationTimeAfter": 1.5, "MaxResults": 5, "NextToken": "x", "SortBy": "NAME"},
    )]  # fmt: skip

    @fuzzed
    @given(st.sampled_from(sorted(HANDLERS)), requests(calls))
    def attack(operation: str, data: bytes) -> None:
        _, _, body = data.partition(b"\r\n\r\n")
        siege.send(signed(programs.endpoint, operation, body).data)

    with siege.running():
        attack()
    siege.check()
    assert 400 in siege.statuses


def test_huge_values_are_refused(programs: Programs) -> None:
    siege = programs.siege()
    with siege.running():
        for body in HUGE:
            for operation in sorted(HANDLERS):
                siege.send(signed(programs.endpoint, operation, body.encode()).data)
    siege.check()
