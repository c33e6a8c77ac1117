"""An operator whose objects other programs change all the time, and one with a slow API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.apiservers import Cluster
from tests.fault_proxy import READS, Call, Fault, FaultProxy
from tests.operator.conftest import Place, conditions, job
from unbroken.kube.client import MERGE, connect
from unbroken.operator import definitions
from unbroken.spec.keys import MADE_BY

JOB = "hyperpodpytorchjobs/lm"
STORM = 50


@asynccontextmanager
async def operated(
    cluster: Cluster, folder: Path, name: str
) -> AsyncIterator[tuple[Place, FaultProxy]]:
    """Run an operator for a namespace behind a proxy."""
    async with (
        FaultProxy(cluster).serve() as proxy,
        connect(proxy.kubeconfig(folder / "kubeconfig")) as behind,
        connect(cluster.kubeconfig) as client,
    ):
        await client.raw("POST", "api/v1/namespaces", body={"metadata": {"name": name}})
        async with Place(behind, name).operator():
            yield Place(client, name), proxy


def writes(proxy: FaultProxy) -> list[Call]:
    """Return the operator's writes, without its lease and its events."""
    calls = [call for call in proxy.calls if call.method not in READS]
    return [c for c in calls if "/leases" not in c.path and "/events" not in c.path]


async def test_who_writes_the_same_objects_all_the_time_makes_no_work(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Ignore labels and annotations of other programs, but react to changes that matter."""
    async with operated(cluster, tmp_path, "conflicts") as (here, proxy):
        await here.post("hyperpodpytorchjobs", job())
        await here.until("pods/lm-pods-1", lambda pod: pod)
        await here.until(JOB, conditions)
        before = len(writes(proxy))
        for number in range(STORM):
            mark = {"metadata": {"annotations": {"other": str(number)}}}
            await here.merge(JOB, mark)
            await here.merge("pods/lm-pods-0", mark)
        old = await here.get("pods/lm-pods-1")
        assert old is not None
        await here.delete("pods/lm-pods-1", gracePeriodSeconds=0)
        uid = old["metadata"]["uid"]
        await here.until("pods/lm-pods-1", lambda pod: pod["metadata"]["uid"] != uid)
        made = writes(proxy)[before:]
        assert len(made) < STORM / 5, [(call.method, call.path) for call in made]


async def test_an_operator_whose_first_writes_are_put_off_loses_none(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Retry after 503 with Retry-After, which kube-apiserver 1.36 sends for new definitions."""
    put_off = Fault(
        lambda call: call.method not in READS, 20, status=503, headers={"Retry-After": "0"}
    )
    async with (
        FaultProxy(cluster).serve() as proxy,
        connect(proxy.kubeconfig(tmp_path / "kubeconfig")) as behind,
        connect(cluster.kubeconfig) as client,
    ):
        name = "put-off"
        await client.raw("POST", "api/v1/namespaces", body={"metadata": {"name": name}})
        proxy.faults = [put_off]
        here = Place(client, name)
        async with Place(behind, name).operator():
            await here.post("hyperpodpytorchjobs", job())
            await here.until("pods/lm-pods-1", lambda pod: pod)
            await here.until(JOB, conditions)
        assert put_off.times == 0
        refused = [call for call in proxy.writes() if not call.status]
        assert len(refused) == 20
        for call in refused:
            same = [one for one in proxy.writes() if (one.path, one.body) == (call.path, call.body)]
            assert any(one.status for one in same), call.path


async def test_operators_that_start_together_install_the_definitions_together(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Install a definition that another operator creates after this one has asked for it."""
    async with (
        FaultProxy(cluster).serve() as proxy,
        connect(proxy.kubeconfig(tmp_path / "kubeconfig")) as client,
        connect(cluster.kubeconfig) as other,
    ):
        await definitions.install(other)
        proxy.faults = [Fault(lambda call: call.method == "GET", status=404)]
        await definitions.install(client)
        posted = [call for call in proxy.calls if call.method == "POST"]
        assert [call.status for call in posted] == [409]


@pytest.mark.parametrize(("theirs", "is_kept"), [("99.0.1", True), ("0.0.9", False), ("", False)])
async def test_a_definition_of_a_later_version_stays(
    cluster: Cluster, theirs: str, is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Keep a newer definition: an operator that waits to lead may be older than the leader."""
    path = f"{definitions.PATH}/nodechecks.unbroken.dev"

    async def check() -> str:
        async with connect(cluster.kubeconfig) as client:
            await definitions.install(client)
            changed = {
                "metadata": {"annotations": {MADE_BY: theirs}},
                "spec": {"names": {"shortNames": ["later"]}},
            }
            await client.merge(path, changed)
            await definitions.install(client)
            found = (await client.raw("GET", path)).decode()
            await client.raw(
                "PATCH", path, body={"metadata": {"annotations": {MADE_BY: None}}}, headers=MERGE
            )
            await definitions.install(client)
            return found

    assert ('"later"' in await check()) is is_kept
    assert (f" version={theirs}" in caplog.text) is is_kept


@pytest.mark.heavy
async def test_a_server_that_takes_two_seconds_for_a_write_is_enough(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Create pods in parallel, each once."""
    async with operated(cluster, tmp_path, "slow") as (here, proxy):
        slow = Fault(lambda call: call.method not in READS, times=None, slow_seconds=2.0)
        proxy.faults.append(slow)
        await here.post("hyperpodpytorchjobs", job(replicas=4))
        await here.until("pods", lambda listed: len(listed["items"]) == 4)
        posted = [call for call in writes(proxy) if call.path.endswith("/pods")]
        assert len(posted) == 4
        assert max(c.at for c in posted) - min(c.at for c in posted) < 2.0
