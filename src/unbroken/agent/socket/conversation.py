"""Messages of workers and the agent over the socket, by the rules of the HyperPod agent.

Restartable workers are ordered to leave their training, and receive the values for the next
attempt. Their messages become events of the machine, or parts of `/status`. The sender is known
from the connection, whatever its `local_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unbroken.agent.snapshots.messages import SnapshotMessages
from unbroken.core.agent.events import (
    AgentEvent,
    Arrived,
    CheckpointsReported,
    Disconnected,
    FaultReported,
    Passed,
    Recall,
    Registered,
)
from unbroken.core.snapshots.checkpoint_steps import CheckpointSteps
from unbroken.log_lines import Log
from unbroken.wire import ipc
from unbroken.wire.agent import HistoryCommand, StartCommand

from .ipc import Connection, WorkerSocket

log = Log(__name__)

TEXT_MAX = 4096
DATA_CHARACTERS_MAX = 1024 * 1024
CLIENTS_MAX = 64
"""Most clients of one connection."""
LABELS_MAX = 64
MODES = ("process_level_restart", "job_level_restart")
"""Restart modes that a worker may request and `/status` then reports; the last takes precedence."""
ENVIRONMENT = (
    *("RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "JOB_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"),
)
"""Fields that a worker is released with, in addition to SPARE."""
Handler = Callable[[Connection, Mapping[str, Any]], None]


@dataclass(slots=True)
class _WorkerReports:
    """Reports of one worker about itself."""

    data: str | None = None
    has_failed: bool = False


@dataclass(slots=True)
class Conversation:
    """One agent's side; `handlers` may be added to."""

    feed: Callable[[AgentEvent], None]
    workers: Callable[[], Mapping[int, int]]
    """Returns local ranks of the living workers, by pid."""
    environment: Callable[[StartCommand, int], Mapping[str, str]]
    """Returns the environment of a worker of an attempt, by local rank."""
    nproc: int
    is_inprocess: bool
    """True if every client is restartable."""
    snapshots: SnapshotMessages
    rank_labels: dict[str, str] = field(default_factory=dict)
    asked_mode: str = ""
    history: HistoryCommand | None = None
    """The newest history of the job; None: the operator has sent none."""
    is_history_asked: bool = False
    """True if a worker has asked for it."""
    handlers: dict[str, Handler] = field(default_factory=dict)
    _reports: dict[int, _WorkerReports] = field(default_factory=dict)
    _steps: CheckpointSteps = field(default_factory=CheckpointSteps)
    _prefixes: dict[tuple[Connection, str], str] = field(default_factory=dict)
    """Prefixes of checkpoints, by client."""
    _socket: WorkerSocket | None = None
    _command: StartCommand | None = None
    """The newest start command, with its updates."""

    def start(self) -> str:
        """Listen; return the path. Raises WorldError."""
        self.handlers |= {
            ipc.INIT: self._init,
            ipc.AT_BARRIER: self._at_barrier,
            ipc.PAST_BARRIER: self._past_barrier,
            ipc.JOB_FAULT: self._job_fault,
            ipc.JOB_DATA: self._job_data,
            ipc.RANK_LABELS: self._rank_labels,
            ipc.CHECKPOINT_INIT: self._checkpoint_init,
            ipc.CHECKPOINT_UPDATE: self._checkpoint_update,
            ipc.CHECKPOINT_GET: self._checkpoint_get,
            ipc.HISTORY: self._send_history,
            **self.snapshots.handlers,
        }
        self._socket = WorkerSocket(self.workers, self)
        return self._socket.start()

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
        self.snapshots.close()

    def begin(self, command: StartCommand) -> None:
        """Prepare for an attempt that is about to start."""
        self._command, self.asked_mode = command, ""
        self.snapshots.begin(command)
        self._steps.choose(command.progress)
        self._report_progress()

    def update(self, command: StartCommand) -> None:
        """Send new addresses to the workers, if the agent is for in-process restart."""
        self._command = command
        if self.is_inprocess:
            for local_rank in sorted(set(self.workers().values())):
                message = self._start_message(ipc.JOB_RANK_INFO, command, local_rank)
                self._send([local_rank], message)

    def recall(self, order: Recall) -> None:
        """Order workers to leave their training."""
        message: dict[str, object] = {"type": ipc.JOB_FAULT, "restart_count": order.attempt}
        if order.save_seconds:
            message["save_seconds"] = order.save_seconds
        self._send(order.local_ranks, message)

    def release(self, local_ranks: Sequence[int], command: StartCommand) -> None:
        """Release workers at the barrier."""
        for local_rank in local_ranks:
            self._reports.pop(local_rank, None)
            self._send([local_rank], self._start_message(ipc.JOB_START, command, local_rank))

    def worker_data(self) -> list[dict[str, Any]]:
        """Return the workers' data in the form of `/status`."""
        node = self._command.rank if self._command is not None else -1
        return [
            {
                "rank": node * self.nproc + local_rank,
                "group_rank": node,
                "local_rank": local_rank,
                "failed": told.has_failed,
                "data": told.data,
            }
            for local_rank, told in sorted(self._reports.items())
            if told.data is not None
        ]

    def received(self, connection: Connection, message: Mapping[str, Any]) -> None:
        """Take a worker's message; one that lacks a field is dropped, as by the stock agent."""
        kind, client = message.get("type"), message.get("client_id")
        if "local_rank" not in message or not isinstance(client, str) or len(client) > TEXT_MAX:
            return
        handler = self.handlers.get(kind) if isinstance(kind, str) else None
        if handler is not None:
            handler(connection, message)

    def lost(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        for client in connection.clients:
            self._prefixes.pop((connection, client), None)
        if any(connection.clients.values()):
            self.feed(Disconnected(*_sender(connection)))

    def _send(self, local_ranks: Iterable[int], message: Mapping[str, Any]) -> None:
        """Send to every restartable client of these workers."""
        assert self._socket is not None
        pids = [pid for pid, rank in self.workers().items() if rank in local_ranks]
        for connection in [one for pid in pids for one in self._socket.of(pid)]:
            for client in [name for name, is_one in connection.clients.items() if is_one]:
                connection.send({**message, "client_id": client})

    def _start_message(
        self, kind: str, command: StartCommand, local_rank: int
    ) -> Mapping[str, Any]:
        result = self.environment(command, local_rank)
        told = {name: result[name] for name in ENVIRONMENT}
        ips = command.rank_ips
        return {
            "type": kind,
            "worker_envs": told | {"SPARE": str(command.spare)},
            "aggregate_worker_data": {
                "rank_ips": None if ips is None else [{"rank": rank, "ip": ip} for rank, ip in ips],
                "aggregate_worker_data": command.worker_data,
            },
        }

    def _init(self, connection: Connection, message: Mapping[str, Any]) -> None:
        client = message["client_id"]
        is_restartable = self.is_inprocess or message.get("restartable") is True
        was_restartable = connection.clients.get(client)
        if was_restartable is None and len(connection.clients) >= CLIENTS_MAX:
            return
        connection.clients[client] = is_restartable
        if is_restartable:
            self.feed(Registered(*_sender(connection), _attempt(message)))
        elif was_restartable:
            self.feed(Disconnected(*_sender(connection)))

    def _at_barrier(self, connection: Connection, message: Mapping[str, Any]) -> None:
        self.feed(Arrived(*_sender(connection), _attempt(message)))

    def _past_barrier(self, connection: Connection, message: Mapping[str, Any]) -> None:
        self._reports.pop(connection.speaker.local_rank, None)
        self.feed(Passed(*_sender(connection), _attempt(message)))

    def _job_fault(self, connection: Connection, message: Mapping[str, Any]) -> None:
        mode = _text(message.get("restart_mode")).lower()
        if mode in MODES and self.asked_mode != MODES[-1]:
            self.asked_mode = mode
        self._reports.setdefault(connection.speaker.local_rank, _WorkerReports()).has_failed = True
        reason, text = _text(message.get("reason")), message.get("message")
        # The end of a traceback names the error.
        text = text[-TEXT_MAX:] if isinstance(text, str) else ""
        self.feed(FaultReported(*_sender(connection), mode, reason, text))

    def _job_data(self, connection: Connection, message: Mapping[str, Any]) -> None:
        data, local_rank = message.get("data"), connection.speaker.local_rank
        if not isinstance(data, str) or len(data) > DATA_CHARACTERS_MAX:
            log.warning("data of a worker refused: not text, or too long", local_rank=local_rank)
            return
        self._reports.setdefault(local_rank, _WorkerReports()).data = data

    def _rank_labels(self, connection: Connection, message: Mapping[str, Any]) -> None:
        labels = message.get("labels")
        if isinstance(labels, dict) and len(labels) <= LABELS_MAX:
            self.rank_labels = {
                name[:TEXT_MAX]: value[:TEXT_MAX]
                for name, value in labels.items()
                if isinstance(value, str)
            }

    def _checkpoint_init(self, connection: Connection, message: Mapping[str, Any]) -> None:
        prefix, kinds = message.get("prefix"), message.get("checkpoint_types")
        client = message["client_id"]
        if not isinstance(prefix, str) or len(prefix) > TEXT_MAX or not isinstance(kinds, dict):
            return
        if client not in connection.clients:
            if len(connection.clients) >= CLIENTS_MAX:
                return
            connection.clients[client] = False
        self._prefixes[connection, client] = prefix
        counts = {name: n if type(n) is int else None for name, n in list(kinds.items())[:8]}
        self._steps.begin(prefix, counts)
        self._report_progress()

    def _checkpoint_update(self, connection: Connection, message: Mapping[str, Any]) -> None:
        prefix = self._prefixes.get((connection, message["client_id"]))
        kind, step, path = (message.get(name) for name in ("checkpoint_type", "step", "path"))
        if prefix is None or type(step) is not int or not isinstance(kind, str):
            return
        if isinstance(path, str) and len(path) <= TEXT_MAX:
            self._steps.report(prefix, kind, step, path, connection.speaker.local_rank)
            self._report_progress()

    def _checkpoint_get(self, connection: Connection, message: Mapping[str, Any]) -> None:
        client = message["client_id"]
        prefix = self._prefixes.get((connection, client))
        path = None if prefix is None else self._steps.path(prefix)
        connection.send({"type": ipc.CHECKPOINT_GET, "client_id": client, "path": path})

    def _send_history(self, connection: Connection, message: Mapping[str, Any]) -> None:
        self.is_history_asked = True
        known = {"version": 0} if self.history is None else asdict(self.history)
        client = message["client_id"]
        connection.send({"type": ipc.HISTORY, "client_id": client, **known})

    def history_version(self) -> int | None:
        """Return the version of the history for reports; None: no worker has asked for it."""
        if not self.is_history_asked:
            return None
        return 0 if self.history is None else self.history.version

    def _report_progress(self) -> None:
        self.feed(CheckpointsReported(self._steps.progress()))


def _sender(connection: Connection) -> tuple[int, int]:
    return connection.speaker.local_rank, connection.speaker.pid


def _attempt(message: Mapping[str, Any]) -> int | None:
    told = message.get("attempt")
    return told if type(told) is int else None


def _text(value: object) -> str:
    return value[:TEXT_MAX] if isinstance(value, str) else ""
