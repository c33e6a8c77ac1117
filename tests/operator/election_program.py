"""A program that writes as fast as it can while it leads: KUBECONFIG NAMESPACE NAME SECONDS."""

from __future__ import annotations

import asyncio
import sys

from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.clock import pause
from unbroken.operator.election import Election, LeaderTerms, Mandate, identity


async def write(client: KubeClient, path: str, name: str) -> None:
    """Put the name into an object, again and again."""
    number = 0
    while True:
        number += 1
        body = {"data": {"writer": name, "number": str(number)}}
        try:
            await client.merge(path, body)
        except WorldError:
            await pause(0.001)


async def main() -> None:
    """Stand for election for ever."""
    kubeconfig, namespace, name, seconds = sys.argv[1:]
    path = f"api/v1/namespaces/{namespace}/configmaps/written"
    async with connect(kubeconfig) as client:

        async def program(mandate: Mandate) -> None:
            guarded = client.guarded(mandate.is_given)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(write(guarded, path, name))

        terms = LeaderTerms("l", namespace, int(seconds), 0.2, acts_in_outages=False)
        await Election(client, terms, identity()).lead(program)


asyncio.run(main())
