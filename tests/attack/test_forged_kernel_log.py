"""Any process of a node forged a fault of the node, which was then replaced.

The kernel quotes names of processes and files in its log, and anybody may choose them.  A process
without any right took the name `NVRM: Xid (PCI:` and crashed in a file with the name
`): 79, pid=1, name=x, GPU has fallen off the bus.`: the daemon read XID 79 and the operator ordered
a replacement.  Other patterns matched such a name anywhere in the line.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attack import forged_crash
from tests.core.nodes.drive_node_health import Bench
from unbroken.core.nodes.health import GpusSampled, HostSampled, LineRead
from unbroken.core.nodes.health_object import NODE_ACTIONS
from unbroken.core.nodes.kernel_log import KernelLine, read_line, read_record
from unbroken.core.nodes.signals import GpuReading, GpuSample, HostSample, Sign, SignTable
from unbroken.nodes.host import look
from unbroken.nodes.kernel_reader import FileReader, KmsgReader
from unbroken.nodes.once import look_once
from unbroken.nodes.tables import read_table
from unbroken.spec.keys import HEALTH
from unbroken.spec.nodes.fault_table import load_fault_table

TABLE = read_table(None)
FORGED_CRASH = Path(forged_crash.__file__).read_text()
NAME, FILE = "NVRM: Xid (PCI:", "): 79, pid=1, name=x, GPU has fallen off the bus."
FALLEN = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)
CRASHES = (
    (
        rb"6,341,1919088868,-;NVRM: Xid (PCI:[18551]: segfault at 0 ip 00007fcb3a8ef002 "
        rb"sp 00007fff4c596c28 error 6 in ): 79, pid=1, name=x, GPU has fallen off the bus."
        rb"[2,7fcb3a8ef000+1000] likely on CPU 1 (core 1, socket 0)"
    ),
    (
        rb"6,343,1919130160,-;a[18552]: segfault at 0 ip 00007f9433225002 "
        rb"sp 00007ffe5aee4a48 error 6 in Kernel panic - not syncing"
        rb"[2,7f9433225000+1000] likely on CPU 1 (core 1, socket 0)"
    ),
    (
        rb"6,345,1919156974,-;x\x0aNVRM: Xid (P[18553]: segfault at 0 ip 00007f1a7dfd9002 "
        rb"sp 00007ffe5ac70498 error 6 in Uncorrected hardware error\x0aNVRM: Xid (PCI:0000:3b:00)"
        rb": 79, x[2,7f1a7dfd9000+1000] likely on CPU 1 (core 1, socket 0)"
    ),
)
"""Records that a Linux 6.18 wrote of three such processes, which ran as nobody."""
WORDS = (
    FALLEN,
    "NVRM: Xid (PCI:",
    FILE,
    "Kernel panic - not syncing",
    "Uncorrected hardware error",
    "NRT_UNRECOVERABLE_ERROR",
    "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR",
    "Unrecovered read error",
    "[Hardware Error]: event severity: fatal",
    "EDAC MC0: 1 UE ",
    "EXT4-fs (sda1): Remounting filesystem read-only",
    "XFS (a): x Shutting down filesystem",
    "nvme nvme0: Removing after probe failure",
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 1, Fatal",
    "task docker:1 blocked for more than 120 seconds",
    "BUG: soft lockup - CPU#1 stuck",
    "Watchdog detected hard LOCKUP on cpu",
)
"""Text that a forger would choose for a name."""
QUOTED = (
    "{comm}[4711]: segfault at 0 ip 0 sp 0 error 6 in {file}[400000+1000] likely on CPU 1",
    "{comm}[4711]: bad frame in rt_sigreturn frame:0 ip:0 sp:0 orax:0 in {file}[400000+1000]",
    "{comm}[4711] vsyscall attempted with vsyscall=none ip:0 cs:33 in {file}[400000+1000]",
    "{comm}[4711]: unhandled level 3 translation fault (11) at 0x0 in {file}[400000+1000]",
    "traps: {comm}[4711] trap invalid opcode ip:0 sp:0 error:0 in {file}[400000+1000]",
    "traps: {comm}[4711] general protection fault ip:0 sp:0 error:0 in {file}[400000+1000]",
    " in {file}[400000+1000]",
    "process '{file}' started with executable stack",
    "{comm}[4711]: memfd_create() called without MFD_EXEC or MFD_NOEXEC_SEAL set",
    "{comm} (4711): drop_caches: 3",
    "{comm} (4711): Using mlock ulimits for SHM_HUGETLB is deprecated",
    "{comm}: sending ioctl 5310 to a partition!",
    "{comm}: attempt to access beyond end of device",
    "{comm} invoked oom-killer: gfp_mask=0x0(), order=0, oom_score_adj=0",
    "[   4711]  1000  4711     1000     1000    57344        0             0 {comm}",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task_memcg=/{file},task={comm},pid=1",
    "oom_reaper: reaped process 4711 ({comm}), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
    'audit: type=1701 audit(1.0:1): auid=1 uid=1 comm="{comm}" exe="{file}" sig=11 res=1',
    'audit: type=1326 audit(1.0:1): auid=1 comm="{comm}" exe="/{file}" sig=31 syscall=1',
    'ptrace attach of "{file}"[4711] was attempted by "{file}"[4712]',
    "mmap: {comm} (4711): VmData 1 exceed data ulimit 0. Update limits.",
    "CPU: 3 PID: 4711 Comm: {comm} Not tainted 6.18.44 #1",
    "Modules linked in: {file}",
    "Memory cgroup stats for /{file}:",
    "usb 1-1: Product: {file}",
    "input: {file} as /devices/virtual/input/input7",
    "EXT4-fs (sda1): mounted filesystem {file} r/w with ordered data mode",
    "overlayfs: failed to resolve '{file}': -2",
    "loop7: detected capacity change from 0 to 8 {file}",
    "request_module: modprobe {file} cannot be processed",
    "Out of memory: Killed process 4711 ({comm}) total-vm:9kB, anon-rss:1kB",
    "Memory cgroup out of memory: Killed process 4711 ({comm}) total-vm:9kB, anon-rss:1kB",
    "INFO: task {comm}:4711 blocked for more than 120 seconds.",
    "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [{comm}:4711]",
    "cgroup: fork rejected by pids controller in /{file}",
    "NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name={comm}, Graphics Exception",
    "NVRM: Xid (PCI:0000:3b:00): 149, pid=1, name={comm}, NETIR Nonfatal XC0",
)
"""Lines that kernels write about a process or file, with its name and its file's."""
EVENTS = {"OOMKilling", "TaskHung", "KernelDeadlock", "SoftLockup", "ForkRejected"}
EVENTS |= {"Xid13", "Xid149NonFatal"}
"""Events of such lines that are right; none requires an action at its first time."""


