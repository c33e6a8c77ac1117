"""The documented log of deep checks, on disk.

Lines of one node: `<directory>/<node>/sagemaker-deep-health-check.log`, as `TIME info TEXT`; a
fault, and a test that broke off, is a JSON object. These of all nodes of a check are also in the
file `DeepHealthCheckResults/<check>` of the cluster's log group:
`<directory>/aws/sagemaker/Clusters/<name>/<id>`, or `<directory>` without a Cluster.
(Forms: SageMaker developer guide, "Deep health checks"; reference section 2.5.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from unbroken.core.nodes.checks.plan import DEVICES_COMPARED, RUN
from unbroken.core.nodes.checks.verdict import CONNECTIVITY
from unbroken.kube.clock import rfc3339
from unbroken.spec.nodes.kinds import CheckResult, Outcome

FILE = "sagemaker-deep-health-check.log"
RESULTS = "DeepHealthCheckResults"
EFA = "efa-loopback-"
"""Beginning of the names of results about EFA devices; the name of the device follows."""
BANDWIDTHS = (CONNECTIVITY, DEVICES_COMPARED)
"""Names of the results that compare a bandwidth with a limit."""
SLOW = "Bandwidth has less than threshold"
NAME = re.compile(r"[A-Za-z0-9-]{1,63}")


def line(result: CheckResult, now: float, region: str, instance_type: str) -> str:
    """Return the line for a result."""
    if is_error(result):
        return _error(result, now, region, instance_type)
    if result.outcome is Outcome.PASS and result.test.startswith(EFA):
        device = result.test.removeprefix(EFA)
        text = f"EFA Loopback check passed for device: {device} . Output summary is"
        return f"{rfc3339(now)}\tinfo\t{text} {result.message}"
    if (result.outcome, result.test) == (Outcome.PASS, "gpus"):
        return f"{rfc3339(now)}\tinfo\tGpuPci Count check success"
    amount = "" if result.measured is None else f" {result.measured:g} {result.unit}".rstrip()
    word = "success" if result.outcome is Outcome.PASS else result.outcome.value
    text = f": {result.message}" if result.message else ""
    return f"{rfc3339(now)}\tinfo\t{result.test} {word}{amount}{text}"


def is_error(result: CheckResult) -> bool:
    """True if a test found a fault, or was interrupted: no part of the machine is named then."""
    return result.outcome is Outcome.FAIL or (result.outcome, result.test) == (Outcome.UNKNOWN, RUN)


def _error(result: CheckResult, now: float, region: str, instance_type: str) -> str:
    error, more = result.message or result.test, {}
    if result.expected is not None and result.measured is not None:
        least, got = f"{result.expected:g}", f"{result.measured:g}"
        if result.test in BANDWIDTHS and result.measured < result.expected:
            more = {"detail": error} if result.message != SLOW else {}
            error = f"{SLOW}: Expected minimum threshold :{least},NCCL Test output Bw: {got}"
        else:
            text = f"Expected threshold :{least},{result.test} output: {got} {result.unit}"
            error = f"{error}: {text.rstrip()}"
    is_fault = result.outcome is Outcome.FAIL
    # An interrupted test proves nothing, so no replacement is requested.
    found = "FaultyInstance. Replace the Instance." if is_fault else "UnknownError."
    message = (
        f"Encountered {found} Region: {region or 'none'}, "
        f"InstanceType: {instance_type or 'unknown'}. "
        f"ERROR:{error}"
    )
    named = {"FaultyInstance": result.node} if is_fault else {"Instance": result.node}
    entry = {"level": "error", "ts": rfc3339(now), "msg": message, **named, "test": result.test}
    entry |= more
    return msgspec.json.encode(entry).decode()


def log_group(name: str, cluster_id: str) -> str:
    """Return the path of a cluster's log group; empty: it has no name and id of the right form."""
    if not (NAME.fullmatch(name) and NAME.fullmatch(cluster_id)):
        return ""
    return f"aws/sagemaker/Clusters/{name}/{cluster_id}"


def write(
    directory: Path,
    check: str,
    lines: Iterable[tuple[CheckResult, str]],
    groups: Mapping[str, str] | None = None,
) -> None:
    """Append lines to the files of their nodes, and errors to that of the check.

    `groups`: the path of the log group of each node's cluster, if it has one.
    """
    for path, text in _files(directory, check, lines, groups or {}):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _files(
    directory: Path,
    check: str,
    lines: Iterable[tuple[CheckResult, str]],
    groups: Mapping[str, str],
) -> Iterator[tuple[Path, str]]:
    for result, text in lines:
        yield directory / result.node / FILE, text
        if is_error(result):
            yield directory / groups.get(result.node, "") / RESULTS / check, text
