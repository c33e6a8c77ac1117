"""Faults that a test of the tests plants: what the checks then find is real to their comparisons.

`UNBROKEN_CHECK_PLANT=memory-flip:0x10,slow-disk:10`.  Nobody else reads the variable, and every
result says that something was planted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unbroken.errors import SpecError

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
