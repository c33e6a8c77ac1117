"""Training script of every launcher in `scoreboard.py`: four ranks that break as planned.

SCOREBOARD_DIR has the checkpoints, SCOREBOARD_PLAN is the fault. SCOREBOARD_EVENTS is the socket of
the judge, which receives each start, step and end. SCOREBOARD_USE lists what the script uses:
`torch` (else plain sockets), `progress` (unbroken.worker), `heartbeat` (nvidia-resiliency-ext).
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from scoreboard_faults import SPIKE_FACTOR, Injector, Loader
from scoreboard_group import GpuGroup, PlainGroup, TorchGroup
from scoreboard_pauses import PAUSES
from scoreboard_trials import (
    BY_NAME,
    CHECKPOINT_STEPS,
    LOG_STEPS,
    PAUSED,
    WORLD,
    Plan,
    advance,
    contribution,
    long_pause,
    loss,
    pause,
    step_seconds,
)

RANK = int(os.environ["RANK"])
DIRECTORY = Path(os.environ["SCOREBOARD_DIR"])
_judge = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def tell(what: str, **more: object) -> None:
    """Send an event to the judge."""
    event = {"what": what, "rank": RANK, "pid": os.getpid(), "at": time.time(), **more}
    if what == "port":
        event["place"] = [os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])]
    _judge.sendto(json.dumps(event).encode(), "\0" + os.environ["SCOREBOARD_EVENTS"])


class Silence:
    """Reports nothing to the launcher; the launcher only sees what the script prints."""

    def step(self, step: int, loss: float) -> None:
        """Report a step."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Report the phase that begins."""
        del name
        return nullcontext()

    def checkpoint(self, step: int) -> None:
        """Report a complete checkpoint."""


class Progress(Silence):
    """Reports to unbroken's agent."""

    def __init__(self) -> None:
        from unbroken import worker

        self._worker: Any = worker

    def step(self, step: int, loss: float) -> None:
        self._worker.progress(step, loss=loss)

    def phase(self, name: str) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = self._worker.phase(name)
        return found

    def checkpoint(self, step: int) -> None:
        self._worker.checkpoint(step)


class Heartbeat(Silence):
    """Sends heartbeats to ft_launcher's rank monitor."""

    def __init__(self) -> None:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        self._client = RankMonitorClient()
        self._client.init_workload_monitoring()

    def step(self, step: int, loss: float) -> None:
        self._client.send_heartbeat()


class Checkpoints:
    """Checkpoints of all ranks: each writes its part; a checkpoint is complete when all have."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, step: int, state: float) -> None:
        """Write the part of this rank."""
        folder = self._directory / str(RANK)
        part = folder / "part"
        part.write_text(repr(state))
        part.rename(folder / f"step-{step}")

    def newest(self) -> int:
        """Return the newest step of which all ranks have written their part; 0: none."""
        saved = [
            {int(path.name.removeprefix("step-")) for path in folder.glob("step-*")}
            for folder in (self._directory / str(rank) for rank in range(WORLD))
        ]
        return max(set.intersection(*saved), default=0)

    def load(self, step: int) -> float:
        """Return this rank's part."""
        return float((self._directory / str(RANK) / f"step-{step}").read_text()) if step else 0.0


def telling(uses: list[str]) -> Silence:
    """Return the reporter for the launcher."""
    if "progress" in uses:
        return Progress()
    return Heartbeat() if "heartbeat" in uses else Silence()


def say(plan: Plan, text: str) -> None:
    """Print a line, unless the plan asks for silence."""
    if plan.mode != "silence":
        print(text, flush=True)


def rest(plan: Plan, step: int, launcher: Silence, group: PlainGroup | TorchGroup) -> None:
    """Evaluate, or write a large checkpoint, as planned."""
    if plan.fault == PAUSED and step == plan.step:
        kind, seconds, is_told = long_pause(plan)
        with launcher.phase(kind.replace(" ", "-")) if is_told else nullcontext():
            PAUSES[kind](RANK, seconds, DIRECTORY)
            group.barrier()
    found = pause(plan, step)
    if found is None:
        return
    with launcher.phase(found[0]):
        say(plan, f"step {step}: {found[0]}")
        time.sleep(found[1])


def main() -> None:
    """Train to the last step."""
    plan = Plan.from_json(os.environ["SCOREBOARD_PLAN"])
    uses = os.environ["SCOREBOARD_USE"].split(",")
    tell("start")
    launcher, injector = telling(uses), Injector(plan, DIRECTORY, tell)
    loader, checkpoints = Loader(), Checkpoints(DIRECTORY / "checkpoints")
    seconds = float(os.environ["SCOREBOARD_COLLECTIVE_SECONDS"])
    plain = GpuGroup if BY_NAME[plan.fault].is_on_gpu else PlainGroup
    group = (TorchGroup if "torch" in uses else plain)(DIRECTORY, seconds)
    injector.before_meeting()
    step = group.meet(checkpoints.newest())
    state = checkpoints.load(step)
    while step < plan.last_step:
        step += 1
        poison = injector.before(step, loader, group)
        loader.next_batch()
        time.sleep(step_seconds(plan, step) * (2 if injector.is_slow else 1))
        told = loss(plan, RANK, step) * (SPIKE_FACTOR if injector.has_spike else 1)
        told = math.nan if math.isnan(state + poison) else told
        state = advance(state, group.all_reduce(contribution(RANK, step) + poison))
        launcher.step(step, told)
        tell("step", step=step)
        if step % LOG_STEPS == 0:
            say(plan, f"step {step}/{plan.last_step} loss {told:.4f}")
        if step % CHECKPOINT_STEPS == 0 and not injector.saves_nothing and math.isfinite(state):
            checkpoints.save(step, state)  # in a moment: no phase of its own
            launcher.checkpoint(step)
        rest(plan, step, launcher, group)
    tell("end", state=state)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"rank {RANK}: {error}", file=sys.stderr)
        raise