def escaped(text: str) -> bytes:
    """Return text as /dev/kmsg shows it (kernel/printk/printk.c, msg_add_ext_text)."""
    shown = (
        f"\\x{one:02x}" if one < 32 or one >= 127 or one == 92 else chr(one)
        for one in text.encode(errors="replace")
    )
    return "".join(shown).encode()


def signs_of(record: bytes, table: SignTable = TABLE) -> list[Sign]:
    line = read_record(record)
    return [] if line is None else table.of_line(line)


def kernel_says(text: str, priority: int = 4) -> list[Sign]:
    return signs_of(b"%d,1,2,-;%s\n" % (priority, escaped(text)))


@pytest.mark.parametrize("record", CRASHES, ids=["xid", "panic", "newline"])
def test_a_crash_under_a_forged_name_is_no_fault(record: bytes) -> None:
    assert signs_of(record) == []
    assert signs_of(record.replace(b"6,", b"4,", 1)) == []
    plain = read_line(record.partition(b";")[2])
    assert plain is not None
    assert TABLE.of_line(plain) == []


@pytest.mark.parametrize("form", QUOTED)
def test_no_name_that_the_kernel_quotes_asks_for_an_action(form: str) -> None:
    names = (f"{before}{word}" for before in ("", "\n", "x, ", ") ") for word in WORDS)
    for name in names:
        text = form.format(comm=name[:15], file=name)
        for priority in (0, 3, 4, 6):
            found = kernel_says(text, priority)
            assert {sign.reason for sign in found} <= EVENTS, text
            assert not [sign for sign in found if sign.entry.action in NODE_ACTIONS], text


