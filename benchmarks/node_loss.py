"""Losses of nodes under a training job on a real Kubernetes: seconds until training resumes.

Five real nodes (kubelet, containerd, pods with addresses of their own), the chart with its default
values, no provider of machines, and nobody who taints a node.  Two ranks train over gloo, on a node
each; with `spare`, a spare pod waits on a third.  A node that the leading operator is not on is
lost.  Times are seconds from the loss to the first step that all ranks have made again.

Needs what tests/realnodes needs (CONTRIBUTING.md), root above all.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from arguments import count, output_file
from node_loss_torchrun import try_torchrun
from node_loss_trials import LOSSES, QUICK, Loss, Trial, Unsettled, figures, load, new_job, try_loss
from recovery import machine
from recovery_trials import say

from tests.apiservers import CannotStartError
from tests.realnodes.plane import real_cluster
from tests.realnodes.releases import Release, released

NODES = 5
"""Two more than pods: where two pods miss each other, both may be replaced."""
MARKS = ("detected", "ended", "first step")
OURS, TORCHRUN = "unbroken", "torchrun"
PEERED = ("power-off", "cut-off")
"""The losses that torchrun is asked to survive."""


def measure(options: argparse.Namespace, cells: dict[tuple[str, str, bool], list[Trial]]) -> None:
    """Try each loss so often, and note each trial in `cells` as soon as it is done."""
    losses = [one for one in LOSSES if one.name in options.losses]
    with ExitStack() as stack:
        cluster = stack.enter_context(real_cluster(NODES, has_images=True))
        say(f"in {cluster.directory}")
        release = stack.enter_context(released(cluster))
        for has_spare in options.spares:
            _try_ours(options, release, losses, has_spare, cells)
            for number, name in enumerate(_peered(options, losses)):
                trial = try_torchrun(release, name, 2 * number + has_spare, has_spare=has_spare)
                _note(TORCHRUN, trial, cells)


def _try_ours(
    options: argparse.Namespace,
    release: Release,
    losses: list[Loss],
    has_spare: bool,
    cells: dict[tuple[str, str, bool], list[Trial]],
) -> None:
    job = new_job(release.cluster, has_spare=has_spare, lease={})
    for loss in losses * options.runs:
        try:
            trial = try_loss(release, job, loss)
        except (Unsettled, subprocess.TimeoutExpired) as error:
            trial = Trial(loss.name, has_spare, why_wrong=str(error))
        _note(OURS, trial, cells)
    release.cluster.kubectl("delete", "hyperpodpytorchjobs", job.name, "--timeout=55s")


def _peered(options: argparse.Namespace, losses: list[Loss]) -> Iterator[str]:
    for loss in losses:
        if loss.name in PEERED:
            yield from [loss.name] * options.torchrun


def _note(who: str, trial: Trial, cells: dict[tuple[str, str, bool], list[Trial]]) -> None:
    cells.setdefault((who, trial.loss, trial.has_spare), []).append(trial)
    seen = ", ".join(f"{name} after {at:.2f} s" for name, at in trial.marks.items())
    late = f", ran beside the next attempt for {trial.overlap:.3f} s" if trial.overlap else ""
    spare = "with" if trial.has_spare else "without"
    say(f"{who}, {trial.loss}, {spare} a spare: {trial.why_wrong or seen}{late} (load {load()})")


def table(cells: list[dict[str, Any]]) -> str:
    """Rows of Markdown: medians of each mark, and the worst of the last."""
    heads = ["", "loss", "spare", "recovered", "overlaps", *MARKS, "worst"]
    rows = [heads, ["---"] * len(heads)]
    for cell in cells:
        row = [cell["launcher"], cell["loss"], "yes" if cell["spare"] else "no"]
        row += [f"{cell['right']}/{cell['trials']}", str(cell["overlaps"])]
        row += [_shown(cell["p50"].get(name)) for name in MARKS]
        rows.append([*row, _shown(cell["worst"].get(MARKS[-1]))])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    wrong = [f"{c['launcher']}, {c['loss']}: {why}" for c in cells for why in c["wrong"]]
    return "\n".join([*lines, *wrong])


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"


def parse() -> argparse.Namespace:
    """The command line."""
    names = [loss.name for loss in LOSSES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=count, default=10, help="trials of each loss (default 10)")
    quick = f"one trial each of {', '.join(QUICK)}, without a spare, and no torchrun"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--losses", help=f"some of {', '.join(names)} (default all)")
    parser.add_argument(
        "--spare", choices=("no", "yes", "both"), default="both",
        help="whether the job has a spare pod (default both, one after the other)",
    )  # fmt: skip
    parser.add_argument(
        "--torchrun", type=int, default=1,
        help=f"trials of torchrun for each of {', '.join(PEERED)} (default 1)",
    )  # fmt: skip
    parser.add_argument("--json", type=output_file, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.spare, options.torchrun = 1, "no", 0
    options.losses = options.losses.split(",") if options.losses else None
    options.losses = options.losses or (list(QUICK) if options.quick else names)
    if unknown := set(options.losses) - set(names):
        parser.error(f"no such loss: {', '.join(sorted(unknown))}")
    options.spares = {"no": [False], "yes": [True], "both": [False, True]}[options.spare]
    return options


def main() -> int:
    """Measure, print the table; 1 where a job did not recover or attempts overlapped, 130 after
    Ctrl-C, with what was measured up to then."""
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cells: dict[tuple[str, str, bool], list[Trial]] = {}
    where, began, code = machine(), time.monotonic(), 0
    try:
        measure(options, cells)
    except CannotStartError as error:
        print(f"node_loss: {error}", file=sys.stderr)
        return 1
    except subprocess.SubprocessError as error:
        say(f"{error}: what was measured so far")
        code = 1
    except KeyboardInterrupt:
        say("interrupted: what was measured so far")
        code = 130
    found = [{"launcher": who, **figures(cell)} for (who, _, _), cell in cells.items()]
    if options.json is not None:
        seconds = round(time.monotonic() - began)
        options.json.write_text(
            json.dumps({"machine": where, "seconds": seconds, "cells": found}, indent=1)
        )
    print(table(found))
    ours = [cell for cell in found if cell["launcher"] == OURS]
    is_bad = any(cell["wrong"] or cell["overlaps"] for cell in ours)
    return code or int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
