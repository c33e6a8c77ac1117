"""Run worlds: one seed with its trace, or many on all cores, with what they went through.

python -m unbroken.sim --seed 17 --trace
python -m unbroken.sim --seeds 5000
python -m unbroken.sim --seeds 5000 --fresh $(git rev-parse HEAD)
python -m unbroken.sim --seeds 5000 --digest
python -m unbroken.sim --seed 17 --record "what was wrong" >> tests/sim/regressions.jsonl
python -m unbroken.sim --worlds tests/sim/regressions.jsonl

Two commits that print the same digest have done exactly the same in all these worlds: every event,
every order and every text.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .draw import draw
from .probes import unreached
from .progress import Progress
from .recorded import RecordedWorld, read_worlds, write_line
from .simulation import Simulation

CHUNK = 50
MANY = 2000
"""Worlds that must have reached every situation together."""
SHOWN = 5
"""Failures that are printed in full."""
FRESH_SEEDS = 3000
FRESH_FIRST, FRESH_RANGES = 1_000_000_000, 1_000_000
"""Fresh seeds lie in one of so many ranges that follow each other, above those that people try."""
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C has ended."""
Start = int | RecordedWorld
"""A world to run: its seed, or all that is recorded of it."""
Result = tuple[int, Counter[str], list[tuple[int, str]], int]
"""Worlds, their probes, their failures, and the digests of their traces, joined by XOR."""


