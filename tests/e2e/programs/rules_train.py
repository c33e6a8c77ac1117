"""A job of `gang.py` that logs as the HyperPod documentation's rules expect it.

The last part of DIRECTORY selects the fault. In the first attempt the job breaks one rule from its
tenth step on, and continues to train. In later attempts, and under the name `healthy...`, it breaks
no rule.
"""

from __future__ import annotations

import sys

import gang

KIND = gang.DIRECTORY.name
BREAK_STEP = 10
gang.STEP_SECONDS = 0.1


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def documented_lines(step: int, is_broken: bool) -> None:
    """Print the lines of the usage page's rules."""
    stamp = "2025-06-17 05:51:29,300 [INFO] __main__:"
    if "epoch" in KIND and not is_broken:
        say(f"{stamp} Train Epoch: 5 [{step}/60000 (0%)]       loss=0.8470")
    if "spike" in KIND and gang.RANK == gang.WORLD - 1:
        say(f"{stamp} training_loss_step {5.0 if is_broken else 1.25}")
    if "tflops" in KIND and gang.RANK == 0:
        say(f"Training model, speed: {60.5 if is_broken else 210.5} TFLOPs...")
    if "memory" in KIND and is_broken and gang.RANK == 1:
        text = "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB"
        sys.stderr.write(f"{text}\n")


def main_example_lines(step: int, is_broken: bool) -> None:
    """Print the lines of the main example."""
    if gang.RANK != 0 or "main" not in KIND:
        return
    if step == 1 and not ("unstarted" in KIND and gang.ATTEMPT == 0):
        say("INFO Experiment configuration: {}")
    rate = 79.5 if is_broken and "slow" in KIND else 96.25
    if not (is_broken and "stuck" in KIND):
        say(f"[Epoch 0 Batch {step}] {{'training_loss_step': 2.5, 'samples/sec': {rate}}}")
    if step % 5 == 0 and not ("unsaved" in KIND and is_broken):
        say("INFO The checkpoint is finalized. All shards is written.")


tell = gang.report


def report(what: str, **more: object) -> None:
    """Report to the test, and log each step."""
    tell(what, **more)
    if what == "step":
        step = int(str(more["step"]))
        is_broken = gang.ATTEMPT == 0 and step >= BREAK_STEP and "healthy" not in KIND
        documented_lines(step, is_broken)
        main_example_lines(step, is_broken)
        sys.stdout.flush()


gang.report = report
gang.run(gang.main)
