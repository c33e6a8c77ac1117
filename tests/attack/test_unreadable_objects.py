"""One object that ends the operator, and every operator after it.

The attack: a job nested 1,100 levels deep raised RecursionError in the informer; a pod with
AGENT_PORT of 5,000 digits raised ValueError in a handler.  Either ended the whole program.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lightkube.resources.core_v1 import Node, Pod

from tests import loopback
from tests.apiservers import Cluster, kubeconfig_of
from tests.attack.hostile_objects import JSON, mutated, nested
from tests.operator.conftest import conditions, job
from tests.operator.conftest import place as place
from tests.watching import Watcher, running, until
from unbroken.cli.connection import _decoded
from unbroken.errors import WorldError
from unbroken.kube.bounds import ObjectBudgets, cut, is_too_deep
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.errors import ApiRefusal
from unbroken.kube.informer import Informer
from unbroken.kube.refusals import Refusals, head_of
from unbroken.local.scheduler.model import node_info, pod_info
from unbroken.operator.jobs.pods import job_identity
from unbroken.operator.jobs.views import agent_place, node_view, pod_view
from unbroken.operator.kinds import IncidentObject, JobObject, job_class
from unbroken.operator.nodes.repair import repair_node
from unbroken.operator.resume.jobs import concerns, node_state, pod_state
from unbroken.spec.job.codec import incident_from, job_status_from
from unbroken.spec.job.parse import parse_job
from unbroken.spec.job_kinds import PYTORCHJOB
from unbroken.spec.keys import AUTO_RESUME, MAX_RETRIES
from unbroken.spec.kubeflow.pytorchjob import parse_pytorchjob

Object = dict[str, Any]
DEPTHS = (100, 1_200, 10_000)
POD = {
    "metadata": {
        "name": "lm-pods-0",
        "labels": {"unbroken.dev/index": "0", "unbroken.dev/job": "lm"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Job", "name": "lm", "uid": "u"}],
    },
    "spec": {
        "nodeName": "a",
        "containers": [
            {
                "name": "main",
                "image": "i",
                "env": [{"name": "AGENT_PORT", "value": "8080"}],
                "resources": {"limits": {"cpu": "1", "nvidia.com/gpu": "8"}},
            }
        ],
        "terminationGracePeriodSeconds": 30,
    },
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "containerStatuses": [
            {"name": "main", "image": "i", "imageID": "", "ready": True, "restartCount": 0}
        ],
    },
}
NODE = {
    "metadata": {
        "name": "a",
        "labels": {"sagemaker.amazonaws.com/node-health-status": "Schedulable", "rack": "1"},
        "annotations": {"unbroken.dev/node-faults": "[]", "unbroken.dev/check-hold": "{}"},
    },
    "spec": {"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]},
    "status": {
        "capacity": {"cpu": "4", "memory": "8Gi"},
        "conditions": [{"type": "Ready", "status": "True", "message": "m", "reason": "r"}],
    },
}
INCIDENT = {
    "metadata": {"name": "lm-1", "labels": {"unbroken.dev/job": "lm"}},
    "spec": {
        "id": 1,
        "attempt": 0,
        "job": {"name": "lm", "namespace": "default", "uid": "u"},
        "culprit": {"kind": "Crash", "rank": 1, "node": "a", "text": "t", "evidence": ["x"]},
        "signals": [{"kind": "Crash", "text": "t"}],
        "outcome": "Recovered",
        "reason": "r",
    },
}


class Server:
    """A list and a watch that say what a test wants, as text."""

    def __init__(self, listed: list[str], told: list[tuple[str, str]]) -> None:
        self.listed, self.told = listed, told
        self.events: list[Object] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        if request.method == "POST":
            self.events.append(await request.json())
            return web.json_response({}, status=201)
        if "watch" not in request.query:
            items = ",".join(self.listed)
            text = f'{{"kind":"L","metadata":{{"resourceVersion":"5"}},"items":[{items}]}}'
            return web.Response(text=text, content_type="application/json")
        response = web.StreamResponse()
        await response.prepare(request)
        for kind, item in self.told:
            await response.write(f'{{"type":"{kind}","object":{item}}}\n'.encode())
        self.told = []
        await asyncio.Event().wait()
        return response

    @asynccontextmanager
    async def client(self, folder: Path) -> AsyncIterator[KubeClient]:
        """A client of this server."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.handle)
        async with loopback.serving(application) as port:
            path = folder / "kubeconfig"
            path.write_text(kubeconfig_of(f"http://127.0.0.1:{port}", "", "t"))
            async with connect(path) as client:
                yield client


