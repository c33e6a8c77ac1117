#!/usr/bin/env python3
"""Cost of ten log rules for a training step.

    benchmarks/log_rules_step.py [--quick] [--json FILE]

A real torch step on one core (the model of `train_step.py`, without peers) logs to a pipe, as a
worker does.  A process reads it as the agent does, with ten rules or with none.  Pairs in turns.
`step` compares the median times of a step, which other work on the machine disturbs.  `agent` is
the CPU time that the rules add to the reader, as a share of the time of training.  Other work
disturbs it little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import BinaryIO

from arguments import output_file
from log_rules import MATCH, QUIET, READ_BYTES, rules
from train_step import BATCH, WIDTH

from unbroken.core.logs.lines import LineAssembler
from unbroken.core.logs.rule_events import Lines, LogStarted
from unbroken.core.logs.rules import LogRules

RULE_COUNT = 10
RATES = (10, 1_000)
"""Lines a second of a rank: a line for each step, and a script at full verbosity."""


def read_as_agent(rule_count: int) -> None:
    """Read standard input to its end; print the CPU seconds used."""
    machine = LogRules(rules(rule_count), [0]) if rule_count else None
    assembler = LineAssembler()
    if machine:
        machine.step(LogStarted(), 0.0)
    start = time.process_time()
    while chunk := os.read(0, READ_BYTES):
        if machine:
            machine.step(Lines(0, "stdout", assembler.feed(chunk)), time.monotonic())
    print(time.process_time() - start)


def train(seconds: float, rate: float, log: BinaryIO) -> list[float]:
    """Train for a time; return the seconds of each step. One line in ten matches a rule."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps, written, began = [], 0, time.monotonic()
    at = began
    while at < began + seconds:
        optimizer.zero_grad()
        batch = torch.randn(BATCH, WIDTH)
        nn.functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        due = int((at - began) * rate)
        for i in range(written, due):
            log.write(f"{(MATCH if i % 10 == 9 else QUIET).format(i=i, v=1.5)}\n".encode())
        written = max(written, due)
        log.flush()
        now = time.monotonic()
        steps.append(now - at)
        at = now
    return steps


def measured(seconds: float, rate: float, rule_count: int) -> tuple[float, float]:
    """Median seconds of a step, and the reader's CPU seconds a second."""
    command = [sys.executable, __file__, "--agent", str(rule_count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin
        assert reader.stdout
        steps = train(seconds, rate, reader.stdin)
        reader.stdin.close()
        spent = float(reader.stdout.read())
    return statistics.median(steps), spent / sum(steps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter pairs")
    parser.add_argument("--json", type=output_file, help="write the figures to this file, too")
    parser.add_argument("--agent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agent is not None:
        read_as_agent(options.agent)
        return
    pairs, seconds = (3, 2.0) if options.quick else (10, 6.0)
    figures: dict[str, float] = {}
    print(f"{'lines/s':>8} {'step, ms':>9} {'step':>8} {'agent':>8}   added by {RULE_COUNT} rules")
    for rate in RATES:
        ratios, shares, plain = [], [], []
        for _ in range(pairs):
            without, read = measured(seconds, rate, 0)
            with_rules, judged = measured(seconds, rate, RULE_COUNT)
            ratios.append(with_rules / without - 1)
            shares.append(judged - read)
            plain.append(without)
        step, agent = statistics.median(ratios), statistics.median(shares)
        figures |= {f"step_added.{rate}": step, f"agent_cpu_share.{rate}": agent}
        print(f"{rate:8,} {statistics.median(plain) * 1000:9.2f} {step:8.2%} {agent:8.3%}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
