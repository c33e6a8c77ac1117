"""The same kill under frameworks: Hugging Face Trainer, Accelerate and Lightning.

A worker gets SIGKILL some seconds after the first step of all ranks. Measured is the time until all
ranks have made a step again, by their own notes (`framework_steps.py`), in three modes:

    torchrun   with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    first      `unbroken run` of a script that never ran here
    second     `unbroken run` of a script whose imports an earlier run has learned

Modes take turns, in another order in each round, and only one job exists at a time. `told` is the
cost that `unbroken explain` shows. Needs an environment with the frameworks: `--env`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from arguments import count, durations, output_file, words
from frameworks_launch import (
    FRAMEWORKS,
    START_SECONDS,
    TEACH_SECONDS,
    Framework,
    Job,
    Setting,
    Torchrun,
    Unbroken,
    Unmeasured,
    until,
)
from recovery_launch import UP, bring_up
from recovery_trials import say

TORCHRUN, FIRST, SECOND = MODES = ("torchrun", "first", "second")
DELAYS = (5.0, 15.0, 60.0, 300.0)
Object = dict[str, Any]


@dataclass(slots=True)
class Trial:
    """One kill."""

    framework: str
    delay: float
    """Seconds from the first step of all ranks to the kill."""
    mode: str
    round: int
    seconds: float | None = None
    """Seconds from the kill to the next step of all ranks; None: see `why_not`."""
    told: float | None = None
    """Cost that `unbroken explain` shows; None: it shows none."""
    told_from: float | None = None
    """Seconds from the kill to the begin of that cost; negative: it begins before the kill."""
    told_until: float | None = None
    """Seconds from the kill to its end."""
    starts: tuple[str, ...] = ()
    """How each worker was started after the kill: warm or cold."""
    start_seconds: float | None = None
    """Seconds from the start of the launcher to the first step of all ranks."""
    helpers_mib: float | None = None
    workers_mib: float | None = None
    helpers_cpu_seconds: float | None = None
    """Processor time of learning and of parked workers, until the kill."""
    load: float = 0.0
    why_not: str = ""


def run_trial(job: Job, trial: Trial, bound: float) -> None:
    """Start the job, kill a worker of it, and note what happens."""
    began = time.time()
    try:
        job.start()
        first = until(job.first_steps, START_SECONDS, "first step of all ranks")
        at = max(one["at"] for one in first.values())
        trial.start_seconds = at - began
        time.sleep(max(0.0, at + trial.delay - time.time()))
        if isinstance(job, Unbroken):
            helpers = job.helpers()
            trial.helpers_mib, trial.workers_mib = helpers.mib, helpers.workers_mib
            trial.helpers_cpu_seconds = helpers.cpu_seconds
        killed_at, stepped_at = job.kill(bound)
        trial.seconds = stepped_at - killed_at
        if isinstance(job, Unbroken):
            trial.starts = tuple(job.starts())
            note_told(trial, job.told(), killed_at)
    except (Unmeasured, OSError) as error:
        trial.why_not = str(error)
    finally:
        job.stop()
        trial.load = os.getloadavg()[0]


def note_told(trial: Trial, incident: Object, killed_at: float) -> None:
    """Note the cost that an incident names, and where it begins and ends."""
    trial.told = incident["seconds"]
    if trial.told is not None and incident.get("progressAt"):
        trial.told_until = datetime.fromisoformat(incident["progressAt"]).timestamp() - killed_at
        trial.told_from = trial.told_until - trial.told


def teach(job: Unbroken) -> Object:
    """Run a script until its imports are learned; return what that took."""
    found: Object = {"framework": job.framework.name}
    try:
        job.start()
        first = until(job.first_steps, START_SECONDS, "first step of all ranks")
        at = max(one["at"] for one in first.values())
        until(job.has_learned, TEACH_SECONDS, "learned imports")
        found |= {"learned_after_seconds": time.time() - at, **asdict(job.helpers())}
    except Unmeasured as error:
        found["why_not"] = str(error)
    finally:
        job.stop()
    return found


def plan(options: argparse.Namespace) -> Iterator[Trial]:
    """Yield all trials. The modes of a pair follow on each other, in turn in another order."""
    for number in range(options.rounds):
        for framework in options.frameworks:
            for delay in options.delays:
                shift = number % len(options.modes)
                for mode in [*options.modes[shift:], *options.modes[:shift]]:
                    yield Trial(framework.name, delay, mode, number)


@contextmanager
def cluster(directory: Path, nodes: int) -> Iterator[None]:
    """A local cluster for the time of the block."""
    try:
        if why_not := bring_up(directory, nodes):
            raise Unmeasured(f"unbroken up: {why_not}")
        yield
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is ended in any case
        down = [*UP, "down", "--dir", str(directory), "--purge"]
        subprocess.run(down, capture_output=True, check=False)
        signal.signal(signal.SIGINT, before)


def measure(
    options: argparse.Namespace, base: Path, note: Callable[[Trial | Object], None]
) -> None:
    """Make all trials; `note` gets each as soon as it is done, and what each lesson took."""
    nodes, ranks = options.shape
    setting = Setting(nodes, ranks, options.env / "bin/python", base / "cluster")
    known = {one.name: one for one in options.frameworks}
    with cluster(setting.cluster, nodes):
        for framework in options.frameworks if SECOND in options.modes else ():
            folder = base / f"teach-{framework.name}"
            note(teach(Unbroken(framework, setting, folder, learned(base, framework))))
        for number, trial in enumerate(plan(options)):
            job = new_job(trial, known[trial.framework], setting, base / f"job-{number}")
            run_trial(job, trial, options.bound_seconds)
            note(trial)


def learned(base: Path, framework: Framework) -> Path:
    """Return the cache in which the first run of a script has left what it has learned."""
    return base / f"learned-{framework.name}"


def new_job(trial: Trial, framework: Framework, setting: Setting, folder: Path) -> Job:
    """Return the job of a trial, with a folder of its own."""
    if trial.mode == TORCHRUN:
        return Torchrun(framework, setting, folder)
    is_second = trial.mode == SECOND
    cache = learned(folder.parent, framework) if is_second else folder / "cache"
    return Unbroken(framework, setting, folder, cache)


def figures(trials: Sequence[Trial]) -> list[Object]:
    """The figures of each framework, delay and mode, in the order of the first trials."""
    cells: dict[tuple[str, float, str], list[Trial]] = {}
    for one in trials:
        cells.setdefault((one.framework, one.delay, one.mode), []).append(one)
    return [_cell(key, some, trials) for key, some in cells.items()]


def _cell(key: tuple[str, float, str], own: Sequence[Trial], every: Sequence[Trial]) -> Object:
    framework, delay, mode = key
    good = [one for one in own if one.seconds is not None]
    seconds = [one.seconds for one in good if one.seconds is not None]
    told = [one.told for one in good if one.told is not None]
    apart = [apart for one in good if (apart := disagreement(one)) is not None]
    faster = [ratio for one in good if (ratio := _faster(one, every)) is not None]
    return {
        "framework": framework,
        "delay_seconds": delay,
        "mode": mode,
        "kills": len(own),
        "recovered": len(good),
        "p50_seconds": statistics.median(seconds) if seconds else None,
        "min_seconds": min(seconds, default=None),
        "max_seconds": max(seconds, default=None),
        "times_faster": statistics.median(faster) if faster else None,
        "told_p50_seconds": statistics.median(told) if told else None,
        "told_apart_max": max(apart, key=abs, default=None),
        "warm": sum(set(one.starts) == {"warm"} for one in good),
        "helpers_mib": _median([one.helpers_mib for one in good]),
        "workers_mib": _median([one.workers_mib for one in good]),
        "helpers_cpu_seconds": _median([one.helpers_cpu_seconds for one in good]),
        "load": [min(one.load for one in own), max(one.load for one in own)],
        "not_recovered": [one.why_not for one in own if one.seconds is None],
    }


def disagreement(trial: Trial) -> float | None:
    """Return by which share of the measured cost `explain` is above it; None: it names none."""
    if trial.seconds is None or trial.told is None:
        return None
    return trial.told / trial.seconds - 1


def _faster(trial: Trial, every: Sequence[Trial]) -> float | None:
    """Return the seconds of torchrun's kill of the same pair by those of this one."""
    place = (trial.framework, trial.delay, trial.round)
    pair = [
        one.seconds
        for one in every
        if one.mode == TORCHRUN and (one.framework, one.delay, one.round) == place
    ]
    if not pair or pair[0] is None or trial.seconds is None:
        return None
    return pair[0] / trial.seconds


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


