"""Saves to a real S3 server, moto's, which fails while ranks save, and while ranks are killed.

`python -m tests.worker.s3_crashes KIND STRIDE`, with s3fs in PYTHONPATH. It tries a fault at every
so many requests of a save by two ranks, until a save has fewer requests, and prints a line of JSON
for each point. A program of its own, because s3fs takes a second to import.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import fsspec
import s3fs
import torch
from aiobotocore.session import get_session
from torch import distributed

from tests.worker.forked import Child, fork, group
from tests.worker.s3_stores import NEW, OLD, RANKS, S3, running_s3
from unbroken import worker
from unbroken.worker.checkpointing import storage
from unbroken.worker.checkpointing.checkpoints import Superseded

POINTS_MAX = 500
OUTAGE_REQUESTS = 20
S3_SERVER: S3


def begun(retries: int = 8) -> worker.checkpoints:
    """Return the checkpoints of a new attempt, which tries again soon."""
    storage.RETRY_DELAYS, storage.READ_RETRIES = (0.1,) * retries, retries
    return worker.checkpoints(os.environ["RUN_URL"], keep=1)


def filled(value: float) -> torch.nn.Linear:
    """Return a model all of whose weights are the same number."""
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def restored(saved: Any) -> tuple[int, float]:
    """Return the step that is restored, and its weights; 0 and 0: there is none."""
    model = filled(0)
    found = saved.restore(model=model)
    values = {value.item() for parameter in model.parameters() for value in parameter.flatten()}
    assert len(values) == 1, "the state is of more than one step"
    return (found.step if found else 0), values.pop()


def next_saved(
    rank: int = 0, go: int = -1, told: int = -1, added: float = OLD, retries: int = 8
) -> str:
    """Restore, save the next step, and report it if this rank's part is stored."""
    if go >= 0:
        os.read(go, 1)
    try:
        saved = begun(retries)
        step = restored(saved)[0] + 1
        assert saved.save(step, model=filled(step + added))
        saved.wait()
        if saved.failed:
            return "failed"
    except Superseded:
        return "superseded"
    if told >= 0:
        os.write(told, b"%d" % rank)
    return "saved"


def what_is_left() -> dict[str, Any]:
    """Restore, and save the next step; return what was found, and what the next attempt finds."""
    saved = begun()
    found = restored(saved)
    assert saved.save(found[0] + 1, model=filled(found[0] + 1 + NEW))
    saved.wait()
    assert saved.failed == 0
    newest = restored(begun())
    fs, run = fsspec.core.url_to_fs(os.environ["RUN_URL"])
    left = sorted({name for path in fs.find(run) for name in re.findall(r"step-\d+", path)})
    return {"found": found, "newest": newest, "left": left}


class Save:
    """A save of step 2 by all ranks, which begins on `begin`, and what comes of it."""

    def __init__(self, name: str, folder: Path, retries: int = 8) -> None:
        os.environ["RUN_URL"] = f"s3://bucket/{name}"
        S3_SERVER.order(copy=["first/", f"{name}/"])
        (reading, self._go), (self._said, told) = os.pipe(), os.pipe()
        given = (reading, told, OLD, retries)
        self.ranks: list[Child] = group(RANKS, next_saved, folder / "store", *given)
        os.close(told)
        os.close(reading)

    def begin(self, **orders: Any) -> None:
        """Begin, under orders of the server."""
        S3_SERVER.order(**orders)
        os.write(self._go, b"g" * RANKS)
        os.close(self._go)

    def is_held(self) -> bool:
        """Wait until the server holds a request; return False if all ranks have ended first."""
        ended = {rank.said for rank in self.ranks}
        while ended:
            ready = wait([S3_SERVER.told, *ended])
            if S3_SERVER.told in ready:
                S3_SERVER.told.readline()
                return True
            ended -= set(ready)
        return False

    def confirmed(self) -> str:
        """Wait for the end of all ranks; return those that have stored their part."""
        for rank in self.ranks:
            rank.end()
        with os.fdopen(self._said) as said:
            return said.read()


