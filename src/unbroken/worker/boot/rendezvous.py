"""A client of torch's store waits until somebody listens there, and nobody asks for names.

Torch's own pauses for about 500 ms after a first connection that was refused (torch 2.6 to 2.13).
Ranks that start cold are further apart than that; those that start warm would spend most of their
start there.  `groups.watch` does the same, and more, for functions that are restartable.

For its log torch looks up the name of each address that it connects to or that connects, mostly in
the DNS: a question that is lost holds up the store, and so everybody, for 5 s.
"""

import sys
from typing import Any

TRY_SECONDS = 0.001
TRY_SECONDS_MAX = 0.25
SHARE = 0.1
"""Of what has been waited already: thousands of ranks ask one host."""
PATIENCE_SECONDS = 10.0
"""Then torch goes on in its own way, and says what is wrong."""
FATAL = 4
"""Above every level at which torch logs."""


def be_patient() -> None:
    """From now on clients wait so, where torch.distributed is imported."""
    store: Any = getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
    if store is None or hasattr(store.__init__, "torchs_own"):
        return
    make = store.__init__

    def patient(self: Any, *given: Any, **named: Any) -> None:
        words = {**dict(zip(("host_name", "port", "", "is_master"), given, strict=False)), **named}
        if not words.get("is_master") and isinstance(words.get("port"), int):
            timeout: Any = words.get("timeout")
            limit = PATIENCE_SECONDS
            if hasattr(timeout, "total_seconds"):
                limit = min(limit, timeout.total_seconds())
            await_listening(str(words.get("host_name")), words["port"], limit)
        make(self, *given, **named)

    # Without `__wrapped__`, by which `groups.watch` knows its own.
    patient.torchs_own = make  # type: ignore[attr-defined]
    store.__init__ = patient
    ask_for_no_names()


def await_listening(host: str, port: int, seconds: float) -> float:
    """The seconds that a connection takes; 0: nobody listens in time, or torch may find out why."""
    import socket
    from time import monotonic, sleep  # noqa: TID251  (in the user's process, at its own pace)

    began = now = monotonic()
    while now - began < seconds:
        try:
            socket.create_connection((host, port), seconds).close()
        except ConnectionRefusedError:
            sleep(min(TRY_SECONDS + SHARE * (now - began), TRY_SECONDS_MAX))
        except OSError:
            break
        else:
            return monotonic() - now
        now = monotonic()
    return 0.0


def ask_for_no_names() -> None:
    """Have torch write addresses as numbers, in this process and those that are forked from it.

    Torch looks up no more names once it could not (torch 2.9 to 2.13, formatSockAddr in
    socket.cpp).  So there is one that it cannot: that of a port that is taken, of which a store
    complains.  It asks nobody, in this thread and this moment only (`retry` of resolver(3)), and
    says nothing of it.  (A client that nobody answers would do, but pauses for up to 1 s.)
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
    resolver = state().contents  # retrans, retry, ...: its beginning has been the same since BIND 4
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
