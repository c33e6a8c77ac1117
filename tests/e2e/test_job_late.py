"""A worker that everybody has given up wakes late, and overwrites nothing that is newer."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.job_events import Event, await_end, parent, places
from tests.e2e.jobs import Job, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "programs/late.py"


def heard(one: Job, what: str, attempt: int) -> Event:
    """The first of its kind."""

    def first(events: list[Event]) -> Event | None:
        return next((e for e in events if (e.what, e.attempt) == (what, attempt)), None)

    found: Event = one.events.until(first)
    return found


@pytest.mark.heavy
def test_a_pod_that_wakes_late_overwrites_nothing(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for name in ("wake", "told"):
        os.mkfifo(tmp_path / name)
    with job(cluster, tmp_path, program=PROGRAM, replicas=1, nproc=1) as one:
        late = heard(one, "held", 0)
        agent = one.starts(0)[0].more["agent"]
        # The agent's keeper and the container's supervisor: nothing here may answer a signal.
        pids = [parent(parent(agent)), parent(agent), agent, late.pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        pod = places(one.starts(0))[0]
        cluster.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
        found = heard(one, "restored", 1)
        assert (found.more["step"], found.more["source"], found.more["weight"]) == (3, "disk", 3)
        one.steps(1)
        os.kill(late.pid, signal.SIGCONT)
        (tmp_path / "wake").write_bytes(b"now")
        told = json.loads((tmp_path / "told").read_text())
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        for pid in pids:
            await_end(pid)
        one.steps(1)
        one.kill(one.starts(1)[0])
        again = heard(one, "restored", 2)
        assert again.more["source"] == "memory"
        assert again.more["weight"] == 1000 + again.more["step"]
        one.finish()
    assert told["disk"] == "Superseded"
    names = [path.name for path in (tmp_path / "saved").glob("step-*")]
    assert names
    assert not [name for name in names if "attempt-0" in name], names
