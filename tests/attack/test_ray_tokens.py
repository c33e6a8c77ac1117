"""Ray's tokens go to the Ray that they are of, and to nobody else.

The attack: another user of the machine listens at the address of a pod before Ray does.  The
dashboard's port is known, and addresses of pods are given in order.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster, Context, User

from tests.attack.test_ray_dashboard import HEAD, serving
from tests.watching import Watcher, running
from unbroken.agent_http.sessions import plain_session
from unbroken.errors import WorldError
from unbroken.kube.cache import Key
from unbroken.local import listeners
from unbroken.local.node.port_forwarding import ForwardedPod, PodConnection
from unbroken.local.ray import ray_tokens
from unbroken.operator.resume import ray_dashboard
from unbroken.operator.resume.ray_dashboard import (
    Budgets,
    Dashboard,
    DashboardAddress,
    RefusedError,
)

Object = dict[str, Any]
OTHER = os.geteuid() + 1
LISTEN, CONNECTED = "0A", "01"
V4, V6, ANY_V4, ANY_V6 = "127.0.0.1", "::ffff:127.0.0.1", "0.0.0.0", "::"


def tokens(key: str = "the key") -> Any:
    """Return the tokens of a local cluster that has this key."""
    config = SingleConfig("c", Context("c"), Cluster(), User(token=key))
    return ray_tokens(config)


def raycluster(uid: str = "u1", **spec: Any) -> Object:
    """Return a RayCluster; `spec`: that of its head's pod."""
    return {"metadata": {"uid": uid}, "spec": {"headGroupSpec": {"template": {"spec": spec}}}}


@dataclass
class Seen:
    """A dashboard that is served, and the credentials that it has got."""

    url: str
    credentials: Watcher[str]

    @property
    def port(self) -> int:
        """Its port."""
        port = urlsplit(self.url).port
        assert port is not None
        return port


@asynccontextmanager
async def dashboard(status: int = 200) -> AsyncIterator[Seen]:
    """Serve a dashboard that answers with this status."""
    credentials = Watcher[str]()

    async def jobs(request: web.Request) -> web.Response:
        credentials(request.headers.get("Authorization", ""))
        return web.json_response([], status=status)

    async with serving([web.get("/api/jobs/", jobs)]) as url:
        yield Seen(url, credentials)


def say_of_listeners(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: tuple[str, int, str, int]
) -> None:
    """Let the kernel's tables have these rows: host, port, state and user of a socket."""
    tables = {name: ["  sl  local_address ..."] for name in ("tcp", "tcp6")}
    for host, port, state, user in rows:
        v4 = host.removeprefix("::ffff:")
        packed = f"{int.from_bytes(IPv4Address(v4).packed, 'little'):08X}" if "." in v4 else "0" * 8
        prefix = {V6: "0000000000000000FFFF0000", ANY_V6: "0" * 24}.get(host, "")
        table = "tcp6" if ":" in host else "tcp"
        line = f"   0: {prefix}{packed}:{port:04X} 00000000:0000 {state} 0:0 00:0 0 {user:5} 0 1"
        tables[table].append(line)
    for name, lines in tables.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(listeners, "TABLES", tuple(folder / name for name in (*tables, "absent")))


def test_each_raycluster_has_a_token_of_its_own() -> None:
    url = "http://127.64.0.2:8265"
    found = [
        tokens(key)(raycluster(uid), url)
        for key, uid in (("a", "u1"), ("a", "u2"), ("b", "u1"), ("a", "u1"))
    ]
    assert len(set(found)) == 3
    assert found[0] == found[3]
    assert len(found[0]) == 64


async def test_the_kernels_own_table_names_the_dashboard_as_ours() -> None:
    async with dashboard() as seen, plain_session() as session:
        place = DashboardAddress(seen.url, partial(tokens(), raycluster(), seen.url))
        assert await Dashboard(session).jobs(place) == b"[]"
        assert seen.credentials.seen == [f"Bearer {tokens()(raycluster(), seen.url)}"]


@pytest.mark.parametrize("host", [V4, V6, ANY_V4, ANY_V6])
async def test_nothing_is_sent_where_another_user_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    async with dashboard() as seen, plain_session() as session:
        own = (V4, seen.port, LISTEN, os.geteuid())
        say_of_listeners(tmp_path, monkeypatch, own, (host, seen.port, LISTEN, OTHER))
        place = DashboardAddress(seen.url, partial(tokens(), raycluster(), seen.url))
        with pytest.raises(RefusedError, match=f"user {OTHER} of this machine listens at"):
            await Dashboard(session).jobs(place)
        await Dashboard(session).submit(place, {"entrypoint": "x"})
        assert seen.credentials.seen == []
        pod = ForwardedPod("ray-head", lambda: V4, {})
        with pytest.raises(WorldError, match=f"user {OTHER} of this machine listens there"):
            await PodConnection(pod, seen.port).run(_unused)


async def _unused(_: bytes) -> None:
    raise AssertionError


async def test_sockets_that_take_no_connection_to_ray_are_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with dashboard() as seen, plain_session() as session:
        port = seen.port
        rows = [
            (V4, port ^ 1, LISTEN, OTHER),
            ("127.0.0.2", port, LISTEN, OTHER),
            (V4, port, CONNECTED, OTHER),
            # The pod runs as another user than the local cluster.
            (V4, port, LISTEN, OTHER + 1),
            (V4, port, LISTEN, OTHER + 2),
        ]
        say_of_listeners(tmp_path, monkeypatch, *rows)
        container = {"securityContext": {"runAsUser": OTHER + 1}}
        spec = {"securityContext": {"runAsUser": OTHER + 2}, "containers": [container, {}]}
        place = DashboardAddress(seen.url, partial(tokens(), raycluster(**spec), seen.url))
        assert await Dashboard(session).jobs(place) == b"[]"


@pytest.mark.parametrize("status", [401, 403])
async def test_a_dashboard_that_wants_another_token_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(ray_dashboard, "SILENCE_SECONDS", 0.0)
    unused: Any = None
    told: list[tuple[Key, str]] = []
    async with dashboard(status) as seen, plain_session() as session:
        dashboards = ray_dashboard.RayDashboards(
            unused, session, unused, lambda key, why: told.append((key, why))
        )
        key = Key("team", "ray")
        async with running(dashboards.run()):
            dashboards.want(
                key, HEAD, DashboardAddress(seen.url), Budgets(0.0).of("team", key, 0.0)
            )
            await seen.credentials.until(lambda found: len(found) >= 3)
    assert seen.credentials.seen[0] == ""
    assert told == [(key, f"ray-head: the dashboard asks for another token (HTTP {status})")]
