"""Check whether a process may be forked: state that its children would share or lack."""

import os
import sys
from collections.abc import Collection

_SHARED = ("socket:", "pipe:", "anon_inode:")
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg")
"""Device files of NVIDIA's driver, AMD's, and under WSL."""
_HARMLESS = ("jemalloc_bg_thd",)
"""Threads whose library prepares for a fork, and does without them in a child. jemalloc, a part of
pyarrow, returns memory to the system in its thread. In a child the threads that allocate return it
(`background_thread_postfork_child` of jemalloc 5)."""
NAMES_MAX = 4
"""Threads that a reason names at most."""


class Look:
    """Examines this process."""

    def __init__(self, lost: str) -> None:
        """`lost` is the end of the reason if only libraries have started threads."""
        self._lost = lost
        self.directory = os.getcwd()
        self._known = dict(_open_files())

    def danger(self, ours: Collection[int] = (), is_forked: bool = True) -> str | None:
        """Return the reason that forbids a fork, or None; `ours` are descriptors of sockets that do
        not. In a process that is forked no more, threads of libraries are no reason."""
        # CUDA starts threads and opens files: CUDA itself is the better reason.
        return (
            cuda()
            or self._threads(is_forked)
            or _processes()
            or self._files(ours)
            or self._elsewhere()
        )

    def _threads(self, is_forked: bool) -> str | None:
        if len(os.listdir("/proc/self/task")) == 1:
            return None
        if found := _python_threads():
            return f"has started threads: {', '.join(found)}"
        found = _native_threads() if is_forked else []
        names = ", ".join(found[:NAMES_MAX])
        return f"has started threads ({names}) {self._lost}" if found else None

    def _files(self, ours: Collection[int]) -> str | None:
        for number, target in _open_files():
            if number in ours or self._known.get(number) == target:
                continue
            if target.startswith(_SHARED):
                kind = target.partition(":")[0].replace("anon_inode", target[11:])
                return f"holds a {kind} (descriptor {number})"
            if target.startswith(_GPUS):
                return f"has opened {target}: what uses a GPU does not survive a fork"
        return None

    def _elsewhere(self) -> str | None:
        now = os.getcwd()
        return None if now == self.directory else f"has changed the directory to {now}"


def end_children() -> None:
    """Kill processes that modules have started."""
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as children:
                pids = [int(pid) for pid in children.read().split()]
        except FileNotFoundError:
            continue
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def _native_threads() -> list[str]:
    # Libraries that prepare for a fork, such as OpenBLAS, end their threads before one.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    names = []
    for task in sorted(os.listdir("/proc/self/task"), key=int)[1:]:
        try:
            with open(f"/proc/self/task/{task}/comm") as name:
                names += [name.read().strip()]
        except OSError:
            continue
    return [name for name in names if name not in _HARMLESS]


def _python_threads() -> list[str]:
    threading = sys.modules.get("threading")
    if threading is None:
        return []
    main = threading.main_thread()
    return [thread.name for thread in threading.enumerate() if thread is not main]


def _processes() -> str | None:
    try:
        result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    pid = "" if result is None else f" {result.si_pid}"
    return f"has started a process{pid}"


def cuda() -> str | None:
    """Return whether torch has begun to use CUDA, in this process or in the one it was forked
    from."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and (cuda.is_initialized() or cuda._is_in_bad_fork()):
        return "has initialised CUDA"
    return None


def _open_files() -> list[tuple[int, str]]:
    result = []
    for name in os.listdir("/proc/self/fd"):
        try:
            result += [(int(name), os.readlink(f"/proc/self/fd/{name}"))]
        except OSError:
            # The descriptor of the directory itself.
            continue
    return result
