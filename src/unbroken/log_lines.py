"""Log lines of all programs: an event in plain words, then `key=value` pairs.

    log = Log(__name__)
    log.warning("lease not renewed", lease=name, failures=3, error=error)
    # lease not renewed lease=kube-system/unbroken-operator failures=3 error="no answer in 5 s"

The event is a constant text; what varies is a value. `KEYS` has one name for each thing, and a
test compares all calls with it. Values may come from outside: each is one word or a quoted JSON
string in ASCII, and bounded, so that no value can forge a line or a pair.
"""

from __future__ import annotations

import json
import logging
import re
from enum import Enum

LINE_FORM = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""Form of a line with its time, level and module."""
LONGEST = 1000
"""Characters of a value; the rest is cut off."""
KEYS = {
    "action": "repair or remedy",
    "address": "host and port that a server listens on",
    "agent": "host and port of an agent",
    "attempt": "number of an attempt",
    "avoid": "nodes that a pod must not get",
    "by": "who caused the event",
    "bytes": "number of bytes",
    "check": "NodeCheck",
    "claim": "PersistentVolumeClaim",
    "client": "client of a webhook",
    "cluster": "Cluster or RayCluster",
    "command": "message to an agent",
    "condition": "type of a condition",
    "container": "container of the pod",
    "count": "number of the things that the event names",
    "cursor": "position in the kernel log",
    "definition": "CustomResourceDefinition",
    "error": "why something failed",
    "event": "reason of a Kubernetes event",
    "exit_code": "exit code of a process",
    "failures": "failures in a row",
    "fault": "entry of the table of faults",
    "file": "path of a file or directory",
    "force": "yes: without a grace period",
    "gate": "decision of a queue",
    "group": "API group",
    "holder": "holder of a lease",
    "id": "ID that a program gave itself",
    "job": "namespace/name of a job of any kind",
    "jobs": "number of jobs",
    "killed": "number of containers killed",
    "key": "key in a work queue",
    "kind": "kind of an object",
    "lease": "Lease",
    "local_rank": "rank in its pod",
    "machine": "Machine",
    "message": "text for people, as in the object or event",
    "method": "HTTP method",
    "module": "Python module",
    "namespace": "namespace",
    "node": "node",
    "nodes": "nodes, or their number",
    "object": "namespace/name of an object of any kind",
    "order": "order that a machine gave",
    "own_mib": "memory of one process, in MiB",
    "param": "parameter of a run in an experiment tracker",
    "path": "HTTP path",
    "phase": "phase of an object",
    "pid": "process ID, or several",
    "place": "line of the source",
    "pod": "pod, or namespace/name of it, or several",
    "policy": "policy of a deletion",
    "problem": "what is wrong with an input",
    "program": "program that one of ours runs",
    "provider": "provider of machines",
    "queue": "work queue",
    "rank": "global rank",
    "reason": "why something was decided",
    "request": "ID of a request",
    "retry_seconds": "seconds until the next try",
    "secret": "Secret",
    "seconds": "duration",
    "shared_mib": "memory that processes share, in MiB",
    "snapshot": "name of a snapshot",
    "source": "where a snapshot was read",
    "state": "state of a machine or script",
    "status": "status of a condition, or HTTP status",
    "step": "training step, or step of a check",
    "taints": "taints of a node",
    "task": "what a request to the API server is for",
    "test": "test of a check",
    "url": "URL",
    "variable": "environment variable that changes this",
    "version": "version of an object, API or program",
    "volume": "PersistentVolume",
    "workload": "Workload of Kueue",
    "world_size": "number of ranks",
}
"""Every key, and what its value is."""

_WORD = re.compile(r"[!#-<>-~]+")
"""A value without quotes: printable ASCII, no space, no `"`, no `=`."""


def line(event: str, values: dict[str, object]) -> str:
    """Return a log line. A value that is None is left out."""
    pairs = (f"{key}={_shown(value)}" for key, value in values.items() if value is not None)
    return " ".join((event, *pairs))


class Log:
    """Writes log lines to the logger of a module. `prefix` comes before each event."""

    def __init__(self, name: str, prefix: str = "") -> None:
        self._logger = logging.getLogger(name)
        self._prefix = prefix

    def debug(self, event: str, /, *, exc_info: bool = False, **values: object) -> None:
        """Write a line of level DEBUG, with the traceback of the current exception if asked for."""
        self._write(logging.DEBUG, event, values, exc_info)

    def info(self, event: str, /, **values: object) -> None:
        """Write a line of level INFO."""
        self._write(logging.INFO, event, values)

    def warning(self, event: str, /, **values: object) -> None:
        """Write a line of level WARNING."""
        self._write(logging.WARNING, event, values)

    def error(self, event: str, /, **values: object) -> None:
        """Write a line of level ERROR."""
        self._write(logging.ERROR, event, values)

    def exception(self, event: str, /, **values: object) -> None:
        """Write a line of level ERROR with the traceback of the current exception."""
        self._write(logging.ERROR, event, values, True)

    def log(self, level: int, event: str, /, **values: object) -> None:
        """Write a line of a level that is chosen by the caller."""
        self._write(level, event, values)

    def is_on(self, level: int) -> bool:
        """True if lines of this level are written."""
        return self._logger.isEnabledFor(level)

    def _write(
        self, level: int, event: str, values: dict[str, object], exc_info: bool = False
    ) -> None:
        if self._logger.isEnabledFor(level):
            text = line(self._prefix + event, values)
            self._logger.log(level, text, exc_info=exc_info, stacklevel=3)


class LastProblem:
    """The newest text about something that is tried again and again, to log what lasts once."""

    def __init__(self) -> None:
        self._text = ""

    def note(self, text: str) -> bool:
        """Keep the text (empty: there is no problem); return True if it is another one."""
        is_new, self._text = text != self._text, text
        return is_new


def _shown(value: object) -> str:
    text = _text(value)
    if len(text) > LONGEST:
        text = text[: LONGEST - 3] + "..."
    return text if _WORD.fullmatch(text) else json.dumps(text)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, BaseException):
        return str(value) or type(value).__name__
    if isinstance(value, (list, tuple, set, frozenset)) and not hasattr(value, "_fields"):
        return ",".join(map(str, value))
    return str(value)
