"""One tenant had every node of the cluster put into quarantine.

The repairer counted every Incident object of every namespace for the node that its text named,
whatever user had made it. It also believed a program's own report that a GPU was broken. Five
objects made by hand, or a script that ended five times with a CUDA error, were enough for each
node. Nothing limited the number of nodes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.apiservers import Cluster as ApiServer
from tests.core.nodes.drive_repair import World, world
from tests.e2e.clusters import Cluster, find_kubectl, kill
from tests.operator.conftest import Place, job
from tests.operator.jobs.test_runner import Script, surroundings
from tests.operator.nodes.test_node_repair import QUICK, fleet  # noqa: F401
from tests.operator.trained_jobs import Job, until
from tests.watching import running
from unbroken.core.job.events import IncidentSeen, JobSeen, WriteIncident
from unbroken.core.nodes import blame
from unbroken.core.nodes.repair.events import RecordRepairEvent
from unbroken.kube.client import connect
from unbroken.kube.clock import wall
from unbroken.operator import definitions
from unbroken.operator.jobs.pods import JobIdentity, job_identity
from unbroken.operator.jobs.runner import JobRunner
from unbroken.operator.nodes.repair import RepairOptions
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.job.parse import parse_job
from unbroken.spec.nodes.kinds import BLAME_MAX, BlameEntry, BlameKind, NodeRecordSpec
from unbroken.spec.nodes.values import Action, Health
from unbroken.spec.schema.fields import write_record

Object = dict[str, Any]
NOW = 1_800_000_000.0
DAY = 86400.0
MOST = blame.LIMIT * blame.SPACE_SHARE
CLAIMS = ("CudaError", "NodeLost", "NodeFault", "Signal")
"""Classes that a program can bring about: by its text, its agent's report, or its exit code."""


def claimed(fault: str, node: str, at: float, number: int = 1) -> Incident:
    """An ended incident whose program says that the machine is broken."""
    text = "CUDA error: uncorrectable ECC error encountered"
    culprit = Symptom(at, fault, text, node=node, exit_code=blame.SIGBUS_EXIT)
    return Incident(number, 0, culprit, (culprit,), Remedy.POD, "lost", at, ended_at=at + 9)


def entry(source: str, at: float, fault: str = "CudaError") -> BlameEntry:
    found = blame.of_incident(claimed(fault, "node-0", at), source)
    assert found is not None
    return found


@pytest.mark.parametrize("fault", CLAIMS)
def test_what_only_programs_say_never_leads_to_quarantine(fault: str) -> None:
    record = NodeRecordSpec()
    for number in range(500):
        space, at = f"team-{number % 50}", NOW + number
        record = blame.add_incident(record, entry(f"{space}/lm{number}-1", at, fault), at)
        assert blame.score(record, at) <= MOST + 1e-9
    assert all(blame.ALONE in one.text for one in record.blame)


def test_a_job_counts_once_a_day_however_often_it_fails() -> None:
    record = NodeRecordSpec()
    for number in range(1, 200):
        at = NOW + number * DAY / 100
        record = blame.add_incident(record, entry(f"team/lm-{number}", at), at)
    assert len(record.blame) == 2


def test_a_namespace_reaches_half_the_limit_even_beside_a_real_fault() -> None:
    real = blame.of_fault(NOW - 3600, "Xid62", "", Action.RESET_GPU)
    record = blame.add(NodeRecordSpec(), real, NOW)
    for number in range(20):
        record = blame.add_incident(record, entry(f"team/lm{number}-1", NOW), NOW)
    assert record.blame[-1].weight == blame.INCIDENT_POINTS
    assert blame.score(record, NOW) <= MOST + real.weight < blame.LIMIT
    shown = blame.points_at(record, NOW)
    assert sum(shown) == pytest.approx(blame.score(record, NOW))
    assert len(shown) == len(record.blame)


def test_a_failed_check_confirms_what_programs_say() -> None:
    record = blame.add(NodeRecordSpec(), blame.of_check(NOW - 3600, "c", "slow"), NOW)
    for space in ("a", "b"):
        record = blame.add_incident(record, entry(f"{space}/lm-1", NOW), NOW)
    assert blame.score(record, NOW) == pytest.approx(4.0 + 2 * 2.0, abs=0.1)


