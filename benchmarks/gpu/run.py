"""Everything of recovery that needs a GPU to be believed, in one command.

`python benchmarks/gpu/run.py [--out DIR] [--parts restarts,snapshots,hang] [--kills 10]
[--rounds 10] [--device cpu]`, or `make bench-gpu`.  One GPU is enough; NCCL's restarts need two.
Writes `gpu.json` and `gpu.txt`, says of each part that cannot run why, and ends with 1 if something
is wrong.  `--device cpu` runs the same program on gloo, at a small size, to test itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import hangs
import restarts
import saving
from machine import Machine, Outcome, found, table, write

PARTS = ("restarts", "snapshots", "hang")


def measured(machine: Machine, options: argparse.Namespace) -> Iterator[Outcome]:
    """One part after the other."""
    if "restarts" in options.parts:
        yield from restarts.measure(machine, options.kills, options.modes, options.out)
    if "snapshots" in options.parts:
        yield from saving.measure(machine, options.rounds)
    if "hang" in options.parts:
        yield from hangs.measure(machine)


def names(known: tuple[str, ...]) -> object:
    """A list of them, with commas."""

    def read(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if not set(given) <= set(known):
            raise argparse.ArgumentTypeError(f"of {','.join(known)}, with commas")
        return given

    return read


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", type=names(PARTS), default=PARTS)
    parser.add_argument("--modes", type=names(restarts.MODES), default=restarts.MODES)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if options.kills < 1 or options.rounds < 1:
        parser.error("--kills and --rounds are at least 1")
    machine = found(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for outcome in measured(machine, options):
        outcomes.append(outcome)
        print(outcome.row(), file=sys.stderr, flush=True)
        write(options.out, machine, outcomes)
    print(table(machine, outcomes), end="")
    return int(any(one.problems for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