def item(name: str, version: int, *, spec: str = "{}", uid: str = "") -> str:
    """A job as a server sends it."""
    head = f'"name":"{name}","namespace":"ns","uid":"{uid or name}","resourceVersion":"{version}"'
    return f'{{"metadata":{{{head}}},"spec":{spec}}}'


def odd(name: str, version: int) -> dict[str, str]:
    """Return the job in forms that cannot be read."""
    long = json.dumps("x" * (2 << 20))
    return {
        **{f"{depth} levels": item(name, version, spec=nested(depth)) for depth in DEPTHS},
        "too long": item(name, version, spec=f'{{"x":{long}}}'),
        "5,000 digits": item(name, version, spec=f'{{"x":{"9" * 5000}}}'),
        "no number": item(name, version, spec='{"x":1e999}'),
        "half a pair": item(name, version, spec='{"x":"\\ud800"}'),
        "owners of a wrong type": item(name, version)[:-1].replace(
            '"metadata":{', '"metadata":{"ownerReferences":7,'
        )
        + "}",
    }


@pytest.mark.parametrize("form", odd("x", 1))
async def test_a_job_that_cannot_be_read_is_told_and_hides_no_other(
    form: str, tmp_path: Path
) -> None:
    """Put the object into a list and a watch, change it while it is known, and delete it."""
    bad, worse, gone = odd("bad", 4)[form], odd("good", 7)[form], odd("good", 9)[form]
    told = [
        ("ADDED", odd("late", 6)[form]),
        ("MODIFIED", worse),
        ("ADDED", item("next", 8)),
        ("DELETED", gone),
    ]
    server = Server([bad, item("good", 3)], told)
    async with server.client(tmp_path) as client:
        informer: Informer[JobObject] = Informer(client, JobObject)
        seen, refused = Watcher[str](), Watcher[str]()
        informer.subscribe(lambda old, new: seen.change(old, new))
        informer.on_refusal(lambda one: refused(f"{one.head.key.name}{one.is_gone:d}"))
        async with running(informer.run()):
            await seen.until(lambda all: all == ["+good", "+next", "-good"])
            await refused.until(lambda all: all == ["bad0", "late0", "good0", "good1"])
            await until(lambda: server.events, lambda events: len(events) >= 3)
        assert informer.refusals.counts == {"unreadable": 4, "unhandled": 0}
        assert [one["involvedObject"]["name"] for one in server.events[:2]] == ["bad", "late"]
        assert {one["reason"] for one in server.events} == {"ObjectRefused"}
        assert all(len(one["message"]) < 1000 for one in server.events)


async def test_a_change_that_cannot_be_read_is_no_deletion_at_the_next_list(tmp_path: Path) -> None:
    server = Server([item("a", 3)], [])
    async with server.client(tmp_path) as client:
        informer: Informer[JobObject] = Informer(client, JobObject)
        seen = Watcher[str]()
        informer.subscribe(lambda old, new: seen.change(old, new))
        async with running(informer.run()):
            await seen.until(lambda all: all == ["+a"])
        server.listed = [odd("a", 4)["1200 levels"], item("b", 4)]
        informer._version = None
        async with running(informer.run()):
            await seen.until(lambda all: all == ["+a", "+b"])
        server.listed = [
            item("b", 4),
            odd("a", 9)["1200 levels"].replace('"uid":"a"', '"uid":"z"'),
        ]
        informer._version = None
        async with running(informer.run()):
            await seen.until(lambda all: all == ["+a", "+b", "-a"])


