"""Activity of a rank in words, from its process state and the stack of its main thread.

Texts of py-spy 0.4 with CPython 3.9-3.13, torch 2.x, gloo, NCCL and glibc; those of torch 2.13 on
gloo are kept with the tests.  A stack is read from the innermost frame outwards, and a
frame of the user's own code ends the search, for what is outside of it only called it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import takewhile

from unbroken.wire.observation import Collective, RankEvidence, ThreadStack


class Kind(Enum):
    """Kinds of what a rank does."""

    GONE = "gone"
    STOPPED = "stopped"
    STUCK = "stuck"
    COLLECTIVE = "collective"
    """The rank waits for its peers."""
    STORE = "store"
    """The rank waits in the rendezvous' store, for its peers or for rank 0."""
    DATA = "data"
    CHILD = "child"
    GIL = "gil"
    """A thread holds the global interpreter lock and does not run."""
    LOCK = "lock"
    SLEEP = "sleep"
    FILES = "files"
    NETWORK = "network"
    CHECKPOINT = "checkpoint"
    COMPUTE = "compute"
    OTHER = "other"
    UNKNOWN = "unknown"


WAITING = (Kind.COLLECTIVE, Kind.STORE)
"""Activities that wait for peers, which are more interesting than who waits for them."""
LISTENING = (Kind.NETWORK, Kind.OTHER)
"""Perhaps to peers."""
BUSY_SHARE = 0.5
"""Share of a core; more is computing."""
IDLE_SHARE = 0.05
GIL_IDLE_SHARE = 0.1
"""Cores; threads that wait for the GIL wake up 200 times a second and use less."""


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Equal for ranks that do the same, whatever line they are at."""

    kind: Kind
    words: str
    """The words without the place."""
    where: str = ""
    """Function of the user's."""
    via: str = ""
    """The caller, if ranks differ only by it."""
    holds_gil: bool = False
    """A thread of the rank holds the GIL at every look."""


