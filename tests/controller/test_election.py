"""Who acts, of several operators of one cluster, on both API servers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from apiservers import Cluster, embedded_cluster
from controller.conftest import Place
from unbroken.controller.election import Election, LeaderTerms, identity, is_dead
from unbroken.kube.client import KubeClient, connect
from watching import Watcher, running

FAST = 0.05


def identity_of(pid: int) -> str:
    """Identity of another process of this machine."""
    here, _, _ = identity().rpartition("/")
    place, _, _ = here.rpartition("/")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{place}/{pid}/{fields[19]}"


def test_a_process_of_this_machine_is_known_to_live_or_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        holder = identity_of(process.pid)
        assert not is_dead(holder)
        assert is_dead(f"{holder}1"), "another process has the number now"
        process.kill()
    assert is_dead(holder)
    assert not is_dead(identity())


@pytest.mark.parametrize("holder", ["", "somebody", "other-host/pid:[1]/1/2", "a/b/c/d/e"])
def test_of_other_machines_nothing_is_known(holder: str) -> None:
    assert not is_dead(holder)


class Leaders:
    """Programs that tell when they lead and when they stop."""

    def __init__(self, client: KubeClient, terms: LeaderTerms) -> None:
        self.told: Watcher[str] = Watcher()
        self._client = client
        self._terms = terms

    async def lead(self, holder: str) -> None:
        """Stand for election as `holder`."""

        async def program() -> None:
            self.told(f"+{holder}")
            try:
                await asyncio.Event().wait()
            finally:
                self.told(f"-{holder}")

        await Election(self._client, self._terms, holder).lead(program)


@pytest.fixture
def leaders(place: Any) -> Callable[[int], Any]:
    """Elections in a namespace of their own."""

    @asynccontextmanager
    async def opened(seconds: int) -> AsyncIterator[tuple[Leaders, Place]]:
        async with place() as here:
            yield Leaders(here.client, LeaderTerms("l", here.namespace, seconds, FAST)), here

    return opened


def test_one_acts_and_the_next_follows_at_once_when_it_ends(leaders: Any) -> None:
    async def check() -> None:
        async with leaders(60) as (found, here):
            async with running(found.lead("second-host/x/1/1")):
                await found.told.until(lambda told: len(told) == 1)
                async with running(found.lead("third-host/x/1/1")):
                    await here.until(
                        "leases/l", lambda lease: lease["spec"]["holderIdentity"].startswith("sec")
                    )
                    assert found.told.seen == ["+second-host/x/1/1"]
            async with running(found.lead("third-host/x/1/1")):
                await found.told.until(lambda told: "+third-host/x/1/1" in told)
            assert found.told.seen[1] == "-second-host/x/1/1"

    asyncio.run(check())


def lease(here: Place, holder: str) -> Any:
    """A lease as its holder left it."""
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 60}
    metadata = {"name": "l", "namespace": here.namespace}
    return here.post(
        "leases", {"apiVersion": "coordination.k8s.io/v1", "metadata": metadata, "spec": spec}
    )


def test_a_silent_holder_loses_the_lease(leaders: Any) -> None:
    async def check() -> None:
        async with leaders(1) as (found, here):
            await lease(here, "dead-host/x/1/1")
            async with running(found.lead("me")):
                await found.told.until(lambda told: told == ["+me"])
                seen = await here.get("leases/l")
                assert seen is not None
                assert seen["spec"]["leaseTransitions"] == 1

    asyncio.run(check())


def test_a_dead_process_of_this_machine_is_not_waited_for(leaders: Any) -> None:
    async def check() -> None:
        async with leaders(3600) as (found, here):
            place_of, _, ticks = identity().rpartition("/")
            await lease(here, f"{place_of}/{int(ticks) + 1}")
            async with running(found.lead("me")):
                await found.told.until(lambda told: told == ["+me"])

    asyncio.run(check())


def test_who_sees_another_holder_stops_to_act(leaders: Any) -> None:
    async def check() -> None:
        async with leaders(60) as (found, here), running(found.lead("me")):
            await found.told.until(lambda told: told == ["+me"])
            await here.merge("leases/l", {"spec": {"holderIdentity": "other"}})
            await found.told.until(lambda told: told == ["+me", "-me"])

    asyncio.run(check())


@pytest.mark.slow
def test_a_leader_goes_on_while_the_api_server_is_away(tmp_path: Path) -> None:
    async def check(cluster: Cluster) -> None:
        async with connect(cluster.kubeconfig) as client:
            found = Leaders(client, LeaderTerms("l", "default", 1, FAST))
            async with running(found.lead("me")):
                await found.told.until(lambda told: told == ["+me"])
                cluster.process.kill()
                cluster.process.wait()
                # Longer than the lease is good for.
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(2):
                        await asyncio.Event().wait()
                assert found.told.seen == ["+me"]

    with embedded_cluster(tmp_path / "server") as cluster:
        asyncio.run(check(cluster))
