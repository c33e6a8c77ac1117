"""Runs the operator: clocks, tokens, sockets, and the election of one among several."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field

import aiohttp

from unbroken.kube.client import KubeClient
from unbroken.kube.clock import steady_clock
from unbroken.kube.events import EventRecorder
from unbroken.kube.informers import Informers

from . import definitions
from .election import Election, LeaderTerms, identity
from .operator import Operator, Watches
from .runner import Surroundings

COMPONENT = "hyperpod-pytorch-job-controller"
"""Reporter of the events of jobs (as upstream's)."""
ORDERS_MAX = 64
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """What the operator is told by whoever starts it."""

    namespace: str | None = None
    """Look after the jobs of this one only; None: all."""
    terms: LeaderTerms = field(default_factory=LeaderTerms)


async def run_operator(
    client: KubeClient,
    informers: Informers | None = None,
    options: OperatorOptions | None = None,
) -> None:
    """Install our kinds and run the operator until cancelled, whenever it leads.

    `informers`: shared ones, which the caller runs; None: of its own.
    """
    options = options or OperatorOptions()
    await definitions.install(client)
    election = Election(client, options.terms, identity())
    await election.lead(lambda: _lead(client, informers, options.namespace))


async def _lead(client: KubeClient, informers: Informers | None, namespace: str | None) -> None:
    async with asyncio.TaskGroup() as tasks:
        if informers is None:
            watches = Watches.own(client, namespace)
            for informer in watches.all():
                tasks.create_task(informer.run())
        else:
            watches = Watches.shared(informers)
        recorder = EventRecorder(client, COMPONENT)
        tasks.create_task(recorder.run())
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            around = Surroundings(
                client=client,
                recorder=recorder,
                session=session,
                clock=steady_clock(),
                new_token=lambda: secrets.token_urlsafe(TOKEN_BYTES),
                slots=asyncio.Semaphore(ORDERS_MAX),
            )
            await Operator(around, watches).run()
