"""`unbroken operator` with terms of the test's own: KUBECONFIG SECONDS RENEW_SECONDS OUTAGES."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from unbroken.kube.client import connect
from unbroken.operator.driver import OperatorOptions, run_operator
from unbroken.operator.election import LeaderTerms

KEY = bytes(32)
"""The operator's key, which all operators of a cluster share."""


async def main() -> None:
    """Run until SIGTERM."""
    kubeconfig, seconds, renew, outages = sys.argv[1:]
    terms = LeaderTerms(
        duration_seconds=int(seconds),
        renew_seconds=float(renew),
        acts_in_outages=outages == "acts",
    )
    async with connect(kubeconfig, manager="unbroken-operator") as client:
        options = OperatorOptions(terms=terms, key=KEY)
        running = asyncio.ensure_future(run_operator(client, None, options))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()


logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
asyncio.run(main())