HEADS = (
    "framework", "killed after, s", "mode", "recovered", "p50, s", "min, max", "faster",
    "explain, s", "off by at most", "warm", "templates, MiB", "workers, MiB", "processor, s",
    "load",
)  # fmt: skip


def table(cells: Sequence[Object]) -> str:
    """Rows of Markdown."""
    rows = [HEADS, ("---",) * len(HEADS), *map(_row, cells)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    whys = [
        f"{cell['framework']}, {cell['delay_seconds']:g} s, {cell['mode']}: {why}"
        for cell in cells
        for why in cell["not_recovered"]
    ]
    return "\n".join([*lines, *whys])


def _row(cell: Object) -> tuple[str, ...]:
    def shown(key: str, form: str = "{:.2f}") -> str:
        return "" if cell[key] is None else form.format(cell[key])

    is_ours = cell["mode"] != TORCHRUN
    some = cell["p50_seconds"] is not None
    return (
        cell["framework"],
        f"{cell['delay_seconds']:g}",
        cell["mode"],
        f"{cell['recovered']}/{cell['kills']}",
        shown("p50_seconds"),
        f"{shown('min_seconds')}, {shown('max_seconds')}" if some else "",
        shown("times_faster", "{:.1f}x") if is_ours else "",
        shown("told_p50_seconds"),
        shown("told_apart_max", "{:+.0%}"),
        f"{cell['warm']}/{cell['recovered']}" if is_ours else "",
        shown("helpers_mib", "{:.0f}"),
        shown("workers_mib", "{:.0f}"),
        shown("helpers_cpu_seconds", "{:.1f}"),
        "{:.1f} to {:.1f}".format(*cell["load"]),
    )


def shape(text: str) -> tuple[int, int]:
    """Read a shape such as 2x2: nodes and ranks of each."""
    nodes, _, ranks = text.partition("x")
    if not (nodes.isdecimal() and ranks.isdecimal() and int(nodes) * int(ranks) > 1):
        raise argparse.ArgumentTypeError(f"{text} is no shape of two ranks or more, such as 2x2")
    return int(nodes), int(ranks)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; end with a clear error where the environment lacks a package."""
    names = [one.name for one in FRAMEWORKS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=count, default=5, help="of all trials (default 5)")
    parser.add_argument("--frameworks", type=words(names), default=names, help="(default all)")
    parser.add_argument("--modes", type=words(MODES), default=list(MODES), help="(default all)")
    delays = "seconds from the first step to the kill (default 5,15,60,300)"
    parser.add_argument("--delays", type=durations, default=list(DELAYS), help=delays)
    parser.add_argument("--shape", type=shape, default=(1, 2), help="nodes x ranks (default 1x2)")
    parser.add_argument("--bound-seconds", type=float, default=180.0, help="(default 180)")
    parser.add_argument("--env", type=Path, required=True, help="environment with the frameworks")
    parser.add_argument(
        "--json", type=output_file, help="write the trials and figures to this file"
    )
    parser.add_argument("--keep", action="store_true", help="keep the logs of the launchers")
    options = parser.parse_args(given)
    options.env = options.env.absolute()
    if not (options.env / "bin/python").exists():
        parser.error(f"{options.env} is no environment: it has no bin/python")
    options.frameworks = [one for one in FRAMEWORKS if one.name in options.frameworks]
    try:
        _require(options.frameworks, options.env, parser)
    except Unmeasured as error:
        parser.error(str(error))
    return options


def _require(frameworks: Sequence[Framework], env: Path, parser: argparse.ArgumentParser) -> None:
    for one in frameworks:
        if missing := one.missing(env / "bin/python"):
            parser.error(
                f"{one.name}: {env} has no module {', '.join(missing)}: run "
                f"`{env}/bin/pip install {one.install}`, or leave it out of --frameworks"
            )


def machine(options: argparse.Namespace) -> str:
    """Return cores and versions of this machine, and the priority of this program."""
    asks = "from importlib.metadata import version as v; import sys; "
    asks += "print(*(f'{one} {v(one)}' for one in sys.argv[1:]), sep=', ')"
    modules = dict.fromkeys(["torch", *(m for one in options.frameworks for m in one.modules)])
    command = [str(options.env / "bin/python"), "-c", asks, *modules]
    versions = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    python = f"Python {platform.python_version()}"
    return f"{cores} cores, Linux {platform.release()}, {python}, {versions}, nice {os.nice(0)}"


def main() -> int:
    """Measure, and print the table; 1 if a kill was not measured."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    base, began = Path(tempfile.mkdtemp(prefix="unbroken-frameworks-")), time.monotonic()
    trials, lessons, where = list[Trial](), list[Object](), machine(options)
    loads = [os.getloadavg()[0]]
    say(f"in {base}")

    def note(found: Trial | Object) -> None:
        if isinstance(found, Trial):
            trials.append(found)
            seen = found.why_not or f"{found.seconds:.2f} s"
            told = f", told {found.told} (from {found.told_from} to {found.told_until})"
            more = "" if found.mode == TORCHRUN else f"{told}, {found.starts}"
            what = f"{found.framework}, killed after {found.delay:g} s, {found.mode}"
            say(f"{what}: {seen}{more} (load {found.load:.1f})")
        else:
            lessons.append(found)
            say(json.dumps(found))
        if options.json:
            took = f"{time.monotonic() - began:.0f} s"
            document = {
                "machine": where, "took": took, "shape": "{}x{}".format(*options.shape),
                "load": [*loads, os.getloadavg()[0]], "command": " ".join(sys.argv[1:]),
                "learning": lessons, "figures": figures(trials),
                "trials": [asdict(one) for one in trials],
            }  # fmt: skip
            options.json.write_text(json.dumps(document, indent=1) + "\n")

    status = 0
    try:
        measure(options, base, note)
    except Unmeasured as error:
        say(f"failed: {error}")
        status = 1
    except KeyboardInterrupt:
        say("interrupted: what was measured so far")
        status = 130
    finally:
        if not options.keep:
            shutil.rmtree(base, ignore_errors=True)
    print(f"{where}\n\n{table(figures(trials))}")
    return status or int(any(one.seconds is None for one in trials))


if __name__ == "__main__":
    raise SystemExit(main())
