"""Auto-resume against an API whose news come late, twice or never, and which breaks at any point.

The truth is kept here: a force-delete of a pod whose node may still run it, a restart too many, or
a pod deleted that no decision was about, fails the test at once.  After the faults end, the job
must come to rest with pods on good nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.drive_resumed import ResumedWorld
from unbroken.core.auto_resume import (
    AskForFence,
    AutoResume,
    DeleteResumedPod,
    Picture,
    Record,
    Say,
    WriteResumeRecord,
)
from unbroken.spec.auto_resume import Resume

RANKS = 3


@dataclass
class World(ResumedWorld):
    """A PyTorchJob, and the machine that resumes it."""

    heard_job: tuple[int, Record] = (1, Record())
    machine: AutoResume = field(default_factory=AutoResume)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.make_missing_pods()
        self.hear(lost=0.0)

    def hear(self, lost: float) -> None:
        """Pass on the news of each object, but for a share that is lost."""
        self.hear_of_pods_and_nodes(lost)
        if self.random.random() >= lost:
            self.heard_job = (self.version, self.record)

    def step(self, crash: float = 0.0) -> None:
        """Let the machine look and act; the program may crash between any two acts."""
        version, record = self.heard_job
        seen = Picture(
            *("PyTorchJob", "lm", str(version), Resume(True, self.most), record),
            pods=tuple(self.heard_pods.values()),
            nodes={**self.nodes, **self.heard_nodes},
        )
        for effect in self.machine.step(seen, self.now):
            if self.random.random() < crash:
                self.machine = AutoResume()
                return
            if not self.carry_out(effect):
                return

    def carry_out(self, effect: object) -> bool:
        """Carry out one effect; False if the effects after it must not be carried out."""
        match effect:
            case WriteResumeRecord(record, version):
                return self.write_record(record, version)
            case DeleteResumedPod(_, uid, node, force):
                self.delete(uid, node, force)
            case AskForFence(node):
                self.ask_for_fence(node)
            case Say():
                pass
            case _:
                raise AssertionError(effect)
        return True


def make_world(seed: int, most: int) -> World:
    """Make a job of three ranks on five nodes."""
    names = tuple(f"w-{rank}" for rank in range(RANKS))
    return World(Random(seed), most, RANKS + 2, names, blind=0.3)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4))
def test_never_more_restarts_than_allowed_and_no_pod_without_a_decision(
    seed: int, most: int
) -> None:
    world = make_world(seed, most)
    for _ in range(60):
        if world.random.random() < 0.15:
            world.break_something()
        world.pass_time(world.random.choice((0.1, 1.0, 3.0)))
        world.hear(lost=0.5)
        world.step(crash=0.1)
        if world.random.random() < 0.3:
            world.step()  # the same picture again


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_after_one_fault_the_job_comes_to_rest_with_one_restart(seed: int) -> None:
    world = make_world(seed, most=3)
    victim = world.random.choice(sorted(world.pods))
    node = world.pods[victim].node
    assert node is not None
    before = set(world.pods)
    world.break_node(node, world.random.randrange(3))
    for _ in range(80):
        world.pass_time(1.0)
        world.hear(lost=0.4)
        world.step(crash=0.05)
    assert world.all_run(), world.pods
    assert world.restarts == 1
    assert not before & set(world.pods), "all were made anew"
