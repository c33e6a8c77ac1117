"""Cost and correctness of snapshots of a large state on a device.

The state is a rank's share of a model of 7B parameters on 8 ranks, or as much of it as fits.
Weights are in bf16, Adam's two moments in fp32.  Right after `save` has returned, a step multiplies
matrices and then writes every tensor.  A copy that is not ordered before the step holds a mixture
of steps, which the restore detects.  All values are small whole numbers, exact in every type.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from machine import Machine, Outcome

PARAMETERS, RANKS = 7_000_000_000, 8
BYTES_EACH = 2 + 4 + 4
"""Bytes of a parameter: bf16, and two moments in fp32."""
TENSOR = 16 * 1024 * 1024
CYCLE = 16
SIDE = {"cuda": 8192, "cpu": 512}
STEP_SECONDS = {"cuda": 0.3, "cpu": 0.03}
"""Seconds of a step without snapshots; approximate."""
CPU_PARAMETERS = 2_000_000
SLOTS = 2
CHANGES = 3
SECONDS_MAX = 900


def parameters(machine: Machine) -> int:
    """Return the number of parameters: those of the share, or fewer if memory is short."""
    if machine.device == "cpu":
        return CPU_PARAMETERS
    host = (machine.host_free_bytes // 2) // (SLOTS * BYTES_EACH)
    return min(PARAMETERS // RANKS, host, int(machine.gpu_free_bytes * 0.7) // BYTES_EACH)


def measure(machine: Machine, rounds: int) -> Iterator[Outcome]:
    """Yield the outcome of a measurement in a process of its own."""
    count = parameters(machine)
    command = [sys.executable, __file__, machine.device, str(count), str(rounds)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SECONDS_MAX
        )
    except subprocess.TimeoutExpired:
        yield Outcome("snapshots", problems=[f"not done after {SECONDS_MAX} s"])
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-3:]
        yield Outcome("snapshots", problems=[f"it ended with {done.returncode}: {lines}"])
        return
    yield Outcome(**json.loads(done.stdout))


class Share:
    """The state of the rank; every step writes `tensors`."""

    def __init__(self, device: str, count: int) -> None:
        import torch

        self.device = device
        sizes = [TENSOR] * (count // TENSOR) + ([count % TENSOR] if count % TENSOR else [])
        kinds = (torch.bfloat16, torch.float32, torch.float32)
        made = [[self.value(size, 0).to(kind) for size in sizes] for kind in kinds]
        self.model = torch.nn.ParameterList(
            [torch.nn.Parameter(one, requires_grad=False) for one in made[0]]
        )
        self.moments = Moments(made[1], made[2])
        self.tensors = [*self.model, *made[1], *made[2]]
        side = SIDE[device]
        self._matrix = torch.randn(side, side, dtype=torch.bfloat16, device=device)
        self.multiplications = 1

    def value(self, size: int, steps: int) -> Any:
        """Return the correct value of a tensor after `steps` steps."""
        import torch

        return (torch.arange(size, device=self.device) % CYCLE + steps).float()

    def step(self) -> None:
        """Compute, and write every tensor."""
        import torch

        for _ in range(self.multiplications):
            self._matrix @ self._matrix
        torch._foreach_add_(self.tensors, 1)

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def wrong(self, steps: int) -> int:
        """Return the number of tensors whose values are wrong after `steps` steps."""
        import torch

        return sum(
            not torch.equal(one.float(), self.value(one.numel(), steps)) for one in self.tensors
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state."""
        return sum(one.nbytes for one in self.tensors)


class Moments:
    """State of an Adam optimizer: two moments of each parameter."""

    def __init__(self, first: list[Any], second: list[Any]) -> None:
        self._held = {"exp_avg": first, "exp_avg_sq": second}

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the moments by name, as an optimizer does."""
        return {name: list(tensors) for name, tensors in self._held.items()}

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Copy the moments of a state into these, in place."""
        for name, tensors in self._held.items():
            for here, there in zip(tensors, state[name], strict=True):
                here.copy_(there)


def seconds(call: Callable[[], Any]) -> float:
    """Return the duration of one call in seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def copied(share: Share) -> float:
    """GB/s from the device into torch's own pinned memory. On the CPU: GB/s of a plain copy."""
    import torch

    source = share.tensors[len(share.model)]
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=share.device == "cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        share.synchronize()

    copy()
    return float(source.nbytes / 1e9 / statistics.median([seconds(copy) for _ in range(5)]))


