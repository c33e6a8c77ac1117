"""Input and output of a test, and faults that a test of the tests plants.

What the checks find of a planted fault is real to their comparisons.

`UNBROKEN_CHECK_PLANT=memory-flip:0x10,slow-disk:10`.  Nobody else reads the variable, and every
result says that something was planted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import SpecError
from unbroken.spec.nodes.kinds import Outcome

VARIABLE = "UNBROKEN_CHECK_PLANT"
KNOWN = {
    "memory-flip": "OFFSET of a byte of the tested memory whose lowest bit is flipped",
    "wrong-core": "NUMBER of a processor whose results are changed",
    "wrong-product": "gpuN, whose product is changed in one place",
    "simulated-gpus": "COUNT of devices that the processor plays, where there is no GPU",
    "slow-disk": "MB/s that the disk is slowed down to",
    "disk-flip": "BLOCK of the test file that is damaged on the disk",
    "slow-link": "MB/s that the link between two nodes is slowed down to",
    "slow-device": "NUMBER of a device whose links are slowed down",
    "wrong-sum": "NUMBER of a device whose part of a sum is changed",
    "wrong-weights": "STEP of the training run at which one weight is changed",
    "hang": "TEST that never ends",
    "crash": "TEST whose process is killed",
}
"""Name -> what its value is."""


@dataclass(frozen=True, slots=True)
class Plants:
    """Planted faults, by name."""

    values: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        """The value as written; None: not planted."""
        return self.values.get(name)

    def number(self, name: str) -> int | None:
        """The value as a number, decimal or 0x...; None: not planted."""
        value = self.values.get(name)
        return None if value is None else int(value, 0)

    def __bool__(self) -> bool:
        return bool(self.values)

    def __str__(self) -> str:
        return ",".join(f"{name}:{value}" for name, value in self.values.items())


def read_plants(text: str) -> Plants:
    """Plants as the variable says them; SpecError for one that is not known."""
    result = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition(":")
        if name not in KNOWN:
            raise SpecError(f"{VARIABLE}: no plant {name!r}; there are {', '.join(KNOWN)}")
        if name not in ("wrong-product", "hang", "crash"):
            _require_number(name, value)
        result[name] = value
    return Plants(result)


def _require_number(name: str, value: str) -> None:
    try:
        int(value, 0)
    except ValueError as error:
        raise SpecError(f"{VARIABLE}: {name}:{value}: needs the {KNOWN[name]}") from error


SHORT_SECONDS = 2.0
"""Duration of a test that can be longer or shorter."""
RANKS_LEAST = 2
"""Processes of a test of links: with fewer, nothing goes from one to another."""


@dataclass(frozen=True, slots=True)
class PairPart:
    """The part of this machine in a test of two."""

    rank: int
    """0 listens, 1 connects."""
    host: str
    """Address of rank 0."""
    port: int
    peer: str = ""
    """Name of the other node."""


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """Parameters of the tests."""

    seconds: float = SHORT_SECONDS
    """Approximate duration of each test of a part under load."""
    directory: Path = Path("/tmp")
    """On the disk that is tested."""
    gpus: int | None = None
    """GPUs that should be there; None: not known."""
    efa: int | None = None
    """EFA devices that should be there; None: not known."""
    memory_share: float = 0.5
    """Share of the free memory to be tested."""
    ranks: int = RANKS_LEAST
    """Processes of this machine in tests of links, where it has no GPUs."""
    dcgm_level: int = 2
    """Level of NVIDIA's `dcgmi diag`: 1 to 4."""
    doubt_seconds: float = 8.0
    """Extra seconds for a disk that seems slow to show that it is not. Of 28 short runs with six
    programs that wrote to the same disk, one saw 22 MB/s."""
    pair: PairPart | None = None
    plants: Plants = field(default_factory=Plants)


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of one test; the caller adds its node, kind and duration."""

    test: str
    outcome: Outcome
    message: str = ""
    """The problem and what to do; of a pass, what was seen."""
    measured: float | None = None
    expected: float | None = None
    unit: str = ""
    backend: str = ""
    """Backend of torch.distributed that moved the data; empty: no links were measured."""


def passed(
    test: str, message: str = "", measured: float | None = None, unit: str = "", backend: str = ""
) -> Finding:
    """Nothing is wrong."""
    return Finding(test, Outcome.PASS, message, measured, None, unit, backend)


def failed(test: str, message: str) -> Finding:
    """Something was seen to be wrong."""
    return Finding(test, Outcome.FAIL, message)


def unknown(test: str, message: str) -> Finding:
    """Nothing can be said."""
    return Finding(test, Outcome.UNKNOWN, message)


def skipped(test: str, message: str) -> Finding:
    """There is no such hardware here."""
    return Finding(test, Outcome.SKIPPED, message)


def against(test: str, measured: float, least: float, unit: str, message: str) -> Finding:
    """A measurement that must reach a limit; `message` is what to do where it does not."""
    is_good = measured >= least
    outcome = Outcome.PASS if is_good else Outcome.FAIL
    return Finding(test, outcome, "" if is_good else message, round(measured, 3), least, unit)


@dataclass(frozen=True, slots=True)
class Test:
    """One test; it may find several things."""

    __test__ = False  # pytest would take it for one of its own

    name: str
    run: Callable[[CheckSettings], Iterator[Finding]]
    limit_seconds: float = 30.0
    """Seconds: it is given up after these and twice the settings' seconds."""
