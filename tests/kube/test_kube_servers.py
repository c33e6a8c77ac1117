"""Informers, leases and events against API servers that run; one is killed and started again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import ConfigMap, Event, Namespace

from tests.apiservers import CannotStartError, Cluster, real_cluster
from tests.watching import Watcher, running, until
from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient, api_errors, connect
from unbroken.kube.clock import micro_time, parse_time, rfc3339
from unbroken.kube.errors import ApiRefusal
from unbroken.kube.events import BURST, Correlator, EventRecorder, Occurrence, reference_to
from unbroken.kube.informer import Informer
from unbroken.kube.lease import LeaseTerms, renew_lease


async def namespace(client: KubeClient, name: str) -> str:
    """Make a namespace of the test's own."""
    made = await client.create(Namespace(metadata=ObjectMeta(generateName=f"{name}-")))
    assert made.metadata is not None
    assert made.metadata.name is not None
    return made.metadata.name


def config_map(name: str, namespace: str) -> ConfigMap:
    """A small object."""
    return ConfigMap(metadata=ObjectMeta(name=name, namespace=namespace))


async def test_informer_follows_what_happens(cluster: Cluster) -> None:
    """Create, change and delete arrive, and other namespaces do not."""
    async with connect(cluster.kubeconfig) as client:
        mine, other = await namespace(client, "mine"), await namespace(client, "other")
        await client.create(config_map("a", mine))
        told: Watcher[str] = Watcher()
        informer = Informer(
            client,
            ConfigMap,
            namespace=mine,
            fields="metadata.name!=kube-root-ca.crt",
            on_change=told.change,
        )
        async with running(informer.run()):
            await informer.synced.wait()
            await client.create(config_map("b", other))
            await client.create(config_map("b", mine))
            await client.set(ConfigMap, "b", namespace=mine, labels={"x": "y"})
            await client.delete(ConfigMap, "a", namespace=mine)
            await told.until(lambda seen: len(seen) >= 4)
        assert told.seen == ["+a", "+b", "~b", "-a"]


async def test_errors_of_the_api_are_ours(cluster: Cluster) -> None:
    """Keep code and reason, so that callers can distinguish absent from refused."""
    async with connect(cluster.kubeconfig) as client:
        with pytest.raises(ApiRefusal) as refused, api_errors("get it"):
            await client.get(ConfigMap, "absent", namespace="default")
        assert (refused.value.code, refused.value.reason) == (404, "NotFound")
        assert str(refused.value) == 'get it: configmaps "absent" not found'


async def test_lease_is_made_and_renewed(cluster: Cluster) -> None:
    """The first renewal makes it; whole seconds keep their fraction."""
    async with connect(cluster.kubeconfig) as client:
        terms = LeaseTerms("node-x", await namespace(client, "leases"))
        for second in (1_700_000_000.0, 1_700_000_010.5):
            await renew_lease(client, terms, second)
            lease = await client.get(Lease, "node-x", namespace=terms.namespace)
            assert lease.spec is not None
            assert lease.spec.holderIdentity == "node-x"
            assert lease.spec.renewTime == datetime.fromtimestamp(second, UTC)


async def test_equal_events_are_counted_in_one_object(cluster: Cluster) -> None:
    """Count equal events, which `kubectl describe` shows as "x3 over ..."."""
    async with connect(cluster.kubeconfig) as client:
        place = await namespace(client, "events")
        about = await client.create(config_map("a", place))
        recorder = EventRecorder(client, "tester", "here")
        counts: Watcher[int] = Watcher()
        informer = Informer(
            client,
            Event,
            namespace=place,
            on_change=lambda old, new: counts((new and new.count) or 0),
        )
        async with running(recorder.run(), informer.run()):
            await informer.synced.wait()
            for reason in ("Ready", "Tired", "Ready", "Ready"):
                recorder.record(about, "Normal", reason, "it is so")
            await counts.until(lambda seen: {1, 3} <= set(seen))
            events = {item.reason: item for item in informer.items()}
        assert {reason: item.count for reason, item in events.items()} == {
            "Ready": 3,
            "Tired": 1,
        }
        assert events["Ready"].involvedObject.uid == reference_to(about).uid
        assert recorder.dropped == 0


def test_object_with_too_many_events_loses_the_rest() -> None:
    """A burst, then one in five minutes; other objects have their own."""
    correlator = Correlator()

    def note(name: str, now: float) -> bool:
        what = Occurrence("ns", "Pod", name, "u", "Normal", "R", f"at {now}", "")
        return correlator.note(what, None, now) is not None  # type: ignore[arg-type]

    assert [note("a", 1000.0 + i / 100) for i in range(BURST + 2)] == [True] * BURST + [False] * 2
    assert note("b", 1001.0)
    assert note("a", 1301.0)


@pytest.mark.parametrize(
    ("seconds", "time", "micro"),
    [
        (0, "1970-01-01T00:00:00Z", "1970-01-01T00:00:00.000000Z"),
        (1_700_000_000.25, "2023-11-14T22:13:20Z", "2023-11-14T22:13:20.250000Z"),
    ],
)
def test_times_are_written_as_kubernetes_does(seconds: float, time: str, micro: str) -> None:
    """Write times, and read them back with any fraction or offset."""
    assert (rfc3339(seconds), micro_time(seconds)) == (time, micro)
    assert parse_time(micro) == seconds
    assert parse_time("2023-11-14T23:13:20.25+01:00") == 1_700_000_000.25
    with pytest.raises(ValueError, match="time zone"):
        parse_time("2023-11-14T23:13:20")


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A real API server that may be killed."""
    try:
        with real_cluster(tmp_path) as cluster:
            yield cluster
    except CannotStartError as error:
        pytest.skip(str(error))


def again(cluster: Cluster, folder: Path) -> subprocess.Popen[bytes]:
    """Start a killed API server with the same command."""
    with open(folder / "second.log", "wb") as log:
        return subprocess.Popen(cluster.process.args, stdout=log, stderr=log)


@pytest.mark.realkube
@pytest.mark.slow
async def test_informer_outlives_its_server(own_cluster: Cluster, tmp_path: Path) -> None:
    """Killed and started again on the same port: the copy catches up with what it missed."""

    async def eventually_delete(client: KubeClient, place: str) -> None:
        async def is_deleted() -> bool:
            try:
                with api_errors("delete"):
                    await client.delete(ConfigMap, "a", namespace=place)
            except (WorldError, ApiRefusal):
                return False
            return True

        await until(is_deleted)

    async def scenario() -> subprocess.Popen[bytes]:
        async with connect(own_cluster.kubeconfig) as client:
            place = await namespace(client, "restart")
            await client.create(config_map("a", place))
            await client.create(config_map("b", place))
            told: Watcher[str] = Watcher()
            informer = Informer(client, ConfigMap, namespace=place, on_change=told.change)
            async with running(informer.run()):
                await told.until(lambda seen: len(seen) >= 2)
                own_cluster.process.kill()
                own_cluster.process.wait()
                second = again(own_cluster, tmp_path)
                # Not through the informer's eyes: it may not be back before this is over.
                await eventually_delete(client, place)
                await client.create(config_map("c", place))
                await told.until(lambda seen: len(seen) >= 4)
            assert told.seen == ["+a", "+b", "-a", "+c"]
            return second

    second = await scenario()
    second.terminate()
    second.wait()