def calibrate(share: Share) -> None:
    """Set the work of a step so that it takes about the wanted time."""

    def step() -> None:
        share.step()
        share.synchronize()

    step()
    once = seconds(step)
    share.multiplications = max(1, round(STEP_SECONDS[share.device] / max(once, 1e-6)))


def trained(share: Share, rounds: int, after: Callable[[], Any] = lambda: None) -> list[float]:
    """Return the seconds of each step; the last includes the call of `after`."""

    def step() -> None:
        share.step()
        after()
        share.synchronize()

    return [seconds(step) for _ in range(rounds)]


def run(device: str, count: int, rounds: int) -> Outcome:
    """Run all measurements in this process."""
    from tests.worker.snapshot_agents import channel
    from unbroken.agent.snapshots.slots import SnapshotSlots
    from unbroken.worker.snapshot.snapshot import Snapshot

    share = Share(device, count)
    calibrate(share)
    outcome = Outcome("snapshots", {
        "bytes": share.nbytes, "share_of_7b": round(count * RANKS / PARAMETERS, 4),
        "tensors": len(share.tensors), "memcpy_gb_per_second": copied(share),
    })  # fmt: skip
    plain = statistics.median(trained(share, rounds))
    memory = SnapshotSlots()
    with channel(memory) as line:
        snapshot = Snapshot(model=share.model, optimizer=share.moments, channel=line)
        outcome.figures |= saved(share, snapshot, rounds)
        number = iter(range(SLOTS + rounds, 10**6))
        saving = statistics.median(trained(share, rounds, lambda: snapshot.save(next(number))))
        outcome.figures |= {
            "step_seconds": plain, "step_and_save_seconds": saving,
            "step_longer_percent": 100 * (saving / plain - 1),
        }  # fmt: skip
        judge(share, snapshot, next(number), outcome)
        snapshot.close()
    memory.close()
    return outcome


def saved(share: Share, snapshot: Any, rounds: int) -> dict[str, Any]:
    """Measure saves on an idle device; the first two allocate the memory."""
    first, blocked, done = [], [], []
    for step in range(SLOTS + rounds):
        share.synchronize()
        began = time.perf_counter()
        if not snapshot.save(step):
            raise SystemExit("a snapshot was refused: too little memory")
        held_up = time.perf_counter() - began
        snapshot.flush()
        if step < SLOTS:
            first.append(round(held_up, 3))
        else:
            blocked.append(held_up)
            done.append(time.perf_counter() - began)
    return {
        "first_saves_blocked_seconds": first,
        "save_blocked_seconds": statistics.median(blocked),
        "save_done_seconds": statistics.median(done),
        "done_gb_per_second": share.nbytes / 1e9 / statistics.median(done),
    }


def judge(share: Share, snapshot: Any, step: int, outcome: Outcome) -> None:
    """Save, change all tensors at once, discard the state, restore it."""
    import torch

    kept = base(share)
    snapshot.save(step)
    for _ in range(CHANGES):
        share.step()
    snapshot.flush()
    share.synchronize()
    if base(share) != kept + CHANGES:
        outcome.problems.append("the steps that followed have not written the state")
    for one in share.tensors:
        one.zero_()
    outcome.figures["restore_seconds"] = seconds(snapshot.restore)
    share.synchronize()
    wrong = share.wrong(kept)
    outcome.figures["restored_bit_for_bit"] = not wrong
    if wrong:
        outcome.problems.append(f"{wrong} of {len(share.tensors)} tensors are not as saved")
    if share.device == "cuda":
        slots = [torch.frombuffer(one.memory, dtype=torch.uint8) for one in snapshot._open if one]
        outcome.figures["pinned"] = all(one.is_pinned() for one in slots)
        if not outcome.figures["pinned"]:
            outcome.problems.append("the slots are not pinned")


def base(share: Share) -> int:
    """Return the number of steps made."""
    return int(share.tensors[-1][0])


def main() -> None:
    """Measure one rank's share in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("parameters", type=int)
    parser.add_argument("rounds", type=int)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    print(json.dumps(asdict(run(options.device, options.parameters, options.rounds))))


if __name__ == "__main__":
    main()
