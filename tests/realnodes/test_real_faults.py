"""Faults of a real node: its daemon reports it, its job moves, and it is repaired and tested.

Machines share this host's kernel; a file for each stands for its log. The expected reactions are
read from the shipped table of faults.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.realnodes.jobs import Job, Life
from tests.realnodes.plane import RealCluster, details, health, operator, repair_options, until
from tests.realnodes.stages import Object, Stages
from unbroken.nodes.tables import read_table
from unbroken.spec.nodes.values import Action

NODES = 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(900),
]


def xid(number: int, text: str, gpu: str = "3b") -> str:
    """Return the line that NVIDIA's driver logs about a GPU."""
    return f"NVRM: Xid (PCI:0000:{gpu}:00): {number}, pid=4711, name=python3, {text}"


LOST = "Xid79"
LINES = {
    "Ext4Error": "EXT4-fs error (device nvme1n1p1): ext4_lookup:1855: inode #2: comm python3",
    # A fault of another GPU: with a 94 of its own GPU, the 48 would be the program's.
    "Xid94": xid(94, "Contained: CE User Channel (0x9). RST: No, D-RST: No", "5e"),
    "Xid31": xid(31, "Ch 00000008, MMU Fault: ENGINE GRAPHICS"),
    "Xid13": xid(13, "Graphics Exception: ESR 0x504648=0x1000e"),
    "Xid48": xid(48, "An uncorrectable double bit error (DBE) has been detected on GPU"),
    "ReadOnlyRemount": "EXT4-fs (nvme1n1p1): Remounting filesystem read-only",
    LOST: xid(79, "GPU has fallen off the bus."),
}
"""Lines that a kernel logs for faults, by their names in the table."""
TABLE = read_table(None).table.entries
CONDITION = TABLE[LOST].condition_type()
PENDING = "UnschedulablePendingReplacement"


@pytest.fixture(scope="module")
def guarded(cluster: RealCluster) -> RealCluster:
    """Provide the cluster with the daemon on each node."""
    cluster.deploy_daemon()
    return cluster


@pytest.fixture
def watched(guarded: RealCluster) -> Iterator[RealCluster]:
    """Provide the cluster, and remove the fault records after each test."""
    yield guarded
    guarded.kubectl("delete", "noderecords", "--all")


def test_a_node_without_its_gpu_is_left_replaced_tested_and_used_again(
    watched: RealCluster, record_property: Callable[[str, object], None]
) -> None:
    with operator(watched, *repair_options(watched)):
        job = Job(watched, "moved")
        job.apply()
        bad = job.running()[1].node
        repair, times = moves(job, LOST)
        assert repair["replacement"] != bad
        assert [one["metadata"]["name"] for one in watched.get("nodes")["items"]].count(bad) == 0
        assert job.newest() == 1, "the repair of a node that was left has stopped the job"
        assert times["repair Acting"] > times["workers stopped"]
        record(times, record_property)
        job.finish()


def moves(job: Job, fault: str) -> tuple[Object, dict[str, float]]:
    """Check that the job leaves rank 1's node, which is repaired as the table says, and tested.

    The node must be in service again. Return its repair, and the seconds to each stage.
    """
    cluster, entry, before = job.cluster, TABLE[fault], job.running()
    bad = before[1].node
    boot = boot_id(cluster, bad)
    with Stages(cluster, job) as stages:
        stages.said_at = cluster.write_kernel_log(bad, LINES[fault])
        second = job.running(after=before[1].attempt)
        assert bad not in {one.node for one in second.values()}
        until(lambda: stages.repair(bad).get("state") == "Done", f"{bad} is repaired", 300)
        is_lost = entry.action is Action.REPLACE
        label = PENDING if is_lost else "UnschedulablePendingReboot"
        assert stages.was_marked(bad, label, entry.condition_type())
        repair = stages.repair(bad)
        times = stages.times(bad, entry.condition_type())
    assert (repair["fault"], repair["action"]) == (fault, entry.action.value)
    assert cluster.get("nodecheck", repair["check"])["status"]["phase"] == "Passed"
    back = repair["replacement"] if is_lost else bad
    until(
        lambda: cluster.condition(back, entry.condition_type()) != "True",
        "the daemon takes it back",
    )
    assert health(cluster.get("node", back)) == ("Schedulable", False)
    assert (boot_id(cluster, back) == boot) == (entry.action is Action.RESET_GPU)
    return repair, times


