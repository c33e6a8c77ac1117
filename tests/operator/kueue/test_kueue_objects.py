"""Workloads as they are written and read, in both versions of Kueue's API."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.operator.conftest import job
from unbroken.core.job.kueue import Admission, GiveBack, Placement, Report
from unbroken.operator.jobs.pods import JobIdentity
from unbroken.operator.kueue.objects import (
    OF_KUEUE,
    Priority,
    place_pod,
    shape_of,
    status_after,
    workload_body,
    workload_view,
)
from unbroken.spec.job.parse import parse_job

Object = dict[str, Any]
IDENTITY = JobIdentity("ns", "lm", "uid-1")
OLD = {"levels": ["b", "r"], "domains": [{"values": ["b1", "r1"], "count": 2}]}
NEW = {
    "levels": ["b", "r"],
    "slices": [
        {
            "domainCount": 1,
            "valuesPerLevel": [{"universalValue": "b1"}, {"roots": ["1"], "prefix": "r"}],
            "universalPodCount": 2,
        }
    ],
}


def workload(**status: Any) -> Object:
    """Return a Workload of the sample job."""
    made = job()
    spec = parse_job(made).spec
    return {**workload_body(made, IDENTITY, spec, "v1beta2", Priority()), "status": status}


def view(found: Object, flavors: Object | None = None, selector: Object | None = None) -> Any:
    """Return the view of a Workload; `selector` is the job's own."""
    made = copy.deepcopy(job())
    made["spec"]["replicaSpecs"][0]["template"]["spec"]["nodeSelector"] = selector or {}
    return workload_view(found, parse_job(made).spec, flavors or {})


@pytest.mark.parametrize("assignment", [OLD, NEW])
def test_both_versions_write_the_same_places(assignment: Object) -> None:
    assigned = {"name": "pods", "flavors": {}, "topologyAssignment": assignment}
    found = view(workload(admission={"clusterQueue": "c", "podSetAssignments": [assigned]}))
    placement = found.admission.placements["pods"]
    assert [placement.of_pod(index) for index in range(3)] == [
        {"b": "b1", "r": "r1"},
        {"b": "b1", "r": "r1"},
        {},
    ]


def test_both_versions_name_the_priority_class() -> None:
    made, priority = job(), Priority(5, "high", OF_KUEUE)
    spec = parse_job(made).spec
    old, new = (
        workload_body(made, IDENTITY, spec, version, priority)["spec"]
        for version in ("v1beta1", "v1beta2")
    )
    assert old["priorityClassSource"] == "kueue.x-k8s.io/workloadpriorityclass"
    assert old["priority"] == new["priority"] == 5
    reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}
    assert new["priorityClassRef"] == reference


def test_what_flavors_and_checks_ask_for_reaches_the_placement() -> None:
    assigned = {"name": "pods", "flavors": {"cpu": "a", "nvidia.com/gpu": "a"}}
    update = {"name": "pods", "labels": {"l": "1"}, "nodeSelector": {"zone": "z"}}
    found = workload(
        admission={"clusterQueue": "c", "podSetAssignments": [assigned]},
        admissionChecks=[{"name": "prov", "state": "Ready", "podSetUpdates": [update]}],
    )
    assert view(found).admission == "there is no ResourceFlavor a"
    flavors = {"a": {"spec": {"nodeLabels": {"gpu": "h100"}, "tolerations": [{"key": "t"}]}}}
    placement = view(found, flavors).admission.placements["pods"]
    assert placement.node_selector == {"gpu": "h100", "zone": "z"}
    assert placement.tolerations == ({"key": "t"},)
    assert placement.labels == {"l": "1"}
    assert "wants gpu=a100" in view(found, flavors, {"gpu": "a100"}).admission


def test_the_shape_changes_with_what_is_asked_for_and_with_nothing_else() -> None:
    def shape(path: tuple[Any, ...] = (), value: object = None) -> str:
        made = copy.deepcopy(job())
        place = made
        for part in path[:-1]:
            place = place[part]
        if path:
            place[path[-1]] = value
        return shape_of(made, parse_job(made).spec)

    assert shape(("spec", "runPolicy"), {"activeDeadlineSeconds": 9}) == shape()
    for path, value in (
        (("spec", "replicaSpecs", 0, "replicas"), 3),
        (("spec", "replicaSpecs", 0, "spares"), 1),
        (("metadata", "annotations"), {"kueue.x-k8s.io/podset-preferred-topology": "r"}),
    ):
        assert shape(path, value) != shape(), path


def test_a_condition_keeps_its_time_until_it_turns() -> None:
    found = workload()
    found["status"] = status_after(found, Report("PodsReady", False, "WaitForStart", "a"), 1000)
    found["status"] = status_after(found, Report("PodsReady", False, "WaitForRecovery", "b"), 2000)
    (ready,) = found["status"]["conditions"]
    assert ready["lastTransitionTime"] == "1970-01-01T00:16:40Z"
    assert (ready["reason"], ready["message"]) == ("WaitForRecovery", "b")
    (ready,) = status_after(found, Report("PodsReady", True, "Recovered", ""), 3000)["conditions"]
    assert ready["lastTransitionTime"] == "1970-01-01T00:50:00Z"


def test_what_is_given_back_counts_the_time_that_it_was_held() -> None:
    admitted = {
        "type": "Admitted",
        "status": "True",
        "reason": "Admitted",
        "message": "",
        "lastTransitionTime": "1970-01-01T00:16:40Z",
    }
    found = workload(admission={"clusterQueue": "c"}, conditions=[admitted])
    status = status_after(found, GiveBack("Preempted", "", is_requeued=True), 1060)
    assert status["accumulatedPastExecutionTimeSeconds"] == 60
    assert "admission" not in status
    # A reason is never empty: the API would refuse it.
    assert all(one["reason"] for one in status["conditions"])


def test_a_pod_keeps_the_labels_that_it_is_found_by() -> None:
    pod = {
        "metadata": {
            "labels": {"HPJob": "lm", "kueue.x-k8s.io/queue-name": "q"},
            "annotations": {"a": "1"},
        },
        "spec": {"nodeSelector": {"own": "1"}, "tolerations": [{"key": "own"}]},
    }
    placement = Placement({"gpu": "x"}, ({"key": "t"},), {"HPJob": "other", "l": "1"})
    made = place_pod(pod, Admission("wl", {"pods": placement}), "pods", 0)
    labels = made["metadata"]["labels"]
    assert labels == {"HPJob": "lm", "l": "1", "kueue.x-k8s.io/podset": "pods"}
    assert made["metadata"]["annotations"] == {"a": "1", "kueue.x-k8s.io/workload": "wl"}
    assert made["spec"]["nodeSelector"] == {"own": "1", "gpu": "x"}
    assert made["spec"]["tolerations"] == [{"key": "own"}, {"key": "t"}]
