"""An informer's copy stays right through breaks, as scripted by a server of the test's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from lightkube import KubeConfig
from lightkube.resources.core_v1 import ConfigMap, PersistentVolumeClaim

from tests import loopback
from tests.apiservers import kubeconfig_of
from tests.event_loops import PauseLoop, run_on
from tests.watching import Watcher, running
from unbroken.kube.client import connect
from unbroken.kube.informer import Informer

Object = dict[str, Any]


def config_map(name: str, version: int) -> Object:
    """An object as a server sends it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
        },
    }


def bookmark(version: int) -> Object:
    """A bookmark event."""
    return {
        "type": "BOOKMARK",
        "object": {"kind": "ConfigMap", "metadata": {"resourceVersion": str(version)}},
    }


def event(kind: str, name: str, version: int) -> Object:
    """A watch event."""
    return {"type": kind, "object": config_map(name, version)}


GONE: Object = {
    "type": "ERROR",
    "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"},
}


class Script:
    """Answers requests with the next line of its script; holds the last watch open."""

    def __init__(self, *answers: Object | list[Object] | int | str) -> None:
        self.answers = list(answers)
        self.requests: Watcher[str] = Watcher()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request: a dict is a list, a list is a watch, a number is an error."""
        query = dict(request.query)
        query.pop("timeoutSeconds", None)
        watch = query.pop("watch", None) is not None
        kind = "watch" if watch else "list"
        where = query.get("resourceVersion", query.get("continue", ""))
        assert ("allowWatchBookmarks" in query) == watch
        self.requests(f"{kind} {where}".strip())
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, int):
            return web.json_response({"kind": "Status", "code": answer}, status=answer)
        if isinstance(answer, str):
            return web.Response(text=answer)
        if isinstance(answer, dict):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for line in answer:
            await response.write(json.dumps(line).encode() + b"\n")
        if not self.answers:
            await asyncio.Event().wait()
        return response

    @asynccontextmanager
    async def serve(self, tmp: Any) -> AsyncIterator[str]:
        """A kubeconfig's path for a server on loopback."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self.handle)
        async with loopback.serving(app) as port:
            path = tmp / "kubeconfig"
            path.write_text(kubeconfig_of(f"http://127.0.0.1:{port}", "", "t"))
            yield str(path)


def page(version: int, *names: str, more: str | None = None) -> Object:
    """A list of objects, all at the list's version."""
    metadata = {"resourceVersion": str(version), **({"continue": more} if more else {})}
    return {"metadata": metadata, "items": [config_map(name, version) for name in names]}


def check(tmp: Any, script: Script, changes: list[str], requests: list[str]) -> None:
    """Run an informer on the script; compare its changes and requests."""

    async def scenario() -> None:
        told: Watcher[str] = Watcher()
        async with script.serve(tmp) as path, connect(path) as client:
            informer = Informer(client, ConfigMap, on_change=told.change)
            async with running(informer.run()):
                await told.until(lambda seen: len(seen) >= len(changes))
                await script.requests.until(lambda seen: len(seen) >= len(requests))
        assert told.seen == changes
        assert script.requests.seen == requests

    asyncio.run(scenario())


def test_pages_are_one_list(tmp_path: Any) -> None:
    """Callbacks come after the last page; the watch starts at its version."""
    script = Script(page(5, "a", more="next"), page(5, "b"), [event("MODIFIED", "a", 6)])
    check(tmp_path, script, ["+a", "+b", "~a"], ["list", "list next", "watch 5"])


def test_watch_resumes_from_the_last_version_it_saw(tmp_path: Any) -> None:
    """Count bookmarks, report each change once, and never list again."""
    script = Script(
        page(5, "a"),
        [event("ADDED", "b", 7), bookmark(9)],
        [event("ADDED", "b", 7), event("DELETED", "a", 12)],
        [event("ADDED", "c", 13)],
    )
    requests = ["list", "watch 5", "watch 9", "watch 12"]
    check(tmp_path, script, ["+a", "+b", "-a", "+c"], requests)


def test_forgotten_version_lists_again_and_tells_what_was_deleted(tmp_path: Any) -> None:
    """Send 410 as an event of the watch, and as the answer to it."""
    script = Script(page(5, "a"), [GONE], page(20, "b"), 410, page(30, "b", "c"), [])
    requests = ["list", "watch 5", "list", "watch 20", "list", "watch 30"]
    check(tmp_path, script, ["+a", "-a", "+b", "~b", "+c"], requests)


def test_forgotten_version_is_no_failure_of_the_server(tmp_path: Any) -> None:
    """After an outage the first watch often ends so; a further back-off cost up to 5 s."""
    script = Script(page(5, "a"), 500, 500, 500, [GONE], page(20, "b"), [])
    loop = PauseLoop()

    async def check() -> None:
        async with script.serve(tmp_path) as path, connect(path) as client:
            informer = Informer(client, ConfigMap)
            async with running(informer.run()):
                await script.requests.until(lambda seen: seen[-1:] == ["watch 20"])
        assert informer.failures == 4

    run_on(loop, check())
    assert script.requests.seen == ["list", *["watch 5"] * 4, "list", "watch 20"]
    pauses = [one for one in loop.pauses if one]
    assert len(pauses) == 3, "one after each error, and none after the forgotten version"


def test_errors_are_survived(tmp_path: Any) -> None:
    """A server that is overloaded, broken or not one at all."""
    script = Script(503, "no list", page(5, "a"), 500, [event("ADDED", "b", 6)])
    check(tmp_path, script, ["+a", "+b"], ["list", "list", "list", "watch 5", "watch 5"])


async def test_object_that_cannot_be_read_hides_no_other(tmp_path: Any) -> None:
    """Count the object, and leave it out."""
    odd = config_map("odd", 5)
    odd["spec"] = {"resources": "none"}
    listed = {"metadata": {"resourceVersion": "5"}, "items": [odd, config_map("even", 5)]}
    async with Script(listed, []).serve(tmp_path) as path, connect(path) as client:
        informer = Informer(client, PersistentVolumeClaim)
        async with running(informer.run()):
            await informer.synced.wait()
        assert [i.metadata.name for i in informer.items() if i.metadata] == ["even"]
        assert informer.refusals.counts["unreadable"] == 1


async def test_late_subscriber_is_told_what_is_there(tmp_path: Any) -> None:
    """Programs share one informer."""
    script = Script(page(5, "a"), [event("ADDED", "b", 6)])
    async with script.serve(tmp_path) as path, connect(path) as client:
        informer = Informer(client, ConfigMap)
        async with running(informer.run()):
            await informer.synced.wait()
            told: Watcher[str] = Watcher()
            informer.subscribe(told.change)
            await told.until(lambda seen: seen == ["+a", "+b"])


async def test_kubeconfig_of_the_environment_is_found(tmp_path: Any, monkeypatch: Any) -> None:
    """KUBECONFIG names it when nobody else does."""
    async with Script(page(1), []).serve(tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", f"/nowhere:{path}")
        async with connect() as client:
            expected = KubeConfig.from_file(path).get()
            assert expected is not None
            assert client.config.cluster.server == expected.cluster.server
