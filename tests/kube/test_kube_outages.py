"""After an outage of the API server, what waits for a retry resumes soon."""

from __future__ import annotations

import asyncio

from unbroken.kube.clock import monotonic
from unbroken.kube.transport import Contact


def timed(contact: Contact, seconds: float) -> float:
    """Length of a pause during which the server answers again."""

    async def run() -> float:
        began = monotonic()
        asyncio.get_running_loop().call_soon(contact.answered)
        await contact.pause(seconds)
        return monotonic() - began

    return asyncio.run(run())


def test_an_answer_ends_a_pause_in_an_outage_and_no_other_pause() -> None:
    contact = Contact()
    assert timed(contact, 0.5) >= 0.49, "there was no outage"
    contact.lost()
    assert timed(contact, 10.0) < 8.0
    contact.lost()
    assert timed(contact, 2.0) >= 0.39, "a request that alone fails is not repeated at once"
