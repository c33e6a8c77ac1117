"""Check that the agent finds a hanging collective in torch's flight recorder.

Only NCCL's recorder can be read from another process. With another backend ranks hang as well, and
the agent reads their stacks.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from machine import Machine, Outcome

from tests.agent.running import linked, running, start
from unbroken.agent.evidence.examine import FILE_VARIABLES, PIPE_VARIABLE
from unbroken.wire.agent import AgentState
from unbroken.wire.observation import Evidence

SCRIPT = Path(__file__).with_name("hang_train.py")
BOUND_SECONDS = 120.0
LOOK_SECONDS = 10.0
ASKED_MAX = 3


async def _evidence(machine: Machine, ranks: int, backend: str, folder: Path) -> Evidence | str:
    """Let ranks hang; return the evidence that the agent finds, or why it finds none."""
    environ = {
        "BENCH_DEVICE": machine.device, "BENCH_BACKEND": backend,
        PIPE_VARIABLE: f"{folder}/pipe_", **dict.fromkeys(FILE_VARIABLES, f"{folder}/trace_"),
        # On by default since torch 2.8.
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    }  # fmt: skip
    with running(folder, str(SCRIPT), nproc=ranks, UNBROKEN_WARM="off", **environ) as agent:
        async with linked(agent) as operator:
            try:
                async with asyncio.timeout(BOUND_SECONDS):
                    await operator.state(AgentState.READY)
                    port = operator.reports[-1].offered_port
                    operator.send(start(0, master_port=port))
                    ups = asyncio.to_thread(agent.stdout.wait_for, r"(?s)" + "hangs now.*" * ranks)
                    await ups
                    # Torch looks once a second whether it is asked, which may be too late.
                    for _ in range(ASKED_MAX):
                        found = await operator.examine(0, LOOK_SECONDS)
                        if machine.device == "cpu" or any(one.collectives for one in found.ranks):
                            break
                    return found
            except TimeoutError:
                newest = operator.reports[-1] if operator.reports else None
                return f"no answer in {BOUND_SECONDS:.0f} s: {newest and newest.faults}"[:500]


def measure(machine: Machine) -> Iterator[Outcome]:
    """Let ranks hang on each backend; yield whether the agent's evidence is right."""
    has_nccl = bool(machine.gpus and machine.nccl)
    ranks = max(1, min(8, len(machine.gpus))) if has_nccl else 2
    backend = "nccl" if has_nccl else "gloo"
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        began = time.monotonic()
        found = asyncio.run(_evidence(machine, ranks, backend, Path(folder)))
    outcome = Outcome(f"hang {backend}", {"ranks": ranks, "seconds": time.monotonic() - began})
    if isinstance(found, str):
        outcome.problems.append(found)
        yield outcome
        return
    waiting = found.ranks if ranks == 1 else found.ranks[:-1]
    outcome.figures["collectives"] = {
        one.rank: [f"{c.operation} {c.sequence} {c.state}" for c in one.collectives]
        for one in found.ranks
    }
    outcome.figures["asked"] = found.request
    outcome.figures["stacks"] = sum(bool(one.threads) for one in found.ranks)
    for one in waiting if has_nccl else ():
        is_known = any(
            (c.operation, c.sequence) == ("all_reduce", 2) and c.state != "completed"
            for c in one.collectives
        )
        if not is_known:
            outcome.problems.append(f"rank {one.rank}: the hanging all_reduce is not seen")
    if not any("all_reduce" in frame for one in waiting for t in one.threads for frame in t.frames):
        notes = {one.note for one in waiting}
        if has_nccl:
            outcome.figures["stacks_note"] = sorted(notes)
        else:
            outcome.problems.append(f"no stack has the hanging all_reduce: {sorted(notes)}")
    yield outcome