NAMES = st.one_of(
    st.text(max_size=40),
    st.tuples(st.text(max_size=4), st.sampled_from(WORDS), st.text(max_size=4)).map("".join),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map("\n".join),
).map(lambda name: name.replace("\0", " "))


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(QUOTED), NAMES, NAMES, st.integers(0, 7), st.integers(0, 250))
def test_whatever_the_names_are_no_node_is_repaired(
    form: str, comm: str, file: str, level: int, cut: int
) -> None:
    name = comm.encode(errors="replace")[:15].decode(errors="replace")
    text = form.format(comm=name, file=file[:255])
    for said in (text, text[:cut]):
        found = kernel_says(said, level)
        assert not [sign for sign in found if sign.entry.action in NODE_ACTIONS], said


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400))
def test_no_bytes_make_a_sign_by_chance_or_raise(data: bytes) -> None:
    for record in (data, b"12,1,2,-;" + data, b"4,1,2,+;" + data):
        assert signs_of(record) == []


def test_what_a_program_writes_to_the_log_does_not_count() -> None:
    assert [sign.reason for sign in kernel_says(FALLEN, 4)] == ["Xid79"]
    for facility in range(1, 24):
        assert kernel_says(FALLEN, 8 * facility + 3) == []
    assert kernel_says(FALLEN, 6) == []  # the level of a report about a program


def test_the_rest_of_a_record_and_its_dictionary_are_no_lines() -> None:
    assert signs_of(f"4,1,2,+;{FALLEN}\n".encode()) == []
    assert signs_of(f"4,1,2,-;usb\n {FALLEN}\n{FALLEN}\n".encode()) == []
    assert signs_of(rb"4,1,2,-;x\x0a" + FALLEN.encode()) == []
    assert [one.reason for one in signs_of(f"4,1,2,c,caller=T9;{FALLEN}".encode())] == ["Xid79"]


@pytest.mark.parametrize(
    "line",
    [
        FALLEN,
        "NVRM: Xid (PCI:00000000:3b:00.0): 79, pid=1, name=x, GPU has fallen off the bus.",
        "NVRM: Xid (0000:3b:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 79, GPU has fallen off the bus.",
        f"[   12.345678] {FALLEN}",
        f"Nov 21 23:54:23 node-1 kernel: [   12.345678] {FALLEN}",
        f"2026-11-21T23:54:23.123456+00:00 node-1 kernel: {FALLEN}",
        f"3,77,12345678,-;{FALLEN}",
        f"<3>[   12.345678] {FALLEN}",
    ],
)
def test_every_form_of_the_driver_s_line_still_counts(line: str) -> None:
    read = read_line(line.encode())
    assert read is not None
    (sign,) = TABLE.of_line(read)
    assert (sign.reason, sign.part) == ("Xid79", "0000:3b:00")


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:): 79, pid=1, name=x, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3b:00) 79, x",
        "NVRM: Xid (PCI:0000:3b:00): 79 x",
        "NVRM: Xid (PCI:zzzz:3b:00): 79, x",
        f"node-1 myprogram kernel: {FALLEN}",
        f"Nov 21 23:54:23 node-1 myprogram[7]: kernel: {FALLEN}",
        f"name {FALLEN}",
    ],
)
def test_what_is_not_exactly_the_driver_s_form_does_not_count(line: str) -> None:
    read = read_line(line.encode())
    assert read is not None
    assert TABLE.of_line(read) == []


