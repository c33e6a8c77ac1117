"""Faults of a running job's nodes: the job moves or stays, as the table of faults says.

The node is repaired, tested and returned to service; without NodeRecovery nothing touches it. The
fault is a line in the file that stands for a node's kernel log, or comes from a library that stands
for NVML. If the fault ends a program on real hardware, the worker is killed too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.apiclient import Api
from tests.e2e.clusters import Cluster
from tests.e2e.control import api_of, is_tainted
from tests.e2e.job_events import Event, places
from tests.e2e.jobs import Job, job
from tests.nodes.nvml_library import build
from unbroken.spec.keys import FAULT_DETAILS, HEALTH, VERIFIED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Object = dict[str, Any]
NODES, RECORDS = "/api/v1/nodes", "/apis/unbroken.dev/v1/noderecords"
MACHINES = "/apis/unbroken.dev/v1/machines"
XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=1, name=python, of a test\n"
READ_ONLY = "EXT4-fs (nvme1n1p1): Remounting filesystem read-only\n"
EXT4 = "EXT4-fs error (device nvme1n1p1): ext4_lookup:1855: inode #2: comm python\n"
CURVE = Path(__file__).parent / "programs/curve.py"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, kubectl_path: str) -> Iterator[Cluster]:
    """Start three nodes with repairs."""
    found = Cluster(tmp_path_factory.mktemp("machines") / "state", kubectl_path)
    found.unbroken("up", "--detach", "--nodes", "3")
    yield found
    found.take_away()


@pytest.fixture
def nodes(machines: Cluster) -> Iterator[Cluster]:
    """Provide the nodes; check at the end that all three are in service."""
    yield machines
    with closing(api_of(machines)) as api:
        listed = api.get(NODES).made["items"]
        assert len(listed) == 3
        for node in listed:
            patiently(api, NODES, node["metadata"]["name"], in_service)


def patiently(api: Api, collection: str, name: str, holds: Callable[[Object], bool]) -> Object:
    """Wait for the object with much patience: a busy node's check is silent for long."""
    while True:
        try:
            return api.until(collection, name, holds)
        except TimeoutError:
            continue  # the test's own limit ends it


def in_service(node: Object) -> bool:
    """Return whether the node takes pods."""
    labels = node["metadata"]["labels"]
    return labels.get(HEALTH) == "Schedulable" and not is_tainted(node)


def is_bad(node: Object) -> bool:
    """Return whether the node has a condition of a fault, and the label."""
    listed = node["status"].get("conditions") or ()
    kinds = {one["type"] for one in listed if one["status"] == "True"}
    is_labelled = node["metadata"]["labels"].get(HEALTH, "").startswith("UnschedulablePending")
    return is_labelled and bool(kinds & {"NvidiaGPUUnhealthy", "HardwareUnhealthy"})


def details(node: Object) -> str:
    """Return the details of the node's faults."""
    return str((node["metadata"].get("annotations") or {}).get(FAULT_DETAILS, ""))


def write(cluster: Cluster, node: str, line: str) -> None:
    """Write a line into a node's kernel log."""
    with (cluster.directory / "nodes" / node / "kernel.log").open("a") as log:
        log.write(line)


def plant(cluster: Cluster, node: str, gpu: str) -> None:
    """Set what NVML reports of the node's GPU."""
    folder = cluster.directory / "nodes" / node
    library = build(folder.parent.parent)
    if library is None:
        pytest.skip("no gcc, which compiles the library that stands for NVML")
    (folder / "gpus.txt").write_text(f"gpu 00000000:3B:00.0 {gpu}\n")
    shutil.copy(library, folder / "part")
    (folder / "part").rename(folder / "libnvidia-ml.so.1")


def node_of(one: Job, worker: Event) -> str:
    """Return the node of a worker."""
    pod = worker.more["environment"]["UNBROKEN_POD"]
    return str(one.pods()[pod]["spec"]["nodeName"])