@dataclass(slots=True)
class Found:
    """Events that the worlds so far went through."""

    seeds: int = 0
    probes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    digest: int = 0
    """Digests of the traces, joined by XOR: the order of the worlds does not matter."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m unbroken.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, help="run one world")
    parser.add_argument("--trace", action="store_true", help="print everything that happens in it")
    parser.add_argument("--seeds", type=int, default=5000, help="run so many worlds")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of them")
    fresh = f"run {FRESH_SEEDS} more worlds, whose seeds are drawn from this commit's hash"
    parser.add_argument("--fresh", metavar="COMMIT", help=fresh)
    digest = "print a digest of all that happens in the worlds, to compare two commits"
    parser.add_argument("--digest", action="store_true", help=digest)
    record = "print the line that keeps the world of --seed in a file, and do not run it"
    parser.add_argument("--record", metavar="CAUSE", help=record)
    worlds = "run the worlds of this file; with --seed, only those of that seed"
    parser.add_argument("--worlds", metavar="FILE", type=Path, help=worlds)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args(arguments)
    if options.record is not None:
        if options.seed is None or options.worlds:
            parser.error("--record needs --seed, and no --worlds")
        _print(write_line(RecordedWorld(options.seed, options.record, draw(options.seed))))
        return 0
    if options.worlds and options.fresh:
        parser.error("--worlds runs the worlds of its file only: leave out --fresh")
    try:
        ranges = _chosen(options)
    except OSError as error:
        parser.error(f"{options.worlds}: {error.strerror}")
    except ValueError as error:
        parser.error(f"{options.worlds}: {error}")
    if options.seed is not None:
        return _run_each(ranges[0], _print if options.trace else None)
    again = "python -m unbroken.sim" + (f" --worlds {options.worlds}" if options.worlds else "")
    return _many(ranges, options.processes, again, is_digested=options.digest)


def _chosen(options: argparse.Namespace) -> list[Sequence[Start]]:
    """Return the worlds to run, in ranges. Raises OSError and ValueError for their file."""
    if options.worlds:
        recorded = read_worlds(options.worlds.read_text("utf-8"))
        chosen = [world for world in recorded if options.seed in (None, world.seed)]
        if not chosen:
            raise ValueError("no world" + (f" of seed {options.seed}" if recorded else ""))
        return [chosen]
    if options.seed is not None:
        return [[options.seed]]
    ranges: list[Sequence[Start]] = [range(options.first, options.first + options.seeds)]
    if options.fresh:
        seeds = fresh_seeds(options.fresh)
        ranges.append(seeds)
        _print(f"fresh seeds {seeds[0]} to {seeds[-1]}, drawn from commit {options.fresh}")
        _print(f"    python -m unbroken.sim --first {seeds[0]} --seeds {len(seeds)}")
    return ranges


def fresh_seeds(commit: str) -> range:
    """Seeds that are the same for the same commit and others for every other one."""
    drawn = int(hashlib.sha256(commit.encode()).hexdigest(), 16) % FRESH_RANGES
    first = FRESH_FIRST + drawn * FRESH_SEEDS
    return range(first, first + FRESH_SEEDS)


def begin(start: Start, tell: Callable[[str], None] | None = None) -> Simulation:
    """Return the world of a seed, or a recorded one, before its first event."""
    if isinstance(start, int):
        return Simulation(start, tell=tell)
    return Simulation(start.seed, tell=tell, scenario=start.scenario)


def run_chunk(worlds: Sequence[Start], *, is_digested: bool = False) -> Result:
    """Run these worlds; a digest of their traces is made only on request, for it takes time."""
    probes: Counter[str] = Counter()
    failures, joined = [], 0
    for start in worlds:
        seed = start if isinstance(start, int) else start.seed
        digest = hashlib.sha256(str(seed).encode())
        try:
            world = begin(start, _digester(digest) if is_digested else None)
            world.run()
        except Exception:  # noqa: BLE001  (any failure of a world is its result)
            failures.append((seed, traceback.format_exc(limit=-4)))
        else:
            probes.update(world.schedule.probes.keys())
            probes["events"] += world.schedule.events
        joined ^= int(digest.hexdigest(), 16)
    return len(worlds), probes, failures, joined


def _digester(digest: hashlib._Hash) -> Callable[[str], None]:
    return lambda line: digest.update(f"{line}\n".encode())


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _run_each(worlds: Sequence[Start], tell: Callable[[str], None] | None) -> int:
    for start in worlds:
        world = begin(start, tell)
        _print(str(world.scenario))
        seed = start if isinstance(start, int) else start.seed
        try:
            world.run()
        finally:
            _print(f"seed {seed}: {dict(world.schedule.probes)}, {world.schedule.events} events")
    return 0


def _many(
    ranges: Iterable[Sequence[Start]], processes: int, again: str, *, is_digested: bool
) -> int:
    chunks = [worlds[i : i + CHUNK] for worlds in ranges for i in range(0, len(worlds), CHUNK)]
    progress = Progress(sum(map(len, chunks)), sys.stderr, time.perf_counter)
    result, is_whole = Found(), True
    try:
        for seeds, probes, failures, digest in _results(chunks, processes, is_digested):
            result.seeds += seeds
            result.probes.update(probes)
            result.failures += failures
            result.digest ^= digest
            for seed, _ in failures:
                # A long run may be looked into before it ends.
                progress.write_line(f"seed {seed} failed")
            progress.update(result.seeds, len(result.failures))
    except KeyboardInterrupt:
        is_whole = False
    progress.close()
    missing = _tell(result, progress.seconds, again, is_whole=is_whole)
    if is_digested and is_whole:
        _print(f"digest {result.digest:064x}")
    if not is_whole:
        return INTERRUPTED
    return 1 if result.failures or missing else 0


def _tell(found: Found, seconds: float, again: str, *, is_whole: bool) -> list[str]:
    """Print what was found, with the command that runs a failure `again`; return the probes that no
    world reached."""
    probes, failures, count = found.probes, sorted(found.failures), found.seeds
    for seed, text in failures[:SHOWN]:
        _print(f"seed {seed}\n{text}\n    {again} --seed {seed} --trace\n")
    if not is_whole:
        _print("interrupted; up to then:")
    speed = f"{count} seeds in {seconds:.1f} s: {count / seconds:.0f} seeds/s"
    events = probes.pop("events", 0) / max(count, 1)
    _print(f"{speed}, {events:.0f} events a seed, {len(failures)} failures")
    _print("  ".join(f"{name} {number}" for name, number in sorted(probes.items())))
    missing = unreached(probes) if count >= MANY and is_whole else []
    if missing:
        _print(f"never reached: {', '.join(missing)}")
    if len(failures) > SHOWN:
        _print(f"failed: {[seed for seed, _ in failures]}")
    return missing


def _results(
    chunks: Sequence[Sequence[Start]], processes: int, is_digested: bool
) -> Iterator[Result]:
    run_some = partial(run_chunk, is_digested=is_digested)
    if processes == 1:
        yield from map(run_some, chunks)
        return
    # Ctrl-C reaches every process of the terminal; the first one ends the others.
    context, ignore = multiprocessing.get_context("fork"), (signal.SIGINT, signal.SIG_IGN)
    with context.Pool(processes, signal.signal, ignore) as pool:
        yield from pool.imap_unordered(run_some, chunks)


if __name__ == "__main__":
    sys.exit(main())
