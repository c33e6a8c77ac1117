"""Behaviour of the client when the connection to the API server, or the server itself, fails.

A real client, a real server, and a real proxy between them that breaks connections and answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightkube.resources.core_v1 import ConfigMap

from tests.apiservers import Cluster
from tests.fault_proxy import Call, Fault, FaultProxy
from tests.watching import PATIENCE_SECONDS, Watcher, running, until
from unbroken.errors import WorldError
from unbroken.kube import informer as informer_module
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.errors import ApiRefusal
from unbroken.kube.informer import IDLE_SECONDS, Informer

Object = dict[str, Any]


@dataclass
class Way:
    """A namespace of the test's own, with the proxy and a direct connection."""

    proxy: FaultProxy
    client: KubeClient
    direct: KubeClient
    maps: str
    namespace: str

    async def make(self, *names: str) -> None:
        """Create objects, without the proxy."""
        for name in names:
            await self.direct.raw("POST", self.maps, body={"metadata": {"name": name}})

    async def remove(self, name: str) -> None:
        """Delete an object, without the proxy."""
        await self.direct.raw("DELETE", f"{self.maps}/{name}")

    @asynccontextmanager
    async def watched(
        self, idle_seconds: float = IDLE_SECONDS
    ) -> AsyncIterator[tuple[Informer[ConfigMap], Watcher[str]]]:
        """Yield a complete informer, and the changes that it reports."""
        told: Watcher[str] = Watcher()
        informer = Informer(
            self.client,
            ConfigMap,
            namespace=self.namespace,
            fields="metadata.name!=kube-root-ca.crt",
            on_change=told.change,
        )
        informer.idle_seconds = idle_seconds
        async with running(informer.run()):
            async with asyncio.timeout(PATIENCE_SECONDS):
                await informer.synced.wait()
            yield informer, told

    def asked(self, *, watches: bool) -> list[Call]:
        """Return the lists or the watches that the proxy has seen."""
        reads = [call for call in self.proxy.calls if call.method == "GET"]
        return [call for call in reads if call.is_watch is watches and call.path.endswith("maps")]


@asynccontextmanager
async def opened(cluster: Cluster, folder: Path) -> AsyncIterator[Way]:
    """Open a way for one test."""
    async with (
        FaultProxy(cluster).serve() as proxy,
        connect(proxy.kubeconfig(folder / "kubeconfig")) as client,
        connect(cluster.kubeconfig) as direct,
    ):
        body = {"metadata": {"generateName": "faults-"}}
        made = json.loads(await direct.raw("POST", "api/v1/namespaces", body=body))
        name = made["metadata"]["name"]
        yield Way(proxy, client, direct, f"api/v1/namespaces/{name}/configmaps", name)


def is_list(call: Call) -> bool:
    """Return whether a call lists config maps."""
    return call.method == "GET" and call.path.endswith("configmaps") and not call.is_watch


def is_watch(call: Call) -> bool:
    """Return whether a call watches config maps."""
    return call.is_watch and call.path.endswith("configmaps")


async def test_a_list_that_breaks_between_two_pages_is_read_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Discard all that was read before the failure, and report no change twice."""
    monkeypatch.setattr(informer_module, "PAGE", 2)

    async with opened(cluster, tmp_path) as way:
        await way.make(*"abcde")
        way.proxy.faults = [Fault(lambda call: "continue" in call.query, status=410)]
        async with way.watched() as (_, told):
            assert told.seen == ["+a", "+b", "+c", "+d", "+e"]
        lists = way.asked(watches=False)
        assert [("continue" in call.query) for call in lists] == [False, True, False, True, True]
        assert {call.query["limit"] for call in lists} == {"2"}


async def test_a_watch_that_fell_silent_is_opened_again_where_it_was(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Open the watch again without a new list: all earlier changes are still known."""
    async with opened(cluster, tmp_path) as way:
        await way.make("a")
        way.proxy.faults = [Fault(is_watch, is_silent=True)]
        async with way.watched(0.3) as (_, told):
            await way.make("b")
            await way.remove("a")
            await told.until(lambda seen: seen == ["+a", "+b", "-a"])
        assert len(way.asked(watches=False)) == 1


