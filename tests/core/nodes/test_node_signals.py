"""Signs of faults in readings of GPUs, system and counters, and the entry of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tables import cases
from unbroken.core.nodes.kernel_log import KernelLine
from unbroken.core.nodes.signals import (
    Blocked,
    CounterFinding,
    GpuFinding,
    GpuReading,
    GpuSample,
    GpuWatch,
    HostFinding,
    HostSample,
    HostWatch,
    SignTable,
)
from unbroken.nodes.tables import read_table
from unbroken.spec.nodes.fault_table import FaultTable, GpuSign, HostSign, load_fault_table
from unbroken.spec.problems import ManifestError

LONG = 10_000.0
GOOD = GpuReading(
    index=0,
    pci="00000000:3B:00.0",
    ecc_uncorrected=0,
    is_sram_over=False,
    is_remap_pending=False,
    is_remap_failed=False,
    nvlink_errors=0,
    links_up=(0, 1, 2),
    slowdown=0,
    recovery=0,
)


def gpu_signs(
    *gpus: GpuReading, uptime: float | None = LONG, expected: int | None = 1
) -> list[GpuSign]:
    """Return the signs at the last of several looks at one GPU."""
    watch, found = GpuWatch(expected), list[GpuFinding]()
    for gpu in gpus:
        found = list(watch.look(GpuSample((gpu,)), uptime))
    return [one.sign for one in found]


def test_a_good_gpu_shows_nothing() -> None:
    assert gpu_signs(GOOD, GOOD) == []


def test_what_nvml_does_not_say_is_no_fault() -> None:
    assert gpu_signs(GOOD, GpuReading(0, "00000000:3B:00.0"), GOOD) == []
    watch = GpuWatch(8)
    unknown = GpuSample(problem="no driver")
    assert [*watch.look(unknown, LONG), *watch.look(unknown, LONG)] == []


@pytest.mark.parametrize(
    ("now", "sign"),
    [
        (GpuReading(0, "00000000:3B:00.0", error=15), GpuSign.LOST),
        (GpuReading(0, "00000000:3B:00.0", error=16), GpuSign.RESET_REQUIRED),
        (replace(GOOD, is_sram_over=True), GpuSign.SRAM_THRESHOLD),
        (replace(GOOD, is_remap_pending=True), GpuSign.REMAP_PENDING),
        (replace(GOOD, is_remap_failed=True), GpuSign.REMAP_FAILED),
        (replace(GOOD, recovery=2), GpuSign.RECOVERY),
        (replace(GOOD, ecc_uncorrected=1), GpuSign.ECC_UNCORRECTED),
        (replace(GOOD, nvlink_errors=1), GpuSign.NVLINK_ERRORS),
        (replace(GOOD, links_up=(0, 2)), GpuSign.NVLINK_DOWN),
        (replace(GOOD, slowdown=0x40), GpuSign.THERMAL_SLOWDOWN),
        (replace(GOOD, slowdown=0x80), GpuSign.POWER_BRAKE),
    ],
)
def test_each_sign_shows(now: GpuReading, sign: GpuSign) -> None:
    assert gpu_signs(GOOD, now) == [sign]


def test_counts_at_the_first_look_are_history() -> None:
    old = replace(GOOD, ecc_uncorrected=5, nvlink_errors=9, links_up=(), slowdown=0xFF)
    assert gpu_signs(old) == gpu_signs(old, old) == []


def test_missing_gpus_count_after_the_grace_and_twice() -> None:
    assert gpu_signs(GOOD, expected=2) == []
    assert gpu_signs(GOOD, GOOD, expected=2) == [GpuSign.MISSING]
    assert gpu_signs(GOOD, GOOD, expected=2, uptime=60.0) == []
    assert gpu_signs(GOOD, GOOD, expected=2, uptime=None) == []
    assert gpu_signs(GOOD, GOOD, expected=None) == []


def host_signs(*samples: HostSample, limits: dict[str, float] | None = None) -> list[object]:
    """Return the findings at the last of several looks, ten seconds apart."""
    watch = HostWatch(0.05, limits or {})
    found: list[object] = []
    for number, sample in enumerate(samples):
        found = list(watch.look(sample, 10.0 * number))
    return found


def test_little_space_is_told_once_until_there_is_enough_again() -> None:
    full, edge, free = (HostSample(free={"/": share}) for share in (0.04, 0.055, 0.5))
    assert len(host_signs(full)) == 1
    assert host_signs(full, full) == host_signs(full, edge, full) == []
    assert len(host_signs(full, free, full)) == 1


def test_only_what_could_be_written_before_has_become_read_only() -> None:
    written, read = HostSample(read_only={"/": False}), HostSample(read_only={"/": True})
    assert host_signs(read, read) == host_signs(read) == []
    (found,) = host_signs(written, read)
    assert found == HostFinding(HostSign.READ_ONLY, "/", "/ can only be read now")


def test_a_clock_that_was_never_synchronised_is_no_fault() -> None:
    good, bad = HostSample(is_clock_good=True), HostSample(is_clock_good=False)
    assert host_signs(bad, bad) == host_signs(good, HostSample()) == []
    assert len(host_signs(good, bad)) == 1


def blocked_for(*looks: tuple[float, Blocked], limit: float | None = 60.0) -> list[str]:
    """Return the findings of looks at these times; the last look is made twice."""
    watch = HostWatch(None, {}, limit)
    told: list[str] = []
    for now, one in [*looks, looks[-1]]:
        found = watch.look(HostSample(blocked=(one,)), now)
        told += [one.text for one in found if isinstance(one, HostFinding)]
    return told


def test_a_process_that_does_not_wake_up_in_the_kernel_is_told_once() -> None:
    one = Blocked(41, 900, "python3", 7, "nfs_wait_bit_killable", "uid-1")
    assert blocked_for((0.0, one), (30.0, one), (59.0, one)) == []
    assert blocked_for((0.0, one), (30.0, one), (60.0, one), (90.0, one)) == [
        "python3 41 cannot be interrupted: it waits in the kernel (nfs_wait_bit_killable) for 60 s"
    ]
    assert blocked_for((0.0, one), (90.0, one), limit=None) == []


def test_a_process_that_goes_on_or_is_another_is_not_blocked() -> None:
    one = Blocked(41, 900, "python3", 7)
    assert blocked_for((0.0, one), (90.0, replace(one, switches=8))) == []
    assert blocked_for((0.0, one), (90.0, replace(one, start=901))) == []
    watch = HostWatch(None, {}, 60.0)
    looks = [(0.0, (one,)), (30.0, ()), (70.0, (one,))]
    assert not [found for now, some in looks for found in watch.look(HostSample(blocked=some), now)]


def test_counters_are_held_against_their_rate() -> None:
    def at(value: int) -> HostSample:
        return HostSample(counters={("efa0 1", "rx_drops"): value})

    limits = {"rx_drops": 100.0}
    assert host_signs(at(0), at(1000), limits=limits) == []
    (found,) = host_signs(at(0), at(1001), limits=limits)
    assert isinstance(found, CounterFinding)
    assert found.text == "efa0 1: rx_drops grew by 1001 in 10 s"
    assert host_signs(at(5000), at(10), limits=limits) == []
    assert host_signs(at(0), at(9999)) == []
    assert len(host_signs(at(0), at(1), limits={"rx_drops": 0.0})) == 1


TABLE = read_table(None)


@cases
def test_a_line_of_the_kernel_is_of_its_entry(line: str, reasons: list[str]) -> None:
    assert [sign.reason for sign in TABLE.of_line(KernelLine(line))] == reasons


def test_an_unknown_xid_asks_for_nothing() -> None:
    (sign,) = TABLE.of_line(KernelLine("NVRM: Xid (PCI:0000:3b:00): 998, what"))
    assert (sign.entry.action.value, sign.part, sign.xid) == ("none", "0000:3b:00", 998)


def test_the_driver_s_verdict_is_of_the_entry_with_its_number() -> None:
    found = GpuFinding(GpuSign.RECOVERY, "0000:3b:00", "t", 2)
    assert [sign.reason for sign in TABLE.of_finding(found)] == ["GpuRecoveryReboot"]
    assert TABLE.of_finding(replace(found, recovery=99)) == []


def custom(text: str) -> FaultTable:
    return load_fault_table([("mine", f"version = 1\n[fault]\n{text}")])


def test_patterns_are_found_anywhere_and_cannot_stall() -> None:
    rest = "title = 't', class = 'kernel', action = 'none', source = 's'"
    table = SignTable(custom(f"A = {{ kernel = ['b+c|^x'], {rest} }}"))
    assert table.of_line(KernelLine("a bbc d"))
    assert not table.of_line(KernelLine("a bd"))
    for bad in ("(", ")|(", "(?=a)b"):
        with pytest.raises(ManifestError, match=r"fault.A.kernel\[0\]: Invalid value"):
            SignTable(custom(f"A = {{ kernel = ['{bad}'], {rest} }}"))
