"""The election of the acting operator among several of one cluster, on both API servers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.apiservers import Cluster, embedded_cluster
from tests.operator.conftest import Place
from tests.watching import Watcher, running, until
from unbroken.kube.client import KubeClient, connect
from unbroken.operator.election import Election, LeaderTerms, Mandate, _Silence, identity, is_dead

FAST = 0.05


def identity_of(pid: int) -> str:
    """Return the identity of another process of this machine."""
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
    """Programs that report when they begin and stop to lead."""

    def __init__(self, client: KubeClient, terms: LeaderTerms) -> None:
        self.told: Watcher[str] = Watcher()
        self.mandates: dict[str, Mandate] = {}
        self._client = client
        self._terms = terms

    async def lead(self, holder: str) -> None:
        """Be a candidate as `holder`."""

        async def program(mandate: Mandate) -> None:
            self.mandates[holder] = mandate
            self.told(f"+{holder}")
            try:
                await asyncio.Event().wait()
            finally:
                self.told(f"-{holder}")

        await Election(self._client, self._terms, holder).lead(program)


@pytest.fixture
def leaders(place: Any) -> Callable[[int], Any]:
    """Run elections in a namespace of their own."""

    @asynccontextmanager
    async def opened(seconds: int, renew: float = FAST) -> AsyncIterator[tuple[Leaders, Place]]:
        async with place() as here:
            yield Leaders(here.client, LeaderTerms("l", here.namespace, seconds, renew)), here

    return opened


async def test_one_acts_and_the_next_follows_at_once_when_it_ends(leaders: Any) -> None:
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


async def test_who_waits_hears_at_once_that_the_lease_was_given_back(
    leaders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    # A candidate that has to ask repeatedly would ask too late for this test.
    async with leaders(3600, 1800.0) as (found, here):
        await lease(here, "other-host/x/1/1")
        async with running(found.lead("me")):
            await until(lambda: caplog.text, lambda text: "operator waits" in text)
            await here.merge("leases/l", {"spec": {"holderIdentity": ""}})
            await found.told.until(lambda told: told == ["+me"])


def lease(here: Place, holder: str) -> Any:
    """Return a lease as its holder left it."""
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 60}
    metadata = {"name": "l", "namespace": here.namespace}
    return here.post(
        "leases", {"apiVersion": "coordination.k8s.io/v1", "metadata": metadata, "spec": spec}
    )


async def test_a_silent_holder_loses_the_lease(leaders: Any) -> None:
    async with leaders(1) as (found, here):
        await lease(here, "dead-host/x/1/1")
        async with running(found.lead("me")):
            await found.told.until(lambda told: told == ["+me"])
            seen = await here.get("leases/l")
            assert seen is not None
            assert seen["spec"]["leaseTransitions"] == 1


async def test_a_dead_process_of_this_machine_is_not_waited_for(leaders: Any) -> None:
    async with leaders(3600) as (found, here):
        place_of, _, ticks = identity().rpartition("/")
        await lease(here, f"{place_of}/{int(ticks) + 1}")
        async with running(found.lead("me")):
            await found.told.until(lambda told: told == ["+me"])


async def test_who_sees_another_holder_stops_to_act(leaders: Any) -> None:
    async with leaders(60) as (found, here), running(found.lead("me")):
        await found.told.until(lambda told: told == ["+me"])
        await here.merge("leases/l", {"spec": {"holderIdentity": "other"}})
        await found.told.until(lambda told: told == ["+me", "-me"])


async def test_a_lease_that_others_write_too_is_kept(leaders: Any) -> None:
    """Repeat a write of ours that conflicts: each write of another program causes one conflict."""
    async with leaders(60) as (found, here), running(found.lead("me")):
        await found.told.until(lambda told: told == ["+me"])
        first = await here.get("leases/l")
        assert first is not None
        for number in range(50):
            await here.merge("leases/l", {"metadata": {"labels": {"n": str(number)}}})
        renewed = first["spec"]["renewTime"]
        await here.until("leases/l", lambda lease: lease["spec"]["renewTime"] > renewed)
        assert found.told.seen == ["+me"]
        assert found.mandates["me"].is_given()


def test_silence_counts_only_while_the_server_answers() -> None:
    silence = _Silence(15.0)
    assert silence.left(100.0) == 15.0
    for now in (100.0, 105.0, 110.0):
        silence.seen("v1", now)
    assert silence.left(110.0) == 5.0
    silence.seen("v2", 111.0)
    assert silence.left(111.0) == 15.0, "it was renewed"
    silence.seen("v2", 118.0)
    silence.broken()
    silence.seen("v2", 119.0)
    assert silence.left(119.0) == 15.0, "nobody could renew while the server was away"
    silence.seen("v2", 130.0)
    assert silence.left(130.0) == 15.0, "who stood still does not know what the server did"


async def until_given(mandate: Mandate, is_given: bool) -> None:
    """Wait until the mandate is given, or withdrawn."""
    await until(mandate.is_given, lambda found: found is is_given)


@pytest.mark.slow
async def test_in_an_outage_a_leader_holds_still_and_goes_on_after_it(tmp_path: Path) -> None:
    """End the mandate in an outage, unless no other operator can reach the server either."""
    folder = tmp_path / "server"

    async def check(cluster: Cluster) -> None:
        port = int(cluster.url.rpartition(":")[2])
        async with connect(cluster.kubeconfig) as client:
            alone = Leaders(client, LeaderTerms("alone", "default", 2, FAST))
            among = Leaders(client, LeaderTerms("among", "default", 2, FAST, False))
            async with running(alone.lead("me"), among.lead("me")):
                for one in (alone, among):
                    await one.told.until(lambda told: told == ["+me"])
                cluster.process.kill()
                cluster.process.wait()
                await until_given(among.mandates["me"], False)
                assert alone.mandates["me"].is_given()
                with embedded_cluster(folder, port):
                    await until_given(among.mandates["me"], True)
                    assert alone.told.seen == among.told.seen == ["+me"]

    with embedded_cluster(folder) as cluster:
        await check(cluster)
