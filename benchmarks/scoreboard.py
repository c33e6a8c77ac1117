#!/usr/bin/env python3
"""Compare unbroken with its peers: the same faults, and the same judge.

    benchmarks/scoreboard.py --seeds 20 --json FILE           # everything
    benchmarks/scoreboard.py --quick                          # a minute or two
    benchmarks/scoreboard.py --markdown docs/detection.md --from FILE [FILE ...]

The figures of each fault: whether the job reached its last step with the right result, and how
long it paused.  Further figures: how many steps were made twice, when the fault was detected, and
which rank was blamed.
A trial without a result is shown as not run, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from arguments import output_file
from recovery_launch import Unavailable
from scoreboard_judge import Judge, NotRun, interrupted
from scoreboard_launch import Dlrover, FtLauncher, Launcher, Torchrun, TorchrunFreshStore, Trial
from scoreboard_outcome import Outcome, rows
from scoreboard_peers import NO_PEERS, peers
from scoreboard_tables import line, markdown, table
from scoreboard_trials import BY_NAME, FAULTS, WELL, Fault, plan
from scoreboard_unbroken import Unbroken, UnbrokenAct, UnbrokenOutput, UnbrokenSilence

LAUNCHERS = (
    Unbroken,
    UnbrokenOutput,
    UnbrokenSilence,
    UnbrokenAct,
    Torchrun,
    TorchrunFreshStore,
    FtLauncher,
    Dlrover,
)
NOT_RUN = {
    "torchft": "it has no launcher; its Manager needs a training loop of its own, and what it"
    " promises, to go on with the ranks that are left, is another result than the judge's"
}
QUICK_FAULTS = ("stop", "error", "segfault", "disk")
QUICK_LAUNCHERS = ("unbroken", "torchrun")
Contest = tuple[Fault, int, Launcher, str]
TORCH_MEBIBYTES = 800
"""Mebibytes that two workers need in addition with torch."""
STARTING_MAX = 3
"""Number of trials that may start at the same time, since starts use much processor time."""
_starting = threading.Semaphore(STARTING_MAX)


def say(text: str) -> None:
    """Print progress to standard error, since the table goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def run_trial(contest: Contest, directory: Path, bound: float) -> Outcome:
    """Run one fault with one launcher."""
    fault, seed, launcher, program = contest
    made = plan(fault, seed, launcher.mode)
    empty = Outcome(
        fault.name, seed, launcher.name, program, made.rank, made.step, mode=launcher.mode
    )
    if interrupted.is_set():
        return Outcome(**{**empty.to_json(), "not_run": "interrupted"})
    try:
        with Judge(made, directory) as judge:
            more = TORCH_MEBIBYTES if program == "torch" else 0
            groups = judge.memory_groups(launcher.agent_mebibytes + more)
            trial = Trial(made, directory, judge.name, program == "torch", groups)
            with _starting:
                job = launcher.start(trial)
                judge.until_step(job)
                say(f"{directory.name} {launcher.name} steps")
            try:
                why = judge.look_on(job, bound)
                return judge.outcome(launcher.name, program, why, job.words(judge.ranks))
            finally:
                job.stop()
    except (NotRun, Unavailable) as error:
        return Outcome(**{**empty.to_json(), "not_run": str(error)})


def contests(options: argparse.Namespace, launchers: Iterable[Launcher]) -> list[Contest]:
    """Return all trials in random order, so that noise affects all launchers alike.

    The order also makes it unlikely that trials which use a whole core run together.
    """
    listed = list(launchers)
    found = [
        (BY_NAME[name], seed, launcher, program)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for name in options.faults.split(",")
        for launcher in listed
        for program in options.programs.split(",")
        if BY_NAME[name].is_hang or name in WELL or launcher.mode == "told"
        if seed - options.first_seed < options.peer_seeds or isinstance(launcher, Unbroken)
    ]
    return random.Random(0).sample(found, len(found))


