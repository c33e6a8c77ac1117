"""The rank that wrote a recorded line, by the name of the file and by prefixes of tools.

Prefixes of tools are removed, because the agent's rules see the line as the worker wrote it. These
are `[default0]:` of torchrun, `[3]: ` of `unbroken logs`, the time of `kubectl logs --timestamps`,
and `[pod/NAME/CONTAINER] ` of `--prefix`. `[rank3]:`, which torch itself writes, stays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from unbroken.errors import SpecError

KUBECTL_TIME = re.compile(
    rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{7,9}(?:Z|[+-]\d\d:\d\d) (?:(stdout|stderr) [FP] )?"
)
KUBECTL_POD = re.compile(rb"\[pod/[^\]/\s]{0,253}?(\d{1,9})/[^\]\s]+\] ")
WORKER = re.compile(
    rb"\[(?:(\d{1,9})\]: ?|(rank)(\d{1,9})\]:|([A-Za-z_][\w.]{0,200}?)(\d{1,9})\]:)"
)
AGENT = re.compile(rb"\[[a-z0-9][-a-z0-9]*-\d+\]: ")
"""Prefix of `unbroken logs` before a line that no worker wrote."""
DROPPED_LINES = re.compile(r"unbroken: lines dropped here, .{1,200}: ([0-9]{1,15})$")
"""The line of the local cluster's log in place of lines that are gone (local/node/logs)."""

_TORCHRUN = re.compile(r"(?:attempt_(\d{1,9})/)?(\d{1,9})/(stdout|stderr)(?:\.log)?(?:\.gz)?$")
_ATTEMPT = re.compile(r"attempt[-_](\d{1,9})")
_RANK = re.compile(r"rank[-_.=]?(\d{1,9})", re.IGNORECASE)
_NODE = re.compile(r"node[-_.=]?(\d{1,9})", re.IGNORECASE)
_POD = re.compile(r"[a-z0-9]-(\d{1,9})(?:_[^/]*/[^/]+/\d+)?(?:\.(?:log|txt|out|err))*(?:\.gz)?$")


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """The origin of a file's lines."""

    attempt: int = 0
    rank: int | None = None
    """Rank over the whole job; None: see `local_rank`."""
    node: int = 0
    local_rank: int = 0
    stream: str = "stdout"


def origin_of(path: str) -> FileOrigin:
    """Return the origin according to the file's name."""
    stream = "stderr" if re.search(r"(stderr|\.err)[^/]*$", path) else "stdout"
    attempt, node, rank = (_last(pattern, path) for pattern in (_ATTEMPT, _NODE, _RANK))
    torchrun, pod = _TORCHRUN.search(path), _POD.search(path)
    if rank is None and torchrun is None and pod and node is None:
        node = int(pod[1])
    local_rank = int(torchrun[2]) if torchrun else 0
    return FileOrigin(attempt or 0, rank, node or 0, local_rank, stream)


def _last(expression: re.Pattern[str], path: str) -> int | None:
    result = expression.findall(path)
    return int(result[-1]) if result else None


class Prefix(Enum):
    """The meaning of a number before a line."""

    RANK = "rank"
    LOCAL_RANK = "local rank"
    NODE = "node"
    AGENT = "agent"
    """The line is no worker's."""


@dataclass(frozen=True, slots=True)
class BareLine:
    """A line without prefixes of tools."""

    text: bytes
    stamp: bytes = b""
    """Time stamp of kubectl; better than a time in the text."""
    stream: str | None = None
    prefixes: tuple[tuple[Prefix, int], ...] = ()


def take_off(line: bytes) -> BareLine:
    """Split a line into the prefixes of tools and the rest."""
    if line[:1] not in b"[0123456789":
        return BareLine(line)
    stamp, stream, prefixes = b"", None, []
    if pod := KUBECTL_POD.match(line):
        prefixes.append((Prefix.NODE, int(pod[1])))
        line = line[pod.end() :]
    if time := KUBECTL_TIME.match(line):
        stamp, line = time[0], line[time.end() :]
        stream = time[1].decode() if time[1] else None
    if AGENT.match(line):
        return BareLine(line, stamp, stream, ((Prefix.AGENT, 0),))
    if worker := WORKER.match(line):
        rank, is_torch, of_torch, _, local_rank = worker.groups()
        kind = Prefix.LOCAL_RANK if local_rank else Prefix.RANK
        prefixes.append((kind, int(rank or of_torch or local_rank)))
        if not is_torch:
            line = line[worker.end() :]
    return BareLine(line, stamp, stream, tuple(prefixes))


def dropped_lines(line: bytes) -> int:
    """Return the number of lines that are gone where this line is; 0: it is an ordinary line."""
    result = DROPPED_LINES.match(line.decode(errors="replace"))
    return int(result[1]) if result else 0


def rank_of(origin: FileOrigin, told: BareLine, nproc: int | None) -> int | None:
    """Return the rank that wrote a line; None: no worker did.

    Raises SpecError if `nproc` has to be known.
    """
    rank, node, local_rank = origin.rank, origin.node, origin.local_rank
    for kind, number in told.prefixes:
        match kind:
            case Prefix.AGENT:
                return None
            case Prefix.RANK:
                rank = number
            case Prefix.NODE:
                rank, node = None, number
            case Prefix.LOCAL_RANK:
                rank, local_rank = None, number
    if rank is not None:
        return rank
    if node and nproc is None:
        raise SpecError(
            f"which rank is local rank {local_rank} of node {node}? Give --nproc-per-node, or "
            "--rank FILE=RANK"
        )
    return node * (nproc or 0) + local_rank
