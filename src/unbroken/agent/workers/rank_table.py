"""`pod_resourceconfig.json`: the addresses of all ranks, for programs in the pod that read it.

HyperPod's agent 1.1.3 writes it whenever an operator sends both a version and addresses. The table
is resized to the number of nodes, and the sent addresses replace the known ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from unbroken.log_lines import Log
from unbroken.wire.agent import StartCommand

log = Log(__name__)

DIRECTORY = "/opt/ml/input/config"
DIRECTORY_VARIABLE = "UNBROKEN_RESOURCE_CONFIG_DIR"
NAME = "pod_resourceconfig.json"


def merge(known: list[str | None], command: StartCommand) -> list[str | None]:
    """Return the table after a command."""
    table = (known + [None] * command.nnodes)[: command.nnodes]
    for rank, ip in command.rank_ips or ():
        table[rank] = ip
    return table


class RankTable:
    """The file and its last contents."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / NAME
        self._ips: list[str | None] = []
        self.version: str | None = None
        """Version that the file holds; operators send again until it is theirs."""
        self.warning = ""
        """Why the last write failed."""

    def load(self) -> None:
        """Take over what an earlier agent in this pod wrote."""
        try:
            result: Any = json.loads(self._file.read_bytes())
            ips = [ip if isinstance(ip, str) else None for ip in result["ips"]]
            version = result["ips_timestamp"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if isinstance(version, str):
            self._ips, self.version = ips, version

    def take(self, command: StartCommand) -> None:
        """Write the addresses of the command; a file that cannot be written stops nothing."""
        if command.ip_version is None or command.rank_ips is None:
            return
        table = merge(self._ips, command)
        current = table[command.rank] if command.rank < len(table) else None
        value = {"ips": table, "current_pod_ip": current, "ips_timestamp": command.ip_version}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(".draft")
            draft.write_text(json.dumps(value))
            os.replace(draft, self._file)
        except OSError as error:
            self.warning = f"cannot write {self._file}: {error.strerror}"
            log.warning("rank table not written", error=self.warning, variable=DIRECTORY_VARIABLE)
            return
        self._ips, self.version, self.warning = table, command.ip_version, ""
