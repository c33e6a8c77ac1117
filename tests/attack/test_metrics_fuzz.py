"""The operator's metrics port under garbage: Prometheus and the kubelet's probes are served."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.agent.running import Drain
from tests.apiservers import embedded_cluster, free_port
from tests.attack.listeners import Siege, besiege
from tests.cli_calls import UNBROKEN
from tests.watching import PATIENCE_SECONDS

pytestmark = pytest.mark.slow
ACCEPT = b"application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
RECORDED = [
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: " + ACCEPT + b"\r\nAccept-Encoding: gzip\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: a\r\nUser-Agent: kube-probe/1.33\r\nConnection: close\r\n\r\n",
]


@pytest.fixture
def siege(tmp_path: Path) -> Iterator[Siege]:
    port = free_port()

    def healthy() -> None:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE_SECONDS) as answer:
            assert answer.read() == b"ok\n"

    with embedded_cluster(tmp_path / "state") as cluster:
        command = [*UNBROKEN, "operator", "--kubeconfig", str(cluster.kubeconfig)]
        key = ["--key-file", str(tmp_path / "operator.key"), "--metrics-port", str(port)]
        process = subprocess.Popen(
            [*command, *key], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said = Drain(process.stdout)
        try:
            said.wait_for("operator runs")
            yield Siege(("127.0.0.1", port), process.pid, healthy)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, said.all()
    assert b"Traceback" not in said.all(), "strangers fill the log"


def test_garbage_on_the_metrics_port_is_refused_and_probes_are_answered(siege: Siege) -> None:
    besiege(siege, RECORDED)
    siege.check()


VERSIONS = (
    b" .0.0",
    b"x",
    b"1.x.0",
    b"1.0",
    b"..",
    b"-1.0.0",
    b"9" * 5000,
    b"1.0.0\xff",
    b"2.0.0\t",
)


def test_versions_that_are_none_get_the_metrics_all_the_same(siege: Siege) -> None:
    """prometheus_client compares the parts of a version without a look at what they are."""
    with siege.running():
        for version in VERSIONS:
            for kind in (b"application/openmetrics-text", b"text/plain"):
                accept = b"Accept: " + kind + b";version=" + version
                siege.send(b"GET /metrics HTTP/1.1\r\nHost: a\r\n" + accept + b"\r\n\r\n")
    siege.check()
