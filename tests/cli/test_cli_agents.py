"""Workers of HyperPod's own agent, which names none: they are found among the pod's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from unbroken.cli.job.agents import with_workers
from unbroken.local.node.processes.process import MARKER
from unbroken.wire.agent import AgentReport, AgentState

pytestmark = pytest.mark.slow
CONTAINER = "a-container-of-test-cli-agents"
POD = {"status": {"containerStatuses": [{"containerID": f"unbroken://{CONTAINER}"}, {}]}}
REPORT = AgentReport("stock-", AgentState.RUNNING, rank=1)
PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
"""


@contextmanager
def process(variables: Mapping[str, str]) -> Iterator[int]:
    """Run a process of the container that has a child, as a worker with a loader of data has."""
    ran = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env={MARKER: CONTAINER, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert ran.stdout is not None
    ran.stdout.readline()
    try:
        yield ran.pid
    finally:
        ran.communicate()


def test_workers_are_the_first_processes_with_a_rank() -> None:
    ranks = {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    with (
        process({}),
        process({"RANK": "5"}),
        process({**ranks, "RANK": "three"}),
        process(ranks) as third,
        process({**ranks, "RANK": "2", "LOCAL_RANK": "0"}) as second,
    ):
        report = with_workers(REPORT, POD)
    found = [(one.rank, one.local_rank, one.pid, one.state) for one in report.workers]
    assert found == [(2, 0, second, "running"), (3, 1, third, "running")]
    assert (report.pid, report.nproc, report.rank) == (os.getpid(), 2, 1)


def test_a_pod_without_workers_keeps_the_report_as_it_is() -> None:
    with process({}):
        assert with_workers(REPORT, POD) == REPORT
    assert with_workers(REPORT, {"status": {}}) == REPORT
