"""The documented log of deep checks, on disk.

Lines of one node: `<directory>/<node>/sagemaker-deep-health-check.log`, as `TIME info TEXT`; a
fault, and a test that broke off, is a JSON object.  These of all nodes of a check are also in
`<directory>/DeepHealthCheckResults/<check>`.
(Forms: SageMaker developer guide, "Deep health checks"; reference section 2.5.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from unbroken.core.nodes.checks.limits import RUN
from unbroken.kube.clock import rfc3339
from unbroken.spec.nodes.check import CheckResult, Outcome

FILE = "sagemaker-deep-health-check.log"
RESULTS = "DeepHealthCheckResults"


def line(result: CheckResult, now: float, region: str, instance_type: str) -> str:
    """Return the line for a result."""
    if is_error(result):
        return _error(result, now, region, instance_type)
    amount = "" if result.measured is None else f" {result.measured:g} {result.unit}".rstrip()
    word = "success" if result.outcome is Outcome.PASS else result.outcome.value
    text = f": {result.message}" if result.message else ""
    return f"{rfc3339(now)}\tinfo\t{result.test} {word}{amount}{text}"


def is_error(result: CheckResult) -> bool:
    """True if a test found a fault, or was interrupted: no part of the machine is named then."""
    return result.outcome is Outcome.FAIL or (result.outcome, result.test) == (Outcome.UNKNOWN, RUN)


def _error(result: CheckResult, now: float, region: str, instance_type: str) -> str:
    limits = ""
    if result.expected is not None and result.measured is not None:
        least, got = f"{result.expected:g}", f"{result.measured:g}"
        limits = f": Expected threshold :{least},{result.test} output: {got} {result.unit}".rstrip()
    is_fault = result.outcome is Outcome.FAIL
    # An interrupted test proves nothing, so no replacement is requested.
    found = "FaultyInstance. Replace the Instance." if is_fault else "UnknownError."
    message = (
        f"Encountered {found} Region: {region or 'none'}, "
        f"InstanceType: {instance_type or 'unknown'}. "
        f"ERROR:{result.message or result.test}{limits}"
    )
    named = {"FaultyInstance": result.node} if is_fault else {"Instance": result.node}
    entry = {"level": "error", "ts": rfc3339(now), "msg": message, **named, "test": result.test}
    return msgspec.json.encode(entry).decode()


def write(directory: Path, check: str, lines: Iterable[tuple[CheckResult, str]]) -> None:
    """Append lines to the files of their nodes, and errors to that of the check."""
    for path, text in _files(directory, check, lines):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _files(
    directory: Path, check: str, lines: Iterable[tuple[CheckResult, str]]
) -> Iterator[tuple[Path, str]]:
    for result, text in lines:
        yield directory / result.node / FILE, text
        if is_error(result):
            yield directory / RESULTS / check, text
