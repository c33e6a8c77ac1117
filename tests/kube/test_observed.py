"""Work queues of a running program: they are found while they run, with their counts."""

from __future__ import annotations

from tests.watching import Watcher, running
from unbroken.errors import WorldError
from unbroken.kube.observed import observing
from unbroken.kube.workqueue import WorkQueue


async def test_a_queue_is_found_while_it_runs_and_counts_what_it_did() -> None:
    seen: Watcher[str] = Watcher()

    async def handle(key: str) -> float | None:
        seen(key)
        if key == "bad" and seen.seen.count("bad") == 1:
            raise WorldError("not yet", 0.0)
        return None

    outside, queue = WorkQueue("outside", handle), WorkQueue("inside", handle)
    async with running(outside.run()):
        with observing() as found:
            async with running(queue.run()):
                queue.add("good")
                queue.add("bad")
                await seen.until(lambda keys: keys.count("bad") == 2)
                assert found == {queue}
                queue.add_after("later", 3600.0)
                assert (queue.waiting, queue.failed) == (1, 1)
            assert found == set()
    assert (queue.name, queue.handled) == ("inside", 2)
