"""Jobs in queues, on both API servers; the test acts as Kueue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.apiservers import embedded_cluster
from tests.operator.conftest import NUMBERS, Place, conditions, job
from tests.operator.kueue.kueue_standin import (
    OldPlace,
    admit,
    evict,
    flavor,
    install,
    priority,
    refuse,
    said,
    say_pods_ready,
    workload,
)
from unbroken.kube.client import connect
from unbroken.operator.definitions import install as define_jobs

Object = dict[str, Any]
JOBS, PODS = "hyperpodpytorchjobs", "pods"
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
RACK, HOST = "example.com/rack", "kubernetes.io/hostname"
TOLERATION = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}


def queued(name: str = "lm", **labels: str) -> Object:
    """Return a job of two pods and a spare in a queue, which requires one rack for all pods."""
    made = job(name)
    made["metadata"]["labels"] = {QUEUE: "team-a", **labels}
    replica = made["spec"]["replicaSpecs"][0]
    replica["spares"] = 1
    asks = {"kueue.x-k8s.io/podset-required-topology": RACK}
    # The HyperPod CLI writes the queue on the pods, too.
    replica["template"]["metadata"] = {"annotations": asks, "labels": {QUEUE: "team-a"}}
    return made


async def is_there(place: Place, count: int) -> Object:
    """Wait until the job has `count` pods; return them."""
    return await place.until(PODS, lambda listed: len(listed["items"]) == count)


async def stands(place: Place, condition: str, reason: str) -> Object:
    """Wait until the job's condition has the reason; return the condition."""
    found = await place.until(
        f"{JOBS}/lm",
        lambda seen: conditions(seen).get(condition, {}).get("reason") == reason,
    )
    return conditions(found)[condition]