COLLECTIVE = "waits in a collective"
"""Nobody says in which."""
GPU = "waits for the GPU"
_FRAME = re.compile(r"^(?P<function>.*?)(?: \((?P<file>[^()]*)\))?$", re.DOTALL)
# What is neither a Python file nor a notebook's cell is native code.
_OPERATION = re.compile(
    r"all_?(?:reduce|gather|to_?all)|reduce_?scatter|broadcast|barrier|(?<![a-z])(?:reduce|gather|scatter)(?![a-z])",
    re.IGNORECASE,
)
"""Names of MPI's, NCCL's and torch's collectives, in functions of a user's own."""
_SOURCE = re.compile(r"(?:\.py|>):\d+$")
# Python's own and installed packages are not the user's.
_LIBRARY = re.compile(
    r"(^|/)(torch|unbroken/worker|multiprocessing|concurrent|asyncio|importlib"
    r"|site-packages|dist-packages|python3(\.\d+)?|lightning|pytorch_lightning|transformers|accelerate|deepspeed|numpy)/"
    r"|^(threading|queue|selectors|subprocess|socket|ssl|contextlib|functools|signal|runpy"
    r"|_bootstrap|frozen importlib\._bootstrap)(\.py|:|$)|^<frozen"
)
_OPERATIONS = (
    r"all_reduce|all_reduce_coalesced|all_gather|all_gather_into_tensor|all_gather_coalesced"
    r"|all_to_all|all_to_all_single|reduce_scatter|reduce_scatter_tensor|broadcast|reduce|gather"
    r"|scatter|barrier|monitored_barrier|send|recv|isend|irecv|batch_isend_irecv|wait_tensor"
)
# Function and file of a frame.  The strongest that is found decides, and of equals the innermost:
# locks and sockets are what others wait with, and a collective's own name says more than its parts.
_WAYS, _PARTS, _NAMES = 1, 2, 3
_KNOWN: tuple[tuple[re.Pattern[str], int, Kind, str], ...] = tuple(
    (re.compile("|".join(patterns)), strength, kind, words)
    for strength, kind, words, patterns in (
        (_NAMES, Kind.COLLECTIVE, "waits in {}",
         [rf"^(?:{_OPERATIONS}) \(.*(?:distributed_c10d|_functional_collectives)\.py"]),
        (_NAMES, Kind.COLLECTIVE, "waits in FSDP ({})",
         [r"^\S*(?:wait|gather|reduce|sync)\S* \(.*torch/distributed/fsdp/"]),
        (_PARTS, Kind.STORE, "in the store (rendezvous)",
         [r"\(.*torch/distributed/rendezvous\.py", r"^c10d::(?:TCP|Prefix|File)?Store\b",
          r"^c10d::detail::(?:TCPClient|Socket)"]),
        (_NAMES, Kind.COLLECTIVE, "waits in all_reduce (backward)", [r"^c10d::Reducer::"]),
        (_PARTS, Kind.COLLECTIVE, COLLECTIVE,
         [r"^c10d::", r"^gloo::", r"^p?nccl[A-Z]", r"^ProcessGroup(?:NCCL|Gloo)"]),
        # The host waits for kernels, and those of a collective wait for peers.
        (_PARTS, Kind.COLLECTIVE, GPU,
         [r"^cu(?:da)?(?:Stream|Event|Ctx|Device)Synchronize", r"^c10::cuda::.*synchronize",
          r"^cuda(?:Memcpy|Free|Malloc)", r"^cuMemcpy\w*toH",
          r"^at::native::_local_scalar_dense_cuda", r"^synchronize \(.*torch/cuda/"]),
        (_PARTS, Kind.DATA, "waits for a DataLoader worker",
         [r"^\S*(?:_get_data|_next_data|__next__) \(.*torch/utils/data/dataloader\.py"]),
        (_PARTS, Kind.CHECKPOINT, "reads or writes a checkpoint",
         [r"\(.*torch/serialization\.py", r"\(.*torch/distributed/checkpoint/",
          r"\(.*safetensors/"]),
        (_WAYS, Kind.CHILD, "waits for a child process",
         [r"\(.*(?:subprocess|multiprocessing/popen_\w+|multiprocessing/process)\.py",
          r"^wait(?:4|pid)\b"]),
        (_WAYS, Kind.CHILD, "waits for another process",
         [r"\(.*(?:multiprocessing|concurrent/futures)/"]),
        (_WAYS, Kind.NETWORK, "waits for the network",
         [r"\(.*\b(?:socket|ssl|urllib3|requests|http/client|aiohttp|botocore)\b",
          r"^(?:connect|accept4?|recv|recvfrom|recvmsg|__libc_recv)(?: \(|$)"]),
        (_WAYS, Kind.LOCK, "waits for a lock",
         [r"^(?:lock_)?PyThread_acquire_lock", r"^pthread_mutex_lock", r"^__lll_lock_wait",
          r"^sem_(?:clock)?wait", r"\(.*(?:threading|queue)\.py"]),
        (_WAYS, Kind.SLEEP, "sleeps", [r"^(?:clock_nanosleep|nanosleep|time_sleep|pause)\b"]),
        (_WAYS, Kind.FILES, "reads files",
         [r"^(?:read|pread64|readv|__read|open64|openat|__libc_read)(?: \(|$)"]),
        (_WAYS, Kind.FILES, "writes files",
         [r"^(?:write|pwrite64|writev|__write|fsync|fdatasync|__libc_write)(?: \(|$)"]),
    )
)  # fmt: skip
_GIL_WAIT = re.compile(r"^(?:pthread_cond_(?:timed|clock)wait|take_gil)\b")
"""Innermost native frame of a thread that waits for the GIL (CPython 3.9-3.13, glibc)."""
_WAITS_FREE = re.compile(r"^(?:std|c10d?|gloo|at)::|^p?nccl[A-Z]|^cu(?:da)?[A-Z]")
"""Native code that waits for something else, with the GIL released."""
_PIPE = re.compile(r"pipe_|^wait_for_space")
# Functions of Linux 5-6 in which a process waits (/proc/PID/wchan).
_KERNEL: tuple[tuple[re.Pattern[str], Kind, str], ...] = tuple(
    (re.compile(pattern), kind, words)
    for kind, words, pattern in (
        (Kind.SLEEP, "sleeps", r"nanosleep"),
        (Kind.LOCK, "waits for a lock", r"^futex"),
        (Kind.CHILD, "waits for a child process", r"^do_wait|^kernel_wait"),
        (
            Kind.FILES,
            "reads or writes files",
            r"folio_wait|wait_on_page|io_schedule|^wait_for_partner",
        ),
        (
            Kind.FILES,
            "reads or writes files",
            r"^nfs|^rpc_|fuse_|^request_wait_answer|^lustre|^ll_|^ceph",
        ),
        (Kind.CHILD, "waits for a pipe", _PIPE.pattern),
        (Kind.NETWORK, "waits for the network", r"sk_wait|inet_|tcp_|unix_stream|skb_wait"),
    )
)
_BACKWARD = re.compile(r"^_engine_run_backward \(|^torch::autograd::.*Engine::")


def activity_of(one: RankEvidence) -> RankActivity:
    """Return the activity of a rank."""
    if one.state in ("", "Z", "X"):
        return _gone(one)
    if one.state in ("T", "t"):
        by = "a signal" if one.state == "T" else "a debugger"
        return RankActivity(Kind.STOPPED, f"stopped by {by}")
    frames = one.threads[0].frames if one.threads else ()
    if one.state == "D":
        inside = f" in {one.waits_in}" if one.waits_in not in ("", "0") else ""
        return RankActivity(Kind.STUCK, f"in the kernel (D){inside}", user_function(frames))
    found = _of_gil(one)
    found = found or _of_pipe(one, frames) or _of_stack(frames) or _of_backward(one, frames)
    if found is not None and found.words != COLLECTIVE:
        return found
    return _of_recorder(one, found) or found or _of_process(one, frames)


