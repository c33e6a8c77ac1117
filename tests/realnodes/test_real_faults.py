"""A real node turns bad: its daemon says so, its job moves, it is repaired, tested and given back.

Machines share this host's kernel; a file for each stands for its log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from realnodes.jobs import Job
from realnodes.plane import RealCluster, details, health, operator, repair_options, until
from realnodes.stages import Stages

NODES = 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(900),
]

GPU = "NVRM: Xid (PCI:0000:3b:00): "
LOST = f"{GPU}79, pid=4711, name=python3, GPU has fallen off the bus."
PROGRAM = f"{GPU}31, pid=4711, name=python3, Ch 00000008, MMU Fault: ENGINE GRAPHICS"
CONDITION = "NvidiaGPUUnhealthy"
PENDING = "UnschedulablePendingReplacement"


@pytest.fixture(scope="module")
def watched(cluster: RealCluster) -> RealCluster:
    """The cluster with the daemon on each node."""
    cluster.deploy_daemon()
    return cluster


def test_a_node_without_its_gpu_is_left_replaced_tested_and_used_again(
    watched: RealCluster, record_property: Callable[[str, object], None]
) -> None:
    with operator(watched, *repair_options(watched)):
        job = Job(watched, "moved")
        job.apply()
        bad = job.running()[1].node

        watched.write_kernel_log(bad, PROGRAM)
        until(lambda: "Xid31" in str(details(watched.get("node", bad))), "the daemon tells of it")
        assert health(watched.get("node", bad)) == ("", False)
        assert watched.condition(bad, CONDITION) != "True"
        assert job.newest() == 0

        with Stages(watched, job) as stages:
            stages.said_at = watched.write_kernel_log(bad, LOST)
            second = job.running(after=0)
            assert bad not in {one.node for one in second.values()}
            until(lambda: stages.repair(bad).get("state") == "Done", f"{bad} is repaired", 300)
        assert stages.was_marked(bad, PENDING, CONDITION)
        repair = stages.repair(bad)
        new = repair["replacement"]
        assert (new != bad, repair["action"]) == (True, "replace")
        assert [one["metadata"]["name"] for one in watched.get("nodes")["items"]].count(bad) == 0
        assert watched.get("nodecheck", repair["check"])["status"]["phase"] == "Passed"
        assert health(watched.get("node", new)) == ("Schedulable", False)
        assert job.newest() == 1, "the repair of a node that was left has stopped the job"
        times = stages.times(bad, CONDITION)
        assert times["repair Acting"] > times["workers stopped"]
        record(times, record_property)
        job.finish()


def record(times: Mapping[str, float], record_property: Callable[[str, object], None]) -> None:
    """Have the times of a fault's stages shown at the end of the run."""
    for stage, seconds in times.items():
        record_property(stage, f"{seconds:.1f} s")


def test_without_recovery_the_job_moves_to_its_spare_and_the_node_is_not_touched(
    watched: RealCluster, record_property: Callable[[str, object], None]
) -> None:
    ordered = watched.orders()
    with operator(watched, *repair_options(watched), "--node-recovery", "None"):
        job = Job(watched, "left", spares=1)
        job.apply()
        bad = job.running()[1].node
        boot = watched.get("node", bad)["status"]["nodeInfo"]["bootID"]
        with Stages(watched, job) as stages:
            stages.said_at = watched.write_kernel_log(bad, LOST)
            second = job.running(after=0)
            assert bad not in {one.node for one in second.values()}
            until(lambda: stages.was_marked(bad, PENDING, CONDITION), "the node says so itself")
        record(stages.times(bad, CONDITION), record_property)
        job.finish()
        found = watched.get("node", bad)
        assert health(found) == (PENDING, True)
        assert watched.condition(bad, CONDITION) == "True"
        assert found["status"]["nodeInfo"]["bootID"] == boot
        assert watched.orders() == ordered

        # What a person orders is carried out: the node is rebooted, tested, and the fault is over.
        watched.kubectl("annotate", "node", bad, "unbroken.dev/repair=reboot")
        until(lambda: watched.orders() != ordered, "the reboot is ordered")
        until(
            lambda: watched.get("node", bad)["status"]["nodeInfo"]["bootID"] != boot,
            "the machine has booted",
        )
        until(lambda: watched.condition(bad, CONDITION) == "False", "the daemon takes it back")
