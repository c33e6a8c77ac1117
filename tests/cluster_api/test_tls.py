"""The cluster API by HTTPS, with the certificate that the chart makes, for the real aws CLI."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.apiservers import Cluster
from tests.cli_calls import Cli
from tests.cluster_api.api_program import KEY, Running, credentials_file, running_api
from tests.deploy.charts import EVERYTHING, of_kind, render
from tests.watching import PATIENCE_SECONDS
from unbroken.cluster_api.driver import LIMITS, ClusterApiOptions, Tls

pytestmark = pytest.mark.slow


def write_certificate(folder: Path, ca: str) -> Tls:
    """Write a certificate that the chart has made, as it is mounted; `ca` is its authority's."""
    (secret,) = of_kind(render(EVERYTHING), "Secret", "unbroken-cluster-api-tls")
    assert secret["type"] == "kubernetes.io/tls"
    files = {"tls.crt": "tls.crt", "tls.key": "tls.key", "ca.crt": ca}
    for key, name in files.items():
        draft = folder / f"{name}.new"
        draft.write_bytes(base64.b64decode(secret["data"][key]))
        draft.rename(folder / name)
    return Tls(folder / "tls.crt", folder / "tls.key")


@pytest.fixture
def secured(clusters: Callable[[str], Cluster], tmp_path: Path) -> Iterator[Running]:
    tls = write_certificate(tmp_path, "ca.crt")
    options = ClusterApiOptions(credentials_file(tmp_path), tls=tls)
    with running_api(clusters("embedded"), options) as found:
        yield found


def listed(folder: Path, endpoint: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `aws sagemaker list-clusters`."""
    keys = {"AWS_ACCESS_KEY_ID": KEY.key_id, "AWS_SECRET_ACCESS_KEY": KEY.secret}
    return subprocess.run(
        [str(folder / "aws"), "sagemaker", "list-clusters", "--endpoint-url", endpoint, *options],
        env={
            **keys,
            "PATH": os.environ["PATH"],
            "AWS_DEFAULT_REGION": "us-west-2",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def is_list(text: str) -> bool:
    """Return whether the text answers list-clusters, which may hold clusters of other tests."""
    return isinstance(json.loads(text)["ClusterSummaries"], list)


def test_clients_that_trust_the_certificate_are_answered(
    secured: Running, aws_folder: Path, tmp_path: Path
) -> None:
    assert secured.endpoint.startswith("https://127.0.0.1:")
    done = listed(aws_folder, secured.endpoint, "--ca-bundle", str(tmp_path / "ca.crt"))
    assert done.returncode == 0, done.stderr
    assert is_list(done.stdout)
    done = listed(aws_folder, secured.endpoint)
    assert "CERTIFICATE_VERIFY_FAILED" in done.stderr
    cli = Cli(tmp_path / "none", tmp_path)
    shell = {name: one for name, one in cli.environment.items() if name != "UNBROKEN_DIR"}
    shell |= {"AWS_ACCESS_KEY_ID": KEY.key_id, "AWS_SECRET_ACCESS_KEY": KEY.secret}
    call = ("cluster", "list", "-o", "json", "--endpoint-url", secured.endpoint)
    trusting = {**shell, "AWS_CA_BUNDLE": str(tmp_path / "ca.crt")}
    assert is_list(cli.call(*call, environment=trusting).stdout)
    assert "CERTIFICATE_VERIFY_FAILED" in cli.call(*call, environment=shell, code=1).stderr


def test_a_renewed_certificate_is_served_without_a_restart(
    secured: Running, aws_folder: Path, tmp_path: Path
) -> None:
    write_certificate(tmp_path, "newer.crt")
    done = secured.until(
        lambda: listed(aws_folder, secured.endpoint, "--ca-bundle", str(tmp_path / "newer.crt")),
        lambda found: found.returncode == 0,
    )
    assert is_list(done.stdout)


def test_handshakes_that_are_not_made_keep_nobody_out(
    secured: Running, aws_folder: Path, tmp_path: Path
) -> None:
    place = urlsplit(secured.endpoint)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(
                socket.create_connection((str(place.hostname), place.port), PATIENCE_SECONDS)
            )
            for _ in range(2 * LIMITS.connections)
        ]
        done = listed(aws_folder, secured.endpoint, "--ca-bundle", str(tmp_path / "ca.crt"))
        assert done.returncode == 0, done.stderr
        # All of them end, whether others come or not.
        assert [one.recv(1) for one in silent] == [b""] * len(silent)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tls-cert", "a.crt"], "HTTPS needs both"),
        (["--tls-cert", "a.crt", "--tls-key", "a.key"], "cannot use the certificate a.crt"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused(
    clusters: Callable[[str], Cluster], tmp_path: Path, arguments: list[str], said: str
) -> None:
    kubeconfig = str(clusters("embedded").kubeconfig)
    keys = str(credentials_file(tmp_path))
    call = ("cluster-api", "--kubeconfig", kubeconfig, "--port", "18433", "--credentials", keys)
    assert said in Cli(tmp_path / "none", tmp_path).call(*call, *arguments, code=1).stderr
