"""`python -m unbroken.nodes.checks KIND ...`: test this machine, one result a line.

Ends with 0 whatever was found, with 2 where it was called wrongly: what the results mean is decided
by who reads them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import msgspec

from unbroken.errors import SpecError
from unbroken.spec.nodes.kinds import CheckKind, CheckResult
from unbroken.spec.schema.fields import write_record

from .driver import TESTS, run_tests
from .findings import RANKS_LEAST, SHORT_SECONDS, VARIABLE, CheckSettings, PairPart, read_plants

RANKS_MAX = 64


def main(arguments: list[str]) -> int:
    """Run the tests that are asked for."""
    given = _parser().parse_args(arguments)
    try:
        settings = _settings(given)
    except SpecError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    kinds = [CheckKind(kind) for kind in given.kind]
    # The end of a pod takes the tests with it: `run_tests` kills them on its way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for result in run_tests(kinds, settings, given.node, given.only):
        sys.stdout.write(_line(result, is_json=given.json) + "\n")
        sys.stdout.flush()
    return 0


def _line(result: CheckResult, *, is_json: bool) -> str:
    if is_json:
        return msgspec.json.encode(write_record(result)).decode()
    measured = "" if result.measured is None else f" {result.measured:g} {result.unit}"
    return f"{result.outcome.value:<8}{result.test}{measured}  {result.message}".rstrip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m unbroken.nodes.checks", description="Test this machine."
    )
    parser.add_argument("kind", nargs="+", choices=[kind.value for kind in CheckKind])
    parser.add_argument(
        "--seconds", type=float, default=SHORT_SECONDS, help="of each test under load"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--node", default="", help="name of this node, for the results")
    parser.add_argument("--directory", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")))
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=sorted({test.name for tests in TESTS.values() for test in tests}),
        help="this test of the kinds; may be given several times",
    )
    parser.add_argument("--gpus", type=int, help="those that should be there")
    parser.add_argument("--efa", type=int, help="EFA devices that should be there")
    parser.add_argument("--memory-share", type=float, default=0.5, help="of the free memory")
    parser.add_argument(
        "--ranks",
        type=int,
        default=RANKS_LEAST,
        help="processes of this machine in tests of links, where it has no GPUs",
    )
    parser.add_argument("--dcgm-level", type=int, choices=range(1, 5), default=2)
    parser.add_argument("--rank", type=int, choices=(0, 1), help="of a pair")
    parser.add_argument("--meet", metavar="HOST:PORT", help="where rank 0 of a pair listens")
    parser.add_argument("--peer", default="", help="name of the other node of a pair")
    return parser


def _settings(given: argparse.Namespace) -> CheckSettings:
    pair = None
    if given.rank is not None:
        host, colon, port = (given.meet or "").rpartition(":")
        if not colon or not port.isdecimal():
            raise SpecError("--rank needs --meet HOST:PORT")
        pair = PairPart(given.rank, host.strip("[]"), int(port), given.peer)
    if given.seconds <= 0 or not 0 < given.memory_share <= 1:
        raise SpecError("--seconds must be above 0, --memory-share above 0 and at most 1")
    if not RANKS_LEAST <= given.ranks <= RANKS_MAX:
        raise SpecError(f"--ranks must be from {RANKS_LEAST} to {RANKS_MAX}, not {given.ranks}")
    return CheckSettings(
        seconds=given.seconds,
        directory=given.directory,
        gpus=given.gpus,
        efa=given.efa,
        memory_share=given.memory_share,
        ranks=given.ranks,
        dcgm_level=given.dcgm_level,
        pair=pair,
        plants=read_plants(os.environ.get(VARIABLE, "")),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
