"""Machines of a pool of a given size, and their addresses."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from unbroken.spec.nodes.kinds import MachineSpec

_PLACE = re.compile(r"node-(0|[1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class Listed:
    """A machine that there is."""

    name: str
    spec: MachineSpec
    is_leaving: bool = False

    @property
    def place(self) -> int | None:
        """Return its number in the pool of `unbroken up --nodes`; None: it is not a machine of that
        pool.

        A replacement has the `logicalId` of the machine that it replaces, under a name of its own.
        """
        if self.spec.cluster:
            return None
        match = _PLACE.fullmatch(self.spec.logical_id or self.name)
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of the pool."""

    create: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    """Machines to be created when the leaving machine of that name has gone."""


def changes(machines: Iterable[Listed], count: int) -> Changes:
    """Return the changes to reach `count` places, each with a machine."""
    listed = list(machines)
    held = {one.place for one in listed if not one.is_leaving}
    taken = {one.name for one in listed}
    wanted = [f"node-{number}" for number in range(count) if number not in held]
    surplus = [
        one.name
        for one in listed
        if one.place is not None and one.place >= count and not one.is_leaving
    ]
    return Changes(
        create=tuple(name for name in wanted if name not in taken),
        delete=tuple(surplus),
        blocked=tuple(name for name in wanted if name in taken),
    )


def in_order(names: Iterable[str]) -> list[str]:
    """Names as people count: node-9 before node-10."""
    return sorted(names, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() and part.isascii() else (-1, part)
        for part in re.split(r"([0-9]{1,9})", name)
    ]


def free_index(held: Mapping[str, int] | Collection[int], limit: int) -> int | None:
    """Return the lowest free index below `limit`; None: all are taken."""
    taken = set(held.values()) if isinstance(held, Mapping) else set(held)
    return next((index for index in range(limit) if index not in taken), None)
