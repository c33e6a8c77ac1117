"""The basic tests: is all there, does it answer.  Seconds in all."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from unbroken.kube.clock import wall
from unbroken.spec.nodes.kinds import Outcome

from . import gpu
from .findings import CheckSettings, Finding, Test, failed, passed, unknown

GIB = 2**30
FREE_BYTES = 2**30
FREE_SHARE = 0.03
"""A disk with less free than both is full: kubelet itself evicts below 10 % (its default
`nodefs.available`), so this is later than any pressure that Kubernetes sees."""
FILES_FREE = 1000
SHARED_BYTES = 2**30
"""The 64 MiB that container runtimes give to /dev/shm are too few for torch's data loaders."""
OPEN_FILES = 4096
PROCESSES = 4096
FIRST_DAY = datetime(2025, 1, 1, tzinfo=UTC).timestamp()
"""Nobody who runs this can have an earlier date."""
TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""
TIMEX_BYTES = 208
"""Size of `struct timex` on 64-bit Linux (linux/timex.h)."""
SAMPLE = 2**20


def meminfo(path: Path = Path("/proc/meminfo")) -> Mapping[str, int]:
    """Bytes by name; empty where the kernel does not say."""
    result = {}
    try:
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            number, *unit = rest.split()
            result[name] = int(number) * (1024 if unit else 1)
    except (OSError, ValueError):
        return {}
    return result


def processors(settings: CheckSettings) -> Iterator[Finding]:
    """The processors that the kernel knows, those that work and those that we may use."""
    sys = Path("/sys/devices/system/cpu")
    try:
        listed = Path("/proc/cpuinfo").read_text().count("processor\t:")
        offline = (sys / "offline").read_text().strip()
    except OSError as error:
        yield unknown("processors", f"the kernel does not say how many there are: {error}")
        return
    usable, online = len(os.sched_getaffinity(0)), os.sysconf("SC_NPROCESSORS_ONLN")
    if listed and listed != online:
        text = f"/proc/cpuinfo lists {listed}, {online} are online"
        yield Finding("processors", Outcome.FAIL, text, listed, online, "processors")
        return
    note = f"; offline: {offline}" if offline else ""
    yield passed("processors", f"{usable} of {online} usable{note}", online, "processors")


def memory(settings: CheckSettings) -> Iterator[Finding]:
    """Memory that is there, and what the kernel or the memory controller has found broken."""
    result = meminfo()
    if "MemTotal" not in result:
        yield unknown("memory-size", "/proc/meminfo cannot be read")
        return
    available = result.get("MemAvailable", 0) / GIB
    yield passed(
        "memory-size", f"{available:.1f} GiB available", round(result["MemTotal"] / GIB, 2), "GiB"
    )
    bad = result.get("HardwareCorrupted", 0)
    for file in Path("/sys/devices/system/edac/mc").glob("mc*/ue_count"):
        bad += int(file.read_text())
    if bad:
        text = "broken memory was taken out of use or errors not corrected: have it replaced"
        yield Finding("memory-errors", Outcome.FAIL, text, bad, 0, "bytes or errors")
    else:
        yield passed("memory-errors", measured=0)


def disk(settings: CheckSettings) -> Iterator[Finding]:
    """Something can be written, kept and read again, and there is room."""
    sample = secrets.token_bytes(SAMPLE)
    try:
        with tempfile.TemporaryFile(dir=settings.directory) as file:
            file.write(sample)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            is_same = file.read() == sample
        if is_same:
            yield passed("disk-writable", str(settings.directory))
        else:
            yield failed("disk-writable", f"{settings.directory} gave back other bytes")
    except OSError as error:
        text = f"{settings.directory}: {error.strerror}"
        if error.errno in (errno.EROFS, errno.EIO, errno.ENOSPC):
            yield failed("disk-writable", text)
        else:
            yield unknown("disk-writable", text)
            return
    usage, result = shutil.disk_usage(settings.directory), os.statvfs(settings.directory)
    limit = min(FREE_BYTES, FREE_SHARE * usage.total)
    # Some file systems count no inodes: then none is the number of all.
    is_full = usage.free < limit or (result.f_files > 0 and result.f_favail < FILES_FREE)
    outcome = Outcome.FAIL if is_full else Outcome.PASS
    text = f"{settings.directory} is full: remove old checkpoints or logs" if is_full else ""
    free, least = round(usage.free / GIB, 2), round(limit / GIB, 2)
    yield Finding("disk-space", outcome, text, free, least, "GiB")