async def test_a_job_waits_runs_where_it_is_put_and_gives_its_quota_back(place: Any) -> None:
    async with place() as here:
        await install(here.client, "v1beta2")
        name = here.namespace
        await flavor(here, name, nodeLabels={"gpu": "h100"}, tolerations=[TOLERATION])
        await priority(here, name, 7)
        async with here.operator():
            await here.post(JOBS, queued(**{PRIORITY: name}))
            await _is_asked_for(here)
            await _is_admitted(here, name)
            await _is_preempted(here)
            await admit(here, name)
            await is_there(here, 3)
            await here.merge(f"{JOBS}/lm", {"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
            await stands(here, "Failed", "DeadlineExceeded")
            ended = await workload(here, lambda found: said(found, "Finished")[0] == "True")
            assert said(ended, "Finished") == ("True", "Failed")


async def _is_asked_for(here: Place) -> None:
    asked = await workload(here)
    spec = asked["spec"]
    assert (spec["queueName"], spec["priority"]) == ("team-a", 7)
    assert spec["priorityClassRef"]["kind"] == "WorkloadPriorityClass"
    (pods,) = spec["podSets"]
    assert (pods["name"], pods["count"]) == ("pods", 3)
    assert pods["topologyRequest"] == {"required": RACK, "podIndexLabel": "unbroken.dev/index"}
    found = await here.get(f"{JOBS}/lm")
    assert asked["metadata"]["ownerReferences"][0]["uid"] == found["metadata"]["uid"]
    await refuse(here, "insufficient unused quota for cpu")
    text = "queue team-a: insufficient unused quota for cpu"
    await here.until(
        f"{JOBS}/lm", lambda seen: conditions(seen).get("Suspended", {}).get("message") == text
    )
    assert (await here.get(PODS))["items"] == []


async def _is_admitted(here: Place, name: str) -> None:
    values = [{"universalValue": "r1"}, {"prefix": "node-", "roots": ["a", "b"]}]
    part = {"domainCount": 2, "valuesPerLevel": values, "podCounts": [2, 1]}
    await admit(here, name, topologyAssignment={"levels": [RACK, HOST], "slices": [part]})
    pods = sorted((await is_there(here, 3))["items"], key=lambda pod: pod["metadata"]["name"])
    hosts = [pod["spec"]["nodeSelector"] for pod in pods]
    assert hosts == [{"gpu": "h100", RACK: "r1", HOST: f"node-{one}"} for one in "aab"]
    asked = await workload(here)
    for pod in pods:
        assert TOLERATION in pod["spec"]["tolerations"]
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "pods"
        assert QUEUE not in pod["metadata"]["labels"]
        owner = pod["metadata"]["annotations"]["kueue.x-k8s.io/workload"]
        assert owner == asked["metadata"]["name"]
    await workload(here, lambda found: said(found, "PodsReady") == ("False", "WaitForStart"))
    await say_pods_ready(here)
    await workload(here, lambda found: said(found, "PodsReady") == ("True", "Started"))


async def _is_preempted(here: Place) -> None:
    await evict(here, "Preempted", "to make room")
    given = await workload(here, lambda found: said(found, "QuotaReserved")[0] == "False")
    assert (await here.get(PODS))["items"] == []
    assert "admission" not in given["status"]
    assert said(given, "Requeued") == ("True", "Preempted")
    assert said(given, "Admitted") == ("False", "NoReservation")
    assert said(given, "PodsReady")[0] == "False"
    held = await stands(here, "Suspended", "Evicted")
    assert held["message"] == "queue team-a: Preempted: to make room"
    found = await here.get(f"{JOBS}/lm")
    assert found["status"]["restartCount"] == 0


async def test_a_new_operator_stops_nothing_and_a_suspended_job_leaves_the_queue(
    place: Any,
) -> None:
    async with place() as here:
        await install(here.client, "v1beta2")
        await flavor(here, here.namespace)
        async with here.operator():
            await here.post(JOBS, queued())
            first = await workload(here)
            await admit(here, here.namespace)
            before = await is_there(here, 3)
        async with here.operator():
            await here.merge(f"{JOBS}/lm", {"spec": {"runPolicy": {"activeDeadlineSeconds": 999}}})
            await workload(here, lambda found: said(found, "PodsReady")[0] == "False")
            assert uids(await here.get(PODS)) == uids(before)
            await here.merge(f"{JOBS}/lm", {"spec": {"runPolicy": {"suspend": True}}})
            await here.until("workloads", lambda listed: not listed["items"])
            assert (await here.get(PODS))["items"] == []
            await here.merge(f"{JOBS}/lm", {"spec": {"runPolicy": {"suspend": False}}})
            again = await workload(here)
            assert again["metadata"]["uid"] != first["metadata"]["uid"]
            assert await stands(here, "Suspended", "Queued")
            await here.delete(f"workloads/{again['metadata']['name']}")
            anew = await workload(
                here, lambda found: found["metadata"]["uid"] != again["metadata"]["uid"]
            )
            path = f"workloads/{anew['metadata']['name']}"
            await here.merge(path, {"spec": {"active": False}})
            held = await stands(here, "Suspended", "Deactivated")
            assert "kubectl patch workload" in held["message"]


def uids(listed: Object) -> set[str]:
    """Return the uids of the pods."""
    return {each["metadata"]["uid"] for each in listed["items"]}


async def test_without_kueue_a_job_runs_and_with_it_the_next_one_waits(tmp_path: Path) -> None:
    async def check(here: Place) -> None:
        async with here.operator():
            await here.post(JOBS, queued())
            await is_there(here, 3)
            events = await here.until(
                "events",
                lambda listed: [each for each in listed["items"] if "Kueue" in each["message"]],
            )
            said_so = [each["message"] for each in events["items"] if "Kueue" in each["message"]]
            assert "the job runs without waiting for the queue" in said_so[0]
            await install(here.client, "v1beta1")
            await flavor(here, "any", nodeLabels={"gpu": "old"})
            await here.post(JOBS, queued("next"))
            asked = await workload(here)
            assert asked["metadata"]["labels"]["HPJob"] == "next"
            domain = {"count": 3, "values": ["r7"]}
            await admit(here, "any", topologyAssignment={"levels": [RACK], "domains": [domain]})
            pods = await is_there(here, 6)
            places = {
                each["metadata"]["name"]: each["spec"].get("nodeSelector") for each in pods["items"]
            }
            assert places["next-pods-2"] == {"gpu": "old", RACK: "r7"}
            assert places["lm-pods-2"] is None

    with embedded_cluster(tmp_path / "server") as server:
        async with connect(server.kubeconfig) as client:
            await define_jobs(client)
            name = f"kueue-{next(NUMBERS)}"
            await client.raw("POST", "api/v1/namespaces", body={"metadata": {"name": name}})
            await check(OldPlace(client, name))
