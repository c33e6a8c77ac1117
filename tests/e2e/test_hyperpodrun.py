"""`hyperpodrun` in an embedded pod: found whatever PATH it has, its files kept with the pod."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster, pod
from unbroken.local.node.context import STAND_INS, with_own_commands

pytestmark = pytest.mark.slow

SHOW = "command -v hyperpodrun && echo logs in $UNBROKEN_LOG_DIR && ls -d $UNBROKEN_LOG_DIR"


def test_hyperpodrun_is_found_where_the_pod_sets_its_own_path(cluster: Cluster) -> None:
    path = [{"name": "PATH", "value": "/usr/bin:/bin"}]
    shown = pod("stand-in", "sh", "-c", SHOW, restartPolicy="Never", container={"env": path})
    cluster.apply(shown)
    cluster.wait("pod/stand-in", "jsonpath={.status.phase}=Succeeded")
    lines = cluster.kubectl("logs", "stand-in").stdout.splitlines()
    assert lines[0].endswith("/bin/hyperpodrun")
    assert lines[2].startswith(str(cluster.directory))


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        (["--nnodes=2", "a.py"], ["--server-host=127.77.0.3", "--nnodes=2", "a.py"]),
        (
            ["--server-host=0.0.0.0", "a b.py", "--server-host=0.0.0.0", "*"],
            [*["--server-host=127.77.0.3"] * 2, "a b.py", "--server-host=0.0.0.0", "*"],
        ),
        (["--server-host=10.0.0.7"], ["--server-host=127.77.0.3", "--server-host=10.0.0.7"]),
        ([], ["--server-host=127.77.0.3"]),
    ],
)
def test_an_agent_of_the_pods_own_listens_on_the_address_of_its_pod(
    tmp_path: Path, arguments: list[str], got: list[str]
) -> None:
    own = tmp_path / "hyperpodrun"
    own.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    own.chmod(0o755)
    variables = {
        "PATH": with_own_commands(f"/usr/bin:/bin:{tmp_path}:{STAND_INS}"),
        "AGENT_HOST": "127.77.0.3",
    }
    printed = subprocess.run(
        ["sh", "-c", 'exec hyperpodrun "$@"', "sh", *arguments],
        env=variables, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert printed.splitlines() == got