def repaired(one: Job, node: str) -> Object:
    """Wait until the newest repair of a node has ended; return it."""
    one.until_there(RECORDS, node)

    def is_over(record: Object) -> bool:
        return bool(record["spec"].get("history")) and not record["spec"].get("repair")

    found: Object = patiently(one.api, RECORDS, node, is_over)["spec"]["history"][-1]
    return found


def assert_moved(one: Job, starts: dict[int, Event], bad: str) -> None:
    """Assert that rank 0 resumes on another node, and the others where they were."""
    after = one.steps(1)
    assert node_of(one, after[0]) != bad
    assert places(after)[1] == places(starts)[1]
    assert one.finish()["status"]["restartCount"] == 1
    (incident,) = one.incidents(1)
    assert incident["culprit"]["node"] == bad
    assert incident["culprit"]["fault"] == "NodeFault"
    assert incident["remedy"] == "pod"


def moves_and_is_repaired(cluster: Cluster, folder: Path, befall: Callable[[str], None]) -> Object:
    """Run a job whose rank 0 is on a node that gets a fault; return the repair of the node."""
    with job(cluster, folder, nproc=1, spares=1) as one:
        starts = one.steps(0)
        bad = node_of(one, starts[0])
        uid = one.api.get(f"{NODES}/{bad}").made["metadata"]["uid"]
        boot = one.api.get(f"{NODES}/{bad}").made["status"]["nodeInfo"]["bootID"]
        befall(bad)
        assert_moved(one, starts, bad)
        repair = repaired(one, bad)
        assert repair["state"] == "Done", repair
        assert repair["askedBy"] == "daemon"
        name = repair.get("replacement") or bad
        node = patiently(one.api, NODES, name, in_service)
        assert node["metadata"]["annotations"][VERIFIED]
        assert not details(node)
        is_rebooted = node["status"]["nodeInfo"]["bootID"] != boot
        assert is_rebooted == (repair["action"] != "reset-gpu")
        is_replaced = node["metadata"]["uid"] != uid
        assert is_replaced == (repair["action"] == "replace") == (name != bad)
        if is_replaced:
            assert bad not in {other["metadata"]["name"] for other in api_nodes(one.api)}
            machine = one.api.get(f"{MACHINES}/{name}").made["spec"]
            assert [taint["key"] for taint in machine["taints"]] == [HEALTH], "it joined with it"
    return repair


def api_nodes(api: Api) -> list[Object]:
    """Return all nodes."""
    found: list[Object] = api.get(NODES).made["items"]
    return found


def test_job_leaves_a_node_with_a_broken_disk_which_is_rebooted(
    nodes: Cluster, tmp_path: Path
) -> None:
    repair = moves_and_is_repaired(nodes, tmp_path, lambda node: write(nodes, node, READ_ONLY))
    assert (repair["action"], repair["fault"]) == ("reboot", "ReadOnlyRemount")
    assert repair["check"]


@pytest.mark.heavy
@pytest.mark.parametrize(("xid", "action"), [(79, "replace"), (48, "reset-gpu")])
def test_job_leaves_a_node_whose_kernel_tells_of_its_gpu(
    nodes: Cluster, tmp_path: Path, xid: int, action: str
) -> None:
    line = XID.format(xid)
    repair = moves_and_is_repaired(nodes, tmp_path, lambda node: write(nodes, node, line))
    assert (repair["action"], repair["fault"]) == (action, f"Xid{xid}")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("gpu", "reason"), [("error=15", "GpuLost"), ("failed=1", "GpuRemapFailed")]
)
def test_job_leaves_a_node_whose_gpu_is_broken(
    nodes: Cluster, tmp_path: Path, gpu: str, reason: str
) -> None:
    repair = moves_and_is_repaired(nodes, tmp_path, lambda node: plant(nodes, node, gpu))
    assert (repair["action"], repair["fault"]) == ("replace", reason)