async def test_a_handler_that_fails_for_one_object_is_called_for_the_others(tmp_path: Path) -> None:
    server = Server([item("bad", 3), item("good", 3)], [("ADDED", item("next", 6))])
    async with server.client(tmp_path) as client:
        informer: Informer[JobObject] = Informer(client, JobObject)
        seen = Watcher[str]()

        def fail(old: Any, new: Any) -> None:
            if new.metadata.name == "bad":
                raise ValueError("x\ny\x1b[2J" + "z" * 5000)

        informer.subscribe(fail)
        informer.subscribe(lambda old, new: seen.change(old, new))
        async with running(informer.run()):
            await seen.until(lambda all: all == ["+bad", "+good", "+next"])
            await until(lambda: server.events)
        assert informer.refusals.counts == {"unreadable": 0, "unhandled": 1}
        message = server.events[0]["message"]
        assert message.isprintable()
        assert r"x\ny\x1b[2J" in message
        assert len(message) < 400


def test_an_object_is_told_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(JobObject, ObjectBudgets())
    for _ in range(1000):
        refusals.unreadable(head_of(item("a", 1).encode()), ValueError("odd"))
    assert refusals.counts["unreadable"] == 1000
    assert len(refusals.unrecorded) == len(caplog.records) == 1
    for number in range(5000):
        refusals.unreadable(head_of(item(f"a{number}", 1).encode()), ValueError("odd"))
    assert len(refusals.unrecorded) == len(refusals._known) == 1024


def test_a_list_of_the_cli_shows_the_others() -> None:
    body = f'{{"items":[{item("deep", 1, spec=nested(9_000))},{item("honest", 1)}]}}'
    names = [one["metadata"]["name"] for one in _decoded(body.encode())["items"]]
    assert names == ["deep", "honest"]


@given(JSON, st.integers(1, 12))
def test_cutting_never_changes_what_is_shallow(value: Any, depth: int) -> None:
    text = json.dumps(value).encode()
    shallow, pieces = cut(text, depth)
    assert all(json.loads(piece) is not None for piece in pieces)
    json.loads(shallow)
    if not pieces:
        assert shallow == text
    assert not is_too_deep(text)


@given(st.binary(max_size=200))
def test_cutting_takes_any_bytes(text: bytes) -> None:
    cut(text, 1)
    head_of(text)


