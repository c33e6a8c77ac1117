"""A client of torch's store waits until somebody listens there.

Torch's own pauses for about 500 ms after a first connection that was refused (torch 2.6 to 2.13).
Ranks that start cold are further apart than that; those that start warm would spend most of their
start there.  `groups.watch` does the same, and more, for functions that are restartable.
"""

import sys
from typing import Any

TRY_SECONDS = 0.001
TRY_SECONDS_MAX = 0.25
SHARE = 0.2
"""Of what has been waited already: thousands of ranks ask one host."""
PATIENCE_SECONDS = 10.0
"""Then torch goes on in its own way, and says what is wrong."""


def be_patient() -> None:
    """From now on clients wait so, where torch.distributed is imported."""
    store: Any = getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
    if store is None or getattr(store.__init__, "__name__", "") == "patient":
        return
    make = store.__init__

    def patient(self: Any, *given: Any, **named: Any) -> None:
        words = {**dict(zip(("host_name", "port", "", "is_master"), given, strict=False)), **named}
        if not words.get("is_master") and isinstance(words.get("port"), int):
            _await_listening(str(words.get("host_name")), words["port"], words.get("timeout"))
        make(self, *given, **named)

    # Without `__wrapped__`, by which `groups.watch` knows its own.
    store.__init__ = patient


def _await_listening(host: str, port: int, timeout: Any) -> None:
    import socket
    from time import monotonic, sleep  # noqa: TID251  (in the user's process, at its own pace)

    limit = timeout.total_seconds() if hasattr(timeout, "total_seconds") else PATIENCE_SECONDS
    began = monotonic()
    while (waited := monotonic() - began) < min(limit, PATIENCE_SECONDS):
        try:
            socket.create_connection((host, port), PATIENCE_SECONDS).close()
        except ConnectionRefusedError:
            sleep(min(TRY_SECONDS + SHARE * waited, TRY_SECONDS_MAX))
        except OSError:
            return
        else:
            return