def activities_of(ranks: Mapping[int, RankEvidence]) -> dict[int, RankActivity]:
    """Return the activity of each rank of a job.

    A job may communicate without a known library.  If most ranks listen, inside functions of the
    user's that are named for a collective, then they wait in that collective."""
    activities = {rank: activity_of(one) for rank, one in ranks.items()}
    if any(what.kind in WAITING for what in activities.values()):
        return activities
    listening = (rank for rank, what in activities.items() if what.kind in LISTENING)
    waiting = {rank: name for rank in listening if (name := operation(ranks[rank]))}
    if len(waiting) * 2 <= len(ranks):
        return activities
    return activities | {
        rank: RankActivity(Kind.COLLECTIVE, f"waits in {name}") for rank, name in waiting.items()
    }


def awaits_peers(one: RankEvidence, what: RankActivity) -> bool:
    """True if the rank waits for its peers, in a collective of whatever library."""
    return what.kind in WAITING or (what.kind in LISTENING and bool(operation(one)))


def branches(
    activities: Mapping[int, RankActivity], ranks: Mapping[int, RankEvidence]
) -> dict[int, RankActivity]:
    """Distinguish ranks that do the same by the user's functions that have called it, if these
    differ. Ranks that wait for peers are also distinguished by the lines."""
    own = {
        rank: tuple(
            frame if activities[rank].kind in WAITING else parts(frame)[0]
            for frame in _outside(one)
            if not is_library(frame)
        )
        for rank, one in ranks.items()
    }
    depth = min(map(len, own.values()))
    differs = next((n for n in range(depth) if len({one[n] for one in own.values()}) > 1), None)
    if differs is None:
        return dict(activities)
    return {
        rank: replace(what, via=place((own[rank][differs],))) for rank, what in activities.items()
    }


def _outside(one: RankEvidence) -> tuple[str, ...]:
    """The frames of the main thread, without those inside a collective of the user's own: there
    the one who collects is at another line than those who send."""
    frames = one.threads[0].frames if one.threads else ()
    if activity_of(one).kind not in LISTENING:
        return frames
    inside = [
        number
        for number, frame in enumerate(frames)
        if not is_library(frame) and _OPERATION.search(parts(frame)[0])
    ]
    return frames[max(inside, default=-1) + 1 :]


def place(frames: tuple[str, ...]) -> str:
    """The innermost frame of the user's, or the innermost, as `get_batch (data.py:41)`."""
    frame = next((f for f in frames if not is_library(f)), frames[0] if frames else "")
    function, file = parts(frame)
    return f"{function} ({file.rpartition('/')[2]})" if file else function


def parts(frame: str) -> tuple[str, str]:
    """The function, and its file and line or its library."""
    found = _FRAME.match(frame)
    return (found["function"], found["file"] or "") if found else (frame, "")


def is_library(frame: str) -> bool:
    """True if it is none of the user's own functions."""
    _, file = parts(frame)
    return not _SOURCE.search(file) or _LIBRARY.search(file) is not None


def user_function(frames: tuple[str, ...]) -> str:
    """Name of the innermost function of the user's; empty: there is none."""
    return next((parts(frame)[0] for frame in frames if not is_library(frame)), "")


def operation(one: RankEvidence) -> str:
    """The collective by the name of the user's own function, the outermost such; empty: none."""
    frames = one.threads[0].frames if one.threads else ()
    own = (parts(frame)[0] for frame in reversed(frames) if not is_library(frame))
    found = (_OPERATION.search(name) for name in own)
    return next((match[0] for match in found if match), "")


def pending(one: RankEvidence) -> tuple[Collective, ...]:
    """The collectives that it has begun and not ended, by the flight recorder."""
    return tuple(c for c in one.collectives if c.state in ("scheduled", "started"))


def is_backward(frames: tuple[str, ...]) -> bool:
    """True if the thread is in the backward pass, or waits for it."""
    return any(_BACKWARD.search(frame) for frame in frames)


def explaining_frames(one: RankEvidence) -> tuple[str, ...]:
    """Frames of the thread that explains what the rank does: the one that holds the GIL while the
    main thread waits for the GIL, else the main thread."""
    return (_gil_thread(one) or one.threads[0]).frames if one.threads else ()


