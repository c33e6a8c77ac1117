"""Machines as the pool writes them, on both API servers, and as kubectl shows them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.apiservers import Cluster
from tests.operator.plain import Object, PlainRequests
from unbroken.kube.client import connect
from unbroken.local.machines.pool import MachineRequests
from unbroken.operator import definitions
from unbroken.spec.keys import MACHINE_FINALIZER
from unbroken.spec.nodes.kinds import MACHINE, MachinePhase, MachineSpec, MachineStatus

NAME = "written-machine"


async def written(cluster: Cluster, *statuses: MachineStatus) -> list[Object]:
    """Write the statuses in turn; return the stored status after each. The Machine stays."""
    async with connect(cluster.kubeconfig) as client:
        await definitions.install(client)
        plain, requests = PlainRequests(client), MachineRequests(client)
        path = f"{MACHINE.path}/{NAME}"
        found = await plain.get(path)
        if found is None:
            body = MACHINE.new(NAME, MachineSpec(), {"finalizers": [MACHINE_FINALIZER]})
            found = await plain.call("POST", MACHINE.path, body=body)
        seen = []
        for status in statuses:
            await requests.write_status(NAME, found["metadata"]["uid"], status)
            now = await plain.get(path)
            assert now is not None
            seen.append(now["status"])
        return seen


async def removed(cluster: Cluster) -> None:
    """Remove all objects, since other tests share the server."""
    async with connect(cluster.kubeconfig) as client:
        plain = PlainRequests(client)
        await plain.merge(f"{MACHINE.path}/{NAME}", {"metadata": {"finalizers": None}})
        await client.raw("DELETE", f"{MACHINE.path}/{NAME}")


async def test_message_that_is_over_is_taken_away(cluster: Cluster) -> None:
    said = MachineStatus(MachinePhase.STARTING, "its script runs", started_at=1_800_000_000.0)
    statuses = (MachineStatus(), said, MachineStatus(MachinePhase.RUNNING, boots=1), said)
    first, second, third, fourth = await written(cluster, *statuses)
    await removed(cluster)
    assert first == {"phase": "Pending", "boots": 0, "resets": 0}
    assert (second["message"], second["phase"]) == ("its script runs", "Starting")
    assert third == {"phase": "Running", "boots": 1, "resets": 0}
    assert fourth == second


async def test_kubectl_shows_how_often_it_was_rebooted_and_reset(cluster: Cluster) -> None:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl on the PATH")
    status = MachineStatus(MachinePhase.RUNNING, "its script was left out", boots=3, resets=2)
    await written(cluster, status)
    command = [program, "--kubeconfig", str(cluster.kubeconfig), "get", "machines.unbroken.dev"]
    shown = subprocess.run([*command, NAME], capture_output=True, text=True, check=True).stdout
    await removed(cluster)
    head, row = shown.splitlines()
    assert head.split()[:2] == ["NAME", "PHASE"]
    for name, value in (("BOOTS", "3"), ("RESETS", "2"), ("MESSAGE", "its script was left out")):
        assert row[head.index(name) :].startswith(value), shown