def on_a_node(record: bytes, host: HostSample, *gpus: GpuReading) -> Bench:
    """Return the records of a daemon that reads the record on such a node."""
    bench = Bench()
    bench.nvml = GpuSample(gpus, "" if gpus else "there is no NVIDIA driver")
    bench.step(HostSampled(host))
    bench.step(GpusSampled(bench.nvml, bench.now))
    bench.now += 1.0
    line = read_record(record)
    assert line is not None
    bench.step(LineRead(line, "kmsg:boot:1"))
    return bench


RECORD = f"3,1,2,-;{FALLEN}".encode()
THERE, ELSEWHERE = frozenset({"0000:3b:00"}), frozenset({"0000:00:01"})
HEALTHY = GpuReading(0, "00000000:3B:00.0", ecc_uncorrected=0, slowdown=0)


def test_an_address_that_no_device_has_asks_for_nothing() -> None:
    assert HEALTH in on_a_node(RECORD, HostSample(pci=THERE)).labels
    bench = on_a_node(RECORD, HostSample(pci=ELSEWHERE))
    assert bench.labels == {}
    assert "there is no PCI device 0000:3b:00" in bench.details[-1]["message"]


def test_a_device_that_has_gone_since_the_daemon_began_is_known() -> None:
    bench = Bench()
    bench.step(HostSampled(HostSample(pci=THERE | ELSEWHERE)))
    bench.step(HostSampled(HostSample(pci=ELSEWHERE)))
    line = read_record(RECORD)
    assert line is not None
    bench.step(LineRead(line, "kmsg:boot:1"))
    assert HEALTH in bench.labels


def test_where_devices_cannot_be_listed_the_driver_s_form_is_enough() -> None:
    assert HEALTH in on_a_node(RECORD, HostSample()).labels


def test_a_line_of_a_file_is_its_owner_s_word() -> None:
    bench = Bench()
    bench.step(HostSampled(HostSample(pci=ELSEWHERE)))
    bench.kernel(FALLEN)
    assert HEALTH in bench.labels


@pytest.mark.parametrize(
    ("gpus", "is_replaced"),
    [
        ((HEALTHY,), False),
        ((replace(HEALTHY, error=15),), True),
        ((GpuReading(0, "00000000:3B:00.0"),), True),
        ((replace(HEALTHY, pci="00000000:5E:00.0"),), True),
        ((), True),
    ],
    ids=["listed", "lost", "silent", "not listed", "no NVML"],
)
def test_nvml_that_lists_the_gpu_contradicts_that_it_fell_off_the_bus(
    gpus: tuple[GpuReading, ...], is_replaced: bool
) -> None:
    bench = on_a_node(RECORD, HostSample(pci=THERE), *gpus)
    assert (HEALTH in bench.labels) is is_replaced
    if not is_replaced:
        assert "NVML lists the GPU as well" in bench.details[-1]["message"]


def test_nvml_that_hangs_confirms_and_a_look_from_before_says_nothing() -> None:
    bench = Bench()
    bench.is_nvml_hung = True
    line = read_record(RECORD)
    assert line is not None
    bench.step(LineRead(line, "kmsg:boot:1"))
    bench.step(GpusSampled(GpuSample((HEALTHY,)), bench.now - 1.0))
    bench.wait(30.0)
    assert bench.labels == {}
    bench.wait(20.0)
    assert HEALTH in bench.labels


