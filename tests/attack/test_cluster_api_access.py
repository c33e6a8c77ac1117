"""The attack: a local user without keys controls clusters of another user's `unbroken up`.

The cluster API on the loopback address required no key. Every user of the machine could create,
delete and reboot clusters, and run lifecycle scripts as the user of `unbroken up`.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attack.raw_calls import captured, send
from tests.cli_calls import Cli
from unbroken.cluster_api.signatures import Credential

pytestmark = pytest.mark.slow
VARIABLES = ("AWS_ENDPOINT_URL_SAGEMAKER", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID")
CALL = """
import boto3, botocore, json, sys
if sys.argv[1:] == ["unsigned"]:
    config = botocore.config.Config(signature_version=botocore.UNSIGNED)
    client = boto3.client("sagemaker", config=config)
else:
    client = boto3.client("sagemaker")
try:
    print(json.dumps(client.list_clusters()["ClusterSummaries"]))
except botocore.exceptions.ClientError as error:
    print(json.dumps(error.response["Error"]["Code"]))
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """Start a cluster of a person who has set no keys."""
    folder = tmp_path_factory.mktemp("up")
    cli = Cli(folder / "cluster", folder)
    cli.call("up", "--detach", "--nodes", "0")
    try:
        yield cli
    finally:
        cli.take_away()


def key_of(up: Cli) -> Credential:
    found = up.json("status")["clusterApiCredentials"]
    return Credential(found["accessKeyId"], found["secretAccessKey"])


def boto3(up: Cli, *arguments: str, **changes: str) -> Any:
    """Call boto3 in a shell with the variables that `unbroken status` prints; return its output."""
    named = os.environ.get("UNBROKEN_AWS")
    python = (Path(named) if named else Path(sys.prefix) / "aws/bin") / "python"
    if not python.exists():
        pytest.skip(f"no boto3 beside {python} (tools/setup.sh installs it)")
    lines = re.findall(r"^export (AWS_\w+)=(.*)$", up.call("status").stdout, re.MULTILINE)
    assert set(VARIABLES) | {"AWS_SECRET_ACCESS_KEY"} == {name for name, _ in lines}
    environment = {"PATH": os.environ["PATH"], "AWS_EC2_METADATA_DISABLED": "true"}
    done = subprocess.run(
        [str(python), "-c", CALL, *arguments],
        env={**environment, **dict(lines), **changes},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_call_without_a_key_is_refused(up: Cli) -> None:
    endpoint = up.json("status")["clusterApi"]
    seen = captured(endpoint, "ListClusters", {}, key=key_of(up))
    assert send(endpoint, seen).status == 200
    seen.headers = [one for one in seen.headers if one[0] != b"authorization"]
    reply = send(endpoint, seen)
    assert (reply.status, reply.code) == (403, "MissingAuthenticationTokenException")


def test_boto3_shows_the_errors_of_aws(up: Cli) -> None:
    assert boto3(up) == []
    assert boto3(up, "unsigned") == "MissingAuthenticationTokenException"
    assert boto3(up, AWS_ACCESS_KEY_ID="AKIANOBODYNOBODYNOBO") == "UnrecognizedClientException"
    assert boto3(up, AWS_SECRET_ACCESS_KEY="guessed") == "InvalidSignatureException"


def test_the_key_is_the_owners_alone_and_has_the_form_of_aws(up: Cli) -> None:
    path = up.directory / "cluster-api-credentials"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = key_of(up)
    assert re.fullmatch(r"AKIA[A-Z2-7]{16}", key.key_id)
    assert re.fullmatch(r"[A-Za-z0-9_-]{40}", key.secret)
    for name in ("up.json", "up.log", "cluster.json", "kubeconfig"):
        assert key.secret not in (up.directory / name).read_text(), name


def test_our_own_command_needs_no_word(up: Cli) -> None:
    assert up.call("cluster", "list").stdout == ""
    # A shell that holds keys of AWS, too.
    shell = {**up.environment, "AWS_ACCESS_KEY_ID": "AKIAOTHER", "AWS_SECRET_ACCESS_KEY": "other"}
    assert up.call("cluster", "list", "--dir", str(up.directory), environment=shell).stdout == ""
    shell["AWS_ENDPOINT_URL_SAGEMAKER"] = up.json("status")["clusterApi"]
    del shell["UNBROKEN_DIR"]
    shell["KUBECONFIG"] = str(up.directory / "kubeconfig")
    assert up.call("cluster", "list", environment=shell).stdout == ""


def test_without_a_key_our_command_says_what_to_set(tmp_path: Path) -> None:
    cli = Cli(tmp_path, tmp_path)
    unset = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "UNBROKEN_DIR")
    shell = {name: one for name, one in cli.environment.items() if name not in unset}
    call = ("cluster", "list", "--endpoint-url", "http://127.0.0.1:9")
    said = cli.call(*call, environment=shell, code=1).stderr
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in said


def test_the_key_stays_over_a_restart_and_becomes_private_again(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "cluster", tmp_path)
    path = cli.directory / "cluster-api-credentials"
    cli.call("up", "--detach", "--nodes", "0")
    try:
        first = path.read_text()
        cli.call("down")
        path.chmod(0o644)
        cli.call("up", "--detach", "--nodes", "0")
        assert path.read_text() == first
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert cli.json("status")["clusterApiCredentials"]["accessKeyId"] in first
    finally:
        cli.take_away()
