"""The life of one machine, and the places that a pool of a given size has. Pure.

`decide` compares the desired state of a machine with the observed one. It is called again after
each answer until it orders nothing more. So a pool that is killed between any two orders continues
from there: a half-completed order is given again, and each may be carried out twice.

A reboot is counted when nothing of the machine runs any more, before it is switched on: one that is
killed in the middle has happened once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from unbroken.spec.keys import FENCE, POWER
from unbroken.spec.nodes.kinds import MachinePhase, MachineSpec, MachineStatus


class Power(Enum):
    """Power state that the machine's Node requests."""

    ON = "on"
    OFF = "off"
    """`unbroken.dev/power: off`: somebody has cut the cable."""
    FENCED = "fenced"
    """`unbroken.dev/fence`: somebody wants proof that nothing runs."""


class Stage(Enum):
    """Stage of the machine's processes."""

    UNKNOWN = "unknown"
    """The pool has just begun: what ran under an earlier one may run."""
    DARK = "dark"
    """Nothing of it runs."""
    PREPARING = "preparing"
    """The script before the joining runs."""
    JOINING = "joining"
    ON = "on"
    """Its node has registered."""
    FAILED = "failed"
    """The script before the joining was given up: it never joins."""


@dataclass(frozen=True, slots=True)
class ScriptReport:
    """The newest lifecycle script, for the status."""

    state: str = ""
    """Empty: there was none; else as `MachineStatus.life_cycle`."""
    message: str = ""
    log: str = ""


RUNNING, SUCCEEDED, SKIPPED, FAILED = "Running", "Succeeded", "Skipped", "Failed"
"""States of a script."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A machine as its pool sees it."""

    uid: str
    spec: MachineSpec
    status: MachineStatus
    """Status as the pool wrote it last."""
    host_boot: str = ""
    """Boot ID of the host."""
    cuts: int = 0
    """Number of times that its power was cut so far."""
    is_leaving: bool = False
    """True if it was deleted."""
    is_ours: bool = True
    """True if it has the pool's finalizer."""
    problem: str = ""
    """Why no node can be made of it."""
    index: int | None = None
    """Index of its addresses; None: there are none left."""
    power: Power = Power.ON
    is_out_of_service: bool = False
    """Its Node has the taint that proves that nothing runs there."""
    stage: Stage = Stage.UNKNOWN
    trouble: str = ""
    """Why its node does not run now, though it is tried again."""
    script: ScriptReport = ScriptReport()


class Order(Enum):
    """An order to the pool."""

    ADOPT = "adopt"
    """Add the finalizer, without which a deletion would leave processes behind."""
    CUT = "cut"
    """Kill whatever runs of it, and count the cut."""
    FENCE = "fence"
    """Set the taint that says that nothing runs, and remove its pods."""
    UNFENCE = "unfence"
    """Take the taint away."""
    RESET = "reset"
    """Kill whatever uses its GPUs."""
    SWITCH_ON = "switch-on"
    END = "end"
    """Kill whatever runs of it, delete its Node and files, and let the object go."""


@dataclass(frozen=True, slots=True)
class WriteMachineStatus:
    """Write this status."""

    status: MachineStatus


Effect = Order | WriteMachineStatus


def boot_id(host_boot: str, uid: str, boots: int, cuts: int) -> str:
    """The boot ID of a machine's present life, in the form of a UUID.

    It stays the same as long as the machine runs. It is another after each reboot, loss of power,
    or restart of the host.
    """
    text = f"{host_boot} {uid} {boots} {cuts}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32]))


def decide(seen: Seen, now: float) -> list[Effect]:
    """Return the next effects, in this order; none if the state is as wanted. `now`: since the
    epoch."""
    if seen.is_leaving:
        text = "its processes are ended"
        status = replace(seen.status, phase=MachinePhase.STOPPING, message=text)
        return [*_status_effects(seen, status), Order.END]
    if not seen.is_ours:
        return [Order.ADOPT]
    is_reboot = seen.spec.boots > seen.status.boots
    if is_reboot or seen.power is not Power.ON:
        return _dark(seen, is_reboot=is_reboot)
    if seen.is_out_of_service:
        return [Order.UNFENCE]
    if seen.stage in (Stage.UNKNOWN, Stage.DARK):
        return _start(seen)
    if seen.stage is Stage.ON and seen.spec.resets > seen.status.resets:
        return _reset(seen)
    return _status_effects(seen, _idle_status(seen, now))


def _status_effects(seen: Seen, status: MachineStatus) -> list[Effect]:
    return [WriteMachineStatus(status)] if status != seen.status else []


def _dark(seen: Seen, *, is_reboot: bool) -> list[Effect]:
    """A machine of which nothing is to run, for now."""
    text = {
        Power.ON: f"reboot {seen.spec.boots} is carried out",
        Power.OFF: f"it has no power: its Node has the annotation {POWER}",
        Power.FENCED: f"it is fenced: its Node has the annotation {FENCE}",
    }[seen.power]
    phase = MachinePhase.REBOOTING if is_reboot else MachinePhase.PENDING
    told = _status_effects(seen, replace(seen.status, phase=phase, message=text))
    if seen.stage is not Stage.DARK:
        return [*told, Order.CUT]
    if seen.power is Power.FENCED:
        return [*told, Order.FENCE]
    if seen.power is Power.OFF:
        return told
    # A boot brings the GPUs back as a reset does.
    resets = max(seen.status.resets, seen.spec.resets)
    return [WriteMachineStatus(replace(seen.status, boots=seen.spec.boots, resets=resets))]


def _start(seen: Seen) -> list[Effect]:
    problem = seen.problem or (
        "all addresses of this cluster are taken" if seen.index is None else ""
    )
    if problem:
        return _status_effects(
            seen, replace(seen.status, phase=MachinePhase.FAILED, message=problem)
        )
    boot = boot_id(seen.host_boot, seen.uid, seen.status.boots, seen.cuts)
    is_same = boot == seen.status.boot_id
    status = replace(seen.status, index=seen.index, boot_id=boot)
    if not (is_same and seen.status.phase is MachinePhase.RUNNING):
        status = replace(
            status,
            phase=MachinePhase.STARTING,
            message="",
            started_at=seen.status.started_at if is_same else None,
        )
    # Written before anything runs there: no other machine gets these addresses.
    return [*_status_effects(seen, status), Order.SWITCH_ON]


def _reset(seen: Seen) -> list[Effect]:
    text = f"reset {seen.spec.resets} of its GPUs is carried out"
    told = _status_effects(seen, replace(seen.status, phase=MachinePhase.RESETTING, message=text))
    return [*told, Order.RESET, WriteMachineStatus(replace(seen.status, resets=seen.spec.resets))]


def _idle_status(seen: Seen, now: float) -> MachineStatus:
    """The status of a machine that nothing is to be done about."""
    script = seen.script
    status = replace(seen.status, life_cycle=script.state, life_cycle_log=script.log)
    if script.state == FAILED:
        return replace(status, phase=MachinePhase.FAILED, message=script.message)
    if seen.trouble:
        return replace(status, phase=MachinePhase.STARTING, message=seen.trouble)
    message = script.message
    if script.state == RUNNING:
        return replace(status, phase=MachinePhase.STARTING, message=message)
    if seen.stage is not Stage.ON:
        # Under a pool that took it up, it runs on all the while.
        return replace(status, message=message)
    since = now if status.started_at is None else status.started_at
    return replace(status, phase=MachinePhase.RUNNING, message=message, started_at=since)


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
