"""`hyperpodrun` in an embedded pod: found whatever PATH it has, its files kept with the pod."""

from __future__ import annotations

import pytest

from tests.e2e.clusters import Cluster, pod

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
