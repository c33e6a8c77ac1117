"""After an outage of the API server, what waits for a retry resumes soon."""

from __future__ import annotations

import asyncio

import pytest

from tests.event_loops import VirtualLoop, run_on
from unbroken.kube.transport import EARLIEST, Contact


@pytest.mark.parametrize(
    ("is_lost", "answered_after", "paused"),
    [
        (False, 0.0, 10.0),  # there was no outage
        (True, 5.0, 5.0),
        (True, 20.0, 10.0),
        # A request that alone fails is not repeated at once.
        (True, 0.0, 10.0 * EARLIEST),
    ],
)
def test_an_answer_ends_a_pause_in_an_outage_and_no_other_pause(
    is_lost: bool, answered_after: float, paused: float
) -> None:
    async def run() -> float:
        contact, loop = Contact(), asyncio.get_running_loop()
        if is_lost:
            contact.lost()
        loop.call_later(answered_after, contact.answered)
        await contact.pause(10.0)
        return loop.time()

    assert run_on(VirtualLoop(), run()) == pytest.approx(paused)
