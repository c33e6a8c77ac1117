"""The next action of a pool for a machine; a kill between two orders must lose nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.local.machines.decisions.machine import (
    FAILED,
    RUNNING,
    SUCCEEDED,
    Order,
    Power,
    ScriptReport,
    Seen,
    Stage,
    WriteMachineStatus,
    boot_id,
    decide,
)
from unbroken.spec.nodes.kinds import MachinePhase, MachineSpec, MachineStatus

NOW = 1000.0
UP = MachineStatus(phase=MachinePhase.RUNNING, index=0, boot_id="b", started_at=900.0)


def seen(**changes: Any) -> Seen:
    """Return a machine that runs, except for `changes`."""
    given = Seen(uid="u", spec=MachineSpec(), status=UP, index=0, stage=Stage.ON)
    return replace(given, **changes)


def told(found: Seen) -> str:
    """Return the decision, in short words."""
    words = []
    for effect in decide(found, NOW):
        if isinstance(effect, WriteMachineStatus):
            status = effect.status
            words.append(f"{status.phase.value}({status.boots},{status.resets})")
        else:
            words.append(effect.value)
    return " ".join(words)


ORDERED = MachineSpec(boots=2, resets=3)
CASES = [
    ("one that runs is left alone", seen(), ""),
    ("one without the finalizer gets it first", seen(is_ours=False, spec=ORDERED), "adopt"),
    ("a new one starts", seen(stage=Stage.UNKNOWN, status=MachineStatus()),
     "Starting(0,0) switch-on"),
    ("one of an unknown type fails and says so",
     seen(stage=Stage.UNKNOWN, status=MachineStatus(), problem="no such type"), "Failed(0,0)"),
    ("without an address none starts",
     seen(stage=Stage.UNKNOWN, status=MachineStatus(), index=None), "Failed(0,0)"),
    ("a reboot cuts the power first", seen(spec=ORDERED), "Rebooting(0,0) cut"),
    ("it is counted when nothing runs, as reset too",
     seen(spec=ORDERED, stage=Stage.DARK, status=replace(UP, phase=MachinePhase.REBOOTING)),
     "Rebooting(2,3)"),
    ("one without power stays dark", seen(power=Power.OFF), "Pending(0,0) cut"),
    ("nor is it rebooted", seen(power=Power.OFF, spec=ORDERED, stage=Stage.DARK),
     "Rebooting(0,0)"),
    ("one that is fenced is dark before the proof", seen(power=Power.FENCED), "Pending(0,0) cut"),
    ("and proven when it is", seen(power=Power.FENCED, stage=Stage.DARK), "Pending(0,0) fence"),
    ("the taint goes before it starts",
     seen(is_out_of_service=True, stage=Stage.DARK), "unfence"),
    ("a reset needs no reboot", seen(spec=MachineSpec(resets=1)),
     "Resetting(0,0) reset Running(0,1)"),
    ("and waits until the node is there",
     seen(spec=MachineSpec(resets=1), stage=Stage.JOINING), ""),
    ("one that leaves is ended whatever else is wanted",
     seen(spec=ORDERED, power=Power.OFF, is_leaving=True), "Stopping(0,0) end"),
    ("a script holds it up",
     seen(stage=Stage.PREPARING, script=ScriptReport(RUNNING)), "Starting(0,0)"),
    ("one whose script was given up has failed",
     seen(stage=Stage.FAILED, script=ScriptReport(FAILED, "it ended with 3")), "Failed(0,0)"),
    ("and is rebooted when asked", seen(stage=Stage.FAILED, spec=ORDERED), "Rebooting(0,0) cut"),
    ("trouble is told", seen(trouble="no disk"), "Starting(0,0)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "wanted"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_the_next_orders(found: Seen, wanted: str) -> None:
    assert told(found) == wanted


def test_what_a_script_left_is_in_the_status() -> None:
    report = ScriptReport(SUCCEEDED, "", "/logs/a.log")
    (effect,) = decide(seen(script=report), NOW)
    assert isinstance(effect, WriteMachineStatus)
    assert (effect.status.life_cycle, effect.status.life_cycle_log) == (SUCCEEDED, "/logs/a.log")


def test_each_boot_has_an_id_of_its_own_and_each_look_the_same() -> None:
    lives = [
        ("h", "u", 0, 0),
        ("h", "u", 1, 0),
        ("h", "u", 0, 1),
        ("h", "v", 0, 0),
        ("i", "u", 0, 0),
    ]
    assert len({boot_id(*life) for life in lives}) == len(lives)
    assert boot_id("h", "u", 0, 0) == boot_id("h", "u", 0, 0)
    assert [len(part) for part in boot_id("h", "u", 0, 0).split("-")] == [8, 4, 4, 4, 12]


def test_a_pool_that_takes_a_machine_up_leaves_its_start_as_it_was() -> None:
    boot = boot_id("", "u", 0, 0)
    found = seen(stage=Stage.UNKNOWN, status=replace(UP, boot_id=boot))
    assert told(found) == "switch-on"
    later = decide(replace(found, stage=Stage.ON), NOW)
    assert later == []


# --- a kill between any two orders


@dataclass
class World:
    """A machine, its state in the API, and what really runs."""

    spec: MachineSpec = field(default_factory=MachineSpec)
    status: MachineStatus = field(default_factory=MachineStatus)
    stage: Stage = Stage.UNKNOWN
    has_processes: bool = False
    cuts: int = 0
    is_leaving: bool = False
    is_gone: bool = False
    booted: list[str] = field(default_factory=list)
    """Boot IDs under which its node joined, each once."""

    def act(self, orders_max: int) -> int:
        """Carry out at most `orders_max` effects of the decision; return their number."""
        done = 0
        while not self.is_gone:
            facts = Seen(
                uid="u", spec=self.spec, status=self.status, index=0, cuts=self.cuts,
                stage=self.stage, is_leaving=self.is_leaving,
            )  # fmt: skip
            effects = decide(facts, NOW)
            if not effects:
                return done
            for effect in effects:
                if done == orders_max:
                    return done
                done += 1
                self.carry_out(effect)
        return done

    def carry_out(self, effect: Order | WriteMachineStatus) -> None:
        """Carry out one effect."""
        match effect:
            case WriteMachineStatus(status):
                if status.boots > self.status.boots:
                    assert not self.has_processes, "a reboot was counted while something ran"
                self.status = status
            case Order.CUT:
                self.stage, self.has_processes = Stage.DARK, False
                self.cuts += 1
            case Order.SWITCH_ON:
                assert self.status.index == 0, "it runs at addresses that nobody was told of"
                self.stage, self.has_processes = Stage.ON, True
                if self.status.boot_id not in self.booted:
                    self.booted.append(self.status.boot_id)
            case Order.END:
                self.has_processes, self.is_gone = False, True
            case Order.RESET:
                assert self.stage is Stage.ON
            case _:
                raise AssertionError(effect)


STEPS = st.lists(
    st.tuples(st.sampled_from(["boot", "reset", "look"]), st.integers(0, 4)), max_size=8
)


@given(STEPS, st.booleans())
def test_a_pool_that_is_killed_between_any_two_orders_loses_none(
    steps: list[tuple[str, int]], is_deleted: bool
) -> None:
    world = World()
    for kind, orders in steps:
        boots, resets = world.spec.boots, world.spec.resets
        if kind == "boot":
            world.spec = replace(world.spec, boots=boots + 1)
        elif kind == "reset":
            world.spec = replace(world.spec, resets=resets + 1)
        world.act(orders)
        # Killed: its processes live on, and the next pool knows of the API and the disk only.
        world.stage = Stage.UNKNOWN
    world.is_leaving = is_deleted
    assert world.act(50) < 50, "it never comes to rest"
    if is_deleted:
        assert world.is_gone
        assert not world.has_processes
        return
    assert world.status.phase is MachinePhase.RUNNING
    assert world.status.boots == world.spec.boots
    assert world.status.resets == world.spec.resets
    assert world.booted[-1] == world.status.boot_id