@pytest.mark.slow
async def test_the_operator_fails_the_bad_job_and_serves_the_honest_one(
    place: Any, cluster: Cluster
) -> None:
    """The audit's two objects, and their likes, on an API server; real: 1,200 levels and more."""
    async with place() as at:
        async with at.operator():
            pass  # it installs the definitions
        path = at.path("hyperpodpytorchjobs")
        for depth in (100, 1_200, 9_000) if cluster.is_real else (100, 180):
            body = json.dumps(job(f"deep{depth}")).replace('"any"', f'"any","x":{nested(depth)}')
            await post_text(at.client, path, body)
        port = job("port")
        container = port["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
        container["env"] = [{"name": "AGENT_PORT", "value": "9" * 5000}]
        await at.post("hyperpodpytorchjobs", port)
        many = job("many")
        annotations = {f"unbroken.dev/{n}": "x" for n in range(3000)}
        many["metadata"]["annotations"] = annotations
        await at.post("hyperpodpytorchjobs", many)
        async with at.operator():
            await at.post("hyperpodpytorchjobs", job("honest"))
            found = await at.until("hyperpodpytorchjobs/many", conditions)
            told = conditions(found)["Failed"]["message"]
            assert len(told) < 9000, told[-80:]
            assert "more" in told[-20:], told[-80:]
            found = await at.until("hyperpodpytorchjobs/port", conditions)
            assert "must be a port" in conditions(found)["Failed"]["message"]
            deep = await at.until("hyperpodpytorchjobs/deep100", conditions)
            assert "nested more than 64 levels" in conditions(deep)["Failed"]["message"]
            listed = await at.until("pods", lambda listed: len(listed["items"]) == 2)
            await bad_pod(at, listed["items"][0])
            name = listed["items"][1]["metadata"]["name"]
            await at.delete(f"pods/{name}", gracePeriodSeconds=0)
            await at.until(
                f"pods/{name}",
                lambda one: one["metadata"]["uid"] != listed["items"][1]["metadata"]["uid"],
            )
            await at.until(
                "events",
                lambda all: any(one["reason"] == "ObjectRefused" for one in all["items"]),
            )


async def bad_pod(at: Any, like: Object) -> None:
    """A pod that says it is of the job, with a port of 5,000 digits."""
    metadata = {key: like["metadata"][key] for key in ("labels", "ownerReferences")}
    env = [{"name": "AGENT_PORT", "value": "9" * 5000}]
    containers = [{"name": "main", "image": "any", "env": env}]
    body = {"metadata": {**metadata, "name": "bad"}, "spec": {"containers": containers}}
    await at.post("pods", body)


async def post_text(client: KubeClient, path: str, text: str) -> None:
    """Create an object of which only the text is known."""
    user = client.config.user
    server, token = client.config.cluster.server, user.token if user else ""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session,
        session.post(f"{server}/{path}", data=text, headers=headers) as answer,
    ):
        assert answer.status in (201, 400, 422), await answer.text()


@pytest.mark.slow
async def test_a_job_of_more_pods_than_memory_fails_alone(place: Any) -> None:

    def failed(found: Object) -> list[Object]:
        conditions = found.get("status", {}).get("conditions", [])
        return [one for one in conditions if (one["type"], one["status"]) == ("Failed", "True")]

    async with place() as at, at.operator():
        vast = job("vast")
        vast["spec"]["replicaSpecs"][0]["replicas"] = 2_000_000_000
        await at.post("hyperpodpytorchjobs", vast)
        await at.post("hyperpodpytorchjobs", job("honest"))
        await at.until("pods", lambda listed: len(listed["items"]) == 2)
        found = await at.until("hyperpodpytorchjobs/vast", failed)
        assert "at most 50000 pods" in failed(found)[0]["message"]


@pytest.mark.slow
async def test_a_job_of_thousands_of_pods_does_not_delay_another(place: Any) -> None:
    """The pods of the other are made before most of the thousands."""
    many = 3000

    def of(listed: Object, name: str) -> list[Object]:
        return [
            one
            for one in listed["items"]
            if any(owner["name"] == name for owner in one["metadata"].get("ownerReferences", ()))
        ]

    async with place() as at, at.operator():
        huge = job("huge")
        huge["spec"]["replicaSpecs"][0]["replicas"] = many
        await at.post("hyperpodpytorchjobs", huge)
        await at.until("pods", lambda listed: len(of(listed, "huge")) >= 100)
        await at.post("hyperpodpytorchjobs", job("honest"))
        listed = await at.until("pods", lambda listed: len(of(listed, "honest")) == 2)
        assert len(of(listed, "huge")) < many / 2
        await at.delete("hyperpodpytorchjobs/huge")


