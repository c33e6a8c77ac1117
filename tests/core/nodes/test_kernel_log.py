"""Lines of the kernel's log as they come from /dev/kmsg and from files."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.core.nodes.kernel_log import (
    KernelLine,
    Sxid,
    Xid,
    pci_address,
    read_line,
    read_record,
    read_sxid,
    read_xid,
)
from unbroken.spec.nodes.fault_table import DriverSeverity

MILD = DriverSeverity.NON_FATAL

FALLEN = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)


def test_a_record_has_its_sequence_and_time_and_no_dictionary() -> None:
    data = f"4,1234,98765432,-,caller=T1;{FALLEN}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"
    assert read_record(data.encode()) == KernelLine(FALLEN, 1234, 98765432, 0, 4)


def test_what_a_record_escapes_is_read_and_made_harmless() -> None:
    record = read_record(rb"6,1,2,-;a\x5cb\x1b[31m")
    assert record is not None
    assert record.text == "a\\b [31m"


@pytest.mark.parametrize(
    "line",
    [
        FALLEN,
        f"[   12.345678] {FALLEN}",
        f"[Sat Nov 21 23:54:23 2026] {FALLEN}",
        f"Nov 21 23:54:23 node-1 kernel: [   12.345678] {FALLEN}",
        f"2026-11-21T23:54:23.123456+00:00 node-1 kernel: {FALLEN}\r",
    ],
)
def test_a_line_of_a_file_is_read_without_what_stands_before_it(line: str) -> None:
    assert read_line(line.encode()) == KernelLine(FALLEN)


def test_a_priority_before_a_line_says_who_wrote_it_and_how_severe_it_is() -> None:
    assert read_line(f"<4>[   12.345678] {FALLEN}".encode()) == KernelLine(
        FALLEN, facility=0, level=4
    )
    assert read_line(b"<12>mine") == KernelLine("mine", facility=1, level=4)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (FALLEN, Xid(79, "0000:3b:00", None, None)),
        ("NVRM: Xid (0000:03:00): 6, PE0001", Xid(6, "0000:03:00", None, None)),
        (
            "NVRM: Xid (PCI:0018:01:00.0): 149, NETIR  Fatal",
            Xid(149, "0018:01:00", DriverSeverity.FATAL, None),
        ),
        ("NVRM: Xid (PCI:0018:01:00): 149, NETIR Nonfatal", Xid(149, "0018:01:00", MILD, None)),
        (
            "NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (",
            Xid(154, "0000:18:00", None, 1),
        ),
        (
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9).",
            Xid(94, "0000:01:00", None, None),
        ),
        (
            "NVRM: Xid (PCI:00000000:3b:00.0): 149, pid=7, name=a, Fatal, Nonfatal XC0",
            Xid(149, "0000:3b:00", MILD, None),
        ),
        ("NVRM: Xid (PCI:0:18:0): 79, x", None),
        ("NVRM: Xid (PCI:[4711]: segfault at 0 ip 0 in ): 79, pid=1, name=x, y[40000]", None),
        ("Killed process 7 (NVRM: Xid (PCI:0000:3b:00): 79, x)", None),
        ("NVRM: GPU at PCI:0000:3b:00: GPU-1234", None),
        ("NVRM: Xid (PCI:0000:3b:00): many", None),
    ],
)
def test_an_xid_is_read_only_where_the_driver_writes_it(text: str, found: Xid | None) -> None:
    assert read_xid(text) == found


def test_an_sxid_says_whether_it_is_fatal() -> None:
    place = "nvidia-nvswitch3", MILD, "0000:c1:00"
    start = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, "
    assert read_sxid(start + "Non-fatal, Link 46") == Sxid(28006, *place)
    fatal = replace(Sxid(28006, *place), severity=DriverSeverity.FATAL)
    assert read_sxid(start + "Fatal, Link 46") == fatal
    assert read_sxid(start + "Data") == Sxid(28006, *place)


def test_kernel_and_nvml_name_one_gpu_alike() -> None:
    assert pci_address("PCI:0000:3b:00") == pci_address("00000000:3B:00.0") == "0000:3b:00"


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_make_it_raise(data: bytes) -> None:
    for line in (read_record(data), read_line(data), read_record(b"4,1,2,-;" + data)):
        if line is not None:
            assert line.text.isprintable()
            read_xid(line.text)
            read_sxid(line.text)


@settings(deadline=None)
@given(st.text(max_size=100), st.integers(0, 10**9), st.text(max_size=100))
def test_no_text_in_a_driver_s_line_makes_it_raise(place: str, number: int, rest: str) -> None:
    for start in ("NVRM: Xid", "nvidia-nvswitch0: SXid"):
        text = f"{start} ({place}): {number}, {rest}"
        read_xid(text)
        read_sxid(text)
