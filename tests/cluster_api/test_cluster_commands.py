"""`unbroken cluster` as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli_calls import Cli
from tests.cluster_api.api_program import Hands, Running
from unbroken.cli.cluster.commands import progress
from unbroken.cli.cluster.place import credential_of

pytestmark = pytest.mark.slow


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The command, in a folder of the test's own."""
    return Cli(tmp_path / "none", tmp_path)


def call(cli: Cli, running: Running, *arguments: str, **options: Any) -> Any:
    options["environment"] = {
        **{name: one for name, one in cli.environment.items() if name != "UNBROKEN_DIR"},
        "AWS_ENDPOINT_URL_SAGEMAKER": running.endpoint,
        "AWS_ACCESS_KEY_ID": running.key.key_id,
        "AWS_SECRET_ACCESS_KEY": running.key.secret,
    }
    return cli.call("cluster", *arguments, **options)


def request(cli: Cli, name: str, group: str = "workers", count: int = 2) -> str:
    """A file for `--cli-input-json`."""
    one = {
        "InstanceGroupName": group,
        "InstanceType": "ml.p5.48xlarge",
        "InstanceCount": count,
        "ExecutionRole": "arn:aws:iam::123456789012:role/worker",
    }
    body = {"ClusterName": name, "InstanceGroups": [one]}
    (cli.folder / f"{name}.json").write_text(json.dumps(body))
    return f"{name}.json"


def test_a_cluster_is_created_shown_updated_and_deleted(cli: Cli, running: Running) -> None:
    file = request(cli, "mine")
    done = call(cli, running, "create", "--cli-input-json", f"file://{file}", "--wait")
    assert "mine: InService" in done.stderr
    assert "mine/workers: InService, 2 of 2 up" in done.stderr
    assert [line.split() for line in done.stdout.splitlines()[-2:]] == [
        ["GROUP", "TYPE", "STATUS", "CURRENT", "TARGET", "CHECKS"],
        ["workers", "ml.p5.48xlarge", "InService", "2", "2", "-"],
    ]
    rows = [line.split() for line in call(cli, running, "list").stdout.splitlines()]
    assert rows[0] == ["NAME", "STATUS", "CREATED", "ARN"]
    assert ["mine", "InService"] in [row[:2] for row in rows]
    found = json.loads(call(cli, running, "describe", "mine", "-o", "json").stdout)
    same = yaml.safe_load(call(cli, running, "describe", "mine", "-o", "yaml").stdout)
    assert same == found
    file = request(cli, "mine", count=1)
    done = call(cli, running, "update", "--cli-input-json", file, "--wait", "-o", "json")
    assert json.loads(done.stdout)["InstanceGroups"][0]["TargetCount"] == 1
    done = call(cli, running, "delete", "mine", "--wait")
    assert done.stdout.startswith("cluster mine is deleted")
    assert running.call("DescribeCluster", ClusterName="mine").code == "ResourceNotFound"


def test_a_creation_that_fails_ends_with_one(cli: Cli, running: Running, hands: Hands) -> None:
    hands.fails.add("broken")
    file = request(cli, "bad", "broken")
    done = call(cli, running, "create", "--cli-input-json", file, "--wait", code=1)
    assert "OnCreate ended with 1" in done.stderr
    assert "Failure:" in done.stdout
    call(cli, running, "delete", "bad", "--wait")


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["describe", "none"], "", "Cluster with name none not found (ResourceNotFound)"),
        (["create", "--cli-input-json", "absent"], "", "cannot read absent"),
        (["create", "--cli-input-json", "-"], "{", "- is not JSON"),
        (["create", "--cli-input-json", "-"], "[]", "- must hold an object"),
        (["create", "--cli-input-json", "-"], "{}", "Value null at 'clusterName'"),
        (["list", "--endpoint-url", "nowhere"], "", "'nowhere' is no address"),
        (["list", "--endpoint-url", "http://127.0.0.1:1"], "", "no answer from the cluster API"),
        (["list", "--dir", "absent"], "", "no cluster runs from"),
    ],
)
def test_mistakes_get_one_clear_line(
    cli: Cli, running: Running, arguments: list[str], stdin: str, words: str
) -> None:
    done = call(cli, running, *arguments, code=1, stdin=stdin)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_keys_of_the_environment_sign() -> None:
    assert credential_of({}) is None
    assert credential_of({"AWS_ACCESS_KEY_ID": "a"}) is None
    found = credential_of({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
    assert found is not None
    assert (found.key_id, found.secret, found.token) == ("a", "b", "")


def test_progress_has_a_line_for_the_cluster_and_for_each_group() -> None:
    group = {"InstanceGroupName": "g", "Status": "Creating", "CurrentCount": 1, "TargetCount": 3}
    cluster = {
        "ClusterName": "c",
        "ClusterStatus": "Failed",
        "FailureMessage": "why",
        "InstanceGroups": [group],
    }
    assert progress(cluster) == {"": "c: Failed: why", "g": "c/g: Creating, 1 of 3 up"}
