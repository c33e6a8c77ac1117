"""The trials of the scoreboard: all faults, and the plan that a seed makes of each. No I/O."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

AGENTS, RANKS_PER_AGENT = 2, 2
WORLD = AGENTS * RANKS_PER_AGENT
STEP_SECONDS = 0.1
CHECKPOINT_STEPS = 10
LOG_STEPS = 10
EVALUATION_STEPS, SLOW_CHECKPOINTS = 300, 0.03
"""Steps between evaluations of a healthy run, and the share of checkpoints that are slow."""
MODULUS = 1_000_003
SOON, LEARNED = (60, 90), (750, 900)
"""First and last step at which a fault is injected.

SOON is six to nine seconds after the first step. LEARNED is 75 to 90 s after it, for faults that a
detector finds only after it has learned normal values.
"""
KNOWN = {"told": (300, 400), "output": (450, 550), "silence": (750, 900)}
"""First and last step of a hang, by the signs of progress.

This is 30 to 40 s of steps, 45 to 55 s of lines, or 75 to 90 s of neither.
"""
PAUSED_STEPS = (450, 550)
JITTER_SECONDS = 0.15
HEALTHY, PAUSED, PAUSED_LONG = "healthy", "paused", "paused-long"
WELL = (HEALTHY, PAUSED, PAUSED_LONG)
PAUSES = ("evaluation", "checkpoint", "compile", "data set")
MORE_PAUSES, MORE_SEED = ("poll", "upload", "index", "program"), 2000
"""More kinds of pause, from this seed on, so that trials of lower seeds do not change."""
LONG_SEED, LONG_SECONDS = 3000, (300.0, 620.0)
"""First seed of PAUSED_LONG, and the range of its pauses of all kinds.

Seeds of PAUSED from this one on are those of PAUSED_LONG.
"""
PAUSE_SECONDS = (30.0, 150.0)
"""Shortest and longest long pause of a healthy run."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that happens once in a job."""

    name: str
    what: str
    at_steps: tuple[int, int] = LEARNED
    steps_after: int = 60
    """Steps between the fault and the end of the job."""
    rank: int | None = None
    """The only rank that can have the fault; None: any rank can."""
    is_hang: bool = False
    """True if the fault is tried in all three modes: steps reported, output only, neither."""
    is_shared: bool = False
    """True if the fault lies between ranks, so that naming no rank is right, too."""
    is_on_gpu: bool = False
    """True if the ranks wait for collectives as with a GPU."""


