"""A server that puts writes off: 503 and Retry-After, as right after a change of a definition.

kube-apiserver 1.36 answers so while it replaces the handlers of a kind ("apiserver is shutting
down").  Nothing has been done then, so that the same write may be sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap

from tests.apiservers import Cluster
from tests.cli_forks import run_unbroken
from tests.fault_proxy import READS, Call, Fault, FaultProxy
from tests.operator.conftest import GROUPS, job
from tests.samples import definition, open_schema, widget
from tests.watching import PATIENCE_SECONDS, until
from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.transport import TRIES
from unbroken.operator import definitions

MAPS = "api/v1/namespaces/default/configmaps"
JOBS = f"{GROUPS['hyperpodpytorchjobs']}/namespaces/default/hyperpodpytorchjobs"
AT_ONCE = {"Retry-After": "0"}
GROUP = "put-off.example.com"
CRDS = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def is_write(call: Call) -> bool:
    """True for requests that change something."""
    return call.method not in READS


def small(name: str) -> ConfigMap:
    """An object to create."""
    return ConfigMap(metadata=ObjectMeta(name=name, namespace="default"), data={"a": "b"})


WRITES: dict[str, Callable[[KubeClient, str], Awaitable[object]]] = {
    "raw": lambda client, name: client.raw(
        "PUT", f"{MAPS}/{name}", body={"metadata": {"name": name}}
    ),
    "merge": lambda client, name: client.merge(f"{MAPS}/{name}", {"data": {"a": "c"}}),
    "merge_if_present": lambda client, name: client.merge_if_present(f"{MAPS}/{name}", {}),
    "create_if_absent": lambda client, name: client.create_if_absent(
        MAPS, {"metadata": {"name": f"{name}-new"}}
    ),
    "delete_if_present": lambda client, name: client.delete_if_present(f"{MAPS}/{name}"),
    "create": lambda client, name: client.create(small(f"{name}-new")),
    "replace": lambda client, name: client.replace(small(name)),
    "apply": lambda client, name: client.apply(small(name), force=True),
    "delete": lambda client, name: client.delete(ConfigMap, name, namespace="default"),
}


@pytest.mark.parametrize("is_guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("way", WRITES)
async def test_every_write_is_sent_again(
    clusters: Callable[[str], Cluster], tmp_path: Path, way: str, is_guarded: bool
) -> None:
    name = f"put-off-{way.replace('_', '-')}-{is_guarded}".lower()
    async with (
        FaultProxy(clusters("embedded")).serve() as proxy,
        connect(proxy.kubeconfig(tmp_path / "kubeconfig")) as client,
    ):
        await client.create(small(name))
        proxy.calls.clear()
        proxy.faults = [Fault(is_write, times=2, status=503, headers=AT_ONCE)]
        used = client.guarded(lambda: True) if is_guarded else client
        await WRITES[way](used, name)
        assert len(proxy.writes()) == 3
        assert len({(one.method, one.path, one.body) for one in proxy.writes()}) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_puts_off_for_ever_is_given_up(
    clusters: Callable[[str], Cluster], tmp_path: Path, status: int
) -> None:
    async with (
        FaultProxy(clusters("embedded")).serve() as proxy,
        connect(proxy.kubeconfig(tmp_path / "kubeconfig")) as client,
    ):
        proxy.faults = [Fault(is_write, times=None, status=status, headers=AT_ONCE)]
        with pytest.raises(WorldError) as failed:
            await client.merge(f"{MAPS}/none", {})
        assert failed.value.retry_after_seconds is not None
        assert len(proxy.writes()) == TRIES


async def test_one_that_may_no_longer_write_does_not_repeat(
    clusters: Callable[[str], Cluster], tmp_path: Path
) -> None:
    """An operator that lost its lease while it waited."""
    async with (
        FaultProxy(clusters("embedded")).serve() as proxy,
        connect(proxy.kubeconfig(tmp_path / "kubeconfig")) as client,
    ):
        proxy.faults = [Fault(is_write, times=None, status=503, headers=AT_ONCE)]
        with pytest.raises(WorldError):
            await client.guarded(lambda: not proxy.writes()).merge(f"{MAPS}/none", {"data": {}})
        assert len(proxy.writes()) == 1


async def test_a_command_is_carried_out(clusters: Callable[[str], Cluster], tmp_path: Path) -> None:
    """`unbroken suspend` and `unbroken delete`, as processes; no operator is there."""
    cluster = clusters("embedded")
    async with connect(cluster.kubeconfig) as client:
        await definitions.install(client)
        await client.raw("POST", JOBS, body=job("put-off"))
    with FaultProxy(cluster).beside() as proxy:
        place = ["--kubeconfig", str(proxy.kubeconfig(tmp_path / "kubeconfig"))]
        for words in (["suspend", "put-off"], ["delete", "put-off"]):
            proxy.calls.clear()
            proxy.faults = [Fault(is_write, times=2, status=503, headers=AT_ONCE)]
            done = await asyncio.to_thread(
                run_unbroken, [*words, "--no-wait", *place], tmp_path, os.environ
            )
            assert done.returncode == 0, done.stderr
            assert [one.status for one in proxy.writes()][:3] == [0, 0, 200]


@pytest.mark.realkube
async def test_writes_get_over_changes_of_their_definition(
    clusters: Callable[[str], Cluster], tmp_path: Path
) -> None:
    """Write to a real 1.36 until it has put off one write."""
    cluster = clusters("crds")
    objects = f"apis/{GROUP}/v1/namespaces/default/widgets"
    async with (
        FaultProxy(cluster).serve() as proxy,
        connect(proxy.kubeconfig(tmp_path / "kubeconfig")) as client,
        connect(cluster.kubeconfig) as direct,
    ):
        body = definition(GROUP, open_schema(size={"type": "integer"}))
        await direct.raw("POST", CRDS, body=body)
        await until(lambda: direct.get_or_none(objects, dict), lambda found: found is not None)
        is_over = asyncio.Event()
        made: list[str] = []

        async def write(number: int) -> None:
            for count in itertools.count():
                name = f"w-{number}-{count}"
                await client.raw("POST", objects, body=widget(GROUP, name, spec={"size": 1}))
                made.append(name)
                if is_over.is_set():
                    return

        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(write(number))
            for largest in itertools.count(5):
                if any(one.status == 503 for one in proxy.writes()):
                    break
                schema = open_schema(size={"type": "integer", "maximum": largest})
                versions = definition(GROUP, schema)["spec"]["versions"]
                await direct.merge(
                    f"{CRDS}/{body['metadata']['name']}", {"spec": {"versions": versions}}
                )
            is_over.set()
        found = await direct.raw("GET", objects)
        assert all(f'"{name}"'.encode() in found for name in made)
