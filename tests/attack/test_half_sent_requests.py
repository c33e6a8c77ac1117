"""Half-sent requests that use up the file descriptors of a server.

In the attack, any local user or pod opened hundreds of connections, sent half of a request on each
and waited. The server kept them for ever, until it had no descriptor left for its honest clients.

All servers are attacked at the same time, as their programs take long to start.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.agent.running import KEY, SLEEPER, marked, program, running
from tests.agent_requests import raw_link
from tests.apiclient import Api
from tests.apiservers import Cluster, embedded_cluster
from tests.samples import config_map
from tests.watching import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

SERVERS = ("agent", "agent-without-key", "metrics", "embedded-api")
HELD = 600
AGENT_MAX, METRICS_MAX = 256, 64
API_DESCRIPTORS = 512
SPARE = 40
"""Descriptors that a server may open for honest clients and for itself."""
TURN = threading.Lock()
"""Lock of the attack that opens its connections."""
OPENINGS = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n",
    b"POST /start HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
)
METRICS = """
import asyncio, prometheus_client
from unbroken.observe.server import serving_metrics
async def main():
    async with serving_metrics(prometheus_client.CollectorRegistry(), "127.0.0.1", 0) as url:
        print(url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@contextmanager
def descriptors(soft: int) -> Iterator[None]:
    """Change the limit of open files of this process, and of those that it starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def opened(pids: Collection[int]) -> int:
    """Return the number of descriptors that the processes have open."""
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def hold(
    address: tuple[str, int],
    pids: Collection[int],
    maximum: int,
    honest: Callable[[], object],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Hold half-sent connections open.

    The test fails if the server keeps more than its maximum or refuses the honest client.
    tests/test_listener.py has the time after which it closes those that are left.
    """
    with ExitStack() as stack:
        with TURN:
            honest()
            before, most = opened(pids), 0
            for number in range(HELD):
                one: socket.socket = stack.enter_context(
                    socket.create_connection(address, PATIENCE_SECONDS)
                )
                if tls is not None and number % 4:
                    one = stack.enter_context(tls.wrap_socket(one))
                with suppress(ConnectionError):
                    one.sendall(OPENINGS[number % len(OPENINGS)])
                if number % 100 == 99:
                    honest()
                    most = max(most, opened(pids) - before)
        assert most <= maximum + SPARE
        honest()


async def agent(folder: Path) -> None:
    """Attack an agent, which must serve its operator and keep its link."""
    with running(folder, program(folder, SLEEPER)) as one:
        async with raw_link(one.port, KEY) as link:
            address, pids = ("127.0.0.1", one.port), marked(one.mark)
            holding = asyncio.create_task(
                asyncio.to_thread(hold, address, pids, AGENT_MAX, one.status)
            )
            while not holding.done():
                await link.receive()
            await holding
            await link.receive()


def agent_without_key(folder: Path) -> None:
    """Attack an agent without a key, which must wait for no body."""
    with running(folder, program(folder, SLEEPER), UNBROKEN_AGENT_AUTH="none") as one:
        hold(("127.0.0.1", one.port), marked(one.mark), AGENT_MAX, one.status)


def metrics() -> None:
    """Attack the metrics server, which must answer scrapes."""
    command = [sys.executable, "-c", METRICS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            port = urlsplit(url).port or 0

            def honest() -> None:
                with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
                    assert answer.status == 200

            hold(("127.0.0.1", port), {process.pid}, METRICS_MAX, honest)
        finally:
            process.terminate()


def embedded_api(cluster: Cluster) -> None:
    """Attack the local API server, which must answer and keep its watches."""
    with closing(Api(cluster)) as whole, whole.within("default").watch("configmaps") as watch:
        api = whole.within("default")
        stranger = ssl.create_default_context(cadata=cluster.ca)
        stranger.check_hostname = False
        place = urlsplit(cluster.url)
        address = (str(place.hostname), int(place.port or 0))

        def honest() -> None:
            api.get("configmaps").done()

        hold(address, {cluster.process.pid}, API_DESCRIPTORS // 2, honest, stranger)
        api.post("configmaps", config_map("told")).done()
        assert watch.events(1) == [("ADDED", "told")]


@pytest.fixture(scope="module")
def sieges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """Start the attacks on all servers."""
    folders = {name: tmp_path_factory.mktemp(name) for name in SERVERS}
    with ExitStack() as stack:
        with descriptors(API_DESCRIPTORS):
            cluster = stack.enter_context(embedded_cluster(folders["embedded-api"] / "state"))
        stack.enter_context(descriptors((1 + len(SERVERS)) * HELD))
        pool = stack.enter_context(ThreadPoolExecutor(len(SERVERS)))
        yield {
            "agent": pool.submit(asyncio.run, agent(folders["agent"])),
            "agent-without-key": pool.submit(agent_without_key, folders["agent-without-key"]),
            "metrics": pool.submit(metrics),
            "embedded-api": pool.submit(embedded_api, cluster),
        }


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_closes_half_sent_requests_and_serves_the_honest(
    sieges: dict[str, Future[None]], server: str
) -> None:
    sieges[server].result()
