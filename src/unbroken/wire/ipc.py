"""Frames of the socket between an agent and its workers: those of the HyperPod agent 1.1.3.

A frame is four bytes, big-endian, of length, and a JSON object in UTF-8 of this length. A worker's
object has `type`, `local_rank` and `client_id`; one without them is dropped. Types of this project
beyond the documented ones are marked "Ours"; a stock client never sends or gets them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

VARIABLE = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"
HEADER = struct.Struct(">I")
FRAME_BYTES_MAX = 16 * 1024 * 1024

INIT = "init"
"""Ours adds `restartable: true` and `attempt`: this worker can leave its training on request."""
AT_BARRIER, PAST_BARRIER = "at_rcb_barrier", "past_rcb_barrier"
"""Ours add `attempt`, which was left or is begun: late messages of an older one do not count."""
JOB_START, JOB_FAULT, JOB_RANK_INFO = "job_start", "job_fault", "job_rank_info"
"""Ours adds `save_seconds` to `job_fault` before a planned move: the worker leaves after it has
saved the step that it is in, or after this time."""
STUCK_CODE = 75
"""Ours: exit code of a worker that cannot leave its training on request; EX_TEMPFAIL of
sysexits.h."""
JOB_DATA, RANK_LABELS = "job_data", "rank_labels"
CHECKPOINT_INIT, CHECKPOINT_UPDATE, CHECKPOINT_GET = (
    "ckpt_init",
    "ckpt_info_update",
    "ckpt_info_get",
)

SNAPSHOT_OPEN = "snapshot_open"
"""Ours: `name`, `rank`, `attempt`, `slot` (0 or 1), `bytes`; answered with `snapshot_slot`.

Every answer about snapshots may have `error` instead.
"""
SNAPSHOT_SLOT = "snapshot_slot"
"""Ours: with one descriptor."""
SNAPSHOT_SAVED = "snapshot_saved"
"""Ours: `name`, `rank`, `attempt`, `slot`, `step`; answered with `snapshot_kept`."""
SNAPSHOT_USED = "snapshot_used"
"""Ours: `name`, `rank`, `attempt`, and the snapshot that all ranks restored, `from_attempt` and
`step`.

Other snapshots of older attempts may go. Answered with `snapshot_kept`.
"""
SNAPSHOT_KEPT = "snapshot_kept"
SNAPSHOT_FIND = "snapshot_find"
"""Ours: `name`, `rank`, `attempt`; answered with `snapshot_found`.

The answer has `steps`, each with `attempt` and `step`, and one descriptor for each, in this order.
With `from_attempt` and `step` it has that one alone, also if this agent holds it as a buddy. With
`everyone: true` it has no descriptors: `steps` lists those of all ranks in this agent's memory,
copies of other nodes included, each with `rank` and `world_size` too.
"""
SNAPSHOT_FOUND = "snapshot_found"
SNAPSHOT_FETCH = "snapshot_fetch"
"""Ours: `name`, `rank`, `attempt`; bring snapshots here from the holders of this node rank;
answered with `snapshot_found`.

The agent brings the newest that the holders have, and what it holds as a buddy. `from` in the
answer gives for each step the node rank of its buddy, or null for this agent's own memory. The
answer has all that this agent has by then, as for `snapshot_find`. With `list: true` nothing is
brought: `steps` and `from` list what could be, and no descriptors come. With `from_attempt` and
`step` that one alone is brought; without them, the newest two.
"""
FETCH_SECONDS = 540.0
"""Seconds, at most, that an agent takes to answer it, however large the state."""
RECEIPT = "receipt"
"""Ours: `name`, `rank`, `attempt`, `step`, `source`, `seconds`, `checksum`, `saved_attempt`, and
`replicas` as ranges; not answered."""

HISTORY = "history"
"""Ours: a question for the job's incidents, and its answer: `version` (0: the operator has sent
none), and then the other fields of `wire.agent.HistoryCommand`."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


class Frames:
    """Bytes in, objects out. Raises ValueError if the stream cannot be trusted any more."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the objects that are complete by now; other values are dropped, as by the stock
        agent."""
        self._unread += data
        result: list[dict[str, Any]] = []
        while len(self._unread) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._unread)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {length} bytes; at most {FRAME_BYTES_MAX} are read")
            end = HEADER.size + length
            if len(self._unread) < end:
                break
            body = bytes(self._unread[HEADER.size : end])
            del self._unread[:end]
            result += _object(body)
        return result


def _object(body: bytes) -> list[dict[str, Any]]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return []
    return [value] if isinstance(value, dict) else []
