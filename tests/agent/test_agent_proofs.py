"""Agents that offer no proof of their job's key: served, or refused with the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests import loopback
from tests.agent.running import SLEEPER, linked, program, running, start
from tests.watching import until
from unbroken.agent_http.client import LinkResources
from unbroken.agent_http.identity import Proofs
from unbroken.wire.agent import AgentState

pytestmark = pytest.mark.slow


class Plain:
    """A program with the documented requests alone: HyperPod's own agent, or one that poses as it.

    `refusal`: its answer to a link.
    """

    def __init__(self, refusal: int) -> None:
        self.requests: list[str] = []
        self.links = 0
        """Attempts to open a link."""
        self.initialized = "2026-01-01T00:00:00.000000+00:00"
        """Time of its start, which is its identity."""
        self._refusal = refusal

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        if request.path == "/v1/link":
            self.links += 1
            return web.Response(status=self._refusal)
        self.requests.append(request.path)
        entered = {"INIT": self.initialized}
        return web.json_response({"status": "ready", "transitions": entered})

    @asynccontextmanager
    async def served(self) -> AsyncIterator[int]:
        """Serve at a port of its own."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with loopback.serving(app) as port:
            yield port


@pytest.mark.parametrize("refusal", [404, 403])
async def test_an_agent_that_offers_no_proof_is_served_and_reported(refusal: int) -> None:
    agent, proofs, told = Plain(refusal), Proofs(is_required=False), list[None]()
    shared = LinkResources(on_unproven=lambda: told.append(None))
    async with agent.served() as port:
        more = {"proofs": proofs, "is_ours": False}
        async with linked(port, shared=shared, **more) as operator:
            report = await operator.state(AgentState.READY)
            assert report.agent_id.startswith("stock-")
            operator.send(start(0))
            await until(lambda: "/start" in agent.requests)
    assert told
    assert not proofs.is_given


REFUSED = {
    "required": (Proofs(), False, "this operator requires one"),
    "proven before": (Proofs(is_required=False, is_given=True), False, "have proven it"),
    "our command": (Proofs(is_required=False), True, "its pod runs unbroken's agent"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_an_agent_without_a_proof_is_asked_and_sent_nothing(case: str) -> None:
    proofs, is_ours, why = REFUSED[case]
    agent, told = Plain(404), list[str]()
    shared = LinkResources(on_stranger=told.append)
    async with agent.served() as port:
        more = {"proofs": proofs, "is_ours": is_ours}
        async with linked(port, shared=shared, **more) as operator:
            operator.send(start(0))
            await until(lambda: agent.links >= 3)
            assert why in told[0]
            assert (operator.reports, agent.requests) == ([], [])


@pytest.mark.parametrize("refusal", [401, 500, 503, 200])
async def test_no_other_answer_lets_an_agent_pass_without_a_proof(refusal: int) -> None:
    """Only the answers that HyperPod's agent gives count; a proxy gives others."""
    agent = Plain(refusal)
    async with agent.served() as port:
        more = {"proofs": Proofs(is_required=False), "is_ours": False}
        async with linked(port, **more) as operator:
            await until(lambda: agent.links >= 3)
            assert (operator.reports, agent.requests) == ([], [])


async def test_the_first_proof_ends_the_service_of_agents_without_one(tmp_path: Path) -> None:
    """An impostor at one pod's address is dropped when another agent of the job proves its key."""
    impostor, proofs, told = Plain(404), Proofs(is_required=False), list[str]()
    shared = LinkResources(on_stranger=told.append)
    more = {"proofs": proofs, "is_ours": False}
    with running(tmp_path, program(tmp_path, SLEEPER)) as agent:
        async with impostor.served() as port, linked(port, shared=shared, **more) as deceived:
            await deceived.state(AgentState.READY)
            async with linked(agent, **more) as honest:
                await honest.state(AgentState.READY)
                await deceived.until(lambda: bool(deceived.losses))
            assert "have proven it" in deceived.losses[0]
            assert set(told) == set(deceived.losses)
            count, links = len(impostor.requests), impostor.links
            deceived.send(start(0))
            await until(lambda: impostor.links >= links + 2)
            assert len(impostor.requests) == count
