"""Write flight recorder dumps of many ranks, for `unbroken blame`.

    python benchmarks/blame_dumps.py DIR [--ranks 4096] [--entries 2000] [--late 1234]
    time unbroken blame DIR

One rank has not called the last collective, which all others wait in.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from arguments import count

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.flight_dumps import Recorder


def main() -> None:
    """Write the dumps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=count, default=4096)
    parser.add_argument("--entries", type=count, default=2000, help="of each rank")
    parser.add_argument("--late", type=int, default=1234, help="the rank that is late")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    groups = {"0": ("default_pg", range(options.ranks))}
    healthy = Recorder(0, groups).call(count=options.entries - 1)
    late = healthy.pickle()
    waiting = healthy.call(state="scheduled").pickle()
    for rank in range(options.ranks):
        data = late if rank == options.late else waiting
        (options.folder / f"nccl_trace_rank_{rank}").write_bytes(data)


if __name__ == "__main__":
    main()
