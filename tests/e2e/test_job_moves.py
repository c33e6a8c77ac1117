"""Jobs leave nodes that have a notice, with real processes: the place first, then the ranks."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apiclient import Api
from tests.cli_forks import run_unbroken
from tests.e2e.clusters import Cluster
from tests.e2e.control import api_of
from tests.e2e.job_events import places
from tests.e2e.jobs import Job, job
from tests.watching import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NODES = 3
BUDGETS = "policy/v1:poddisruptionbudgets"
MARKS = ("cloud.google.com/impending-node-termination", "karpenter.sh/disrupted")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, kubectl_path: str) -> Iterator[Cluster]:
    """A cluster of three nodes."""
    found = Cluster(tmp_path_factory.mktemp("moves") / "state", kubectl_path)
    found.unbroken("up", "--detach", "--nodes", str(NODES))
    yield found
    found.take_away()


@pytest.fixture
def api(machines: Cluster) -> Iterator[Api]:
    """Provide the cluster's API; remove all notices from nodes at the end."""
    made = api_of(machines)
    yield made
    for index in range(NODES):
        nodes(machines, "uncordon", f"node-{index}")
        for key in MARKS:
            machines.kubectl("taint", "node", f"node-{index}", f"{key}-", check=False)
    wait_until(lambda: machines.get("nodes")["items"], lambda all_: all(map(takes_pods, all_)))
    made.close()


def takes_pods(node: dict[str, Any]) -> bool:
    """Return True for a ready node without a notice, also after a reboot."""
    conditions = {one["type"]: one["status"] for one in node["status"].get("conditions", ())}
    is_marked = node["spec"].get("unschedulable") or node["spec"].get("taints")
    return conditions.get("Ready") == "True" and not is_marked