def play(todo: Sequence[Contest], options: argparse.Namespace, base: Path) -> list[Outcome]:
    """Run the trials, several at once."""
    found: list[Outcome] = []
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {
            pool.submit(run_trial, contest, base / f"{number:04}", options.bound_seconds): number
            for number, contest in enumerate(todo)
        }
        try:
            for done in as_completed(running):
                found.append(replace(done.result(), load=options.load))
                took = time.monotonic() - began
                say(f"{running[done]:04} {len(found)}/{len(todo)} {took:5.0f} s  {line(found[-1])}")
                if options.json:
                    write(options.json, found, options)
        except KeyboardInterrupt:
            interrupted.set()
            say("interrupted: what was measured so far")
    return found


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let `count` processes compute at the same time as the trials."""
    words = [sys.executable, "-S", "-c", "while True: pass"]
    started = [subprocess.Popen(words, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def machine() -> str:
    """Return date, cores, load and versions of this machine."""
    cores = len(os.sched_getaffinity(0))
    when = time.strftime("%Y-%m-%d")
    load, python = f"load average {os.getloadavg()[2]:.0f}", platform.python_version()
    return f"{when}, {cores} cores, {load}, Linux {platform.release()}, Python {python}"


def repeated(words: Sequence[str]) -> list[str]:
    """Return the options that repeat a run, without the paths of its files."""
    found, words = [], [part for word in words for part in word.split("=", 1)]
    while words:
        word, *words = words
        if word == "--json":
            words = words[1:]
        elif word != "--keep":
            found.append(word)
    return found


def document(outcomes: Sequence[Outcome], options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON document of a run."""
    return {
        "machine": machine(),
        "command": shlex.join(["benchmarks/scoreboard.py", *repeated(sys.argv[1:])]),
        "bound_seconds": options.bound_seconds,
        "jobs": options.jobs,
        "load": options.load,
        "skipped": options.skipped,
        "settings": {kind.name: kind.settings for kind in LAUNCHERS},
        "trials": [one.to_json() for one in outcomes],
    }


def write(path: Path, outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    """Write the document completely or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document(outcomes, options), indent=1) + "\n")
    part.rename(path)


def read_document(path: Path) -> dict[str, Any]:
    """Return a file that `write` has written. SystemExit: it is no such file."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        found["trials"], found["command"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise SystemExit(f"error: {path}: not a whole file of figures: {why}") from None
    return found


def parse() -> argparse.Namespace:
    """Parse the command line."""
    names = [kind.name for kind in LAUNCHERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--faults", default=",".join(fault.name for fault in FAULTS), help="of: %(default)s")
    add("--launchers", default=",".join(names), help="of: %(default)s")
    add("--programs", default="plain", help="of plain, torch (gloo); default plain")
    add("--seeds", type=int, default=3, help="of each fault and launcher (default 3)")
    add("--first-seed", type=int, default=0)
    add("--peer-seeds", type=int, default=10**9, help="so many at most for launchers not ours")
    add("--jobs", type=int, default=12, help="trials at once (default 12)")
    add("--load", type=int, default=0, help="busy processes beside the trials (default 0)")
    add("--bound-seconds", type=float, default=200.0, help="without a step: given up")
    add("--quick", action="store_true", help="one seed of few faults, ours and torchrun")
    add("--json", type=output_file, help="write the figures to this file, after each trial")
    add("--keep", action="store_true", help="keep the directories of the trials")
    add("--markdown", type=Path, help="write the page of figures and run nothing")
    add("--from", type=Path, nargs="+", dest="sources", help="files of figures for it")
    add("--peers", type=Path, help="an earlier page: rows that were not run again come from it")
    add("--note", default="", help="a sentence about the runs for the page")
    options = parser.parse_args()
    options.skipped = dict(NOT_RUN)
    if options.quick:
        options.faults, options.launchers = ",".join(QUICK_FAULTS), ",".join(QUICK_LAUNCHERS)
        options.seeds = 1
    if options.markdown and not options.sources:
        parser.error("--markdown needs --from")
    for given, known in ((options.faults, [*BY_NAME]), (options.launchers, names)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"not known: {', '.join(sorted(unknown))}")
    return options


def ready(options: argparse.Namespace, base: Path) -> list[Launcher]:
    """Return the launchers that are available here."""
    found: list[Launcher] = []
    for kind in LAUNCHERS:
        if kind.name not in options.launchers.split(","):
            continue
        launcher = kind()
        try:
            launcher.prepare(base)
        except Unavailable as error:
            options.skipped[kind.name] = str(error)
            say(f"{kind.name}: {error}")
        else:
            found.append(launcher)
    return found


def main() -> None:
    """Run the trials and print the table; or write the page."""
    options = parse()
    if options.markdown:
        earlier = peers(options.peers.read_text()) if options.peers else NO_PEERS
        documents = [read_document(path) for path in options.sources]
        options.markdown.write_text(markdown(documents, earlier, options.note))
        return
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background jobs ignore the latter
        signal.signal(number, signal.default_int_handler)
    base = Path(tempfile.mkdtemp(prefix="unbroken-scoreboard-"))
    say(f"in {base}")
    launchers: list[Launcher] = []
    outcomes: list[Outcome] = []
    try:
        launchers = ready(options, base)
        with busy(options.load):
            outcomes = play(contests(options, launchers), options, base)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was started is ended in any case
        for launcher in launchers:
            launcher.close()
        if not options.keep:
            shutil.rmtree(base, ignore_errors=True)
    print(machine())
    print(table(rows(outcomes)))
    for name, why in options.skipped.items():
        print(f"{name}: not run: {why}")


if __name__ == "__main__":
    main()
