"""A controller that knows no more of agents than HyperPod's documented protocol says.

It does what the reference documents for the stock operator's pod manager. It polls `/status`, and
takes only a 200 for "received". It starts all agents when all are ready, and stops all when one is
faulted. It increments `faultCount`, sends rules and addresses with each start, and returns the
newest checkpoint that every agent has. It uses plain HTTP, without a token.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.watching import wait_until

Object = dict[str, Any]


@dataclass
class DocumentedController:
    """Controls the agents at these ports of this machine, in the order of their ranks."""

    ports: Sequence[int]
    rules: list[Object] = field(default_factory=list)
    fault_count: int = 0
    master_port: int = 0
    """Master port of the present attempt."""
    faults: list[Object] = field(default_factory=list)
    """Status of the first agent that was found faulted, for each fault."""

    def request(self, port: int, method: str, path: str, body: Object | None = None) -> bytes:
        """Send one request, which must be answered with 200."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, f"{method} {path}: {answer.status} {text!r}"
            return text

    def status(self, port: int) -> Object:
        """Return the status of the agent."""
        found: Object = json.loads(self.request(port, "GET", "/status"))
        return found

    def until(self, *states: str) -> list[Object]:
        """Poll until each agent is in one of these states, or some agent is faulted."""

        def is_reached(found: list[Object]) -> bool:
            told = [one["status"] for one in found]
            is_faulted = "faulted" in told and "ready" not in states
            return is_faulted or all(one in states for one in told)

        return wait_until(lambda: [self.status(port) for port in self.ports], is_reached)

    def start(self) -> None:
        """Start all agents with the addresses that they need, once all are ready."""
        ready = self.until("ready")
        version = f"v{self.fault_count}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.master_port = free.getsockname()[1]
        for rank, port in enumerate(self.ports):
            body = self._rendezvous(rank, version)
            self.request(port, "POST", "/start", {**body, "progress": self._progress(ready)})
        for rank, port in enumerate(self.ports):
            while self.status(port).get("ipversion") != version:
                self.request(port, "POST", "/update", self._rendezvous(rank, version))

    def stop(self, **how: Any) -> None:
        """Stop all agents, and wait until none of their processes runs."""
        for port in self.ports:
            self.request(port, "POST", "/stop", {"restart_mode": "process_level_restart", **how})
        self.until("ready")

    def run(self) -> None:
        """Train to the end, through every fault."""
        self.start()
        while True:
            found = self.until("completed")
            faulted = [one for one in found if one["status"] == "faulted"]
            if not faulted:
                break
            self.faults += faulted[:1]
            self.stop()
            self.fault_count += 1
            self.start()
        for port in self.ports:
            self.request(port, "POST", "/shutdown")

    def _rendezvous(self, rank: int, version: str) -> Object:
        ips = [{"rank": other, "ip": "127.0.0.1"} for other in range(len(self.ports))]
        return {
            "rank": rank,
            "nnodes": len(self.ports),
            "faultCount": self.fault_count,
            "master_addr": "127.0.0.1",
            "master_port": str(self.master_port),
            "log_monitoring_configuration": self.rules,
            "ipVersion": version,
            "rankIps": ips,
            "spare": False,
        }

    def _progress(self, found: Sequence[Object]) -> Object:
        """Return the oldest checkpoint of each prefix that every agent has: all have reached it."""
        told = [one.get("progress") or {} for one in found]
        prefixes = set(told[0]).intersection(*told[1:])
        return {
            p: min((t[p] for t in told), key=lambda o: int(o["progressCount"])) for p in prefixes
        }
