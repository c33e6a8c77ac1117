"""A real Kubernetes with real nodes, started once for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.apiservers import CannotStartError
from tests.realnodes import images
from tests.realnodes.jobs import Job
from tests.realnodes.plane import RealCluster, real_cluster, until
from tests.realnodes.releases import Release, released


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[RealCluster]:
    """A control plane with as many nodes as the file's `NODES` says, and with built images if it
    has `IMAGES`."""
    try:
        has_images = getattr(request.module, "IMAGES", False)
        with real_cluster(request.module.NODES, has_images=has_images) as made:
            yield made
    except CannotStartError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def release(cluster: RealCluster) -> Iterator[Release]:
    """The chart as it is delivered, installed on the cluster."""
    with released(cluster) as found:
        yield found


@pytest.fixture
def job(release: Release, request: pytest.FixtureRequest) -> Job:
    """A job that runs on two of the three nodes, while an operator leads: see `jobs.named`."""
    release.rolled_out()
    until(release.leader, "an operator leads")
    name, annotations = request.param
    made = Job(release.cluster, name, image=images.NAMES["training"], annotations=annotations)
    made.apply()
    made.running()
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests have measured."""
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and report.user_properties:
            terminalreporter.section(f"measured by {report.nodeid.rpartition('::')[2]}")
            for name, value in report.user_properties:
                terminalreporter.write_line(f"{name}: {value}")
