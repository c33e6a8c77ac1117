"""The node under a real control plane: kube-apiserver, its scheduler and its controllers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiservers import CannotStartError
from tests.e2e.planes import Plane
from tests.local.node.node_world import World, processes_of, shell, state
from unbroken.kube.client import connect
from unbroken.local.node import stop_pods

pytestmark = [pytest.mark.slow, pytest.mark.realkube]


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    """A whole real control plane."""
    room = tmp_path / "control-plane"
    room.mkdir()
    plane = Plane(room)
    try:
        plane.start()
    except CannotStartError as error:
        pytest.skip(str(error))
    else:
        yield room / "kubeconfig"
    finally:
        plane.stop()


async def test_a_node_joins_and_runs_what_the_real_scheduler_gives_it(
    tmp_path: Path, kubeconfig: Path
) -> None:
    client = connect(kubeconfig)
    try:
        world = World(tmp_path, client)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(world.pods.run())
            await world.pods.synced.wait()
            async with world.node():
                await world.service_account()
                limits = {"requests": {"cpu": "100m"}}
                said = {"exec": {"command": ["test", "-e", "said"]}, "periodSeconds": 1}
                text = "echo here; touch said; sleep 1000"
                main = shell(text, resources=limits, readinessProbe=said)
                spec: dict[str, object] = {"nodeName": None, "terminationGracePeriodSeconds": 1}
                # v1.20 waits for the account's token to be made unless the pod wants none.
                spec["automountServiceAccountToken"] = False
                await world.create("p", main, **spec)
                pod = await world.ready("p")
                assert pod["spec"]["nodeName"] == "n1"
                assert "running" in state(pod)["state"]
                assert await world.logs("p") == "here\n"
                await world.delete("p")
                await world.gone("p")
                assert processes_of(tmp_path) == []
            watching.cancel()
    finally:
        await client.close()
        await stop_pods(tmp_path)