def clock(settings: CheckSettings) -> Iterator[Finding]:
    """The date is possible; what the kernel says of its synchronisation."""
    if wall() < FIRST_DAY:
        date = datetime.fromtimestamp(wall(), UTC).date()
        yield failed("clock", f"the date is {date}: set the clock, and run an NTP client")
        return
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    if state < 0:
        yield unknown("clock", f"the kernel does not say: {os.strerror(ctypes.get_errno())}")
    elif state == TIME_ERROR:
        yield unknown("clock", "no program tells the kernel that the clock is synchronised (NTP)")
    else:
        yield passed("clock", "synchronised")


def shared_memory(settings: CheckSettings) -> Iterator[Finding]:
    """/dev/shm, where data loaders and snapshots put what processes share."""
    place = Path("/dev/shm")
    try:
        total = shutil.disk_usage(place).total
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
    except OSError as error:
        text = f"{place}: {error.strerror}"
        if error.errno in (errno.EROFS, errno.EIO):
            yield failed("shared-memory", text)
        else:
            yield unknown("shared-memory", text)
        return
    if total < SHARED_BYTES:
        yield unknown(
            "shared-memory",
            f"/dev/shm has only {total // 2**20} MiB; mount an emptyDir with medium: Memory there",
        )
    else:
        yield passed("shared-memory", measured=round(total / GIB, 2), unit="GiB")


def gpus(settings: CheckSettings) -> Iterator[Finding]:
    """The GPUs that the driver shows, against those that should be there."""
    result = gpu.nvml_count()
    if isinstance(result, str):
        yield gpu.without_gpus("gpus", result, settings)
        return
    if settings.gpus is None:
        yield passed("gpus", "how many should be there is not known", result, "GPUs")
        return
    is_good = result >= settings.gpus
    outcome = Outcome.PASS if is_good else Outcome.FAIL
    text = "" if is_good else "the driver shows too few GPUs: look for XIDs in the kernel log"
    yield Finding("gpus", outcome, text, result, settings.gpus, "GPUs")


def torch_works(settings: CheckSettings) -> Iterator[Finding]:
    """torch can be imported and multiplies."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield unknown("torch", f"cannot be imported: {error}")
        return
    a = torch.arange(64 * 64, dtype=torch.float64).remainder(7).reshape(64, 64)
    if (a @ torch.eye(64, dtype=torch.float64)).equal(a):
        yield passed("torch", str(torch.__version__))
    else:
        yield failed("torch", f"torch {torch.__version__} multiplies wrongly")


def loopback(settings: CheckSettings) -> Iterator[Finding]:
    """A connection to this machine itself."""
    sent, got = secrets.token_bytes(2**16), b""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, 5) as client, server.accept()[0] as other:
                other.settimeout(5)
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                while part := other.recv(2**16):
                    got += part
    except OSError as error:
        yield failed("loopback", f"no connection to 127.0.0.1: {error}")
        return
    if got == sent:
        yield passed("loopback")
    else:
        yield failed("loopback", f"{len(got)} of {len(sent)} bytes came, or others than were sent")


def names(settings: CheckSettings) -> Iterator[Finding]:
    """Names that torch's groups look up before they connect."""
    own = socket.gethostname()
    for name in ("localhost", own):
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            advice = f"add it to /etc/hosts, or set GLOO_SOCKET_IFNAME: {error}"
            yield unknown("name-resolution", f"{name} has no address; {advice}")
            return
    yield passed("name-resolution", own)


def limits(settings: CheckSettings) -> Iterator[Finding]:
    """Limits of this process that training runs into.  Never a fault of the node."""
    low = []
    kinds = (("open files", resource.RLIMIT_NOFILE, OPEN_FILES),
             ("processes", resource.RLIMIT_NPROC, PROCESSES))  # fmt: skip
    for name, kind, least in kinds:
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY and hard < least:
            low.append(f"{name}: {hard}, below {least}")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        low.append("locked memory: limited, and RDMA locks what it sends (ulimit -l unlimited)")
    if low:
        yield unknown("limits", "; ".join(low))
    else:
        yield passed("limits")


TESTS = (
    Test("processors", processors),
    Test("memory", memory),
    Test("disk", disk),
    Test("clock", clock),
    Test("shared-memory", shared_memory),
    Test("gpus", gpus),
    Test("torch", torch_works, 120.0),
    Test("loopback", loopback),
    Test("name-resolution", names),
    Test("limits", limits),
)
