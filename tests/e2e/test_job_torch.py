"""Jobs that train with DDP: what torch itself says when a peer or a port is lost is understood."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.jobs import job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DDP = Path(__file__).parent / "programs/ddp.py"


def test_ddp_goes_on_after_a_kill_and_a_stolen_port(cluster: Cluster, tmp_path: Path) -> None:
    with job(cluster, tmp_path, nproc=1, program=DDP) as one:
        starts = one.steps(0)
        port = one.report(starts[0])["offered_port"]
        with socket.create_server(("", port)):
            one.kill(starts[1])
            one.steps(2)
        assert one.finish()["status"]["restartCount"] == 2
        killed, taken = one.incidents(2)
    assert (killed["culprit"]["fault"], killed["culprit"]["rank"]) == ("Signal", 1)
    assert (taken["culprit"]["fault"], taken["culprit"]["rank"]) == ("StorePortTaken", 0)


@pytest.mark.heavy
def test_who_raises_or_leaves_is_the_culprit_not_its_peers(
    cluster: Cluster, tmp_path: Path
) -> None:
    raises = {"attempt": 0, "rank": 0, "step": 5, "do": "raise", "value": "bad batch"}
    leaves = {"attempt": 1, "rank": 1, "step": 5, "do": "exit", "value": 0}
    with job(cluster, tmp_path, raises, leaves, nproc=1, program=DDP) as one:
        one.steps(2)
        one.finish()
        raised, left = one.incidents(2)
    assert (raised["culprit"]["fault"], raised["culprit"]["rank"]) == ("PythonException", 0)
    assert raised["culprit"]["text"] == "ValueError: bad batch"
    assert (left["culprit"]["fault"], left["culprit"]["rank"]) == ("EarlyExit", 1), left
