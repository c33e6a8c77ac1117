"""A pod made the operator call any address: its answers were redirects, and were followed."""

from __future__ import annotations

import re

import pytest

from tests.agent.running import linked
from tests.apiservers import ROOT
from tests.attack.redirecting import Redirecting, redirecting
from tests.watching import until
from unbroken.agent_http.sessions import plain_session
from unbroken.cluster_api.client import connected
from unbroken.cluster_api.signatures import Credential
from unbroken.errors import PeerError
from unbroken.operator.jobs.views import port_number
from unbroken.wire.agent import StopCommand

STATUSES = (301, 302, 303, 307, 308)


async def asked(pod: Redirecting, what: str, count: int = 2) -> None:
    """Return once the pod was asked for it so often."""
    await until(lambda: pod.asked, lambda asked: asked.count(what) >= count)


@pytest.mark.parametrize("status", STATUSES)
async def test_a_link_goes_nowhere_else(status: int) -> None:
    async with redirecting(Redirecting(status)) as pod, linked(pod.port, key=None):
        await asked(pod, "GET /v1/link")
    assert pod.heard == []


@pytest.mark.parametrize("status", STATUSES)
async def test_the_documented_status_goes_nowhere_else(status: int) -> None:
    given = Redirecting(status, ("/status",))
    async with redirecting(given) as pod, linked(pod.port, key=None) as operator:
        await asked(pod, "GET /status")
        assert operator.reports == []
    assert pod.heard == []


@pytest.mark.parametrize("status", STATUSES)
async def test_a_command_goes_nowhere_else(status: int) -> None:
    given = Redirecting(status, ("/stop",))
    async with redirecting(given) as pod, linked(pod.port, key=None) as operator:
        operator.send(StopCommand(0))
        await asked(pod, "POST /stop", 1)
        await asked(pod, "GET /v1/link")
    assert pod.heard == []


async def test_every_session_refuses_redirects_for_every_method() -> None:
    async with redirecting(Redirecting()) as pod, plain_session() as session:
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD"):
            with pytest.raises(PeerError, match=r"a redirect \(HTTP 302\), which"):
                await session.request(method, f"http://127.0.0.1:{pod.port}/any")
        with pytest.raises(PeerError, match="a redirect"):
            await session.ws_connect(f"http://127.0.0.1:{pod.port}/any")
    assert pod.heard == []


async def test_a_client_of_the_cluster_api_goes_nowhere_else() -> None:
    async with (
        redirecting(Redirecting(307)) as pod,
        connected(f"http://127.0.0.1:{pod.port}", Credential("AKID", "secret"), "r") as client,
    ):
        with pytest.raises(PeerError, match="a redirect"):
            await client.call("ListClusters", {})
    assert pod.heard == []


async def test_compressed_answers_are_refused_unread() -> None:
    given = Redirecting(paths=("/elsewhere",))
    async with redirecting(given) as pod, plain_session() as session:
        with pytest.raises(PeerError, match="compressed content"):
            await session.get(f"http://127.0.0.1:{pod.port}/bomb")


async def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with redirecting(Redirecting(paths=("/elsewhere",))) as pod:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{pod.target}")
        async with plain_session() as session:
            await session.get(f"http://127.0.0.1:{pod.port}/status")
        assert pod.asked == ["GET /status"]
        assert pod.heard == []


def test_no_other_module_makes_a_session_of_its_own() -> None:
    """kube/transport asks one API server and follows nothing; node/driver is the embedded kubelet,
    whose probes take a redirect for an answer, as Kubernetes' do."""
    source = ROOT / "src/unbroken"
    found = {
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if re.search(r"(?<!httpx2\.)\bClientSession\(", file.read_text())
    }
    assert found == {"agent_http/sessions.py", "kube/transport.py", "local/node/driver.py"}


@pytest.mark.parametrize(
    ("text", "port"),
    [("8080", 8080), ("65535", 65535), ("1", 1)]
    + [(text, None) for text in ("0", "65536", "9" * 5000, "-1", "", "8o80", "٨٠٨٠", "1e3")],
)
def test_an_agents_port_is_a_port(text: str, port: int | None) -> None:
    assert port_number(text) == port