def test_a_driver_that_prints_users_texts_makes_its_level_worthless() -> None:
    """Check the Neuron driver, which prints any text of a user of /dev/neuron0 as KERN_ERR."""
    for text in ("Kernel panic - not syncing: x", FALLEN):
        host = HostSample(pci=THERE, prints_for_users=True)
        assert on_a_node(f"3,1,2,-;{text}".encode(), host).labels == {}
        assert HEALTH in on_a_node(f"2,1,2,-;{text}".encode(), host).labels
    hbm = "NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR instance-id=i-1 nd-id=0"
    assert on_a_node(f"3,1,2,-;{hbm}".encode(), HostSample()).labels == {}


def test_counters_of_a_neuron_device_are_the_driver_s_own_word(tmp_path: Path) -> None:
    counter = tmp_path / "sys/class/neuron_device/neuron0/stats/hardware/mem_ecc_uncorrected"
    counter.parent.mkdir(parents=True)
    (tmp_path / "sys/module/neuron").mkdir(parents=True)
    watch = TABLE.host_watch()
    found = []
    for now, value in ((0.0, "0"), (10.0, "1")):
        counter.write_text(f"{value}\n")
        sample = look(tmp_path, tuple(TABLE.counter_limits))
        assert sample.prints_for_users
        found = [sign for one in watch.look(sample, now) for sign in TABLE.of_finding(one)]
    assert [(one.reason, one.part) for one in found] == [("NeuronEccUncorrected", "neuron0")]
    assert found[0].entry.action in NODE_ACTIONS


def test_a_user_s_pattern_that_a_name_can_match_is_warned_of() -> None:
    rest = "title = 't', class = 'kernel', action = 'reboot', source = 's'"
    text = f"version = 1\n[fault]\nA = {{ kernel = ['x+', '^y|z', '^w'], {rest} }}"
    table = SignTable(load_fault_table([("mine", text)]))
    assert len(table.warnings) == 2
    assert table.warnings[0].startswith("fault.A.kernel[0]: 'x+' does not begin with ^")
    assert table.of_line(KernelLine("an x here"))
    assert signs_of(CRASHES[0], table) == []
    assert TABLE.warnings == ()


def test_a_file_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text(FALLEN + "\n")
    for mode in (0o620, 0o602, 0o666):
        log.chmod(mode)
        with pytest.raises(PermissionError, match="chmod go-w"):
            list(FileReader(log, "").read())
    log.chmod(0o644)
    assert len(list(FileReader(log, "").read())) == 1


def test_the_rest_of_a_line_that_was_too_long_is_no_line(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    for length in (65_536, 200_000, 400_000):
        log.write_text("x" * length + FALLEN + f"\n{FALLEN}\n")
        reader = FileReader(log, "")
        signs = [sign for line, _ in reader.read() for sign in TABLE.of_line(line)]
        reader.close()
        assert len(signs) == 1


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the crash is x86-64 code")
async def test_a_real_crash_under_a_forged_name_is_no_fault_here(tmp_path: Path) -> None:
    reader = KmsgReader(Path("/"), "")
    try:
        reader.open()
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be read here: {error}")
    before = [line.sequence or 0 for line, _ in reader.read()]
    file = tmp_path / FILE
    file.write_bytes(forged_crash.CODE)
    fd = os.open(file, os.O_RDONLY)
    try:
        command = [sys.executable, "-I", "-c", FORGED_CRASH, NAME, str(fd)]
        done = subprocess.run(command, pass_fds=[fd], check=False, timeout=30)
    finally:
        os.close(fd)
    assert done.returncode == -11
    news = [line for line, _ in reader.read() if (line.sequence or 0) > max(before, default=0)]
    reader.close()
    crashes = [line for line in news if FILE in line.text]
    if not crashes:
        pytest.skip("this kernel does not log crashes (kernel.exception-trace is 0, or limited)")
    assert crashes[0].text.startswith(NAME)
    assert (crashes[0].facility, crashes[0].level) == (0, 6)
    found = await look_once(TABLE, Path("/"), None, None, None)
    assert [sign for sign in found.signs if sign.xid is not None] == []
