"""Records that the daemon writes to its node, when it writes them, and when it removes them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.nodes.drive_node_health import TABLE, Bench
from unbroken.core.nodes.health import GpusSampled, HostSampled, LineRead, LogFault, OwnNodeGone
from unbroken.core.nodes.health_object import DETAILS_BYTES, DETAILS_MAX, read_memory
from unbroken.core.nodes.kernel_log import KernelLine
from unbroken.core.nodes.signals import GpuReading, GpuSample, HostSample
from unbroken.spec.keys import (
    ADVICE,
    DAEMON_MEMORY,
    FAULT_REASONS,
    FAULT_TYPES,
    GPU_UNHEALTHY,
    HARDWARE_UNHEALTHY,
    HEALTH,
)
from unbroken.spec.nodes.values import Action

REBOOT, REPLACE = "UnschedulablePendingReboot", "UnschedulablePendingReplacement"
TAINT = {"key": HEALTH, "value": "Unschedulable", "effect": "NoSchedule"}


def test_a_fault_with_an_action_is_written_as_documented() -> None:
    bench = Bench()
    bench.xid(79, "GPU has fallen off the bus.")
    assert bench.labels == {HEALTH: REPLACE, FAULT_TYPES: GPU_UNHEALTHY, FAULT_REASONS: "Xid79"}
    assert bench.annotations[ADVICE] == "replace"
    (taint,) = bench.taints
    assert taint.items() >= TAINT.items()
    assert bench.conditions == {GPU_UNHEALTHY: ("True", "Xid79")}
    (detail,) = bench.details
    assert detail["timestamp"] == "2027-01-15T08:00:00Z"
    assert (detail["type"], detail["reason"]) == (GPU_UNHEALTHY, "Xid79")
    assert "fallen off the bus" in detail["message"]
    assert bench.events == ["Xid79"]
    (logged,) = (one for one in bench.told if isinstance(one, LogFault))
    assert (logged.action, logged.reason) == (Action.REPLACE, "Xid79")


@pytest.mark.parametrize(
    ("line", "label", "advice", "condition"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 62, t", REBOOT, "reset-gpu", GPU_UNHEALTHY),
        ("NVRM: Xid (PCI:0000:3b:00): 73, t", REBOOT, "reboot", GPU_UNHEALTHY),
        ("EXT4-fs (sda1): Remounting filesystem read-only", REBOOT, "reboot", HARDWARE_UNHEALTHY),
        ("{1}[Hardware Error]: event severity: fatal", REPLACE, "replace", HARDWARE_UNHEALTHY),
    ],
)
def test_each_action_has_its_label_and_advice(
    line: str, label: str, advice: str, condition: str
) -> None:
    bench = Bench()
    bench.kernel(line)
    assert (bench.labels[HEALTH], bench.annotations[ADVICE]) == (label, advice)
    assert bench.conditions[condition][0] == "True"


@pytest.mark.parametrize("xid", [13, 31, 43, 94, 63, 998])
def test_what_is_not_the_node_s_is_an_event_and_a_detail_only(xid: int) -> None:
    bench = Bench()
    bench.xid(xid)
    assert (bench.labels, bench.taints, bench.conditions) == ({}, [], {})
    assert ADVICE not in bench.annotations
    assert bench.events == [f"Xid{xid}"] == [one["reason"] for one in bench.details]


def test_the_severest_action_counts_and_the_newest_reason() -> None:
    bench = Bench()
    bench.xid(79)
    bench.xid(62, pci="0000:5e:00")
    assert (bench.labels[HEALTH], bench.annotations[ADVICE]) == (REPLACE, "replace")
    assert bench.labels[FAULT_REASONS] == "Xid62"
    assert len(bench.taints) == 1


def test_a_flood_of_one_fault_is_one_write_and_then_told_ever_more_seldom() -> None:
    bench = Bench()
    bench.xid(79)
    writes = bench.writes
    for _ in range(600):
        bench.xid(79)
        bench.wait(1.0)
    assert bench.writes - writes == 3  # after 60, 180 and 420 s
    (detail,) = bench.details
    assert detail["message"].endswith("(421 times)")


def test_a_fault_is_told_anew_for_each_gpu() -> None:
    bench = Bench()
    bench.xid(79)
    bench.xid(79, pci="0000:5e:00")
    assert len(bench.details) == 2


def test_details_stay_small() -> None:
    bench = Bench()
    for number in range(300, 340):
        bench.xid(number, "\u00e9" * 2000)
    assert len(bench.details) <= DETAILS_MAX
    assert bench.details[-1]["reason"] == "Xid339"
    assert len(json.dumps(bench.details, ensure_ascii=False).encode()) < DETAILS_BYTES + 200


def test_a_label_never_comes_before_the_condition_behind_it() -> None:
    bench = Bench()
    bench.xid(62)
    assert bench.order == ["conditions", "node"]


# --- a way back


@pytest.mark.parametrize("how", ["reboot", "verify"])
def test_a_condition_is_taken_back_when_the_node_was_found_well(how: str) -> None:
    bench = Bench()
    bench.xid(62)
    if how == "reboot":
        bench.reboot("boot-2")
    else:
        bench.verify("check after-reset")
    assert bench.conditions == {GPU_UNHEALTHY: ("False", "NoFault")}
    assert ADVICE not in bench.annotations


def test_a_change_of_something_else_takes_nothing_back() -> None:
    bench = Bench()
    bench.xid(62)
    bench.change({"metadata": {"labels": {"any": "thing"}}})
    assert bench.conditions[GPU_UNHEALTHY][0] == "True"


def test_a_label_that_somebody_has_taken_away_stays_away() -> None:
    bench = Bench()
    bench.xid(62)
    bench.change({"metadata": {"labels": {HEALTH: None}}, "spec": {"taints": None}})
    bench.xid(62)
    bench.wait(30.0)
    assert HEALTH not in bench.labels
    assert bench.taints == []


def test_a_fault_after_the_verification_counts_anew() -> None:
    bench = Bench()
    bench.xid(79)
    bench.verify("boot-1")
    bench.xid(79)
    assert bench.labels[HEALTH] == REPLACE
    assert bench.conditions[GPU_UNHEALTHY] == ("True", "Xid79")
    assert bench.events == ["Xid79", "Xid79"]


def test_a_fault_that_comes_again_after_its_repair_asks_for_more() -> None:
    bench = Bench()
    bench.xid(62)
    bench.reboot("boot-2")
    bench.verify("boot-2")
    bench.restart()
    bench.xid(62, pci="0000:5e:00")
    assert (bench.labels[HEALTH], bench.annotations[ADVICE]) == (REPLACE, "replace")


def test_after_a_week_it_is_a_new_fault() -> None:
    bench = Bench()
    bench.xid(62)
    bench.verify("boot-1")
    bench.wait(8 * 86400.0)
    bench.xid(62)
    assert bench.labels[HEALTH] == REBOOT


def test_conditions_of_others_are_left_alone() -> None:
    bench = Bench()
    theirs = {"type": GPU_UNHEALTHY, "status": "True", "reason": "Theirs"}
    bench.change({"status": {"conditions": [theirs]}})
    bench.verify("boot-1")
    assert bench.conditions == {GPU_UNHEALTHY: ("True", "Theirs")}


# --- restarts, failures, races


def test_a_daemon_that_starts_again_knows_what_it_has_found() -> None:
    bench = Bench()
    bench.xid(79)
    before = bench.node
    bench.restart()
    assert bench.health.cursor == "file:1"
    bench.xid(79)
    assert bench.node == before
    bench.verify("boot-1")
    assert bench.conditions[GPU_UNHEALTHY][0] == "False"


def test_a_verification_while_no_daemon_ran_is_seen_by_the_next() -> None:
    bench = Bench()
    bench.xid(79)
    bench.change({"metadata": {"annotations": {"unbroken.dev/verified": "x"}}}, is_seen=False)
    bench.restart()
    assert bench.conditions[GPU_UNHEALTHY][0] == "False"


def test_what_could_not_be_written_is_written_when_the_server_is_back() -> None:
    bench = Bench()
    bench.is_down = True
    bench.xid(79)
    bench.xid(31)
    assert bench.events == []
    bench.is_down = False
    bench.see()
    assert bench.conditions == {GPU_UNHEALTHY: ("True", "Xid79")}
    assert sorted(bench.events) == ["Xid31", "Xid79"]


def test_a_write_of_an_old_version_is_made_anew_and_loses_no_taint() -> None:
    bench = Bench()
    bench.xid(79)
    other = {"key": "other", "effect": "NoSchedule"}
    bench.change({"spec": {"taints": [other]}}, is_seen=False)
    bench.xid(79, pci="0000:5e:00")
    assert bench.taints == [other]
    bench.see()
    assert [taint["key"] for taint in bench.taints] == ["other", HEALTH]


def test_a_fault_found_while_the_verification_was_on_its_way_is_kept() -> None:
    bench = Bench()
    bench.change({"metadata": {"annotations": {"unbroken.dev/verified": "x"}}}, is_seen=False)
    bench.xid(79)
    bench.see()
    assert bench.conditions == {GPU_UNHEALTHY: ("True", "Xid79")}
    bench.see()
    assert bench.conditions == {GPU_UNHEALTHY: ("True", "Xid79")}


def test_a_node_made_anew_has_none_of_the_old_faults() -> None:
    bench = Bench()
    bench.xid(79)
    bench.step(OwnNodeGone())
    bench.node = {
        "metadata": {"name": "node-0", "uid": "u-2", "resourceVersion": "1"},
        "spec": {},
        "status": {"nodeInfo": {"bootID": "boot-1"}},
    }
    bench.version = 1
    bench.see()
    assert (bench.labels, bench.conditions) == ({}, {})
    bench.xid(79)
    assert bench.conditions == {GPU_UNHEALTHY: ("True", "Xid79")}


def test_a_memory_that_somebody_has_spoilt_is_none() -> None:
    for text in ("", "{", "[]", '{"faults": 3}', '{"faults": [["a"]]}', "null"):
        assert read_memory(text).faults == {}
    bench = Bench()
    bench.change({"metadata": {"annotations": {DAEMON_MEMORY: "{"}}})
    bench.restart()
    bench.xid(79)
    assert read_memory(bench.annotations[DAEMON_MEMORY]).faults.keys() == {("Xid79", "0000:3b:00")}


# --- XIDs that mean something together


def test_an_xid_48_alone_resets_and_beside_a_94_restarts_the_job() -> None:
    bench = Bench()
    bench.xid(48)
    assert bench.events == []
    bench.wait(5.0)
    assert bench.annotations[ADVICE] == "reset-gpu"
    bench = Bench()
    bench.xid(48)
    bench.xid(94)
    bench.wait(5.0)
    assert bench.labels == {}
    assert sorted(bench.events) == ["Xid48", "Xid94"]


def test_a_flood_of_an_xid_that_waits_is_one_sign_of_each_gpu() -> None:
    bench = Bench()
    for _ in range(2000):
        bench.xid(45)
        bench.xid(48, pci="0000:5e:00")
    bench.wait(5.0)
    assert sorted(bench.events) == ["Xid45", "Xid48"]
    assert bench.annotations[ADVICE] == "reset-gpu"


def test_an_xid_of_another_gpu_stands_beside_none() -> None:
    bench = Bench()
    bench.xid(48)
    bench.xid(94, pci="0000:5e:00")
    bench.wait(5.0)
    assert bench.annotations[ADVICE] == "reset-gpu"


def test_an_xid_48_with_a_64_replaces() -> None:
    bench = Bench()
    bench.xid(64)
    bench.xid(48)
    bench.wait(5.0)
    assert bench.labels[HEALTH] == REPLACE


def test_what_came_before_a_restart_still_says_what_comes_behind_it() -> None:
    bench = Bench()
    bench.xid(94)
    bench.restart()
    bench.xid(48)
    bench.wait(5.0)
    assert bench.labels == {}


def test_an_xid_that_waits_is_not_lost_with_the_daemon() -> None:
    bench = Bench()
    bench.xid(48)
    bench.xid(31, pci="0000:5e:00")
    assert read_memory(bench.annotations[DAEMON_MEMORY]).cursor == ""
    bench.wait(5.0)
    assert read_memory(bench.annotations[DAEMON_MEMORY]).cursor == "file:2"


def test_a_fault_that_comes_often_asks_for_more() -> None:
    bench = Bench()
    for _ in range(4):
        bench.xid(63)
        bench.wait(600.0)
        bench.restart()
    assert bench.labels == {}
    bench.xid(63)
    assert bench.labels[HEALTH] == REPLACE


# --- samples


def gpu(index: int, **readings: object) -> GpuReading:
    return GpuReading(index, f"00000000:{index:02X}:00.0", **readings)  # type: ignore[arg-type]


def looked(bench: Bench, *gpus: GpuReading, times: int = 1) -> None:
    for _ in range(times):
        bench.step(GpusSampled(GpuSample(gpus)))
        bench.wait(30.0)


def test_a_state_that_lasts_is_told_once_and_anew_after_a_verification() -> None:
    bench = Bench()
    looked(bench, gpu(1, is_remap_pending=True), times=20)
    assert bench.events == ["GpuRemapPending"]
    bench.verify("boot-1")
    looked(bench, gpu(1, is_remap_pending=True))
    assert bench.events == ["GpuRemapPending", "GpuRemapPending"]
    assert bench.labels[HEALTH] == REPLACE


def test_an_xid_names_the_gpu_that_nvml_has_at_its_address() -> None:
    bench = Bench()
    looked(bench, gpu(0x3B), gpu(0x5E))
    bench.xid(79)
    assert bench.details[-1]["message"].startswith("0000:3b:00: GPU 59: GPU has fallen off")


def test_a_driver_s_wish_without_an_action_is_told_once() -> None:
    bench = Bench()
    looked(bench, gpu(1, recovery=5), times=100)
    assert bench.events == ["GpuRecoveryImex"]
    assert bench.labels == {}


@pytest.mark.parametrize(
    ("status", "labels", "is_fault"),
    [
        ({"capacity": {"nvidia.com/gpu": "3"}}, {}, True),
        ({"capacity": {"nvidia.com/gpu": "8"}}, {}, False),  # two GPUs, each lent four times
        ({"capacity": {"nvidia.com/gpu": "8"}}, {"nvidia.com/gpu.count": "4"}, True),
        ({"capacity": {"nvidia.com/gpu": "2"}}, {}, False),
        ({}, {}, False),
    ],
)
def test_gpus_are_counted_against_what_the_node_says(
    status: dict[str, object], labels: dict[str, str], is_fault: bool
) -> None:
    bench = Bench()
    bench.change({"status": status, "metadata": {"labels": labels}})
    bench.step(HostSampled(HostSample(uptime_seconds=9000.0)))
    looked(bench, gpu(1), gpu(2), times=3)
    assert bench.events == (["GpuCountMismatch"] if is_fault else [])


def test_gpus_missing_after_the_boot_are_waited_for() -> None:
    bench = Bench(gpus=8)
    bench.step(HostSampled(HostSample(uptime_seconds=30.0)))
    looked(bench, gpu(1), times=3)
    assert bench.events == []


def test_a_blind_daemon_says_nothing() -> None:
    bench = Bench(gpus=8)
    for _ in range(5):
        bench.step(HostSampled(HostSample()))
        bench.step(GpusSampled(GpuSample(problem="no NVIDIA driver")))
        bench.wait(60.0)
    assert (bench.writes, bench.told) == (0, [])


# --- anything


XIDS, GPUS = (48, 79, 94, 62, 31, 45, 63), ("3b", "5e")
LINES = st.sampled_from(
    [
        *(f"NVRM: Xid (PCI:0000:{pci}:00): {xid}, t" for xid in XIDS for pci in GPUS),
        "EXT4-fs (sda1): Remounting filesystem read-only",
        "Out of memory: Killed process 1 (x) total-vm:1kB",
        "nothing",
    ]
)
DOINGS = st.one_of(
    LINES.map(lambda text: ("line", text)),
    st.sampled_from(["wait", "restart", "reboot", "verify", "down", "up", "label"]).map(
        lambda what: (what, "")
    ),
)


@settings(deadline=None)
@given(st.lists(DOINGS, max_size=40))
def test_whatever_happens_labels_taint_and_conditions_agree_in_the_end(
    doings: list[tuple[str, str]],
) -> None:
    bench = Bench(TABLE)
    for number, (what, text) in enumerate(doings):
        match what:
            case "line":
                bench.kernel(text)
            case "wait":
                bench.wait(70.0)
            case "restart" if not bench.is_down:
                bench.restart()
            case "reboot":
                bench.reboot(f"boot-{number}")
            case "verify":
                bench.verify(str(number))
            case "label":
                bench.change({"metadata": {"labels": {"n": str(number)}}})
            case "down" | "up":
                bench.is_down = what == "down"
    bench.is_down = False
    bench.see()
    bench.wait(10_000.0)
    memory = read_memory(bench.annotations.get(DAEMON_MEMORY, ""))
    true = {kind for kind, (status, _) in bench.conditions.items() if status == "True"}
    assert true == {fault.condition for fault in memory.faults.values()}
    if memory.faults:
        assert bench.annotations.get(ADVICE)
    bench.verify("end")
    assert all(status == "False" for status, _ in bench.conditions.values())
    before = bench.writes
    bench.wait(100_000.0)
    assert bench.writes == before


def result(bench: Bench) -> object:
    """Return the relevant final state of a node."""
    memory = read_memory(bench.annotations.get(DAEMON_MEMORY, ""))
    reasons = {one["reason"] for one in bench.details}
    keys = [taint["key"] for taint in bench.taints]
    advice = bench.annotations.get(ADVICE)
    health = bench.labels.get(HEALTH)
    return reasons, keys, advice, health, bench.conditions.keys(), memory.faults.keys()


@settings(deadline=None)
@given(st.lists(LINES, min_size=1, max_size=8), st.integers(0, 30))
def test_killed_before_or_after_any_write_it_ends_where_it_would_have(
    lines: list[str], moment: int
) -> None:
    whole, killed = Bench(TABLE), Bench(TABLE)
    killed.kill_at = moment
    for bench in (whole, killed):
        bench.kernel(*lines)
        bench.wait(30.0)
    assert result(killed) == result(whole)


@settings(deadline=None)
@given(st.text(max_size=200))
def test_no_line_of_the_kernel_makes_it_fail(text: str) -> None:
    bench = Bench(TABLE)
    bench.step(LineRead(KernelLine(f"NVRM: Xid ({text}): 79, {text}"), text))
    bench.step(LineRead(KernelLine(text), text))
    bench.wait(100.0)
