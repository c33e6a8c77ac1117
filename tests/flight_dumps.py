"""A writer of torch's flight recorder dumps, as torch 2.6 to 2.13 write them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

VERSIONS = ("2.4", "2.5", "2.7", "2.9", "2.10")
"""Versions of the format; torch 2.6 writes 2.4 or 2.5, torch 2.8 to 2.13 write 2.10."""
SECOND = 1_000_000_000
START = 1_790_000_000 * SECOND
Groups = Mapping[str, tuple[str, Sequence[int]]]
"""Description and ranks of each process group, by name."""


class Recorder:
    """The flight recorder of one rank."""

    def __init__(
        self, rank: int, groups: Groups, version: str = "2.10", backend: str = "nccl",
        capacity: int = 2000,
    ) -> None:  # fmt: skip
        self.rank, self.groups = rank, groups
        self.version, self.backend, self.capacity = version, backend, capacity
        self.entries: list[dict[str, Any]] = []
        self.enqueued: dict[str, int] = {}
        self._pairs: dict[str, int] = {}
        self._recorded = 0

    def call(
        self, group: str = "0", operation: str = "all_reduce", state: str = "completed",
        count: int = 1, **changes: Any,
    ) -> Recorder:  # fmt: skip
        """Call a collective, `count` times; `changes` are fields of the entry."""
        for _ in range(count):
            self.enqueued[group] = self.enqueued.get(group, 0) + 1
            self._add(group, operation, state, False, changes)
        return self

    def part(self, group: str, operation: str, state: str = "scheduled") -> Recorder:
        """Add a part to the last collective of a group, as a batch has."""
        self._add(group, operation, state, False, {})
        return self

    def pair(self, group: str, operation: str, state: str = "scheduled") -> Recorder:
        """Call `send 0->1` or `recv 1<-0`, by ranks in the group."""
        self._pairs[group] = self._pairs.get(group, 0) + 1
        self._add(group, operation, state, True, {})
        return self

    def fail(self, group: str = "0", operation: str = "all_reduce") -> Recorder:
        """Record a call that ends with an error before it is enqueued."""
        self.call(group, operation, "scheduled")
        self.enqueued[group] -= 1
        return self

    def _add(
        self, group: str, operation: str, state: str, is_p2p: bool, changes: Mapping[str, Any]
    ) -> None:
        at = START + self._recorded * SECOND // 100
        description = self.groups[group][0]
        number = list(self.groups).index(group)
        entry = {
            "frames": [
                {"name": operation, "filename": "/x/site-packages/torch/d.py", "line": 3245},
                {"name": "train", "filename": "/home/me/train.py", "line": 57},
            ],
            "record_id": self._recorded, "pg_id": number, "process_group": (group, description),
            "thread_name": "pt_main_thread", "thread_id": "140440957381504",
            "collective_seq_id": self.enqueued.get(group, 0),
            "p2p_seq_id": self._pairs.get(group, 0), "op_id": self._recorded + 1,
            "profiling_name": f"{self.backend}:{operation}", "time_created_ns": at,
            "input_sizes": [[1024, 4]], "input_dtypes": ["BFloat16"],
            "output_sizes": [[1024, 4]], "output_dtypes": ["BFloat16"], "state": state,
            "time_discovered_started_ns": at if state != "scheduled" else None,
            "time_discovered_completed_ns": at if state == "completed" else None,
            "retired": state == "completed", "timeout_ms": 600_000, "is_p2p": is_p2p,
        }  # fmt: skip
        if self.version < "2.7" and self.version != "2.10":
            del entry["thread_name"], entry["thread_id"]
        self.entries.append(entry | changes)
        self._recorded += 1

    def value(self) -> dict[str, Any]:
        """Return the dump as torch builds it."""
        own = {name: one for name, one in self.groups.items() if self.rank in one[1]}
        return {
            "version": self.version,
            "pg_config": {
                name: {"name": name, "desc": description, "ranks": str(list(ranks))}
                for name, (description, ranks) in own.items()
            },
            "comm_lib_version": "2.27.5",
            "pg_status": {
                str(list(self.groups).index(name)): {
                    "last_enqueued_collective": last, "last_started_collective": -1,
                    "last_completed_collective": -1,
                }
                for name, last in self.enqueued.items()
            },
            "entries": self.entries[-self.capacity :],
        }  # fmt: skip

    def pickle(self) -> bytes:
        """Return the dump as torch's pickler writes it."""
        return torch_pickle(self.value())

    def json(self) -> bytes:
        """Return torch's JSON dump: numbers of `pg_status` as texts, 0 for no time."""
        value = self.value()
        value["pg_status"] = {
            number: {name: str(last) for name, last in one.items()}
            for number, one in value["pg_status"].items()
        }
        times = ("time_discovered_started_ns", "time_discovered_completed_ns")
        value["entries"] = [
            {name: one or 0 if name in times else one for name, one in entry.items()}
            for entry in value["entries"]
        ]
        return json.dumps(value).encode()


def torch_pickle(value: Any) -> bytes:
    """Return a value as torch's C++ pickler writes it: protocol 2, only texts are memoized."""
    parts, memo = [b"\x80\x02"], dict[str, int]()
    _write(value, parts, memo)
    return b"".join([*parts, b"."])


def _write(value: Any, parts: list[bytes], memo: dict[str, int]) -> None:
    if isinstance(value, bool) or value is None:
        parts.append({True: b"\x88", False: b"\x89", None: b"N"}[value])
    elif isinstance(value, int):
        parts.append(_number(value))
    elif isinstance(value, str):
        known = memo.get(value)
        if known is None:
            known = memo[value] = len(memo)
            text = value.encode()
            put = b"q" + bytes([known]) if known < 256 else b"r" + struct.pack("<I", known)
            parts.append(b"X" + struct.pack("<I", len(text)) + text + put)
        else:
            parts.append(b"h" + bytes([known]) if known < 256 else b"j" + struct.pack("<I", known))
    else:
        _write_parts(value, parts, memo)


def _write_parts(value: Any, parts: list[bytes], memo: dict[str, int]) -> None:
    if isinstance(value, dict):
        parts.append(b"}(")
        for key, one in value.items():
            _write(key, parts, memo)
            _write(one, parts, memo)
        parts.append(b"u")
    else:
        parts.append(b"](" if isinstance(value, list) else b"")
        for one in value:
            _write(one, parts, memo)
        parts.append(b"e" if isinstance(value, list) else b"\x86")


def _number(value: int) -> bytes:
    if 0 <= value < 1 << 16:
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