@pytest.mark.heavy
def test_faults_of_programs_leave_the_node_alone(nodes: Cluster, tmp_path: Path) -> None:
    with job(nodes, tmp_path, nproc=1, spares=1) as one:
        starts = one.steps(0)
        where = {rank: node_of(one, worker) for rank, worker in starts.items()}
        before = {node["metadata"]["name"]: node for node in api_nodes(one.api)}
        write(nodes, where[0], EXT4)
        patiently(one.api, NODES, where[0], lambda node: "Ext4Error" in details(node))
        assert one.steps(0) == starts, "of this one, nothing is to be started again"
        for attempt, xid in enumerate((94, 31, 13)):
            write(nodes, where[0], XID.format(xid))
            one.kill(one.starts(attempt)[0])
            after = one.steps(attempt + 1)
            assert {rank: node_of(one, worker) for rank, worker in after.items()} == where
            patiently(
                one.api,
                *(NODES, where[0]),
                lambda node, reason=f"Xid{xid}": reason in details(node),  # type: ignore[misc]
            )
        assert one.finish()["status"]["restartCount"] == 3
        one.incidents(3)
        for node in api_nodes(one.api):
            was = before[node["metadata"]["name"]]
            assert in_service(node)
            assert node["metadata"]["uid"] == was["metadata"]["uid"]
            assert node["status"]["nodeInfo"]["bootID"] == was["status"]["nodeInfo"]["bootID"]


@pytest.mark.heavy
def test_without_recovery_the_job_moves_or_stays_and_the_node_is_left(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster("--nodes", "3", "--node-recovery", "None")
    folder = tmp_path / "job"
    folder.mkdir()
    with job(cluster, folder, nproc=1, spares=1) as one:
        starts = one.steps(0)
        bad = node_of(one, starts[0])
        machine = one.api.get(f"{MACHINES}/{bad}").made
        boot = one.api.get(f"{NODES}/{bad}").made["status"]["nodeInfo"]["bootID"]
        write(cluster, bad, XID.format(31))
        patiently(one.api, NODES, bad, lambda node: "Xid31" in details(node))
        assert one.steps(0) == starts
        write(cluster, bad, XID.format(79))
        assert_moved(one, starts, bad)
        # Another node's repair, which a person orders, is made from begin to end meanwhile.
        other = ({node["metadata"]["name"] for node in api_nodes(one.api)} - {bad}).pop()
        one.api.patch(
            "merge",
            f"{NODES}/{other}",
            {"metadata": {"annotations": {"unbroken.dev/repair": "reset"}}},
        ).done()
        assert repaired(one, other)["state"] == "Done"
        node = one.api.get(f"{NODES}/{bad}").made
        assert is_bad(node)
        assert node["metadata"]["labels"][HEALTH] == "UnschedulablePendingReplacement"
        assert node["status"]["nodeInfo"]["bootID"] == boot
        assert VERIFIED not in node["metadata"]["annotations"]
        record = one.api.get(f"{RECORDS}/{bad}").made["spec"]
        assert not record.get("repair")
        assert not record.get("history")
        assert {entry["source"] for entry in record["blame"]} >= {"Xid79"}
        left = one.api.get(f"{MACHINES}/{bad}").made
        assert left["spec"] == machine["spec"]
        assert "deletionTimestamp" not in left["metadata"]


@pytest.mark.heavy
def test_training_that_moves_off_a_node_loses_no_step(nodes: Cluster, tmp_path: Path) -> None:
    plan = {"attempt": 0, "rank": 0, "step": 9, "at": "begin"}
    with job(nodes, tmp_path, plan, program=CURVE, nproc=1, spares=1) as one:
        one.events.until(lambda events: any(event.what == "held" for event in events))
        bad = node_of(one, one.starts(0)[0])
        write(nodes, bad, XID.format(79))
        one.events.until(lambda events: sum(event.what == "end" for event in events) == 2)
        assert one.until_standing("Completed")["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
        repaired(one, bad)
    assert incident["culprit"]["node"] == bad
    told = [event for event in one.events.all if event.what == "restored"]
    assert {event.more["step"] for event in told} == {8}
    assert len({event.more["checksum"] for event in told}) == 1
    made = [(e.rank, e.more["step"]) for e in one.events.all if e.what == "step"]
    assert sorted(made) == [(rank, step) for rank in (0, 1) for step in range(40)]
