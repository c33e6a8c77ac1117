"""Messages of workers about snapshots: their memory, their buddies' copies, and what they restored.

Jobs without snapshots load nothing of it; jobs without buddies load nothing of replication.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unbroken.agent.socket.ipc import Connection
from unbroken.errors import PeerError
from unbroken.log_lines import Log
from unbroken.wire import ipc
from unbroken.wire.agent import (
    WORKERS_MAX,
    AgentReport,
    Receipt,
    SnapshotReport,
    SnapshotState,
    StartCommand,
)
from unbroken.wire.codec import read

if TYPE_CHECKING:
    from .replication import Replication
    from .slots import SnapshotSlots

log = Log(__name__)

RECEIPTS_MAX = 256
"""Receipts of one agent at most: names times ranks."""
Run = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class SnapshotMessages:
    """The agent's side of the messages; `changed` is called when `add_to` would add different
    values."""

    def __init__(
        self, nproc: int, key: bytes | None, run: Run, changed: Callable[[], None]
    ) -> None:
        self._nproc, self._key, self._run, self._changed = nproc, key, run, changed
        self._command: StartCommand | None = None
        self._receipts: dict[tuple[str, int], Receipt] = {}
        self._copies: tuple[int, ...] = ()
        """Node ranks with copies here."""
        self._snapshots: SnapshotSlots | None = None
        self._replication: Replication | None = None
        """Both are None until a worker asks."""

    @property
    def handlers(self) -> dict[str, Callable[[Connection, Mapping[str, Any]], None]]:
        """Return the handlers, by type of message."""
        kinds = (ipc.SNAPSHOT_OPEN, ipc.SNAPSHOT_SAVED, ipc.SNAPSHOT_USED, ipc.SNAPSHOT_FIND)
        memory = dict.fromkeys(kinds, self._answer)
        return {**memory, ipc.SNAPSHOT_FETCH: self._fetch, ipc.RECEIPT: self._receipt}

    def begin(self, command: StartCommand) -> None:
        """Prepare for an attempt that is about to start."""
        self._command = command
        if self._snapshots is not None:
            self._begin(self._snapshots, command)
        if self._replication is not None:
            self._replication.begin(command)
        if self._receipts:
            self._receipts.clear()
            self._changed()

    def add_to(self, report: AgentReport) -> AgentReport:
        """Add what has been saved and restored, and the ranks of which this agent has copies."""
        receipts = tuple(self._receipts[key] for key in sorted(self._receipts))
        saved = self._saved()
        return replace(report, receipts=receipts, copies=self._copies, snapshots=saved)

    def _saved(self) -> SnapshotReport | None:
        """Return what the report says about saves of the running attempt; None: there are none."""
        snapshots, copies = self._snapshots, self._replication
        if snapshots is None or not (snapshots.states or snapshots.missing):
            return None
        from .slots import middle

        ranks = []
        for key, state in sorted(snapshots.states.items())[:WORKERS_MAX]:
            one = SnapshotState(
                name=key[0],
                rank=key[1],
                step=state.step,
                state_bytes=state.state_bytes,
                save_seconds=middle(state.seconds),
                buddy_step=None if copies is None else copies.buddy_step(key),
                common_step=None if copies is None else copies.common_step(key[0]),
                replicas=state.replicas,
            )
            ranks.append(one)
        return SnapshotReport(
            tuple(ranks),
            buddy="" if self._command is None else self._command.buddy,
            bytes_per_second=None if copies is None else copies.bytes_per_second(),
            memory_bytes=snapshots.memory.taken_bytes(),
            missing_bytes=snapshots.missing,
            copies_missing_bytes=snapshots.memory.copies_missing,
        )

    def _copies_changed(self, ranks: Collection[int]) -> None:
        nodes = tuple(sorted({rank // self._nproc for rank in ranks}))
        if nodes != self._copies:
            self._copies = nodes
            self._changed()

    def close(self) -> None:
        """Release all memory."""
        if self._replication is not None:
            self._replication.close()
        if self._snapshots is not None:
            self._snapshots.close()

    def replication(self) -> Replication:
        """Return the replication to the buddy and back; it is made on first use."""
        if self._replication is None:
            from .replication import Replication

            self._replication = Replication(self._memory(), self._key, self._run)
            self._replication.copies.on_change = self._copies_changed
            if self._command is not None:
                self._replication.begin(self._command)
        return self._replication

    @staticmethod
    def _begin(snapshots: SnapshotSlots, command: StartCommand) -> None:
        snapshots.has_buddy = bool(command.buddy)
        snapshots.begin(command.attempt)

    def _memory(self) -> SnapshotSlots:
        if self._snapshots is None:
            from .slots import SnapshotSlots

            self._snapshots = SnapshotSlots(nproc=self._nproc)
            if self._command is not None:
                self._begin(self._snapshots, self._command)
        return self._snapshots

    def _answer(self, connection: Connection, message: Mapping[str, Any]) -> None:
        reason = self._refusal(connection, message)
        if not reason and message["type"] == ipc.SNAPSHOT_SAVED and self._has_buddy:
            self.replication()  # It is notified of saves.
        self._send(connection, message, reason)
        if not reason and message["type"] == ipc.SNAPSHOT_USED and self._replication is not None:
            self._replication.used((str(message.get("name")), message["rank"]))

    @property
    def _has_buddy(self) -> bool:
        return self._command is not None and bool(self._command.buddy)

    def _send(self, connection: Connection, message: Mapping[str, Any], reason: str) -> None:
        snapshots, copies = self._memory(), self._replication
        if copies is None or reason or message["type"] != ipc.SNAPSHOT_FIND:
            answer = snapshots.refusal(message, reason) if reason else snapshots.answer(message)
            connection.send(answer.message, answer.fds)
            return
        copies.offer(message)
        answer = snapshots.answer(message)
        if message.get("everyone") is True and "error" not in answer.message:
            answer.message["steps"] += copies.everyone(str(message.get("name")))
        connection.send(answer.message, answer.fds)

    def _refusal(self, connection: Connection, message: Mapping[str, Any]) -> str:
        """Return why a request is refused; empty: it is allowed.

        A worker may use its own snapshots in the running attempt; others' it may look for.
        """
        command = self._command
        if command is None:
            return "no attempt has been started"
        if message.get("attempt") != command.attempt:
            return f"attempt {command.attempt} runs, not {str(message.get('attempt'))[:20]}"
        rank = command.rank * self._nproc + connection.speaker.local_rank
        if message["type"] != ipc.SNAPSHOT_FIND and message.get("rank") != rank:
            return f"this is rank {rank}, not {str(message.get('rank'))[:20]}"
        return ""

    def _fetch(self, connection: Connection, message: Mapping[str, Any]) -> None:
        reason = self._refusal(connection, message)
        has_copies = self._replication is not None
        holders = () if self._command is None else self._command.holders
        if reason or not (has_copies or holders):
            self._answer_fetch(connection, message, {})
        else:
            self._run(self._fetched(connection, message))

    async def _fetched(self, connection: Connection, message: Mapping[str, Any]) -> None:
        key = (str(message.get("name")), int(message["rank"]))
        result: Mapping[str, Any] = {}
        try:
            async with asyncio.timeout(ipc.FETCH_SECONDS):
                result = await self.replication().fetch(key, _wanted(message), is_list(message))
        except (TimeoutError, PeerError) as error:
            result = {"problems": [str(error) or f"not all came in {ipc.FETCH_SECONDS:g} s"]}
        finally:
            self._answer_fetch(connection, message, result)

    def _answer_fetch(
        self, connection: Connection, message: Mapping[str, Any], found: Mapping[str, Any]
    ) -> None:
        # The attempt may have changed meanwhile.
        reason = self._refusal(connection, message)
        snapshots = self._memory()
        answer = snapshots.refusal(message, reason) if reason else snapshots.answer(message)
        fds = [] if is_list(message) else answer.fds
        connection.send({**answer.message, **found}, fds)

    def _receipt(self, connection: Connection, message: Mapping[str, Any]) -> None:
        try:
            if reason := self._refusal(connection, message):
                raise PeerError(reason)
            receipt = _read_receipt(message)
        except PeerError as error:
            log.warning("receipt refused", error=error)
            return
        key = (receipt.name, receipt.rank)
        if key in self._receipts or len(self._receipts) < RECEIPTS_MAX:
            self._receipts[key] = receipt
            self._changed()


def is_list(message: Mapping[str, Any]) -> bool:
    """True if a worker only asks for a list."""
    return message.get("list") is True


def _wanted(message: Mapping[str, Any]) -> tuple[int, int] | None:
    point = message.get("from_attempt"), message.get("step")
    if point == (None, None):
        return None
    attempt, step = (_count(number) for number in point)
    if attempt is None or step is None:
        raise PeerError("from_attempt and step are whole numbers, and come together")
    return attempt, step


def _read_receipt(message: Mapping[str, Any]) -> Receipt:
    """Return the receipt in a message. Raises PeerError if a field is missing or wrong."""
    receipt = read(Receipt, message, "receipt")
    if receipt.seconds < 0 or not receipt.source:
        raise PeerError("receipt: no source, or negative seconds")
    return receipt


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None
