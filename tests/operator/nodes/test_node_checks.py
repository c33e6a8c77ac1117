"""Pods, labels and log lines of checks, as values."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.clusters.groups import InstanceGroup, machine_spec
from unbroken.core.nodes.checks.plan import Step
from unbroken.operator.nodes import checks
from unbroken.operator.nodes import checks_log as check_log
from unbroken.operator.nodes import checks_pods as check_pods
from unbroken.operator.nodes.checks_pods import CheckerOptions, unmade
from unbroken.spec.keys import CHECK_HOLD, CHECK_PLANT, CHECK_SECONDS, DEEP_CHECK, HEALTH
from unbroken.spec.nodes.kinds import (
    NODE_CHECK,
    CheckKind,
    CheckPhase,
    CheckResult,
    ClusterSpec,
    NodeCheckSpec,
    Outcome,
)
from unbroken.spec.schema.fields import write_record

Object = dict[str, Any]
TAINT = {"key": HEALTH, "value": "Unschedulable", "effect": "NoSchedule"}
OTHER = {"key": "team", "value": "a", "effect": "NoExecute"}


def node(health: str = "Schedulable", taints: list[Object] | None = None, **more: Any) -> Node:
    content: Object = {
        "metadata": {
            "name": "n1",
            "resourceVersion": "7",
            "labels": {HEALTH: health} if health else {},
            **more,
        },
        "spec": {"taints": taints or []},
        "status": {"allocatable": {"cpu": "4"}},
    }
    return msgspec.convert(content, Node)


def patched(old: Node, patch: Object) -> Node:
    """The node after a merge patch of ours."""
    content = old.to_dict()
    for part in ("labels", "annotations"):
        now = {**(content["metadata"].get(part) or {}), **patch["metadata"].get(part, {})}
        content["metadata"][part] = {key: value for key, value in now.items() if value is not None}
    content["spec"] |= patch.get("spec", {})
    return msgspec.convert(content, Node)


def said(one: Node) -> tuple[str | None, str | None, list[str]]:
    """Health, deep check and keys of the taints."""
    assert one.metadata is not None
    labels = one.metadata.labels or {}
    taints = (one.spec and one.spec.taints) or ()
    return labels.get(HEALTH), labels.get(DEEP_CHECK), [taint.key for taint in taints]


@pytest.mark.parametrize(
    ("standing", "health", "deep", "taints"),
    [
        (CheckPhase.PASSED, "Schedulable", "Passed", ["team"]),
        (CheckPhase.FAILED, "UnschedulablePendingReplacement", "Failed", ["team", HEALTH]),
        (CheckPhase.UNKNOWN, "Schedulable", None, ["team"]),
    ],
)
def test_a_deep_check_holds_a_node_and_gives_it_back(
    standing: CheckPhase, health: str, deep: str | None, taints: list[str]
) -> None:
    before = node(taints=[OTHER])
    taken = checks.take_node(before, "a")
    assert taken is not None
    assert taken["metadata"]["resourceVersion"] == "7"
    held = patched(before, taken)
    assert said(held) == ("Unschedulable", "InProgress", ["team", HEALTH])
    assert checks.held_by(held) == "a"
    assert checks.take_node(held, "a") is None
    patch = checks.give_back_node(held, standing)
    assert patch is not None
    after = patched(held, patch)
    assert said(after) == (health, deep, taints)
    assert checks.held_by(after) == ""
    assert checks.give_back_node(after, standing) is None


@pytest.mark.parametrize(
    "health", ["UnschedulablePendingReboot", "UnschedulablePendingReplacement", "Unschedulable"]
)
def test_what_others_say_of_a_node_outlives_a_check(health: str) -> None:
    before = node(health, taints=[TAINT])
    taken = checks.take_node(before, "a")
    assert taken is not None
    held = patched(before, taken)
    assert said(held)[0] == health
    patch = checks.give_back_node(held, CheckPhase.PASSED)
    assert patch is not None
    assert said(patched(held, patch)) == (health, "Passed", [HEALTH])


@pytest.mark.parametrize(
    ("standing", "health", "deep", "taints"),
    [
        (CheckPhase.PASSED, "Schedulable", "Passed", []),
        (CheckPhase.FAILED, "UnschedulablePendingReplacement", "Failed", [HEALTH]),
        (CheckPhase.UNKNOWN, "Schedulable", None, []),
    ],
)
def test_a_node_that_joins_a_cluster_for_its_check_is_freed_by_it(
    standing: CheckPhase, health: str, deep: str | None, taints: list[str]
) -> None:
    group = InstanceGroup("workers", "ml.c5.large", ("workers-0",), 0, (CheckKind.STRESS,))
    made = machine_spec(ClusterSpec("Train", "abcdef012345", {}), "train", group, "workers-0")
    joined = node(labels=dict(made.labels), taints=[write_record(one) for one in made.taints])
    assert said(joined) == ("Unschedulable", "InProgress", [HEALTH])
    taken = checks.take_node(joined, "a")
    assert taken is not None
    held = patched(joined, taken)
    patch = checks.give_back_node(held, standing)
    assert patch is not None
    assert said(patched(held, patch)) == (health, deep, taints)


def test_a_fault_that_comes_during_a_check_stays() -> None:
    taken = checks.take_node(node(), "a")
    assert taken is not None
    held = patched(node(), taken)
    assert held.metadata is not None
    assert held.metadata.labels is not None
    held.metadata.labels[HEALTH] = "UnschedulablePendingReboot"
    for standing in (CheckPhase.PASSED, CheckPhase.FAILED, CheckPhase.UNKNOWN):
        patch = checks.give_back_node(held, standing)
        assert patch is not None
        assert said(patched(held, patch))[0] == "UnschedulablePendingReboot"
        assert said(patched(held, patch))[2] == [HEALTH]


def test_a_hold_that_is_garbled_holds_nothing() -> None:
    assert checks.held_by(node(annotations={CHECK_HOLD: "{"})) == ""


def a_check(**more: Any) -> Object:
    spec = NodeCheckSpec(("n1", "n2"), (CheckKind.CONNECTIVITY,))
    check: Object = NODE_CHECK.new("c", spec, {"uid": "u-1", **more})
    return check


def test_a_pod_of_a_check_is_pinned_tolerates_all_and_belongs_to_it() -> None:
    step = Step(("n1", "n2"), CheckKind.CONNECTIVITY)
    options = CheckerOptions(image="img", stress_seconds=5)
    pod = check_pods.build_pod(a_check(), step, node(), options)
    assert pod["spec"]["nodeName"] == "n1"
    assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "img"
    words = " ".join(container["command"])
    assert words.startswith("python3 -m unbroken.nodes.checks InstanceConnectivity --json")
    assert words.endswith("--rank 0 --meet $(MEET_HOST):29531 --peer n2")
    assert "--seconds 5 " in words
    assert check_pods.step_of(msgspec.convert(pod, Pod)) == step


def test_a_pod_of_a_check_has_all_devices_of_its_node_and_room_for_nccl() -> None:
    content = node().to_dict()
    devices = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}
    content["status"]["allocatable"] |= devices
    one, step = msgspec.convert(content, Node), Step(("n1",), CheckKind.STRESS)
    pod = check_pods.build_pod(a_check(), step, one, CheckerOptions(image="img"))
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == devices
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert pod["spec"]["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    words = " ".join(container["command"])
    assert words.endswith("--ranks 8 --gpus 8 --efa 32")


@pytest.mark.parametrize(("gpus", "told", "ranks"), [("0", 2, 2), ("0", 6, 6), ("4", 2, 4)])
def test_a_node_has_a_process_for_each_device_and_at_least_two(
    gpus: str, told: int, ranks: int
) -> None:
    content = node().to_dict()
    content["status"]["allocatable"] |= {"nvidia.com/gpu": gpus}
    one, step = msgspec.convert(content, Node), Step(("n1",), CheckKind.STRESS)
    pod = check_pods.build_pod(a_check(), step, one, CheckerOptions(ranks=told))
    words = pod["spec"]["containers"][0]["command"]
    assert words[words.index("--ranks") + 1] == str(ranks)


def test_seconds_and_plants_come_from_annotations() -> None:
    check = a_check(annotations={CHECK_SECONDS: "0.5"})
    one = node(annotations={CHECK_PLANT: "slow-disk:10"})
    step = Step(("n1",), CheckKind.STRESS)
    pod = check_pods.build_pod(check, step, one, CheckerOptions())
    (container,) = pod["spec"]["containers"]
    assert "--seconds 0.5" in " ".join(container["command"])
    assert {"name": "UNBROKEN_CHECK_PLANT", "value": "slow-disk:10"} in container["env"]


def test_nodes_of_one_host_share_its_memory() -> None:
    content = node().to_dict()
    content["status"]["nodeInfo"] = dict.fromkeys(
        (
            *("architecture", "bootID", "kernelVersion", "kubeProxyVersion", "kubeletVersion"),
            *("machineID", "operatingSystem", "osImage", "systemUUID", "containerRuntimeVersion"),
        ),
        "unbroken://0.1",
    )
    one = msgspec.convert(content, Node)
    pod = check_pods.build_pod(a_check(), Step(("n1",), CheckKind.STRESS), one, CheckerOptions())
    words = pod["spec"]["containers"][0]["command"]
    assert words[0] == sys.executable
    assert words[words.index("--memory-share") + 1] == "0.2500"


def a_pod(labels: Object, status: Object, **metadata: Any) -> Pod:
    content = {
        "metadata": {"name": "p", "namespace": "s", "labels": labels, **metadata},
        "spec": {"nodeName": "n1", "containers": [{"name": "c"}]},
        "status": status,
    }
    return msgspec.convert(content, Pod)


@pytest.mark.parametrize(
    ("labels", "phase", "why"),
    [
        ({"HPJob": "lm"}, "Running", "pod s/p runs there"),
        ({"HPJob": "lm"}, "Succeeded", ""),
        ({"app": "web"}, "Running", ""),
        ({check_pods.CHECK_LABEL: "mine"}, "Running", ""),
        ({check_pods.CHECK_LABEL: "other"}, "Pending", "check other tests it"),
    ],
)
def test_a_node_is_busy_with_jobs_and_other_checks(labels: Object, phase: str, why: str) -> None:
    assert check_pods.why_busy("n1", [a_pod(labels, {"phase": phase})], "mine") == why
    assert check_pods.why_busy("n2", [a_pod(labels, {"phase": phase})], "mine") == ""


def test_why_a_pod_did_not_come_to_its_end() -> None:
    killed = {"terminated": {"exitCode": 137, "signal": 9, "reason": "Error"}}
    container = {"name": "c", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Failed", "containerStatuses": [{**container, "state": killed}]}
    assert check_pods.why_ended(a_pod({}, status)) == "its pod ended with 137, signal 9 (Error)"
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
    assert check_pods.why_ended(a_pod({}, evicted)) == "its pod failed: Evicted low on memory"
    assert check_pods.why_ended(a_pod({}, {"phase": "Succeeded"})) == ""
    assert check_pods.why_ended(None) == "its pod was deleted"


def test_only_results_are_read_from_a_log() -> None:
    good = {"node": "liar", "kind": "Basic", "test": "disk", "outcome": "fail", "seconds": 1}
    log = "\n".join(["a warning", json.dumps(good), '{"test": 1}', "[]", '{"kind": "Basic"}', "{"])
    (found,) = check_pods.read_results(log, "n1")
    assert (found.node, found.test, found.outcome) == ("n1", "disk", Outcome.FAIL)


def test_the_log_has_the_documented_forms(tmp_path: Path) -> None:
    stress = CheckKind.STRESS
    fault = CheckResult("n1", stress, "disk-write", Outcome.FAIL, 1.0, "slow", 9.5, 25.0, "MB/s")
    good = CheckResult("n1", stress, "cpu-arithmetic", Outcome.PASS, 1.0)
    broken = unmade("n1", stress, "the test was killed by signal 11")
    lines = [(one, check_log.line(one, 0.0, "us-west-2", "ml.p5")) for one in (good, fault, broken)]
    check_log.write(tmp_path, "c", lines)
    written = (tmp_path / "n1" / "sagemaker-deep-health-check.log").read_text().splitlines()
    first, second, third = written
    assert first == "1970-01-01T00:00:00Z\tinfo\tcpu-arithmetic success"
    entry = json.loads(second)
    assert (entry["level"], entry["ts"]) == ("error", "1970-01-01T00:00:00Z")
    assert entry["FaultyInstance"] == "n1"
    assert entry["msg"] == (
        "Encountered FaultyInstance. Replace the Instance. Region: us-west-2, InstanceType: ml.p5. "
        "ERROR:slow: Expected threshold :25,disk-write output: 9.5 MB/s"
    )
    entry = json.loads(third)
    assert "FaultyInstance" not in entry
    assert (entry["level"], entry["Instance"]) == ("error", "n1")
    assert entry["msg"] == (
        "Encountered UnknownError. Region: us-west-2, InstanceType: ml.p5. "
        "ERROR:the test was killed by signal 11"
    )
    assert (tmp_path / "DeepHealthCheckResults" / "c").read_text().splitlines() == [second, third]


@pytest.mark.parametrize(
    ("test", "message", "detail"),
    [
        ("connectivity", "with n2: 30 GB/s, expected 80", "with n2: 30 GB/s, expected 80"),
        ("device-bandwidth-compared", "Bandwidth has less than threshold", None),
    ],
)
def test_a_bandwidth_below_its_threshold_is_logged_in_the_documented_words(
    test: str, message: str, detail: str | None
) -> None:
    fault = CheckResult(
        "n1", CheckKind.CONNECTIVITY, test, Outcome.FAIL, 0.0, message, 30.0, 80.0, "GB/s"
    )
    entry = json.loads(check_log.line(fault, 0.0, "us-west-2", "p4d.24xlarge"))
    assert entry["msg"] == (
        "Encountered FaultyInstance. Replace the Instance. Region: us-west-2, "
        "InstanceType: p4d.24xlarge. ERROR:Bandwidth has less than threshold: "
        "Expected minimum threshold :80,NCCL Test output Bw: 30"
    )
    assert entry.get("detail") == detail
    broken = CheckResult(
        "n1", CheckKind.CONNECTIVITY, test, Outcome.FAIL, 0.0, "wrong sums", 90.0, 80.0, "GB/s"
    )
    assert "less than threshold" not in check_log.line(broken, 0.0, "", "")


def test_good_devices_are_logged_in_the_documented_words() -> None:
    figures = "MaxBw: 58.590000, AvgBw: 32.420000, MaxTypicalLat: 30.870000"
    device = CheckResult(
        "n1", CheckKind.STRESS, "efa-loopback-rdmap0s29", Outcome.PASS, 1.0, figures
    )
    assert check_log.line(device, 0.0, "", "") == (
        "1970-01-01T00:00:00Z\tinfo\tEFA Loopback check passed for device: rdmap0s29 . "
        f"Output summary is {figures}"
    )
    gpus = CheckResult("n1", CheckKind.BASIC, "gpus", Outcome.PASS, 1.0, "", 8.0, 8.0, "GPUs")
    assert check_log.line(gpus, 0.0, "", "").endswith("\tinfo\tGpuPci Count check success")
    none = CheckResult("n1", CheckKind.STRESS, "nvlink", Outcome.SKIPPED, 1.0, "no driver")
    assert check_log.line(none, 0.0, "", "").endswith("\tinfo\tnvlink skipped: no driver")


def test_errors_of_a_clusters_nodes_go_to_its_log_group(tmp_path: Path) -> None:
    one = CheckResult("n1", CheckKind.STRESS, "disk-write", Outcome.FAIL, 1.0)
    other = CheckResult("n2", CheckKind.STRESS, "disk-write", Outcome.FAIL, 1.0)
    group = check_log.log_group("Train", "a1b2c3d4e5f6")
    check_log.write(tmp_path, "c", [(one, "first"), (other, "second")], {"n1": group})
    results = tmp_path / "aws/sagemaker/Clusters/Train/a1b2c3d4e5f6/DeepHealthCheckResults/c"
    assert results.read_text() == "first\n"
    assert (tmp_path / "DeepHealthCheckResults/c").read_text() == "second\n"


@pytest.mark.parametrize(
    ("name", "cluster_id"), [("", "a1"), ("t", ""), ("..", "a1"), ("t", "a/b")]
)
def test_a_name_that_leads_elsewhere_has_no_log_group(name: str, cluster_id: str) -> None:
    assert check_log.log_group(name, cluster_id) == ""
