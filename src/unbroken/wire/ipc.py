"""Frames of the socket between an agent and its workers: that of the HyperPod agent 1.1.3.

A frame is four bytes, big-endian, of length, and so much JSON in UTF-8: an object.  A worker's has
`type`, `local_rank` and `client_id`; what lacks one is dropped.  Ours beyond the documented ones
are marked; a stock client never sends or gets them.
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
"""Ours adds `restartable: true` and `attempt`: this worker leaves its training when it is told."""
AT_BARRIER, PAST_BARRIER = "at_rcb_barrier", "past_rcb_barrier"
"""Ours add `attempt`, that was left or is begun: what is late of an older one counts for none."""
JOB_START, JOB_FAULT, JOB_RANK_INFO = "job_start", "job_fault", "job_rank_info"
STUCK_CODE = 75
"""Ours: with which a worker ends that was told to leave its training and cannot; EX_TEMPFAIL of
sysexits.h."""
JOB_DATA, RANK_LABELS = "job_data", "rank_labels"
CHECKPOINT_INIT, CHECKPOINT_UPDATE, CHECKPOINT_GET = (
    "ckpt_init",
    "ckpt_info_update",
    "ckpt_info_get",
)

SNAPSHOT_OPEN = "snapshot_open"
"""Ours: `name`, `rank`, `attempt`, `slot` (0 or 1), `bytes`; answered with `snapshot_slot`.  Every
answer about snapshots may have `error` instead."""
SNAPSHOT_SLOT = "snapshot_slot"
"""Ours: one descriptor beside it."""
SNAPSHOT_SAVED = "snapshot_saved"
"""Ours: `name`, `rank`, `attempt`, `slot`, `step`; answered with `snapshot_kept`."""
SNAPSHOT_USED = "snapshot_used"
"""Ours: `name`, `rank`, `attempt`, and what all ranks restored, `from_attempt` and `step`: other
snapshots of older attempts may go.  Answered with `snapshot_kept`."""
SNAPSHOT_KEPT = "snapshot_kept"
SNAPSHOT_FIND = "snapshot_find"
"""Ours: `name`, `rank`, `attempt`; answered with `snapshot_found`: `steps`, each with `attempt` and
`step`, and one descriptor for each, in this order.  With `from_attempt` and `step` that one alone,
also where this agent holds it as a buddy.  With `everyone: true` no descriptors: `steps` of all
ranks in this agent's memory, copies of others among them, each with `rank` and `world_size` too."""
SNAPSHOT_FOUND = "snapshot_found"
SNAPSHOT_FETCH = "snapshot_fetch"
"""Ours: `name`, `rank`, `attempt`: bring here the newest that the holders of this node rank
have, and what this agent holds as a buddy; answered with `snapshot_found`, and in it `from`: for
each its node rank (the buddy's), or null for this agent's own memory.  The answer has all that this
agent has by then, as for `snapshot_find`.  With `list: true` nothing is brought: `steps` and `from`
say what could be, and no descriptors come.  With `from_attempt` and `step` that one alone is
brought; without, the newest two."""
FETCH_SECONDS = 540.0
"""The longest that an agent takes to answer it, however large the state."""
RECEIPT = "receipt"
"""Ours: `name`, `rank`, `attempt`, `step`, `source`, `seconds`, `checksum`, `saved_attempt`, and
`replicas` as ranges; not answered."""


def encode(message: Mapping[str, Any]) -> bytes:
    """A frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


class Frames:
    """Bytes in, objects out; ValueError where the stream cannot be trusted any more."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Objects complete by now; what is no object is left out, as the stock agent drops it."""
        self._unread += data
        found: list[dict[str, Any]] = []
        while len(self._unread) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._unread)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {length} bytes; at most {FRAME_BYTES_MAX} are read")
            end = HEADER.size + length
            if len(self._unread) < end:
                break
            body = bytes(self._unread[HEADER.size : end])
            del self._unread[:end]
            found += _object(body)
        return found


def _object(body: bytes) -> list[dict[str, Any]]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return []
    return [value] if isinstance(value, dict) else []
