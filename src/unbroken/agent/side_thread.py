"""A thread for calls that take long, or never return: memory to be freed, storage that hangs.

An agent that is silent for seconds is taken for lost, so its event loop makes no such call.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class SideThread:
    """Makes calls one after the other. `most`: calls that may wait; None: any number."""

    def __init__(self, name: str, most: int | None = None) -> None:
        self._name, self._most = name, most
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called. If too many wait, since one does not return, the future is
        cancelled."""
        future: Future[T] = Future()
        if self._most is not None and self._calls.qsize() >= self._most:
            future.cancel()
            return future

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001  (the caller gets it)
                future.set_exception(error)

        self._calls.put(call)
        if self._thread is None:
            # Daemonic: a call that never returns must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            self._calls.get()()
