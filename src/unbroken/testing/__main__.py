"""Run worlds: one seed with its trace, or many on all cores, with what they went through.

python -m unbroken.testing --seed 17 --trace
python -m unbroken.testing --seeds 5000
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from unbroken.testing.probes import unreached
from unbroken.testing.world import World, run

CHUNK = 50
SHOWN = 5
"""Failures that are printed in full."""
Result = tuple[Counter[str], list[tuple[int, str]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m unbroken.testing", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one world")
    parser.add_argument("--trace", action="store_true", help="tell all that happens in it")
    parser.add_argument("--seeds", type=int, default=5000, help="run so many worlds")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of them")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _one(options.seed, _say if options.trace else None)
    return _many(options.first, options.seeds, options.processes)


def run_chunk(seeds: Sequence[int]) -> Result:
    """Probes and failures of these worlds."""
    probes: Counter[str] = Counter()
    failures = []
    for seed in seeds:
        try:
            world = run(seed)
        except Exception:  # noqa: BLE001  (any failure of a world is its result)
            failures.append((seed, traceback.format_exc(limit=-4)))
        else:
            probes.update(world.schedule.probes.keys())
            probes["events"] += world.schedule.events
    return probes, failures


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _one(seed: int, tell: Callable[[str], None] | None) -> int:
    world = World(seed, tell=tell)
    _say(str(world.scenario))
    try:
        world.run()
    finally:
        _say(f"seed {seed}: {dict(world.schedule.probes)}, {world.schedule.events} events")
    return 0


def _many(first: int, count: int, processes: int) -> int:
    began = time.perf_counter()
    seeds = range(first, first + count)
    chunks = [seeds[i : i + CHUNK] for i in range(0, count, CHUNK)]
    probes: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    for result in _results(chunks, processes):
        probes.update(result[0])
        failures += result[1]
    seconds = time.perf_counter() - began
    for seed, text in sorted(failures)[:SHOWN]:
        _say(f"seed {seed}\n{text}\n    python -m unbroken.testing --seed {seed} --trace\n")
    speed = f"{count} seeds in {seconds:.1f} s: {count / seconds:.0f} seeds/s"
    _say(f"{speed}, {probes.pop('events', 0) / count:.0f} events a seed, {len(failures)} failures")
    _say("  ".join(f"{name} {number}" for name, number in sorted(probes.items())))
    missing = unreached(probes) if count >= 1000 else []
    if missing:
        _say(f"never reached: {', '.join(missing)}")
    if len(failures) > SHOWN:
        _say(f"failed: {sorted(seed for seed, _ in failures)}")
    return 1 if failures or missing else 0


def _results(chunks: Sequence[Sequence[int]], processes: int) -> Iterator[Result]:
    if processes == 1:
        yield from map(run_chunk, chunks)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap_unordered(run_chunk, chunks)


if __name__ == "__main__":
    sys.exit(main())