def killed(when: str, victim: int, folder: Path, stride: int) -> Iterator[dict[str, Any]]:
    """Kill a rank at each request of any rank, before or after it is carried out."""
    for point in range(1, POINTS_MAX, stride):
        save = Save(f"killed-{point}", folder)
        pid = save.ranks[victim].pid
        save.begin(mode=f"kill-{when}", pid=pid, first=point, last=point)
        is_through = save.ranks[victim].has_returned()
        del save.ranks[victim]
        confirmed = save.confirmed()
        count = S3_SERVER.order()
        yield {"point": point, "requests": count, "is_through": is_through,
               "confirmed": confirmed, **fork(what_is_left).answer()}  # fmt: skip
        if is_through:
            break


def held(folder: Path, stride: int) -> Iterator[dict[str, Any]]:
    """Let each request come late: after a newer attempt has saved."""
    for point in range(1, POINTS_MAX, stride):
        save = Save(f"held-{point}", folder)
        save.begin(mode="hold", first=point, last=point)
        is_held = save.is_held()
        newer = fork(next_saved, 0, -1, -1, NEW).answer()
        by_newer = fork(lambda: restored(begun())).answer()
        S3_SERVER.order()
        confirmed = save.confirmed()
        yield {"point": point, "newer": newer, "by_newer": by_newer, "confirmed": confirmed,
               **fork(what_is_left).answer()}  # fmt: skip
        if not is_held:
            break


def outages(folder: Path, stride: int) -> Iterator[dict[str, Any]]:
    """Let the store be away for some requests, or stopped for a while, from each request on."""
    for mode in ("away", "hold"):
        for point in range(1, POINTS_MAX, stride):
            save = Save(f"outage-{mode}-{point}", folder, retries=100)
            last = point + OUTAGE_REQUESTS if mode == "away" else POINTS_MAX
            save.begin(mode=mode, first=point, last=last)
            is_through = False
            if mode == "hold":
                is_through = not save.is_held()
                S3_SERVER.order()
            confirmed = save.confirmed()
            is_through |= S3_SERVER.order() < point and mode == "away"
            yield {"mode": mode, "point": point, "confirmed": confirmed,
                   **fork(what_is_left).answer()}  # fmt: skip
            if is_through:
                break


def through_faults(rank: int, mode: str) -> list[tuple[str, float]]:
    """Save steps 2 and 3 while the store fails, and step 4 when it works again."""

    def said(**orders: Any) -> None:
        distributed.barrier()
        if rank == 0:
            S3_SERVER.order(**orders)
        distributed.barrier()

    saved, told = begun(retries=4), []
    assert restored(saved)[0] == 1
    for step in (2, 3, 4):
        said(mode=mode if step < 4 else "")
        failed = saved.failed
        assert saved.save(step, model=filled(step))
        saved.wait()
        told.append("failed" if saved.failed > failed else "saved")
    return told


def faults(folder: Path, _stride: int) -> Iterator[dict[str, Any]]:
    """Let the store be slow, flaky, away, full, and lie."""
    for mode in ("slow", "flaky", "away", "full", "lie"):
        os.environ["RUN_URL"] = f"s3://bucket/{mode}"
        S3_SERVER.order(copy=["first/", f"{mode}/"])
        told = [rank.answer() for rank in group(RANKS, through_faults, folder / "store", mode)]
        yield {"mode": mode, "ranks": told, **fork(what_is_left).answer()}


KINDS: dict[str, Callable[[Path, int], Iterator[dict[str, Any]]]] = {
    **{
        f"killed-{when}-{victim}": partial(killed, when, victim)
        for when in ("before", "after") for victim in range(RANKS)
    },
    "held": held, "outages": outages, "faults": faults,
}  # fmt: skip


def main(kind: str, stride: int) -> None:
    """Print what comes of each fault of a kind."""
    # Clients share what they read from the files of botocore: it takes 0.3 s.
    session = get_session()

    async def loaded() -> None:
        async with session.create_client("s3"):
            pass

    asyncio.run(loaded())
    # The retries of this project are tried, and no library waits for seconds before its own.
    fsspec.config.conf["s3"] = {
        "session": session,
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }
    s3fs.S3FileSystem.retries = 1
    os.environ["RUN_URL"] = "s3://bucket/first"
    assert fork(next_saved).answer() == "saved"
    with tempfile.TemporaryDirectory() as place:
        for found in KINDS[kind](Path(place), stride):
            print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    with running_s3() as S3_SERVER:
        os.environ.update(S3_SERVER.variables)
        main(sys.argv[1], int(sys.argv[2]))
