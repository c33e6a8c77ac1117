"""Recovery from killed workers, agents and nodes: unbroken's modes compared with its peers.

Every mode has its own job of `train_step.py` on this machine.  One at a time is measured, the
others make a step now and then; kills go round, one for each mode, in a new order each time.
Measured is from the kill to the moment at which every rank has completed a step again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from arguments import count, output_file, words
from recovery_launch import (
    DDP,
    FAULTS,
    NODE,
    SHARDINGS,
    WORKER,
    FtLauncher,
    Launcher,
    Setting,
    Torchrun,
    TorchrunFreshStore,
    Unavailable,
)
from recovery_peers import PEERS
from recovery_records import STAGES, rate, summary
from recovery_trials import AGAIN, Contestant, Plan, race, say
from recovery_unbroken import OURS

LAUNCHERS: tuple[type[Launcher], ...] = (*OURS, TorchrunFreshStore, Torchrun, FtLauncher, *PEERS)
BASE = TorchrunFreshStore.mode
QUICK = ("cold", "warm", "in-process", BASE)
QUICK_KILLS = 4
LARGE_JOBS, LARGE_TURN = 1, 4


def machine() -> str:
    """Return cores, versions and load of this machine."""
    import torch

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, Linux {platform.release()}, {versions}, load {load}"


def table(cell: dict[str, Any]) -> str:
    """Return a table of seconds by mode and stage, with ratios to torchrun with a fresh store."""
    names = ("recovered", "p50", "p95", "mean", "max", "faster", "step", "beyond", "less",
             "to step", "lost")  # fmt: skip
    head = f"{'mode':24}" + "".join(f"{name:>10}" for name in names)
    head += "".join(f"{name:>11}" for name in STAGES)
    job = f"{cell['shape']}, {cell['sharding']}, {cell['parameters']:,} parameters"
    lines = [f"{job}, fault: {cell['fault']}", head]
    for entry in cell["results"]:
        cells = [f"{entry['mode']:24}{entry['recovered']:>7}/{entry['kills']:<2}"]
        if entry["p50_seconds"] is None:
            lines.append(cells[0] + "  " + "; ".join(entry["not_recovered"]))
            continue
        cells += [f"{entry[f'{name}_seconds']:10.3f}" for name in ("p50", "p95", "mean", "max")]
        faster = entry["times_faster"]
        cells.append(f"{faster:9.1f}x" if faster else f"{'-':>10}")
        for figure in (entry["step_p50_seconds"], entry["beyond_step_p50_seconds"]):
            cells.append(f"{figure:10.3f}" if figure is not None else f"{'-':>10}")
        less = entry["times_less_beyond_step"]
        cells.append(f"{less:9.1f}x" if less else f"{'-':>10}")
        reached = entry["details"].get("to_first_step")
        cells.append(f"{reached:10.3f}" if reached is not None else f"{'-':>10}")
        lost = (entry["lost_steps_p50"], entry["lost_steps_max"])
        cells.append(f"{lost[0]:>6.1f}/{lost[1]:<3}")
        stages = entry["stages"]
        cells += [f"{stages[s]:11.3f}" if s in stages else f"{'-':>11}" for s in STAGES]
        lines.append("".join(cells))
        lines += [f"    {times} x {note}" for note, times in entry.get("notes", {}).items()]
        lines += [
            f"    {x['seconds']:.3f} s, rank {x['rank']}: {x['stage']}" for x in entry["outliers"]
        ]
    lines += [f"{mode:24}skipped: {why}" for mode, why in cell["skipped"].items()]
    return "\n".join(lines)


def figures(contestants: list[Contestant], setting: Setting, fault: str) -> dict[str, Any]:
    """Return a cell of the JSON: all modes of one fault."""
    entries: list[dict[str, Any]] = []
    for one in contestants:
        for mode in (one.kind.mode, one.kind.mode + AGAIN):
            mine = [each for each in one.recoveries if (each.mode, each.fault) == (mode, fault)]
            entries += [dict(summary(mode, mine))] if mine else []
    rate(entries, BASE)
    skipped = {one.kind.mode: one.skipped[fault] for one in contestants if fault in one.skipped}
    return {
        "shape": f"{setting.agents}x{setting.ranks_per_agent}",
        "sharding": setting.sharding,
        "parameters": setting.parameters,
        "fault": fault,
        "results": entries,
        "skipped": skipped,
    }


def measure(
    kinds: list[type[Launcher]], setting: Setting, faults: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure all modes with the same model on the same ranks; return a cell for each fault."""
    shape = f"{setting.agents}x{setting.ranks_per_agent}-{setting.sharding}"
    name = f"{shape}-{setting.parameters}-{faults[0]}"
    contestants = [Contestant(kind, options.base / name, setting) for kind in kinds]
    for one in contestants:
        one.skipped = {fault: why for fault in faults if (why := one.kind.refuses(fault))}
        try:
            if setting.sharding not in one.kind.shardings:
                raise Unavailable(f"its script does not know {setting.sharding}")
            one.kind.prepare()
        except Unavailable as error:
            one.skipped = dict.fromkeys(faults, str(error))
    jobs, kills_a_turn = (LARGE_JOBS, LARGE_TURN) if setting.is_large else (len(kinds), 1)
    plan = Plan(faults, options.kills, options.bound_seconds, jobs, kills_a_turn)
    try:
        race(contestants, plan)
    except KeyboardInterrupt:
        say("interrupted: what was measured so far")
        options.is_interrupted = True
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is ended in any case
        for contestant in contestants:
            contestant.drop()
        signal.signal(signal.SIGINT, before)
    return [figures(contestants, setting, fault) for fault in faults]