def test_jobs_cannot_push_out_what_was_found() -> None:
    record = NodeRecordSpec()
    for number in range(BLAME_MAX):
        record = blame.add(record, blame.of_loss(NOW + number, "silent"), NOW + number)
        for other in range(3):
            source = f"team-{other}/lm{number}-1"
            record = blame.add_incident(record, entry(source, NOW + number), NOW + number)
    assert [one.kind for one in record.blame] == [BlameKind.LOST] * BLAME_MAX


SOURCES = st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 3))


@settings(deadline=None)
@given(st.lists(st.tuples(SOURCES, st.floats(0, 9 * DAY), st.sampled_from(CLAIMS)), max_size=60))
def test_whatever_one_namespace_does_it_reaches_half_the_limit(
    told: list[tuple[tuple[str, int, int], float, str]],
) -> None:
    record = blame.add(NodeRecordSpec(), blame.of_check(NOW, "c", "slow"), NOW)
    for (space, name, number), after, fault in sorted(told, key=lambda one: one[1]):
        one = entry(f"{space}/lm{name}-{number}", NOW + after, fault)
        record = blame.add_incident(record, one, NOW + after)
        held = zip(record.blame, blame.points_at(record, NOW + after), strict=True)
        by_space: dict[str, float] = {}
        for known, points in held:
            if known.kind is BlameKind.INCIDENT:
                key = known.source.partition("/")[0]
                by_space[key] = by_space.get(key, 0.0) + points
        assert all(points <= MOST + 1e-9 for points in by_space.values())


# --- never more nodes than the share


def condemn(found: World, *names: str) -> None:
    """Checks have found enough at each node for a quarantine; a repairer takes over."""
    for name in names:
        held = tuple(blame.of_check(found.now - index, f"c{index}", "slow") for index in range(3))
        known = found.records.get(name, NodeRecordSpec())
        found.records[name] = replace(known, blame=held)
    found.start()
    found.settle()


def held_back(found: World) -> list[str]:
    """Texts of the events about a quarantine that was held back."""
    told = [one for one in found.effects if isinstance(one, RecordRepairEvent)]
    return [one.text for one in told if one.reason == "QuarantineHeldBack"]


def quarantined(found: World) -> list[str]:
    return sorted(name for name, one in found.records.items() if one.quarantined_at is not None)


def test_no_more_nodes_are_quarantined_than_the_share() -> None:
    found = world(10, share=0.2)
    condemn(found, *(f"node-{index}" for index in range(10)))
    found.wait(3600)
    assert quarantined(found) == ["node-0", "node-1"]
    unschedulable = [one.name for one in found.nodes.values() if one.health]
    assert unschedulable == ["node-0", "node-1"]
    texts = held_back(found)
    assert len(texts) == 8  # once each
    assert "12.0 points are held against it" in texts[0]
    assert "node-0, node-1 in quarantine or under repair, of 10 nodes; the limit is 2" in texts[0]


def test_quarantine_and_repair_share_the_limit() -> None:
    found = world(10, share=0.2, outcome=lambda order: "stuck")
    found.fault("node-8")
    found.settle()
    condemn(found, "node-0", "node-1")
    assert quarantined(found) == ["node-0"]
    found.fault("node-9")
    found.wait(60)
    assert "node-0, node-8 in quarantine or under repair" in found.message("node-9")


def test_a_node_that_was_held_back_follows_when_another_is_cleared() -> None:
    found = world(5, share=0.2)
    condemn(found, "node-0", "node-1")
    assert quarantined(found) == ["node-0"]
    found.now += 1
    found.clear("node-0")
    found.wait(60)
    assert quarantined(found) == ["node-1"]
    assert found.nodes["node-0"].health is Health.SCHEDULABLE


def test_a_person_s_order_is_not_held_up_by_a_full_share() -> None:
    found = world(5, share=0.2)
    condemn(found, "node-0")
    found.order("node-1", "reboot")
    found.wait(60)
    assert ("node-1", Action.REBOOT) in found.done()