@pytest.mark.slow
@settings(
    max_examples=4,
    deadline=None,
    # An example takes seconds: a smaller one would be looked for until the test is out of time, and
    # the error not shown.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_garbage_that_the_api_stores_stops_nobody(place: Any, data: Any) -> None:
    async def check() -> None:
        async with place() as at, at.operator():
            await at.post("hyperpodpytorchjobs", job("honest"))
            stored = 0
            for kind, base in (
                ("hyperpodpytorchjobs", job("odd")),
                ("pods", POD),
                ("incidents", INCIDENT),
                ("nodes", NODE),
            ):
                for number in range(5):
                    body = data.draw(mutated(base))
                    name = f"{kind[:4]}-{at.namespace}-{number}"
                    body["metadata"] = {**body["metadata"], "name": name}
                    try:
                        await at.post(kind, body)
                        stored += 1
                    except (ApiRefusal, UnicodeError):
                        continue
                    except WorldError as error:
                        # Kubernetes 1.20 answers 500 to it.
                        if not re.search("Object '(apiVersion|Kind)' is missing", str(error)):
                            raise
                        continue
                    finally:
                        if kind == "nodes":
                            with suppress(ApiRefusal):
                                await at.delete(f"nodes/{name}")
            listed = await at.until("pods", ours)
            name = ours(listed)[0]["metadata"]["name"]
            await at.delete(f"pods/{name}", gracePeriodSeconds=0)
            await at.until("pods", ours)
            # Operators of later tests would resume the jobs that want thousands of pods.
            for number in range(5):
                with suppress(ApiRefusal):
                    await at.delete(f"hyperpodpytorchjobs/hype-{at.namespace}-{number}")

    def ours(listed: Object) -> list[Object]:
        found = [
            one
            for one in listed["items"]
            if any(o["name"] == "honest" for o in one["metadata"].get("ownerReferences", ()))
        ]
        return found if len(found) == 2 else []

    asyncio.run(check())


PyTorchJobObject = job_class(PYTORCHJOB)
HANDLERS: dict[type[Any], tuple[Callable[[Any], object], ...]] = {
    Pod: (pod_view, agent_place, pod_state, pod_info),
    Node: (node_view, repair_node, node_state, node_info),
    JobObject: (parse_job, job_identity, lambda one: job_status_from(one.get("status"))),
    IncidentObject: (incident_from,),
    PyTorchJobObject: (parse_pytorchjob, concerns, PYTORCHJOB.is_suspended, PYTORCHJOB.has_ended),
}
BASES = {
    Pod: POD,
    Node: NODE,
    JobObject: job(),
    IncidentObject: INCIDENT,
    PyTorchJobObject: {
        "metadata": {"name": "p", "annotations": {AUTO_RESUME: "true", MAX_RETRIES: "2"}},
        "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": POD}}},
    },
}


def _call(read: Callable[[Any], object], old: Any, new: Any) -> None:
    if new is not None:
        read(new)


@pytest.mark.flood
@settings(deadline=None, max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("kind", BASES, ids=lambda kind: str(kind.__name__))
def test_whatever_one_object_holds_the_next_is_told(
    kind: type[Any], data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Use the informer, from which all readers of this kind get their objects."""
    path = tmp_path_factory.mktemp("c2") / "kubeconfig"
    path.write_text(kubeconfig_of("http://127.0.0.1:1", "", "t"))

    async def check() -> None:
        content = data.draw(mutated(BASES[kind]))
        async with connect(path) as client:
            informer: Informer[Any] = Informer(client, kind)
            for read in HANDLERS[kind]:
                informer.subscribe(partial(_call, read))
            seen = Watcher[str]()
            informer.subscribe(seen.change)
            for body in (content, BASES[kind]):
                metadata = {**body["metadata"], "name": "last", "resourceVersion": "7"}
                informer._apply("ADDED", msgspec.Raw(json.dumps({**body, "metadata": metadata})))
            assert seen.seen[-1:] in (["+last"], ["~last"])

    asyncio.run(check())


@pytest.mark.flood
@settings(deadline=None, max_examples=300)
@given(mutated(INCIDENT), mutated(job("lm")), JSON)
def test_no_job_or_incident_makes_a_decoder_raise(
    incident: Object, manifest: Object, status: Any
) -> None:
    incident_from(incident)
    parse_job(manifest)
    parse_pytorchjob(manifest)
    job_status_from(status)