def _gil_thread(one: RankEvidence) -> ThreadStack | None:
    """The thread that keeps the GIL from the main thread, or the main thread that keeps the GIL
    without running; None: neither."""
    holder = next((thread for thread in one.threads if thread.holds_gil), None)
    if holder is None:
        return None
    if holder.is_main:
        is_quiet = (one.cpu_share or 0.0) < GIL_IDLE_SHARE and one.state != "R"
        return holder if is_quiet and one.cpu_share is not None else None
    return holder if _waits_for_gil(one.threads[0].frames) else None


def _waits_for_gil(frames: tuple[str, ...]) -> bool:
    """True if the thread may wait for the GIL: it is in no native code that waits without it."""
    native = list(takewhile(lambda frame: not _SOURCE.search(parts(frame)[1]), frames))
    if not native:
        # Without native frames a wait for peers looks the same as the wait for the GIL after it.
        found = _of_stack(frames)
        return found is None or found.kind not in WAITING
    return _GIL_WAIT.search(native[0]) is not None and not any(map(_WAITS_FREE.search, native))


def _of_gil(one: RankEvidence) -> RankActivity | None:
    """By the thread that holds the GIL at every look."""
    holder = _gil_thread(one)
    if holder is None:
        return None
    is_idle = one.cpu_share is None or one.cpu_share < GIL_IDLE_SHARE
    thread = "" if holder.is_main else f" (thread {holder.name or 'without a name'})"
    words = f"holds the GIL{'' if is_idle else ' and computes'}{thread}"
    kind = Kind.GIL if is_idle else Kind.COMPUTE
    return RankActivity(kind, words, user_function(holder.frames) or "native code", holds_gil=True)


def _gone(one: RankEvidence) -> RankActivity:
    if not one.state and not one.pid:
        return RankActivity(Kind.UNKNOWN, "not known")
    return RankActivity(Kind.GONE, "has ended")


def _of_stack(frames: tuple[str, ...]) -> RankActivity | None:
    best, strongest = None, 0
    for frame in frames:
        found = _known(frame)
        if found is not None and found[0] > strongest:
            strongest, kind, words = found
            best = RankActivity(kind, words.format(parts(frame)[0].rpartition(".")[2]))
        if not is_library(frame):
            break
    if best is None or best.kind in WAITING:
        return best
    return replace(best, where=user_function(frames))


@lru_cache(maxsize=4096)
def _known(frame: str) -> tuple[int, Kind, str] | None:
    for pattern, strength, kind, words in _KNOWN:
        if pattern.search(frame):
            return strength, kind, words
    return None


def _of_pipe(one: RankEvidence, frames: tuple[str, ...]) -> RankActivity | None:
    """read(2) and write(2) are for files, by their names; the kernel knows that it is a pipe."""
    found = _of_stack(frames)
    if found is None or found.kind is not Kind.FILES or not _PIPE.search(one.waits_in):
        return None
    return replace(found, kind=Kind.CHILD, words="waits for a pipe")


def _of_backward(one: RankEvidence, frames: tuple[str, ...]) -> RankActivity | None:
    """In the backward pass the hooks, and so the wait, may be on another thread."""
    if not is_backward(frames):
        return None
    for thread in one.threads[1:]:
        found = _of_stack(thread.frames)
        if found is not None and found.kind is Kind.COLLECTIVE:
            return RankActivity(found.kind, f"{found.words} (backward)")
    if one.cpu_share is not None and one.cpu_share >= BUSY_SHARE:
        return RankActivity(Kind.COMPUTE, "computes in the backward pass")
    return RankActivity(Kind.COLLECTIVE, "waits in the backward pass")


def _of_recorder(one: RankEvidence, found: RankActivity | None) -> RankActivity | None:
    """Return the activity by the flight recorder, if the stack does not show the collective."""
    begun = pending(one)
    if not begun or (found is None and _is_elsewhere(one)):
        return None
    return RankActivity(Kind.COLLECTIVE, f"waits in {begun[0].operation.rpartition(':')[2]}")


def _is_elsewhere(one: RankEvidence) -> bool:
    """True if the kernel says that it waits for something that is no peer."""
    return any(p.search(one.waits_in) and k is not Kind.LOCK for p, k, _ in _KERNEL)


def _of_process(one: RankEvidence, frames: tuple[str, ...]) -> RankActivity:
    """By what the kernel says, where no function is known."""
    where = user_function(frames) or (parts(frames[0])[0] if frames else "")
    for pattern, kind, words in _KERNEL:
        if pattern.search(one.waits_in):
            return RankActivity(kind, words, where)
    share = one.cpu_share
    is_busy = share is not None and share >= BUSY_SHARE
    # It is found ready to run, whatever share the machine has left for it.
    if is_busy or (one.state == "R" and where and share != 0.0):
        return RankActivity(Kind.COMPUTE, "computes", where)
    if not frames:
        return RankActivity(Kind.UNKNOWN, "not known")
    return RankActivity(
        Kind.OTHER, "waits" if share is not None and share < IDLE_SHARE else "is", where
    )
