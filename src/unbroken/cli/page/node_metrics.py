"""Reads the metrics of nodes from the address at which the local cluster serves them."""

from __future__ import annotations

from collections.abc import Iterator

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from unbroken.agent_http.sessions import plain_session
from unbroken.core.page.node_history import NAMES, MetricSample
from unbroken.errors import PeerError, WorldError

ANSWER_SECONDS = 5.0
ANSWER_BYTES_MAX = 32 << 20


async def read_metrics(address: str) -> list[MetricSample]:
    """Return the samples of the metrics that the page shows.  Raises WorldError, PeerError."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    try:
        async with (
            plain_session(timeout) as session,
            session.get(address) as answer,
        ):
            if answer.status != 200:
                raise WorldError(f"{address}: HTTP {answer.status}")
            text = await answer.content.read(ANSWER_BYTES_MAX)
            while piece := await answer.content.read(ANSWER_BYTES_MAX - len(text)):
                text += piece
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise WorldError(f"{address}: {str(error) or 'no answer in time'}") from error
    try:
        return list(samples(text.decode(errors="replace")))
    except ValueError as error:
        raise PeerError(f"{address}: not the text format of Prometheus: {error}") from error


def samples(text: str) -> Iterator[MetricSample]:
    """Yield the samples with known names.  Raises ValueError for a line that cannot be read."""
    # Most lines are about jobs and requests: reading all of them would take ten times as long.
    lines = [line for line in text.splitlines() if line.partition("{")[0].split(" ")[0] in NAMES]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for one in family.samples:
            yield MetricSample(one.name, one.labels, one.value)
