"""Loopback addresses of clusters, nodes and pods: a /16 for each cluster, a /24 for each node.

Claims are files in the user's state folder, which no other user can enter or occupy. A claim is
void when its cluster's folder is gone. If all blocks are claimed, those of clusters that do not run
are reassigned. A block in which any program listens is left alone: it is another user's, or what
listens has outlived a cluster that was killed and deleted.

Linux answers on all of 127.0.0.0/8 without set-up.  A pod's address is written down in its
directory, so it stays with the pod over restarts of the runner; a freed one is used again last.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network
from pathlib import Path

from unbroken.errors import SpecError, WorldError

from .listeners import listens_in
from .state import Paths, running

CLAIMS: Path | None = None
"""The folder in which claims are kept, for tests; None: see `_folder`."""
CLAIM_BYTES_MAX = 4096


def claim(directory: Path) -> int:
    """Number of the cluster in `directory`: the same each time, and no other cluster's."""
    with _claims() as folder:
        held = _held(folder)
        for number, holder in held.items():
            if holder == str(directory):
                return number
        for is_void in (_is_gone, _is_stopped):
            for number in range(CLUSTERS_MAX):
                if is_void(held.get(number, "")) and _is_free(number):
                    draft = folder / "draft"
                    draft.write_text(str(directory))
                    draft.replace(folder / str(number))
                    return number
    raise WorldError(f"{CLUSTERS_MAX} clusters on this machine hold all loopback addresses")


def release(directory: Path) -> None:
    """Give up the number of a cluster that is deleted."""
    with _claims() as folder:
        for number, holder in _held(folder).items():
            if holder == str(directory):
                (folder / str(number)).unlink()


def _held(folder: Path) -> dict[int, str]:
    """The folder of the cluster that claims each number."""
    result = {}
    for path in folder.iterdir():
        if path.name.isdecimal() and path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                result[int(path.name)] = os.fsdecode(file.read(CLAIM_BYTES_MAX))
    return result


def _is_gone(holder: str) -> bool:
    return not holder or not Path(holder).is_dir()


def _is_stopped(holder: str) -> bool:
    return _is_gone(holder) or running(Paths(Path(holder))) is None


def _folder() -> Path:
    """The folder of this user's claims.

    It does not depend on the shell: two shells with other variables would give one block twice. So
    it is in the home folder of the user's entry, and in XDG_RUNTIME_DIR only if there is none.
    """
    if CLAIMS is not None:
        return CLAIMS / "networks"
    try:
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        home = Path(os.environ.get("HOME", "/nonexistent"))
    if home.is_dir() and os.access(home, os.W_OK):
        return home / ".local/state/unbroken/networks"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not runtime:
        raise WorldError(
            f"cannot note this cluster's addresses: the home folder {home} cannot be written, and "
            "XDG_RUNTIME_DIR is not set; set it to a folder that only you can enter"
        )
    return Path(runtime) / "unbroken/networks"


@contextmanager
def _claims() -> Iterator[Path]:
    """The folder of claims, for this process alone."""
    folder = _folder()
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        result = folder.lstat()
    except OSError as error:
        raise WorldError(f"cannot note this cluster's addresses in {folder}: {error}") from error
    if result.st_uid != os.geteuid() or not stat.S_ISDIR(result.st_mode):
        raise WorldError(f"{folder} belongs to another user or is no folder: have it removed")
    folder.chmod(0o700)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(folder / "lock", flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(handle)


def _is_free(number: int) -> bool:
    """True if nothing listens at an address of the block: no cluster of another user, and no
    program that outlived a cluster which was killed."""
    block = IPv4Network((node_address(number * NODES_MAX), 16), strict=False)
    return not listens_in(block)


FIRST_NET = 64
"""Cluster 0 has 127.64.0.0/16; what lies below is left to the host's own uses."""
CLUSTERS_MAX = 255 - FIRST_NET
NODES_MAX = 256
"""Nodes of one cluster."""
FIRST_POD, LAST_POD = 2, 254


def node_address(index: int) -> str:
    """Address of a node; its server listens there.  `index`: cluster * NODES_MAX + node."""
    if not 0 <= index < CLUSTERS_MAX * NODES_MAX:
        raise SpecError(f"node index {index} is not between 0 and {CLUSTERS_MAX * NODES_MAX - 1}")
    return f"127.{FIRST_NET + index // NODES_MAX}.{index % NODES_MAX}.1"


class PodAddresses:
    """Hands out the addresses of one node's pods, each to one pod at a time."""

    def __init__(self, index: int) -> None:
        self._prefix = node_address(index).rpartition(".")[0]
        self._used: set[str] = set()
        self._next = FIRST_POD

    def keep(self, addresses: Iterable[str]) -> None:
        """These belong to pods of an earlier runner."""
        for address in addresses:
            self._used.add(address)
            self._next = max(self._next, int(address.rpartition(".")[2]) + 1)

    def take(self) -> str:
        """An address that no pod has; WorldError when all are taken."""
        for _ in range(LAST_POD):
            number = self._next if FIRST_POD <= self._next <= LAST_POD else FIRST_POD
            self._next = number + 1
            address = f"{self._prefix}.{number}"
            if address not in self._used:
                self._used.add(address)
                return address
        raise WorldError("all addresses of the node are taken")

    def free(self, address: str) -> None:
        """The pod is gone."""
        self._used.discard(address)
