"""Recovery after `kill -9` of one worker: unbroken beside torchrun and ft_launcher.

Every launcher has its own job of 2 agents x 2 ranks of `train_step.py` on this machine.  One at a
time runs, the others stand at a gate; kills go round, one for each launcher, each rank in turn.
Measured is from the kill to the moment at which every rank has completed a step again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recovery_launch import LAUNCHERS, RANKS, Torchrun, Unavailable, Unbroken
from recovery_records import STAGES, Recovery, summary
from recovery_watch import Watch, Worker

START_SECONDS = 120.0
STEPS_BEFORE_KILL = 5
"""Steps that every rank has made since the launcher's turn began."""
SETTLE_SECONDS = (0.5, 1.0)
"""The kill falls anywhere in it, so that it meets polling launchers at any phase."""

Launcher = Torchrun | Unbroken


def say(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Contestant:
    """A mode, its job while it has one, and its kills so far."""

    kind: type[Launcher]
    base: Path
    recoveries: list[Recovery]
    job: Launcher | None = None
    watch: Watch | None = None
    jobs: int = 0

    def ensure(self) -> Watch:
        """A job whose ranks have all stepped, standing at the gate."""
        if self.watch is not None:
            return self.watch
        self.jobs += 1
        self.job = self.kind(self.base / f"{self.kind.mode}-{self.jobs}")
        self.watch = watch = self.job.start()
        if not watch.wait(lambda: all_stepped(watch, set()) or bool(self.ended), START_SECONDS):
            raise Unavailable(f"no first step in {START_SECONDS:.0f} s; see {self.job.directory}")
        if self.ended:
            raise Unavailable(self.ended)
        watch.pause()
        say(f"{self.kind.mode}: job {self.jobs} steps")
        return watch

    @property
    def ended(self) -> str:
        """Why the job has ended by itself; empty: it has not."""
        return self.job.ended() if self.job is not None else ""

    def drop(self) -> None:
        """Take the job away."""
        if self.job is not None:
            self.job.stop()
        if self.watch is not None:
            self.watch.end_workers()
            self.watch.close()
        self.job = self.watch = None


def all_stepped(watch: Watch, old: set[int]) -> bool:
    """Whether the newest process of every rank is none of the old ones and has made a step."""
    newest = watch.newest.values()
    return len(newest) == RANKS and all(one.steps and one.pid not in old for one in newest)


def kill_once(contestant: Contestant, rank: int, bound: float, rng: random.Random) -> Recovery:
    """Let the job run, kill one rank, look on until it steps again or the bound is over."""
    watch, job = contestant.ensure(), contestant.job
    assert job is not None
    goals = {one.pid: one.steps + STEPS_BEFORE_KILL for one in watch.newest.values()}
    watch.resume()
    watch.wait(lambda: False, rng.uniform(*SETTLE_SECONDS))
    running = watch.wait(
        lambda: all(one.steps >= goals.get(one.pid, 0) for one in watch.newest.values()), bound
    )
    old = [watch.newest[rank] for rank in range(RANKS)]
    if not running or any(one.died_at for one in old):
        contestant.drop()
        return Recovery(job.mode, rank, time.time(), why_not="did not run on by itself")
    pids, before = {one.pid for one in old}, len(watch.workers)
    killed_at = time.time()
    os.kill(old[rank].pid, signal.SIGKILL)
    watch.wait(lambda: all_stepped(watch, pids) or bool(contestant.ended), bound, reaps=old[rank])
    recovery = Recovery(job.mode, rank, killed_at, detected_at=old[rank].reaped_at)
    if not all_stepped(watch, pids):
        why = contestant.ended or f"no step in {bound:.0f} s"
        contestant.drop()
        return replace(recovery, why_not=why)
    watch.pause()
    seen = outcome(recovery, old, watch.workers[before:], watch.newest)
    return job.told(seen)


def outcome(
    kill: Recovery, old: list[Worker], since: list[Worker], newest: dict[int, Worker]
) -> Recovery:
    """What was seen of the workers, as times: of the `old` ones and of those `since` the kill."""
    new = list(newest.values())
    deaths = [one.died_at for one in old if one.died_at is not None]
    victim_died_at = old[kill.rank].died_at or kill.killed_at
    return replace(
        kill,
        stopped_at=max(deaths) if len(deaths) == len(old) else None,
        started_at=max(one.process_at for one in new),
        stepped_at=max(one.first_step_at or 0.0 for one in new),
        details={
            "attempts": max(Counter(one.rank for one in since).values()),
            "kernel_ends_victim": victim_died_at - kill.killed_at,
            **slowest(new),
        },
    )


def slowest(workers: list[Worker]) -> dict[str, float]:
    """Parts of the way to the first step, each of the rank that took longest."""
    parts: dict[str, list[float]] = {}
    for one in workers:
        times = (one.process_at, one.began_at, one.imported_at, one.joined_at, one.first_step_at)
        known = [at if at is not None else one.began_at for at in times]
        names = ("process_to_python", "import_torch", "join", "joined_to_step")
        for name, start, end in zip(names, known, known[1:], strict=False):
            parts.setdefault(name, []).append(end - start)
        parts.setdefault("first_step_cpu", []).append(one.first_step_cpu_seconds or 0.0)
    return {name: max(values) for name, values in parts.items()}


def race(contestants: list[Contestant], kills: int, bound: float) -> dict[str, str]:
    """Kill in turns; launchers that could not be started, with the reason."""
    rng = random.Random(0)
    skipped: dict[str, str] = {}
    for number in range(kills):
        racing = [one for one in contestants if one.kind.mode not in skipped]
        for contestant in rng.sample(racing, len(racing)):
            try:
                found = kill_once(contestant, number % RANKS, bound, rng)
            except Unavailable as error:
                contestant.drop()
                if not contestant.recoveries:
                    skipped[contestant.kind.mode] = str(error)
                    say(f"{contestant.kind.mode}: {error}")
                    continue
                mode, rank = contestant.kind.mode, number % RANKS
                found = Recovery(mode, rank, time.time(), why_not=str(error))
            contestant.recoveries.append(found)
            took = f"{found.seconds:.3f} s" if found.seconds is not None else found.why_not
            say(f"kill {number + 1}/{kills} {found.mode:21} rank {found.rank}: {took}")
    return skipped


def machine() -> str:
    """Where it was measured."""
    import torch

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, Linux {platform.release()}, {versions}, load {load}"


def table(entries: list[dict[str, Any]], skipped: dict[str, str]) -> str:
    """Seconds by mode and stage; ratios to torchrun, with a fresh store if it never recovered."""
    modes = {entry["mode"]: entry for entry in entries}
    base = next(
        (
            modes[name]
            for name in ("torchrun", "torchrun-fresh-store")
            if modes.get(name, {}).get("p50_seconds")
        ),
        None,
    )
    head = f"{'mode':22}{'recovered':>10}{'p50':>8}{'p95':>8}{'ratio':>7}" + "".join(
        f"{stage:>11}" for stage in STAGES
    )
    lines = [head]
    for entry in entries:
        cells = f"{entry['mode']:22}{entry['recovered']:>7}/{entry['kills']:<2}"
        if entry["p50_seconds"] is None:
            lines.append(cells + "  " + "; ".join(entry["not_recovered"]))
            continue
        ratio = f"{entry['p50_seconds'] / base['p50_seconds']:7.2f}" if base else f"{'':7}"
        stages = "".join(
            f"{entry['stages'][s]:11.3f}" if s in entry["stages"] else f"{'-':>11}" for s in STAGES
        )
        lines.append(
            f"{cells}{entry['p50_seconds']:8.3f}{entry['p95_seconds']:8.3f}{ratio}{stages}"
        )
    lines += [f"{mode:22}skipped: {why}" for mode, why in skipped.items()]
    if base:
        lines.append(f"seconds; ratio of p50 to {base['mode']}; stages are medians")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    names = [kind.mode for kind in LAUNCHERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="of each mode (default 20)")
    parser.add_argument("--quick", action="store_true", help="4 kills, one of each rank")
    parser.add_argument("--modes", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument(
        "--bound-seconds",
        type=float,
        default=60.0,
        help="then it counts as not recovered (default 60)",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--keep", action="store_true", help="keep the logs of the launchers")
    options = parser.parse_args()
    unknown = set(options.modes.split(",")) - set(names)
    if unknown:
        parser.error(f"no such mode: {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    """Measure, print the table."""
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    base = Path(tempfile.mkdtemp(prefix="unbroken-recovery-"))
    say(f"in {base}")
    skipped: dict[str, str] = {}
    contestants: list[Contestant] = []
    where = machine()
    for kind in [kind for kind in LAUNCHERS if kind.mode in options.modes.split(",")]:
        try:
            kind.prepare()
        except Unavailable as error:
            skipped[kind.mode] = str(error)
        else:
            contestants.append(Contestant(kind, base, []))
    try:
        skipped |= race(contestants, 4 if options.quick else options.kills, options.bound_seconds)
    except KeyboardInterrupt:
        say("interrupted: what was measured so far")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was started is ended in any case
        for contestant in contestants:
            contestant.drop()
        if not options.keep:
            shutil.rmtree(base, ignore_errors=True)
    entries = [summary(one.kind.mode, one.recoveries) for one in contestants if one.recoveries]
    if options.json:
        document = {"machine": where, "results": entries, "skipped": skipped}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(where)
    print(table(entries, skipped))


if __name__ == "__main__":
    main()