async def test_what_was_deleted_in_a_gap_is_told_after_it(cluster: Cluster, tmp_path: Path) -> None:
    """Get a 410, since the server has forgotten what the silent watch should have brought."""
    async with opened(cluster, tmp_path) as way:
        await way.make("a", "b")
        way.proxy.faults = [Fault(is_watch, is_silent=True), Fault(is_watch, status=410)]
        async with way.watched(0.3) as (informer, told):
            await way.remove("a")
            await way.make("c")
            await told.until(lambda seen: seen == ["+a", "+b", "-a", "+c"])
            assert informer.get("a", way.namespace) is None
        assert len(way.asked(watches=False)) == 2


@pytest.mark.parametrize(
    "broken",
    [
        Fault(is_list, reset_after=40),
        Fault(is_list, keep_bytes=40),
        Fault(is_list, status=500),
        Fault(is_list, status=401),
        Fault(is_watch, reset_after=40),
        Fault(is_watch, keep_bytes=40),
        Fault(is_watch, status=503),
        Fault(is_watch, status=429, headers={"Retry-After": "1"}),
    ],
    ids=lambda fault: "list" if fault.match is is_list else "watch",
)
async def test_an_informer_gets_over_any_broken_answer(
    cluster: Cluster, tmp_path: Path, broken: Fault
) -> None:
    """Check that the copy is right in the end, and that each change is reported once."""
    broken.times = 2

    async with opened(cluster, tmp_path) as way:
        await way.make("a")
        way.proxy.faults = [broken]
        async with way.watched() as (informer, told):
            await way.make("b", "c")
            await way.remove("b")
            await told.until(lambda seen: {"-b", "+c"} <= set(seen))
            assert [i.metadata.name for i in informer.items() if i.metadata] == ["a", "c"]
        assert broken.times == 0, "the fault was met"
        assert len(told.seen) == len(set(told.seen))


