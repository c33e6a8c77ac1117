"""Work at several places of one machine at once: a process for each, which reports what it
found."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

ANSWER_BYTES_MAX = 16 << 20
"""Bytes of one answer as JSON."""
Place = TypeVar("Place")
Found = TypeVar("Found")


def at_each(
    places: Sequence[Place], work: Callable[[Place], Found]
) -> list[tuple[Place, Found | str]]:
    """Results of `work` for each place, as JSON has them (a tuple comes back as a list); a text
    says how its process ended without an answer."""
    context = multiprocessing.get_context("fork")
    started = []
    for place in places:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(work, place, send))
        process.start()
        # Only the process holds it now: when it ends, so does the pipe.
        send.close()
        started.append((place, process, receive))
    result: list[tuple[Place, Found | str]] = []
    for place, process, receive in started:
        try:
            answer: Found | str = json.loads(receive.recv_bytes(ANSWER_BYTES_MAX))
        except EOFError:
            process.join()
            answer = f"its process ended with {process.exitcode}"
        process.join()
        receive.close()
        result.append((place, answer))
    return result


def _run(work: Callable[[Place], Found], place: Place, send: Connection) -> None:
    send.send_bytes(json.dumps(work(place)).encode())
    send.close()