def boot_id(cluster: RealCluster, node: str) -> str:
    """Return the boot ID of the node's machine, which changes with each boot."""
    return str(cluster.get("node", node)["status"]["nodeInfo"]["bootID"])


def record(times: Mapping[str, float], record_property: Callable[[str, object], None]) -> None:
    """Record the times of a fault's stages for the end of the run."""
    for stage, seconds in times.items():
        record_property(stage, f"{seconds:.1f} s")


def test_a_job_and_its_nodes_feel_of_each_fault_what_the_table_says(
    watched: RealCluster, record_property: Callable[[str, object], None]
) -> None:
    remedies = []
    with operator(watched, *repair_options(watched)):
        job = Job(watched, "struck", spares=1)
        job.apply()
        for fault in (name for name in LINES if name != LOST):
            match TABLE[fault].action:
                case Action.NONE:
                    is_told_of(job, fault)
                case Action.RESTART_JOB:
                    restarts_in_place(job, fault)
                    remedies.append("process")
                case _:
                    _, times = moves(job, fault)
                    record_property(f"{fault}: run again", f"{times['workers run again']:.1f} s")
                    record_property(f"{fault}: repaired", f"{times['repair Done']:.1f} s")
                    remedies.append("pod")
        job.incident(len(remedies))
        incidents = [one["spec"] for one in watched.get("incidents", "-l", "HPJob=struck")["items"]]
        assert [one["remedy"] for one in incidents] == remedies, json.dumps(incidents)
        assert job.object()["status"]["restartCount"] == len(remedies)
        job.finish()


def is_told_of(job: Job, fault: str) -> None:
    """Check that rank 1's node reports a fault, and that node and job do not change otherwise."""
    cluster, node, attempt = job.cluster, job.running()[1].node, job.newest()
    before = health(cluster.get("node", node))
    cluster.write_kernel_log(node, LINES[fault])
    until(lambda: fault in str(details(cluster.get("node", node))), f"{node} tells of {fault}")
    assert health(cluster.get("node", node)) == before
    assert cluster.condition(node, TABLE[fault].condition_type()) != "True"
    assert job.newest() == attempt


def restarts_in_place(job: Job, fault: str) -> None:
    """Kill the worker of rank 1 after its node's fault; check that all ranks restart in place."""
    before = job.running()
    is_told_of(job, fault)
    job.kill_worker(before[1].node)
    after = job.running(after=before[1].attempt)
    assert places(after) == places(before)


def places(workers: Mapping[int, Life]) -> dict[int, tuple[str, str]]:
    """Return the node and the pod of each rank."""
    return {rank: (one.node, one.pod) for rank, one in workers.items()}


def test_without_recovery_the_job_moves_to_its_spare_and_the_node_is_not_touched(
    watched: RealCluster, record_property: Callable[[str, object], None]
) -> None:
    ordered = watched.orders()
    with operator(watched, *repair_options(watched), "--node-recovery", "None"):
        job = Job(watched, "left", spares=1)
        job.apply()
        bad = job.running()[1].node
        boot = boot_id(watched, bad)
        with Stages(watched, job) as stages:
            stages.said_at = watched.write_kernel_log(bad, LINES[LOST])
            second = job.running(after=0)
            assert bad not in {one.node for one in second.values()}
            until(lambda: stages.was_marked(bad, PENDING, CONDITION), "the node says so itself")
        record(stages.times(bad, CONDITION), record_property)
        job.finish()
        found = watched.get("node", bad)
        assert health(found) == (PENDING, True)
        assert watched.condition(bad, CONDITION) == "True"
        assert boot_id(watched, bad) == boot
        assert watched.orders() == ordered

        # The operator carries out a person's order: the node is rebooted and tested, and the fault
        # ends.
        watched.kubectl("annotate", "node", bad, "unbroken.dev/repair=reboot")
        until(lambda: watched.orders() != ordered, "the reboot is ordered")
        until(lambda: boot_id(watched, bad) != boot, "the machine has booted")
        until(lambda: watched.condition(bad, CONDITION) == "False", "the daemon takes it back")