FAULTS = (
    Fault("stop", "SIGSTOP of one rank", is_hang=True),
    Fault("loader", "deadlock in a data loader: its process never answers", is_hang=True),
    Fault("collective", "one rank enters another collective", is_hang=True),
    Fault("loop", "infinite loop on one rank", is_hang=True),
    Fault("dstate", "one rank in state D (its vfork child waits in open())", is_hang=True),
    Fault("silent", "one rank sleeps for ever and says nothing", is_hang=True),
    Fault("gil", "a C call on one rank keeps the GIL and never returns", is_hang=True),
    Fault("locks", "deadlock of two threads of one rank over two locks", is_hang=True),
    Fault("loop-c", "infinite loop in C on one rank, which keeps the GIL", is_hang=True),
    Fault("loop-c-free", "infinite loop in C on one rank, the GIL released", is_hang=True),
    Fault("loader-sleep", "a data loader's process sleeps for ever", is_hang=True),
    Fault("pipe", "one rank writes into a full pipe that nobody reads", is_hang=True),
    Fault("fuse", "one rank opens a file of a file system that stops answering", is_hang=True),
    Fault(
        "link",
        "the packets to one rank are lost from now on, no connection ends",
        is_hang=True,
        is_shared=True,
    ),
    Fault("barrier", "one rank leaves out a barrier", is_hang=True),
    Fault("parent", "SIGSTOP of the parent process of one rank", is_hang=True),
    Fault(
        "loop-gpu",
        "infinite loop on one rank, while the others' host threads spin for their GPU (simulated)",
        is_hang=True,
        is_on_gpu=True,
    ),
    Fault("nan", "the loss of one rank is NaN; all have it a step later", steps_after=150),
    Fault("spike", "the loss of one rank is 30 times what it was", steps_after=300),
    Fault("slow", "one rank takes twice as long for each step", steps_after=600),
    Fault("checkpoint", "one rank writes no more checkpoints", steps_after=1300),
    Fault("error", "an exception on one rank, printed on stderr only", SOON),
    Fault("oom", "one rank allocates until the kernel kills it", SOON),
    Fault("loader-oom", "a data loader's process allocates until the kernel kills it", SOON),
    Fault("segfault", "one rank reads address 0", SOON),
    Fault("disk", "the disk of one rank's checkpoints is full", SOON),
    Fault("port", "somebody else has taken the port of the store", (0, 0), rank=0),
    Fault(HEALTHY, "nothing: evaluations, slow checkpoints, uneven steps", (0, 0), 1500),
    Fault(PAUSED, "nothing: one long pause of a healthy run", PAUSED_STEPS, 100),
    Fault(PAUSED_LONG, "nothing: one pause of five to ten minutes", PAUSED_STEPS, 100),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned fault; a function of its name and the seed alone."""

    fault: str
    seed: int
    rank: int
    """Rank that breaks; -1: none."""
    step: int
    """Step before which the fault happens; 0: when the ranks meet."""
    jitter_seconds: float
    last_step: int
    mode: str = "told"
    """Signs of progress that the script gives: `told`, `output` or `silence`."""

    def to_json(self) -> str:
        """Return the JSON for the environment of the workers."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse the JSON of `to_json`."""
        return cls(**json.loads(text))


def plan(fault: Fault, seed: int, mode: str = "told") -> Plan:
    """Return the plan of a fault by its seed."""
    if fault.name == PAUSED_LONG:
        return plan(BY_NAME[PAUSED], seed + LONG_SEED, mode)
    rng = random.Random(f"{fault.name}:{seed}")
    rank = rng.randrange(WORLD) if fault.rank is None else fault.rank
    between = KNOWN[mode] if fault.is_hang else fault.at_steps
    step, jitter = rng.randint(*between), rng.uniform(0, JITTER_SECONDS)
    if fault.name in WELL:
        rank = -1
    return Plan(fault.name, seed, rank, step, jitter, step + fault.steps_after, mode)


def long_pause(plan: Plan) -> tuple[str, float, bool]:
    """Return kind and seconds of a healthy run's long pause, and whether it reports a phase."""
    rng = random.Random(f"long pause:{plan.seed}")
    kinds: tuple[str, ...] = PAUSES if plan.seed < MORE_SEED else MORE_PAUSES
    kinds = kinds if plan.seed < LONG_SEED else PAUSES + MORE_PAUSES
    kind, is_told = kinds[plan.seed % len(kinds)], plan.seed // len(kinds) % 2 == 0
    return kind, rng.uniform(*(PAUSE_SECONDS if plan.seed < LONG_SEED else LONG_SECONDS)), is_told


def contribution(rank: int, step: int) -> int:
    """Return what a rank adds to the sum of a step."""
    return (step * 31 + rank * 17) % 101


def advance(state: float, total: float) -> float:
    """Return the model after a step; a NaN stays."""
    return (state * 31 + total) % MODULUS


def right_result(last_step: int) -> float:
    """Return the model after `last_step` steps, each made exactly once."""
    state = 0.0
    for step in range(1, last_step + 1):
        state = advance(state, sum(contribution(rank, step) for rank in range(WORLD)))
    return state


def loss(plan: Plan, rank: int, step: int) -> float:
    """Return the loss of a healthy rank: it falls, with noise from the seed."""
    noise = random.Random(f"{plan.seed}:{rank}:{step}").gauss(0, 0.05)
    return max(0.05, 3.0 / (1.0 + 0.02 * step) * (1.0 + noise))


def step_seconds(plan: Plan, step: int) -> float:
    """Return the duration of a step's work: uneven in a healthy run, almost even in others."""
    rng = random.Random(f"step:{plan.seed}:{step}")
    if plan.fault == HEALTHY:
        return min(2.0, STEP_SECONDS * rng.lognormvariate(0, 0.6))
    return STEP_SECONDS * rng.uniform(0.9, 1.1)


def pause(plan: Plan, step: int) -> tuple[str, float] | None:
    """Return phase and seconds of a pause of a healthy run after the step; None: no pause."""
    if plan.fault != HEALTHY:
        return None
    rng = random.Random(f"pause:{plan.seed}:{step}")
    if step % EVALUATION_STEPS == 0:
        return "eval", rng.uniform(2.0, 8.0)
    if step % CHECKPOINT_STEPS == 0 and rng.random() < SLOW_CHECKPOINTS:
        return "checkpoint", rng.uniform(1.0, 5.0)
    return None
