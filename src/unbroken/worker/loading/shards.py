"""Position in the shards of a stream, and their division among ranks.

While there are enough shards, each rank reads its own. The rest of an epoch, when a rank has read
all of its shards, is read by all ranks together: each takes every n-th sample. So of every shard
the samples up to one number were taken, by whichever ranks, and these numbers are the position.
Pure: no torch, no process, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

ENDED = -1
"""Position in a shard that was read to its end."""


class Sample(NamedTuple):
    """A sample, with the position after it."""

    shard: int
    done: int
    """Samples of the shard up to this one."""
    value: Any


def unread(done: Sequence[int]) -> list[int]:
    """Return the shards of which no sample was taken."""
    return [shard for shard, count in enumerate(done) if count == 0]


def begun(done: Sequence[int]) -> list[int]:
    """Return the shards of which some samples were taken."""
    return [shard for shard, count in enumerate(done) if count > 0]


def move(done: list[int], moved: Mapping[int, int]) -> None:
    """Note new positions."""
    for shard, count in moved.items():
        if done[shard] != ENDED:
            done[shard] = count if count == ENDED else max(count, done[shard])


def dealt(done: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Return the shards that a rank reads alone; every rank gets an unread one if they suffice."""
    return [*unread(done), *begun(done)][rank::ranks]


def chunks(samples: Iterable[Sample], ranks: int, batch: int) -> Iterator[list[Sample]]:
    """Yield the samples of each step of all ranks.

    The last chunk has up to one sample more for each rank, so that none is left that has less than
    one for each. It has less than one only if there are no more.
    """
    rest = iter(samples)
    chunk = list(islice(rest, ranks * batch))
    while chunk:
        following = list(islice(rest, ranks * batch))
        if len(following) < ranks:
            chunk, following = chunk + following, []
        yield chunk
        chunk = following


def moves(chunk: Sequence[Sample], shards: Sequence[int], first: int) -> tuple[dict[int, int], int]:
    """Return the positions after a chunk of shards that are read in order, and the index of the
    shard that is being read.

    `first` is the index of the shard that was being read before.
    """
    last = shards.index(chunk[-1].shard, first)
    return {**dict.fromkeys(shards[first:last], ENDED), chunk[-1].shard: chunk[-1].done}, last