async def test_a_server_that_puts_off_is_asked_again_when_it_says(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Send the same content again, and not before the given time."""
    async with opened(cluster, tmp_path) as way:
        off = {"Retry-After": "1"}
        way.proxy.faults = [
            Fault(lambda call: call.method == "POST", status=429, headers=off),
            Fault(lambda call: call.method == "POST", status=503, headers=off),
        ]
        body = {"metadata": {"name": "late"}, "data": {"text": "x" * 10_000}}
        made = json.loads(await way.client.raw("POST", way.maps, body=body))
        assert made["data"] == body["data"]
        writes = way.proxy.writes()
        assert len(writes) == 3
        assert len({call.body for call in writes}) == 1
        assert all(b.at - a.at >= 1.0 for a, b in itertools.pairwise(writes))


async def test_a_server_that_starts_is_asked_again_long_before_it_asks_for_that(
    cluster: Cluster, tmp_path: Path
) -> None:
    """kube-apiserver asks for 10 s, but needs 0.2 s."""
    async with opened(cluster, tmp_path) as way:
        fault = Fault(lambda call: call.method == "POST", status=503, headers={"Retry-After": "10"})
        way.proxy.faults = [fault]
        await way.client.raw("POST", way.maps, body={"metadata": {"name": "soon"}})
        first, second = way.proxy.writes()
        assert 1.0 <= second.at - first.at < 5.0


async def test_other_failures_are_for_the_caller_to_repeat(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Leave the retry to the caller: the client cannot know if a failed request took effect."""
    async with opened(cluster, tmp_path) as way:
        faults = [Fault(is_list, status=status) for status in (401, 429, 500, 503)]
        faults += [Fault(is_list, reset_after=0), Fault(is_list, reset_after=20)]
        for fault in faults:
            way.proxy.faults = [fault]
            with pytest.raises(WorldError, match="GET") as failed:
                await way.client.raw("GET", way.maps)
            assert failed.value.retry_after_seconds is not None
        way.proxy.faults = [Fault(is_list, status=403)]
        with pytest.raises(ApiRefusal):
            await way.client.raw("GET", way.maps)
        assert json.loads(await way.client.raw("GET", way.maps))["kind"] == "ConfigMapList"


def token_kubeconfig(cluster: Cluster, folder: Path) -> Path:
    """Write a kubeconfig with a file for the token, as pods have it; return its path."""
    authority = folder / "ca.crt"
    authority.write_text(cluster.ca)
    place: Object = {"server": cluster.url}
    if cluster.ca:
        place["certificate-authority"] = str(authority)
    whole = {
        "current-context": "pod",
        "contexts": [{"name": "pod", "context": {"cluster": "pod", "user": "account"}}],
        "clusters": [{"name": "pod", "cluster": place}],
        "users": [{"name": "account", "user": {"tokenFile": str(folder / "token")}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(whole))
    return path


async def test_a_token_is_read_again_when_it_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Use a token until it is refused, and then read the file until it has a good one."""
    path, token = token_kubeconfig(cluster, tmp_path), tmp_path / "token"
    token.write_text("outdated")
    async with connect(path) as client:
        with pytest.raises(WorldError, match="namespaces"):
            await client.raw("GET", "api/v1/namespaces")
        token.unlink()
        with pytest.raises(WorldError, match="token"):
            await client.raw("GET", "api/v1/namespaces")
        token.write_text(cluster.token + "\n")
        await client.raw("GET", "api/v1/namespaces")
        token.write_text("not read before it must be")
        await client.raw("GET", "api/v1/namespaces")


@pytest.mark.realkube
@pytest.mark.heavy
async def test_the_token_of_a_service_account_may_end(
    clusters: Callable[[str], Cluster], tmp_path: Path
) -> None:
    """Use a real token bound to a Secret: it ends with the Secret, and the next one works."""
    cluster = clusters("real")
    space = "api/v1/namespaces/default"

    async def issue(direct: KubeClient, secret: str) -> str:
        made = json.loads(
            await direct.raw("POST", f"{space}/secrets", body={"metadata": {"name": secret}})
        )
        about = {"kind": "Secret", "apiVersion": "v1", "name": secret}
        about["uid"] = made["metadata"]["uid"]
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [], "expirationSeconds": 600, "boundObjectRef": about},
        }
        path = f"{space}/serviceaccounts/rotated/token"
        given: str = json.loads(await direct.raw("POST", path, body=body))["status"]["token"]
        return given

    async def check() -> None:
        path, token = token_kubeconfig(cluster, tmp_path), tmp_path / "token"
        async with connect(cluster.kubeconfig) as direct, connect(path) as client:
            account = {"metadata": {"name": "rotated"}}
            await direct.raw("POST", f"{space}/serviceaccounts", body=account)
            token.write_text(await issue(direct, "first"))
            # Every account may ask about itself.
            await client.raw("GET", "api/v1")
            await direct.raw("DELETE", f"{space}/secrets/first")

            async def refusal() -> str:
                try:
                    await client.raw("GET", "api/v1")
                except WorldError as error:
                    return str(error)
                return ""

            # The server remembers for 10 s that it knew the token.
            assert "Unauthorized" in await until(refusal)
            token.write_text(await issue(direct, "second"))
            await client.raw("GET", "api/v1")

    await check()


async def test_an_answer_that_breaks_off_is_told_in_words(cluster: Cluster, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path) as way:
        way.proxy.faults = [Fault(is_list, times=None, reset_after=40)]
        with pytest.raises(WorldError, match="the connection ended in the middle of the answer"):
            await way.client.raw("GET", way.maps)
