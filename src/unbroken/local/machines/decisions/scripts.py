"""The lifecycle scripts of a machine: when each runs, or runs again, and its environment.

`OnCreate` runs before a machine joins, `OnInitComplete` after. Each succeeds once in a machine's
life: a reboot repeats neither, a replacement runs both (reference section 1.5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from unbroken.core.tick import Tick
from unbroken.errors import SpecError
from unbroken.spec.nodes.kinds import script_names

from .machine import FAILED, RUNNING, SKIPPED, SUCCEEDED

ATTEMPTS_MAX = 4
"""HyperPod was seen to try about four times in 18 minutes (reference section 1.5)."""
RETRY_SECONDS = (1.0, 2.0, 4.0)
"""Seconds after each attempt but the last: a judgement, for scripts that wait for nothing of a
cloud."""
S3 = "s3://"


class ScriptKind(Enum):
    """One of the two scripts, by its documented name."""

    ON_CREATE = "OnCreate"
    ON_INIT_COMPLETE = "OnInitComplete"


@dataclass(frozen=True, slots=True)
class ScriptRecord:
    """State of a script that is kept over restarts of the pool."""

    state: str = ""
    attempts: int = 0
    """Begun so far."""
    message: str = ""

    @property
    def is_over(self) -> bool:
        """True if it runs no more in this boot of the machine."""
        return self.state in (SUCCEEDED, SKIPPED, FAILED)


@dataclass(frozen=True, slots=True)
class Looked:
    """State of the attempt in the record: whether it runs, or how it ended."""

    is_alive: bool = False
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt has ended; `last_line` is its last line of output."""

    exit_code: int
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class Unusable:
    """There is nothing to run; trying again would not help."""

    message: str


@dataclass(frozen=True, slots=True)
class Unmapped:
    """No directory is mapped to the script's source."""

    source: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Write the record down; before what follows."""

    record: ScriptRecord


@dataclass(frozen=True, slots=True)
class Start:
    """Start this attempt."""

    attempt: int


Event = Looked | Ended | Unusable | Unmapped | Tick
Effect = Keep | Start


class ScriptRun:
    """One script until it has succeeded or was given up."""

    def __init__(self, kind: ScriptKind, file: str, record: ScriptRecord) -> None:
        self._title = f"{kind.value} {file}"
        self.record = record
        self._retry_at: float | None = None

    def deadline(self) -> float | None:
        """Return when `Tick` is due; None: only after an event."""
        return self._retry_at

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take an event; what to do, in order."""
        if self.record.is_over:
            return []
        match event:
            case Looked(is_alive=True):
                return []
            case Looked(exit_code=int(code)):
                return self._end(code, "", now)
            case Looked():
                return self._begin_again()
            case Ended(code, last_line):
                return self._end(code, last_line, now)
            case Unusable(message):
                return self._keep(FAILED, f"{self._title}: {message}")
            case Unmapped(source):
                text = (
                    f"{self._title} was skipped: no directory stands for {source} "
                    f"(unbroken up --lifecycle-source {source}=DIR)"
                )
                return self._keep(SKIPPED, text)
            case Tick():
                return self._next(now)

    def _begin_again(self) -> list[Effect]:
        """An attempt that was killed with its machine counts no more than once."""
        attempt = max(self.record.attempts, 1)
        return [*self._keep(RUNNING, "", attempt), Start(attempt)]

    def _next(self, now: float) -> list[Effect]:
        if self._retry_at is None or now < self._retry_at:
            return []
        self._retry_at = None
        attempt = self.record.attempts + 1
        return [*self._keep(RUNNING, self.record.message, attempt), Start(attempt)]

    def _end(self, code: int, last_line: str, now: float) -> list[Effect]:
        if code == 0:
            return self._keep(SUCCEEDED, "")
        attempts = self.record.attempts
        said = f": {last_line}" if last_line else ""
        text = f"{self._title} ended with {code} in attempt {attempts} of {ATTEMPTS_MAX}{said}"
        if attempts >= ATTEMPTS_MAX:
            return self._keep(FAILED, text)
        self._retry_at = now + RETRY_SECONDS[min(attempts, len(RETRY_SECONDS)) - 1]
        return self._keep(RUNNING, text)

    def _keep(self, state: str, message: str, attempts: int | None = None) -> list[Effect]:
        count = self.record.attempts if attempts is None else attempts
        self.record = replace(self.record, state=state, message=message, attempts=count)
        return [Keep(self.record)]


def after_boot(record: ScriptRecord) -> ScriptRecord:
    """Return the record after a reboot: a script that was given up gets new attempts."""
    return ScriptRecord() if record.state == FAILED else record


@dataclass(frozen=True, slots=True)
class LocalSource:
    """The folder of an address of lifecycle scripts on this machine."""

    root: str
    """Folder that was mapped; nothing outside is read or run."""
    names: tuple[str, ...]
    """Names of the folders below `root`, outermost first."""


def local_source(source: str, mapped: Mapping[str, str]) -> LocalSource | None:
    """Return the folder that is mapped to an address such as `s3://bucket/prefix`; None: none is.

    If several mapped addresses contain it, the longest counts. Raises SpecError for an address that
    may lead out of the mapped folder.
    """
    wanted = source.removesuffix("/")
    for address in sorted(mapped, key=len, reverse=True):
        above = address.rstrip("/")
        if wanted == above:
            return LocalSource(mapped[address], ())
        if wanted.startswith(above + "/"):
            return LocalSource(mapped[address], script_names(wanted[len(above) + 1 :]))
    return None


def source_mapping(pairs: Iterable[str]) -> dict[str, str]:
    """Addresses and their directories from `s3://bucket/prefix=DIR`; SpecError for others."""
    result = {}
    for pair in pairs:
        address, equals, directory = pair.partition("=")
        bucket = address.removeprefix(S3).split("/")[0]
        if not (address.startswith(S3) and bucket and equals and directory):
            raise SpecError(f"{pair}: write it as s3://BUCKET/PREFIX=DIR")
        result[address.rstrip("/")] = directory
    return result


@dataclass(frozen=True, slots=True)
class Member:
    """A machine of a cluster, in the form for scripts."""

    name: str
    """Name of the machine and its node."""
    group: str
    instance_type: str
    address: str


def instance_id(name: str) -> str:
    """The instance of a node `hyperpod-i-...` (reference section 1.5); of others, their name."""
    return name.removeprefix("hyperpod-") if name.startswith("hyperpod-i-") else name


def resource_config(cluster: str, arn: str, members: Iterable[Member]) -> dict[str, Any]:
    """Return the contents of the file of `SAGEMAKER_RESOURCE_CONFIG_PATH`.

    Its members are those of the example in the documentation ("Customize SageMaker HyperPod
    clusters using lifecycle scripts", resource_config.json).
    """
    groups: dict[str, dict[str, Any]] = {}
    for member in members:
        entry = {"Name": member.group, "InstanceType": member.instance_type, "Instances": []}
        instances = groups.setdefault(member.group, entry)["Instances"]
        instances.append(
            {
                "InstanceName": f"{member.group}-{len(instances) + 1}",
                "AgentIpAddress": member.address,
                "CustomerIpAddress": member.address,
                "InstanceId": instance_id(member.name),
            }
        )
    config = {"ClusterArn": arn, "ClusterName": cluster}
    return {"ClusterConfig": config, "InstanceGroups": list(groups.values())}
