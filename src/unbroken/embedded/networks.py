"""Which block of loopback addresses a cluster has, so that two on one machine never share any.

Claims are files in a folder of this user's; a claim is void when its cluster's directory is gone.
Another user's cluster is noticed by its first node's address being taken.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unbroken.errors import WorldError

from .node.addresses import CLUSTERS_MAX, NODES_MAX, node_address

KUBELET_PORT = 10250
CLAIMS = Path("/tmp")
"""Not TMPDIR: shells that set it differently would give the same block twice."""


def claim(directory: Path) -> int:
    """Number of the cluster in `directory`: the same each time, and no other cluster's."""
    with _claims() as folder:
        held = {path.name: path.read_text() for path in folder.iterdir() if path.name.isdecimal()}
        for name, holder in held.items():
            if holder == str(directory):
                return int(name)
        for number in range(CLUSTERS_MAX):
            holder = held.get(str(number), "")
            if (not holder or not Path(holder).is_dir()) and _is_free(number):
                (folder / str(number)).write_text(str(directory))
                return number
    raise WorldError(f"{CLUSTERS_MAX} clusters on this machine hold all loopback addresses")


@contextmanager
def _claims() -> Iterator[Path]:
    """The folder of claims, for this process alone."""
    folder = CLAIMS / f"unbroken-networks-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise WorldError(f"cannot note this cluster's addresses in {folder}: {error}") from error
    if folder.lstat().st_uid != os.getuid():
        raise WorldError(f"{folder} belongs to somebody else; have it removed")
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(handle)


def _is_free(number: int) -> bool:
    """Whether nobody serves at the first node's address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((node_address(number * NODES_MAX), KUBELET_PORT))
        except OSError:
            return False
    return True
