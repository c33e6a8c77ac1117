"""One container's life, in a process of its own that outlives the runner.

The supervisor starts the program and turns its output into a log. When the program ends, it kills
everything that the program left behind, writes how it ended, and ends too. A watcher of its pidfd
knows then that nothing of the container lives. It is the subreaper of the container, so a process
that daemonises stays its descendant. Signals are its only orders: SIGTERM is passed to the program,
SIGUSR1 kills everything.

Standard library only: it is forked from the launcher, which loads nothing else.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from . import isolation
from .cri_log import LogFile
from .isolation import Isolation, Mount

Request = dict[str, Any]
CHUNK = 64 * 1024
SIGTERM, SIGKILL_ALL = signal.SIGTERM, signal.SIGUSR1
"""Orders: pass it to the program; kill everything."""
START_ERROR = 128
"""Exit code of a program that could not be started (containerd, reason StartError)."""


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is none.

    With the number of the process it identifies one process for as long as the machine is up.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything, so count fields from its end.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def descendants(root: int) -> list[int]:
    """All processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(name))
    result = list(children.get(root, ()))
    for pid in result:
        result += children.get(pid, ())
    return result


def kill(pid: int, number: int) -> None:
    """Signal a process that may be gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Write a small file so that a reader sees all of it or nothing."""
    draft = path + ".draft"
    fd = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(draft, path)


class Reaper:
    """Owns the children of this process: knows when the program ends, ends the others."""

    def __init__(self) -> None:
        self.main = 0
        self.status: int | None = None
        """Status of the program, as from wait(2); None while it runs."""
        self.wakeup, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.orders: list[int] = []

    def listen(self, orders: Sequence[int]) -> None:
        """Wake up `wakeup` on a child's end and on these signals."""
        isolation.prctl(isolation.PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *orders):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            self.orders.append(number)

    def drain(self) -> None:
        """Clear the wake-up."""
        try:
            while os.read(self.wakeup, 512):
                pass
        except BlockingIOError:
            return

    def reap(self, *, wait: bool = False) -> bool:
        """Collect ended children; False when there are no children at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.main:
                self.status = status
            if wait:
                return True

    def kill_all(self) -> None:
        """Kill every descendant and wait for the end of each."""
        while self.reap():
            for pid in descendants(os.getpid()):
                kill(pid, signal.SIGKILL)
            # The killed ones' children become ours, so look again after each end.
            self.reap(wait=True)


def become_program(request: Request, streams: Sequence[int], gate: int, errors: int) -> NoReturn:
    """In the forked child: isolate, wait for the word, and become the program."""
    try:
        os.setsid()
        _enter(request)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        if request.get("tty"):
            _take_terminal()
        if not os.read(gate, 1):
            os._exit(START_ERROR)
        os.chdir(request["cwd"])
        _become_user(request)
        # After the last change of credentials, which would undo it.
        isolation.prctl(isolation.PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except (OSError, ValueError) as error:
        os.write(errors, _start_message(request, error).encode()[:4096])
    finally:
        os._exit(START_ERROR)


def _enter(request: Request) -> None:
    for group in request.get("cgroups", ()):
        with open(f"{group}/cgroup.procs", "w", encoding="ascii") as file:
            file.write("0")
    kind = Isolation(request["isolation"])
    if "join" in request:
        if kind is not Isolation.NONE:
            isolation.join(request["join"], kind)
    elif kind is not Isolation.NONE:
        isolation.unshare(kind)
        if request.get("hostname"):
            isolation.set_hostname(request["hostname"])
        isolation.mount_all([Mount(*mount) for mount in request["mounts"]], request["scratch"])


def _become_user(request: Request) -> None:
    if request.get("gid") is not None:
        os.setgroups([])
        os.setgid(request["gid"])
    if request.get("uid") is not None:
        os.setuid(request["uid"])


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _start_message(request: Request, error: OSError | ValueError) -> str:
    program = request["argv"][0]
    if isinstance(error, ValueError):
        return f'exec: "{program}": {error}'
    if isinstance(error, FileNotFoundError) and not os.path.isdir(request["cwd"]):
        return f"workingDir {request['cwd']}: no such directory"
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        text = "no such file or directory"
        if "/" not in program:
            text = "executable file not found in $PATH"
        return f'exec: "{program}": {text}'
    return f'exec: "{program}": {error.strerror or error}'


def start(request: Request, streams: Sequence[int], reaper: Reaper) -> tuple[int, int]:
    """Fork the program, which waits at a gate: write to the first descriptor to let it go.

    From the second one comes why it could not be started, or nothing.
    """
    gate_out, gate_in = os.pipe2(os.O_CLOEXEC)
    errors_out, errors_in = os.pipe2(os.O_CLOEXEC)
    reaper.main = os.fork()
    if reaper.main == 0:
        os.close(gate_in)
        become_program(request, streams, gate_out, errors_in)
    os.close(gate_out)
    os.close(errors_in)
    for fd in set(streams):
        os.close(fd)
    return gate_in, errors_out


def read_all(fd: int) -> bytes:
    """Read to the end and close."""
    with os.fdopen(fd, "rb") as file:
        return file.read()


def exit_code(status: int) -> int:
    """Return the exit code as a shell and the container runtimes count: 128 + signal."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def run_container(request: Request, report: socket.socket) -> None:
    """Be the supervisor of a container until nothing of it is left."""
    os.setsid()
    isolation.prctl(isolation.PR_SET_NAME, b"unbroken-pod")
    reaper = Reaper()
    reaper.listen((signal.SIGTERM, signal.SIGUSR1))
    streams, outputs = _container_streams(request)
    gate, errors = start(request, streams, reaper)
    report.send(json.dumps({"pid": os.getpid(), "ticks": start_ticks(os.getpid())}).encode())
    if not report.recv(1):
        # The runner died before it could record us: this container never was.
        reaper.kill_all()
        return
    os.write(gate, b"g")
    os.close(gate)
    started_at = time.time_ns()
    problem = read_all(errors).decode("utf-8", "replace")
    if problem:
        reaper.kill_all()
        _write_exit(request, started_at, START_ERROR, "StartError", problem)
        report.close()
        return
    started = {"main": reaper.main, "started_at": started_at / 1e9}
    write_json(os.path.join(request["directory"], "main.json"), started)
    report.send(json.dumps(started).encode())
    report.close()
    _pump(request, outputs, reaper)
    assert reaper.status is not None
    reason = "" if not _was_oom_killed(request) else "OOMKilled"
    _write_exit(request, started_at, exit_code(reaper.status), reason, "")


