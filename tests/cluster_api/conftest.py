"""The real clients of the cluster API: the aws CLI and boto3, in an environment of their own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.apiservers import Cluster
from tests.cluster_api.api_program import Hands, Running, running_api


@pytest.fixture(scope="session")
def aws_folder() -> Path:
    """Folder of `aws` and of the Python that has boto3.

    They cannot be in the environment of the tests: botocore wants an older python-dateutil than
    the Kubernetes client.
    """
    named = os.environ.get("UNBROKEN_AWS")
    folder = Path(named) if named else Path(sys.prefix) / "aws/bin"
    if not (folder / "aws").exists() or shutil.which(folder / "python") is None:
        pytest.skip(f"no aws CLI in {folder} (tools/setup.sh installs it; or set UNBROKEN_AWS)")
    return folder


@pytest.fixture(scope="module")
def running(clusters: Callable[[str], Cluster]) -> Iterator[Running]:
    """Run the cluster API over the local API server."""
    with running_api(clusters("embedded")) as found:
        yield found


@pytest.fixture
def hands(running: Running) -> Iterator[Hands]:
    """The provider, for tests that let machines fail."""
    yield running.hands
    running.hands.fails.clear()
