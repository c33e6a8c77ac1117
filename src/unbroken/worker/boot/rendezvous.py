"""A client of torch's store that waits for its server, without the pauses of torch's own.

Torch's client pauses for about 500 ms after a first connection that was refused (torch 2.6 to
2.13). Ranks that start cold are further apart than that. Ranks that start warm would spend most of
their start there.

For its log torch looks up the name of each address that it connects to or that connects, mostly in
the DNS. A lost query holds up the store, and so all ranks, for 5 s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

TRIED = {"2.12": "2.12.1 (CUDA build without a GPU)", "2.13": "2.13.0 (CPU build)",
         "2.15": "2.15.0 (CUDA build without a GPU)"}  # fmt: skip
"""Minor versions of torch that tests/worker/test_restart.py has passed with, and the builds."""
OFF, ON, ANY_TORCH = "off", "on", "any-torch"
"""Values of `UNBROKEN_IN_PROCESS`."""
ARGUMENTS = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers",
             "multi_tenant", "master_listen_fd", "use_libuv")  # fmt: skip
"""Parameters of `TCPStore`, torch 2.6 to 2.13."""
DEFAULT_SECONDS = 300.0
"""Default of its `timeout`."""
CONNECT_SECONDS = 0.1
"""Seconds until a client's first attempt times out, doubled by each failure: each failure is a line
of torch's log and a lookup of a name."""
POLL_SECONDS = 0.001
POLL_SECONDS_MAX = 0.25
POLL_SHARE = 0.1
"""Pause as a share of the time waited so far: thousands of ranks may poll one host."""
FATAL = 4
"""Log level above every level at which torch logs."""
Construct = Callable[..., None]


def refusal(switch: str, version: str) -> str | None:
    """Return why torch must not be changed; None: it may be."""
    if switch not in ("", ON, ANY_TORCH):
        known = f"on, off or {ANY_TORCH}"
        return f"UNBROKEN_IN_PROCESS is {switch!r}" + ("" if switch == OFF else f", not {known}")
    if version and switch != ANY_TORCH and ".".join(version.split(".")[:2]) not in TRIED:
        tried = ", ".join(TRIED.values())
        return (
            f"torch {version} was never tried (tried: {tried}); a fault gives this worker a new "
            f"process. Install a tried version, or set UNBROKEN_IN_PROCESS={ANY_TORCH}"
        )
    return None


def be_patient(switch: str) -> None:
    """Make clients wait like this from now on, if torch.distributed is imported."""
    torch: Any = sys.modules.get("torch")
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    if hasattr(rendezvous, "TCPStore") and refusal(switch, torch.__version__) is None:
        store = rendezvous.TCPStore
        rendezvous.TCPStore = patient(store, store.__init__)
        ask_for_no_names()


def patient(store: Any, construct: Construct) -> Any:
    """Make a subclass of `TCPStore` whose client connects when its server listens.

    Its attempts are short: between them a signal reaches Python, during torch's pauses it does not.
    The server of `init_process_group` does not wait for clients: the group does.
    """

    def make(self: Any, *args: Any, **named: Any) -> None:
        given = dict(zip(ARGUMENTS, args, strict=False)) | named
        if given.get("is_master") or not {"host_name", "port"} <= given.keys():
            if given.get("multi_tenant"):
                given.setdefault("wait_for_workers", False)
            construct(self, **given)
        else:
            _connect(self, construct, given)

    members = {"__init__": make, "__module__": store.__module__, "__doc__": store.__doc__}
    return type("TCPStore", (store,), members)


def _connect(store: Any, construct: Construct, given: dict[str, Any]) -> None:
    from datetime import timedelta
    from time import monotonic  # noqa: TID251  (in the user's process, at its own pace)

    timeout = given.get("timeout", timedelta(seconds=DEFAULT_SECONDS))
    end, patience = monotonic() + timeout.total_seconds(), 1
    while True:
        took = await_listening(str(given["host_name"]), int(given["port"]), end - monotonic())
        seconds = max(CONNECT_SECONDS, 3 * took) * patience
        seconds = min(seconds, max(end - monotonic(), CONNECT_SECONDS))
        try:
            construct(store, **{**given, "timeout": timedelta(seconds=seconds)})
        except RuntimeError:
            if monotonic() > end:
                raise
            patience *= 2
        else:
            store.set_timeout(timeout)
            return


def await_listening(host: str, port: int, seconds: float) -> float:
    """Wait for a server; return the seconds that a connection takes.

    0: nothing listens in time, or the address is unusable (torch then reports why).
    """
    import socket
    from time import monotonic, sleep  # noqa: TID251  (in the user's process, at its own pace)

    began = now = monotonic()
    while now - began < seconds:
        try:
            socket.create_connection((host, port), seconds).close()
        except ConnectionRefusedError:
            sleep(min(POLL_SECONDS + POLL_SHARE * (now - began), POLL_SECONDS_MAX))
        except OSError:
            break
        else:
            return monotonic() - now
        now = monotonic()
    return 0.0


def ask_for_no_names() -> None:
    """Make torch write addresses as numbers, in this process and those that are forked from it.

    Torch looks up no more names after a lookup has failed (torch 2.9 to 2.13, formatSockAddr in
    socket.cpp). So one lookup is made to fail: that for the log line about a port that is taken. It
    sends no query, in this thread and this moment only (`retry` of resolver(3)), and logs nothing.
    (A client without an answering server would do, but pauses for up to 1 s.)
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        return
    import contextlib
    import ctypes
    import socket

    try:
        libc = ctypes.CDLL(None)
        core = ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so")
        level = ctypes.c_int.in_dll(core, "FLAGS_caffe2_log_level")
        begin, state = libc.__res_init, libc.__res_state
    except (OSError, ValueError, AttributeError):
        return  # another libc, or another torch
    begin()
    state.restype = ctypes.POINTER(ctypes.c_int * 2)
    # retrans, retry, ...: the first fields have been the same since BIND 4
    resolver = state().contents
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        before = level.value, resolver[1]
        level.value, resolver[1] = FATAL, 0
        try:
            with contextlib.suppress(RuntimeError):
                torch.distributed.TCPStore(
                    "127.0.0.1", taken.getsockname()[1], is_master=True, use_libuv=False
                )
        finally:
            level.value, resolver[1] = before