# --- whose incidents count


async def test_objects_that_were_made_by_hand_change_nothing(fleet: Any) -> None:  # noqa: F811
    async with fleet() as found:
        name = await found.node()
        now = wall()
        path = "apis/unbroken.dev/v1/namespaces/default/incidents"
        owner = {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "name": "lm",
            "uid": "0-1",
        }
        for number in range(1, 7):
            metadata: Object = {"name": f"forged{number}-1"}
            if number % 2:
                metadata["ownerReferences"] = [owner]
            spec = write_record(claimed("NodeFault", name, now))
            body = {
                "apiVersion": "unbroken.dev/v1",
                "kind": "Incident",
                "metadata": metadata,
                "spec": spec,
            }
            await found.call("POST", path, body=body)
        async with found.repairer(RepairOptions(settings=QUICK)) as repair:
            real = claimed("CudaError", name, now)
            repair.incident_ended(JobIdentity("team", "lm", "0-1"), real)
            record = await found.record(name, lambda one: one.blame)
        assert [one.source for one in record.blame] == ["team/lm-1"]
        assert record.quarantined_at is None
        for number in range(1, 7):
            await found.client.raw("DELETE", f"{path}/forged{number}-1")


async def test_an_incident_that_was_read_back_from_the_api_is_not_held_against_a_node(
    cluster: ApiServer,
) -> None:
    """An operator that takes over reads open incidents, which their owner may have edited."""
    told: list[int] = []

    def ended(job: JobIdentity, incident: Incident) -> None:
        told.append(incident.number)

    async with connect(cluster.kubeconfig) as client:
        await definitions.install(client)
        here = Place(client, "h5")
        await client.raw("POST", "api/v1/namespaces", body={"metadata": {"name": "h5"}})
        made = await here.post("hyperpodpytorchjobs", job())
        async with surroundings(client) as around:
            around = replace(around, incident_ended=ended)
            script = Script()
            script.runner = runner = JobRunner(around, job_identity(made), script)
            edited = claimed("NodeFault", "victim", wall())
            runner.receive(JobSeen(parse_job(made).spec))
            runner.receive(IncidentSeen(replace(edited, ended_at=None)))
            async with running(runner.run()):
                await script.until(IncidentSeen)
                script.orders = [
                    WriteIncident(edited),
                    WriteIncident(replace(edited, number=2)),
                ]
                await here.until("incidents/lm-2", lambda found: found["spec"])
        await client.raw("DELETE", "api/v1/namespaces/h5")
    assert told == [2]


@pytest.mark.slow
def test_a_running_operator_counts_its_own_incident_and_no_forged_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "state", find_kubectl())
    try:
        cluster.unbroken("up", "--detach", "--nodes", "2")
        job = Job(cluster, "lm", tmp_path)
        for node in ("node-0", "node-1"):
            for number in range(5):
                forge(cluster, f"{node}-{number}", node)
        job.apply()
        first = job.started(0)
        job.wait("Running")
        kill(first[3].pid)
        job.started(1)
        job.incident(1)
        until(lambda: counted(cluster), "a record of the worker that was killed")
        assert counted(cluster) == [("default/lm-1", 0.2)]
    finally:
        cluster.take_away()


def forge(cluster: Cluster, name: str, node: str) -> None:
    """An Incident object that a user made by hand."""
    cluster.apply(
        {
            "apiVersion": "unbroken.dev/v1",
            "kind": "Incident",
            "metadata": {"name": name},
            "spec": json.loads(json.dumps(write_record(claimed("NodeFault", node, wall())))),
        }
    )


def counted(cluster: Cluster) -> list[tuple[str, float]]:
    """Return source and weight of incidents that count for any node."""
    listed = json.loads(cluster.kubectl("get", "noderecords", "-o", "json").stdout)["items"]
    held = [one for record in listed for one in record["spec"].get("blame") or ()]
    return [(one["source"], one["weight"]) for one in held if one["kind"] == "incident"]
