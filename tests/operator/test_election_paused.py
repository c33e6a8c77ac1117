"""Processes that are paused while they lead, and their writes that reach the API server later.

Each has a proxy of its own, which records its writes and their times, by the only clock of the
machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.apiclient import Api
from tests.apiservers import Cluster
from tests.fault_proxy import Call, FaultProxy
from tests.leadership import assert_no_stale_writes, takeovers
from tests.operator.trained_jobs import until

PROGRAM = Path(__file__).with_name("election_program.py")
SECONDS = 2
ROUNDS = 2

pytestmark = pytest.mark.slow


class Writer:
    """A process that writes while it leads."""

    def __init__(self, proxy: FaultProxy, process: subprocess.Popen[bytes]) -> None:
        self.proxy = proxy
        self.process = process

    @property
    def calls(self) -> list[Call]:
        """All requests of the process."""
        return list(self.proxy.calls)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, number)


@contextmanager
def writers(cluster: Cluster, namespace: str, folder: Path) -> Iterator[list[Writer]]:
    """Two of them."""
    with ExitStack() as stack:
        made = []
        for name in ("one", "two"):
            proxy = stack.enter_context(FaultProxy(cluster).beside())
            path = proxy.kubeconfig(folder / name)
            words = [sys.executable, str(PROGRAM), str(path), namespace, name, str(SECONDS)]
            process = stack.enter_context(subprocess.Popen(words))
            stack.callback(process.kill)
            made.append(Writer(proxy, process))
        yield made


def test_who_stood_still_writes_nothing_after_another_has_taken_over(
    clusters: Callable[[str], Cluster], tmp_path: Path
) -> None:
    cluster = clusters("embedded")
    api = Api(cluster, "default")
    namespace = api.post("/api/v1/namespaces", {"metadata": {"generateName": "paused-"}}).made
    name = namespace["metadata"]["name"]
    api.post(f"/api/v1/namespaces/{name}/configmaps", {"metadata": {"name": "written"}}).done()
    api.close()
    with writers(cluster, name, tmp_path) as both:

        def histories() -> dict[str, list[Call]]:
            return {str(one.process.pid): one.calls for one in both}

        until(lambda: takeovers(histories()), "one leads")
        for turn in range(ROUNDS):
            leader = takeovers(histories())[-1].holder
            index = next(i for i, w in enumerate(both) if str(w.process.pid) == leader)
            stopped, other = both[index], both[1 - index]
            stopped.signal(signal.SIGSTOP)
            until(lambda n=turn: len(takeovers(histories())) > n + 1, "the other takes over")
            before = len(other.calls)
            stopped.signal(signal.SIGCONT)
            seen = len(stopped.calls)
            # It has found out when it asks for the lease as one who waits does.
            until(
                lambda w=stopped, n=seen: [c for c in w.calls[n:] if c.is_watch],
                "the first waits again",
            )
            until(lambda w=other, n=before: len(w.calls) > n + 50, "the other writes on")
        assert len(takeovers(histories())) == ROUNDS + 1
        assert_no_stale_writes(histories())
