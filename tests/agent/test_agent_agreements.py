"""Questions of a large job to node rank 0's agent: few of them hold a connection."""

from __future__ import annotations

import asyncio

from unbroken.agent.snapshots.copies import WAITING_MAX, Agreements
from unbroken.core.snapshots.replication import Arrival

NODES = 3 * WAITING_MAX
ARRIVAL = Arrival(known=0, newest=7, stride=1, held=())


async def test_of_hundreds_of_nodes_a_part_waits_and_all_are_counted() -> None:
    agreements = Agreements(NODES)
    asking = [
        asyncio.create_task(agreements.arrive("training", node, ARRIVAL))
        for node in range(NODES - 1)
    ]
    while sum(one.done() for one in asking) < NODES - 1 - WAITING_MAX:
        await asyncio.sleep(0)
    assert {one.result() for one in asking if one.done()} == {None}
    decision = await agreements.arrive("training", NODES - 1, ARRIVAL)
    assert decision is not None
    told = await asyncio.gather(*asking)
    assert told.count(decision) == WAITING_MAX
    # Who was not kept waiting asks again.
    assert await agreements.arrive("training", 200, ARRIVAL) == decision
    agreements.close()
