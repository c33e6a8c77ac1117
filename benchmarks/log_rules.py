#!/usr/bin/env python3
"""Lines a second that the log rules judge on one core.

    benchmarks/log_rules.py [--quick] [--json FILE]

Bytes are processed as in the agent: reads of 64 KiB, lines assembled, each matched against every
rule.  The rules are those of the HyperPod documentation, repeated in other words up to the wanted
number.  Traffic `quiet` has no match.  `training` has a match in one of ten lines, as a log at full
verbosity.  `every` has a match with a captured value in each line, which no job writes.  `re` is
the same matching with Python's own engine, one pattern at a time, without lines, states or
deadlines.

Figures are CPU seconds, so that other work on the machine counts little.  They are medians over
rounds, in turns.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import output_file

from unbroken.core.logs.lines import LineAssembler
from unbroken.core.logs.rule_config import CompiledRule, read_rules
from unbroken.core.logs.rule_events import Lines, LogStarted
from unbroken.core.logs.rules import LogRules
from unbroken.spec.problems import Report

READ_BYTES = 64 * 1024
RULES: tuple[dict[str, Any], ...] = (
    {"logPattern": r".*training_loss_step (\d+(?:\.\d+)?).*"}
    | {"metricThreshold": 2, "operator": "gt", "metricEvaluationDataPoints": 5},
    {"logPattern": ".*Train Epoch.*", "expectedRecurringFrequencyInSeconds": 10},
    {"logPattern": ".*RuntimeError.*out of memory.*", "faultOnMatch": True},
    {"logPattern": ".*Experiment configuration.*", "expectedStartCutOffInSeconds": 120},
    {"logPattern": r".*\[Epoch 0 Batch \d+.*'training_loss_step': (\d+(\.\d+)?).*"}
    | {"expectedRecurringFrequencyInSeconds": 300},
    {"logPattern": ".*The checkpoint is finalized. All shards is written.*"}
    | {"expectedRecurringFrequencyInSeconds": 600},
    {"logPattern": r".*\[Epoch 0 Batch \d+.*'samples\/sec': (\d+(\.\d+)?).*"}
    | {"metricThreshold": 80, "operator": "lteq", "metricEvaluationDataPoints": 25},
    {"logPattern": ".* (.+)TFLOPs.*", "metricThreshold": 100, "operator": "lt"},
    {"logPattern": ".*NCCL.*(timeout|unhandled).*", "faultOnMatch": True},
    {"logPattern": r".*step[ :=]+(\d+).*", "expectedRecurringFrequencyInSeconds": 60},
)
QUIET = "2025-06-17 05:51:29,300 [INFO] torch.distributed: ordinary line {i}, memory 12.3 GiB of 80"
MATCH = "2025-06-17 05:51:29,300 [INFO] __main__: training_loss_step {v:.4f} lr 1e-4 sample {i}"


def rules(count: int) -> tuple[CompiledRule, ...]:
    """The documented rules, and variations of them in other words."""
    entries = []
    for i in range(count):
        rule = dict(RULES[i % len(RULES)], name=f"rule{i}")
        if i >= len(RULES):
            rule["logPattern"] = rule["logPattern"].replace(".*", f".*w{i} ", 1)
        entries.append(rule)
    report = Report()
    compiled = read_rules(entries, report)
    assert not report.problems, report.problems
    return compiled


def traffic(name: str, count: int) -> bytes:
    """Log text with a match in no, every tenth or every line."""
    every = {"quiet": count + 1, "training": 10, "every": 1}[name]
    lines = [
        (MATCH if i % every == every - 1 else QUIET).format(i=i, v=1 + i % 7 / 10)
        for i in range(count)
    ]
    return ("\n".join(lines) + "\n").encode()


def judged(compiled: tuple[CompiledRule, ...], data: bytes) -> None:
    """Match lines as the agent does."""
    machine, assembler = LogRules(compiled, [0]), LineAssembler()
    machine.step(LogStarted(), 0.0)
    for start in range(0, len(data), READ_BYTES):
        lines = assembler.feed(data[start : start + READ_BYTES])
        machine.step(Lines(0, "stdout", lines), 1.0)


def one_by_one(compiled: tuple[CompiledRule, ...], data: bytes) -> None:
    """Match each pattern by itself with Python's `re`."""
    patterns = [re.compile(rule.pattern.source) for rule in compiled]
    for line in data.decode().splitlines():
        for pattern in patterns:
            match = pattern.match(line)
            if match and pattern.groups:
                float(match.group(1))


def seconds(work: Callable[..., None], *arguments: object) -> float:
    start = time.process_time()
    work(*arguments)
    return time.process_time() - start


def resident_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def added_mib() -> float:
    """Return the memory of 50 rules that have matched every kind of line.

    The process frees nothing before.
    """
    data = traffic("training", 500)
    before = resident_mib()
    machine, assembler = LogRules(rules(50), [0]), LineAssembler()
    for _ in range(100):
        machine.step(Lines(0, "stdout", assembler.feed(data)), 1.0)
    return round(resident_mib() - before, 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer lines and rounds")
    parser.add_argument("--json", type=output_file, help="write the figures to this file, too")
    options = parser.parse_args()
    count, rounds = (20_000, 3) if options.quick else (50_000, 5)
    figures: dict[str, float] = {"added_mib.50": added_mib()}
    print(f"memory that 50 rules add after 50,000 lines: {figures['added_mib.50']} MiB\n")
    print(
        f"{'rules':>5} {'traffic':>9} {'lines/s':>12} {'MiB/s':>7} {'re, lines/s':>12} {'ratio':>6}"
    )
    for rule_count in (1, 10, 50):
        compiled = rules(rule_count)
        for name in ("quiet", "training", "every"):
            data = traffic(name, count)
            times = [
                (seconds(judged, compiled, data), seconds(one_by_one, compiled, data))
                for _ in range(rounds)
            ]
            ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
            figures[f"lines_per_second.{rule_count}.{name}"] = round(count / ours)
            figures[f"re_lines_per_second.{rule_count}.{name}"] = round(count / theirs)
            print(
                f"{rule_count:5} {name:>9} {count / ours:12,.0f} {len(data) / ours / 2**20:7.1f} "
                f"{count / theirs:12,.0f} {theirs / ours:6.1f}"
            )
            del data
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