def numbers(text: str) -> list[int]:
    """Parse sizes such as 1M,100M."""
    units = {"k": 1_000, "M": 1_000_000, "G": 1_000_000_000}
    return [int(word.rstrip("kMG")) * units.get(word[-1], 1) for word in text.split(",")]


def shapes(text: str) -> list[tuple[int, int]]:
    """Parse shapes such as 2x2,4x2: agents and ranks of each."""
    pairs = [word.partition("x") for word in text.split(",")]
    return [(int(agents), int(ranks)) for agents, _, ranks in pairs]


def parse() -> argparse.Namespace:
    """Parse the command line."""
    names = [kind.mode for kind in LAUNCHERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    quick = f"{QUICK_KILLS} kills of {', '.join(QUICK)}; three minutes"
    parser.add_argument("--kills", type=count, help="of each mode and fault (default 20)")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--modes", type=words(names), help=f"of {', '.join(names)} (default all)")
    parser.add_argument("--shapes", type=shapes, default=[(2, 2)], help="agents x ranks of each")
    parser.add_argument("--parameters", type=numbers, default=[1_000_000], help="such as 1M,100M")
    divided = f"of {', '.join(SHARDINGS)} (default {DDP})"
    parser.add_argument("--sharding", type=words(SHARDINGS), default=[DDP], help=divided)
    faults = f"of {', '.join(FAULTS)} (default {WORKER})"
    parser.add_argument("--faults", type=words(FAULTS), default=[WORKER], help=faults)
    bound = "then it counts as not recovered (default 60)"
    parser.add_argument("--bound-seconds", type=float, default=60.0, help=bound)
    parser.add_argument("--json", type=output_file, help="write the figures to this file")
    parser.add_argument("--keep", action="store_true", help="keep the logs of the launchers")
    options = parser.parse_args()
    options.kills = options.kills or (QUICK_KILLS if options.quick else 20)
    options.modes = options.modes or (list(QUICK) if options.quick else names)
    return options


def settings(options: argparse.Namespace) -> list[tuple[Setting, list[str]]]:
    """Return the jobs that are needed: with a spare for the loss of a node, and without."""
    groups = [
        (False, [fault for fault in options.faults if fault != NODE]),
        (True, [fault for fault in options.faults if fault == NODE]),
    ]
    return [
        (Setting(agents, ranks, parameters, has_spare, sharding), faults)
        for parameters in options.parameters
        for sharding in options.sharding
        for agents, ranks in options.shapes
        for has_spare, faults in groups
        if faults
    ]


def main() -> None:
    """Measure, and print the tables."""
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.base = Path(tempfile.mkdtemp(prefix="unbroken-recovery-"))
    options.is_interrupted = False
    say(f"in {options.base}")
    kinds = [kind for kind in LAUNCHERS if kind.mode in options.modes]
    where, began = machine(), time.monotonic()
    cells: list[dict[str, Any]] = []
    for setting, faults in settings(options):
        if not options.is_interrupted:
            cells += measure(kinds, setting, faults, options)
    if not options.keep:
        shutil.rmtree(options.base, ignore_errors=True)
    took = f"{time.monotonic() - began:.0f} s, load at the end {os.getloadavg()[0]:.1f}"
    if options.json:
        told = {kind.mode: kind.setting_words or "as it ships" for kind in kinds}
        document = {"machine": where, "took": took, "settings": told, "cells": cells}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{where}; {took}")
    for cell in cells:
        print(f"\n{table(cell)}")
    print(f"\nseconds; faster: p50 of {BASE} by that of the mode; beyond: the time beyond "
          "one usual step of the job (step); less: its ratio, as faster; to step: the last "
          "rank begins its first step; lost: steps, p50/max; stages are medians")  # fmt: skip


if __name__ == "__main__":
    main()