def _container_streams(request: Request) -> tuple[list[int], dict[int, str]]:
    """The program's three streams, and what is read here: descriptor -> name."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    if request.get("tty"):
        import pty

        master, slave = pty.openpty()
        os.close(null)
        return [slave, slave, slave], {master: "stdout"}
    out, out_write = os.pipe2(os.O_CLOEXEC)
    error, error_write = os.pipe2(os.O_CLOEXEC)
    return [null, out_write, error_write], {out: "stdout", error: "stderr"}


def _pump(request: Request, outputs: dict[int, str], reaper: Reaper) -> None:
    """Log output and carry out orders until the program has ended and all others are dead."""
    log = LogFile(os.path.join(request["directory"], "log"))
    log.open()
    poll = select.poll()
    poll.register(reaper.wakeup, select.POLLIN)
    for fd in outputs:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    while reaper.status is None:
        for fd, _ in poll.poll():
            if fd == reaper.wakeup:
                reaper.drain()
                reaper.reap()
            elif not _copy(fd, outputs[fd], log):
                poll.unregister(fd)
        _obey(reaper)
    reaper.kill_all()
    for fd, stream in outputs.items():
        while _copy(fd, stream, log) is True:
            pass
    log.finish(time.time_ns())


def _obey(reaper: Reaper) -> None:
    while reaper.orders:
        if reaper.orders.pop(0) == signal.SIGUSR1:
            reaper.kill_all()
        elif reaper.status is None:
            kill(reaper.main, signal.SIGTERM)


def _copy(fd: int, stream: str, log: LogFile) -> bool | None:
    """Log one chunk.  False at the end of the stream, None when nothing is there now."""
    try:
        data = os.read(fd, CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        # A terminal whose other side has been closed.
        return False
    if not data:
        return False
    log.write(stream, data, time.time_ns())
    return True


def oom_kills(group: str) -> int:
    """Return the number of OOM kills of the kernel in this cgroup."""
    with open(f"{group}/memory.events", encoding="ascii") as file:
        counts = dict(line.split() for line in file)
    return int(counts.get("oom_kill", 0))


def _was_oom_killed(request: Request) -> bool:
    return any(
        os.path.exists(f"{group}/memory.events") and oom_kills(group) > 0
        for group in request.get("cgroups", ())
    )


def _write_exit(request: Request, started_at: int, code: int, reason: str, message: str) -> None:
    write_json(
        os.path.join(request["directory"], "exit.json"),
        {
            "exit_code": code,
            "reason": reason,
            "message": message,
            "started_at": started_at / 1e9,
            "finished_at": time.time_ns() / 1e9,
        },
    )


def run_exec(request: Request, streams: Sequence[int], control: socket.socket) -> None:
    """Be the supervisor of a command inside a container: it dies with the container.

    Processes that the command leaves running stay, until the container ends. When the client goes
    away before the command's end, all of them are killed.
    """
    os.setsid()
    reaper = Reaper()
    reaper.listen(())
    try:
        container = os.pidfd_open(request["join"])
        request["env"] = {**_environment_of(request["join"]), **request.get("env", {})}
    except OSError:
        control.send(json.dumps({"error": "the container has ended"}).encode())
        return
    gate, errors = start(request, streams, reaper)
    os.write(gate, b"g")
    problem = read_all(errors).decode("utf-8", "replace")
    if problem:
        control.send(json.dumps({"error": problem}).encode())
        return
    poll = select.poll()
    for fd in (reaper.wakeup, container, control.fileno()):
        poll.register(fd, select.POLLIN)
    is_told = False
    while True:
        ready = {fd for fd, _ in poll.poll()}
        reaper.drain()
        has_children = reaper.reap()
        if reaper.status is not None and not is_told:
            is_told = True
            poll.unregister(control.fileno())
            control.send(json.dumps({"exit_code": exit_code(reaper.status)}).encode())
            control.close()
        if container in ready or control.fileno() in ready or not has_children:
            break
    reaper.kill_all()


def _environment_of(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