def nodes(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `unbroken nodes`, which must succeed."""
    place = ["--dir", str(cluster.directory)]
    done = run_unbroken(["nodes", *words, *place], Path.cwd(), os.environ)
    assert done.returncode == 0, done.stderr
    return done


def nodes_of(one: Job) -> dict[str, str]:
    """Pod that has not ended -> node."""
    return {
        name: pod["spec"].get("nodeName", "")
        for name, pod in one.pods().items()
        if pod["status"].get("phase") not in ("Succeeded", "Failed")
    }


def only_move(one: Job) -> dict[str, Any]:
    """Check that the job's one incident is a planned move that cost no budget; the incident."""
    (incident,) = one.incidents(1)
    status = one.until(lambda _: True)["status"]
    assert incident["culprit"]["fault"] == "PlannedMove"
    assert (incident["outcome"], incident["remedy"]) == ("recovered", "pod")
    assert status["restartCount"] == 1
    assert (status.get("restartStatus") or {}).get("restartCount", 0) == 0
    assert not status["latestFaultyPodInstanceList"].get("faultyInstanceIdList")
    return incident


@pytest.mark.parametrize("rank", [0, 2])
def test_a_cordoned_node_is_left(machines: Cluster, api: Api, tmp_path: Path, rank: int) -> None:
    with job(machines, tmp_path) as one:
        starts, where = one.steps(0), nodes_of(one)
        old = places(starts)[rank]
        machines.kubectl("cordon", where[old])
        after = one.steps(1)
        new = places(after)[rank]
        api.until("pods", old, lambda _: False)
        for number in one.ranks:
            if places(starts)[number] != old:
                assert places(after)[number] == places(starts)[number]
                assert after[number].more["agent"] == starts[number].more["agent"]
        assert new not in where
        assert nodes_of(one)[new] not in where.values()
        assert only_move(one)["culprit"]["node"] == where[old]
        assert one.finish()["status"]["restartCount"] == 1


def test_a_spare_takes_the_rank_of_a_node_that_a_cloud_reclaims(
    machines: Cluster, api: Api, tmp_path: Path
) -> None:
    with job(machines, tmp_path, spares=1) as one:
        starts, where = one.steps(0), nodes_of(one)
        spare = (set(where) - set(places(starts).values())).pop()
        old = places(starts)[0]
        machines.kubectl("taint", "node", where[old], f"{MARKS[0]}=true:NoSchedule")
        after = one.steps(1)
        assert places(after)[0] == spare
        incident = only_move(one)
        assert incident["culprit"]["text"].startswith("GkeTermination: ")
        api.until("pods", old, lambda pod: pod["spec"].get("nodeName") != where[old])
        one.until_there("pods", old)
        assert nodes_of(one)[old] != where[old]
        one.finish()


def test_without_a_place_the_job_trains_on_until_it_has_one(
    machines: Cluster, api: Api, tmp_path: Path
) -> None:
    with job(machines, tmp_path) as one:
        starts, where = one.steps(0), nodes_of(one)
        (free,) = {f"node-{n}" for n in range(NODES)} - set(where.values())
        machines.kubectl("cordon", free)
        old = places(starts)[0]
        machines.kubectl("taint", "node", where[old], f"{MARKS[1]}:NoSchedule")
        other = where[places(starts)[2]]
        machines.kubectl("cordon", other)
        one.until_there("pods", f"{one.name}-pods-2")
        one.steps(0, more=5)
        machines.kubectl("uncordon", free)
        machines.kubectl("uncordon", other)
        after = one.steps(1)
        assert nodes_of(one)[places(after)[0]] != where[old]
        only_move(one)
        one.finish()


def test_a_node_is_left_before_its_ordered_reboot(
    machines: Cluster, api: Api, tmp_path: Path
) -> None:
    with job(machines, tmp_path) as one:
        starts, where = one.steps(0), nodes_of(one)
        old = places(starts)[0]
        nodes(machines, "reboot", where[old], "--wait")
        incident = only_move(one)
        assert incident["culprit"]["text"].startswith("OrderedRepair: its reboot is ordered; to ")
        assert where[old] not in nodes_of(one).values()
        one.finish()


def test_a_drained_node_is_left_and_taken_back(machines: Cluster, api: Api, tmp_path: Path) -> None:
    with job(machines, tmp_path) as one:
        starts, where = one.steps(0), nodes_of(one)
        old = places(starts)[0]
        done = nodes(machines, "drain", where[old], "--deadline", "10m")
        assert f"{where[old]}: no job pod is left" in done.stdout
        assert f"default/{old}" in done.stderr, "progress is shown"
        assert where[old] not in nodes_of(one).values()
        one.steps(1)
        assert only_move(one)["culprit"]["text"].startswith("Drain: ")
        one.finish()
    nodes(machines, "uncordon", where[old])
    node = api.get(f"/api/v1/nodes/{where[old]}").made
    assert "unschedulable" not in node["spec"]
    assert "unbroken.dev/drain" not in node["metadata"].get("annotations", {})


def test_a_job_without_a_place_leaves_before_the_deadline(
    machines: Cluster, api: Api, tmp_path: Path
) -> None:
    with job(machines, tmp_path, replicas=NODES) as one:
        starts, where = one.steps(0), nodes_of(one)
        others = [f"node-{n}" for n in range(NODES)]
        old = places(starts)[0]
        for name in others:
            machines.kubectl("cordon", name)
        done = nodes(machines, "drain", where[old], "--deadline", "25s", "-o", "json")
        assert json.loads(done.stdout)["nodes"] == [{"name": where[old], "pods": []}]
        assert where[old] not in nodes_of(one).values()
        for name in others:
            if name != where[old]:
                machines.kubectl("uncordon", name)
        one.steps(1)
        assert only_move(one)["culprit"]["text"].endswith("; no other place is free")
        one.finish()


def test_kubectl_drain_waits_until_the_job_has_moved(
    machines: Cluster, api: Api, tmp_path: Path
) -> None:
    with job(machines, tmp_path) as one:
        starts, where = one.steps(0), nodes_of(one)
        one.until_standing("Running")
        name, old = one.name, places(starts)[0]
        one.until_there(BUDGETS, name)
        known = api.until(BUDGETS, name, lambda one: one["status"].get("observedGeneration"))
        assert known["status"]["disruptionsAllowed"] == 0
        assert known["metadata"]["ownerReferences"][0]["name"] == name
        done = machines.kubectl("drain", where[old], "--timeout=90s")
        assert "it would violate the pod's disruption budget" in done.stderr
        assert where[old] not in nodes_of(one).values()
        one.steps(1)
        assert only_move(one)["culprit"]["text"].startswith("Cordon: ")
        assert one.finish()["status"]["restartCount"] == 1
        api.until(BUDGETS, name, lambda _: False)


def test_a_job_without_planned_moves_has_no_budget_and_is_evicted(
    machines: Cluster, api: Api, tmp_path: Path
) -> None:
    off = {"unbroken.dev/planned-moves": "off"}
    with job(machines, tmp_path, annotations=off) as one:
        starts, where = one.steps(0), nodes_of(one)
        one.until_standing("Running")
        machines.kubectl("drain", where[places(starts)[0]], "--timeout=90s")
        one.steps(1)
        (incident,) = one.incidents(1)
        assert incident["culprit"]["fault"] == "PodDeleted"
        assert api.get(BUDGETS).made["items"] == []
        one.finish()


def test_the_budget_follows_the_annotation_of_a_job_that_trains(
    machines: Cluster, api: Api, tmp_path: Path
) -> None:
    with job(machines, tmp_path) as one:
        one.steps(0)
        one.until_there(BUDGETS, one.name)
        what = ("annotate", "--overwrite", "hpj", one.name)
        machines.kubectl(*what, "unbroken.dev/planned-moves=off")
        api.until(BUDGETS, one.name, lambda _: False)
        machines.kubectl(*what, "unbroken.dev/planned-moves=on")
        one.until_there(BUDGETS, one.name)
        assert one.finish()["status"]["restartCount"] == 0
