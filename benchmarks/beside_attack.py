"""Faults of one namespace's job while another namespace attacks the operator, in pairs.

`unbroken up` with nodes of processes, and `unbroken operator` beside it. A real DDP job on gloo
loses a worker, loses a node, and has a rank that hangs: once while nothing else happens, once with
all floods at once. These are seven false dashboards of Ray, and jobs that are created and changed
without end (patterns, numbers, large ones). Each pair has the reverse order of the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from arguments import count, output_file
from beside_attack_programs import DASHBOARDS, NAMESPACE
from control_plane_world import Operator, cpu_seconds, operator
from recovery import machine
from recovery_launch import NODE, UP, WORKER, Setting, Unavailable, end, free_port
from recovery_records import percentile
from recovery_trials import pick, run_on, say
from recovery_unbroken import InProcessSnapshots
from recovery_watch import Worker

HANG = "hang"
FAULTS = (WORKER, NODE, HANG)
PROGRAMS = Path(__file__).with_name("beside_attack_programs.py")
BOUND_SECONDS, START_SECONDS = 180.0, 240.0
CALM_SECONDS = 5.0
"""Seconds between the begin or end of an attack and the first measurement."""
TURNS_SHOWN = 3
TRIES = 5


@dataclass
class Look:
    """Figures of the operator during one half of a pair."""

    is_attacked: bool
    load: float
    seconds: float = 0.0
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from a fault to the first step of all ranks."""
    health: list[float] = field(default_factory=list)
    """Seconds that each answer of the operator took."""
    idle: list[float] = field(default_factory=list)
    """The same of a program that does nothing else."""
    turns: list[tuple[float, float, str]] = field(default_factory=list)
    """Long turns of the operator's loop: seconds, processor seconds, what ran."""
    mebibytes: float = 0.0
    lines_a_minute: float = 0.0
    cores: float = 0.0
    tenant: dict[str, Any] = field(default_factory=dict)


class Attacked(InProcessSnapshots):
    """The job of the namespace that is not attacked, on a cluster with a node for the attackers."""

    mode = "beside an attack"

    def __init__(self, directory: Path, setting: Setting, admits: bool) -> None:
        """`admits`: the API server checks jobs, as with the webhook."""
        super().__init__(directory, setting)
        self.admits = admits
        self.up: subprocess.Popen[bytes] | None = None

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of the cluster."""
        return self.cluster / "kubeconfig"

    @property
    def attackers_node(self) -> str:
        """The node that only pods of attackers run on."""
        return f"node-{self.nodes}"

    def start(self) -> None:
        """Start the cluster without an operator, and apply the job."""
        self.watch.open()
        first = UP if self.admits else [sys.executable, str(PROGRAMS)]
        options = ["--dir", str(self.cluster), "--nodes", str(self.nodes + 1), "--no-operator"]
        with (self.directory / "up.txt").open("wb") as log:
            self.up = subprocess.Popen([*first, "up", *options], stdout=log, stderr=log)
        ready = self.cluster / "up.json"
        until = time.monotonic() + START_SECONDS
        while not ready.exists():
            if time.monotonic() > until or self.up.poll() is not None:
                raise Unavailable(f"unbroken up: see {log.name}")
            time.sleep(0.1)
        self.kubectl("taint", "node", self.attackers_node, "attackers=:NoSchedule")
        self.kubectl("create", "namespace", NAMESPACE)
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(self.manifest()))

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl, again if the API server is too busy for it."""
        for _ in range(TRIES - 1):
            with suppress(Unavailable):
                return super().kubectl(*arguments, stdin=stdin)
        return super().kubectl(*arguments, stdin=stdin)

    def stop(self) -> None:
        """Remove the job and the cluster."""
        if self.up is not None:
            end([self.up], 30.0)
        super().stop()

    def settle(self, fault: str) -> tuple[str, ...]:
        """Wait until all nodes are there, and the spare and all parked workers too."""
        del fault
        if not self.until(self.has_spare, BOUND_SECONDS):
            raise Unavailable("no spare")
        return super().settle(NODE)

    def strike(self, fault: str, victim: Worker) -> None:
        """Stop a process that is to hang; or kill."""
        if fault == HANG:
            self.struck_at = time.time()
            os.kill(victim.pid, signal.SIGSTOP)
        else:
            super().strike(fault, victim)

    def shares_fate(self, fault: str, victim: Worker) -> list[Worker]:
        """Return the workers that the fault ends."""
        return super().shares_fate(WORKER if fault == HANG else fault, victim)


def ray_cluster(kind: str, node: str) -> dict[str, Any]:
    """A RayCluster whose head is a false dashboard."""
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container = {
        "name": "ray-head", "image": "any", "env": [address],
        "command": [sys.executable, str(PROGRAMS), "dashboard", kind],
    }  # fmt: skip
    rules = [
        {
            "name": "Steps",
            "logPattern": r".*step=(\d+)",
            "expectedRecurringFrequencyInSeconds": 1200,
        }
    ]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": kind,
            "namespace": NAMESPACE,
            "annotations": {
                "ray.io/overwrite-container-cmd": "true",
                "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
                "sagemaker.amazonaws.com/job-max-retry-count": "3",
                "unbroken.dev/log-monitoring-configuration": yaml.safe_dump(rules),
            },
        },
        "spec": {
            "headGroupSpec": {
                "rayStartParams": {},
                "template": {"spec": {"nodeName": node, "containers": [container]}},
            }
        },
    }


@contextmanager
def attack(job: Attacked, look: Look) -> Iterator[None]:
    """Run all floods at once for the time of the block."""
    clusters = [ray_cluster(kind, job.attackers_node) for kind in DASHBOARDS]
    job.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(clusters))
    command = [sys.executable, str(PROGRAMS), "tenant", str(job.kubeconfig)]
    tenant = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield
    finally:
        told, _ = tenant.communicate()
        look.tenant = json.loads(told or "{}")
        job.kubectl("delete", "rayclusters,hyperpodpytorchjobs", "--all", "-n", NAMESPACE)


@contextmanager
def observed(program: Operator, url: str, idle: str, folder: Path, look: Look) -> Iterator[None]:
    """Note what the operator does and takes for the time of the block."""
    command = [sys.executable, str(PROGRAMS), "probe", url, idle]
    log, turns = folder / "operator.log", folder / "turns"
    lines, known = _count(log), _count(turns)
    used, began = cpu_seconds(program.pid), time.monotonic()
    asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        told, _ = asking.communicate()
        look.seconds = time.monotonic() - began
        look.cores = (cpu_seconds(program.pid) - used) / look.seconds
        look.mebibytes = program.rss_mebibytes()[0]
        look.lines_a_minute = (_count(log) - lines) * 60 / look.seconds
        for line in told.splitlines():
            place, _, seconds = line.split()[:3]
            (look.health, look.idle)[int(place)].append(float(seconds))
        for line in turns.read_text().splitlines()[known:]:
            seconds, work, what = line.split(maxsplit=2)
            look.turns.append((float(seconds), float(work), what))


def _count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def recover(job: Attacked, fault: str, number: int) -> float:
    """Strike the job once; return the seconds until every rank has made a step again."""
    job.settle(fault)
    if not run_on(job.watch, CALM_SECONDS, BOUND_SECONDS):
        raise Unavailable("the job makes no steps")
    old = list(job.watch.newest.values())
    victim = pick(job, fault, number)
    lost, struck_at = job.shares_fate(fault, victim), time.time()
    job.strike(fault, victim)
    job.watch.wait(lambda: job.is_back(old, lost), BOUND_SECONDS)
    if not job.is_back(old, lost):
        raise Unavailable(f"{fault}: no step in {BOUND_SECONDS:.0f} s; see {job.directory}")
    if fault == NODE:
        struck_at = min((one.died_at for one in lost if one.died_at), default=struck_at)
    seconds = job.stepped_at(old, lost) - struck_at
    job.repair(fault)
    return seconds


def half(job: Attacked, look: Look, options: argparse.Namespace, number: int) -> None:
    """Strike the job by each fault."""
    job.watch.wait(lambda: False, options.seconds)
    for fault in options.faults:
        for turn in range(options.kills if fault == WORKER else 1):
            seconds = recover(job, fault, number * options.kills + turn)
            look.recoveries.setdefault(fault, []).append(seconds)
            say(f"{'attacked' if look.is_attacked else 'quiet':9}{fault:7} {seconds:.2f} s")


def measure(options: argparse.Namespace, base: Path, looks: list[Look]) -> None:
    """Measure all pairs."""
    job = Attacked(base / "job", Setting(2, 1, 100_000, has_spare=True), options.admission)
    job.prepare()
    with ExitStack() as stack:
        stack.callback(job.drop)
        job.start()
        command = [sys.executable, str(PROGRAMS), "idle"]
        idle = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(end, [idle])
        assert idle.stdout is not None
        beside = idle.stdout.readline().strip()
        os.environ["CONTROL_PLANE_TURNS"] = str(base / "turns")
        (base / "turns").touch()
        port = ["--metrics-port", str(free_port())]
        program = stack.enter_context(operator(job.kubeconfig, base, port))
        url = f"http://127.0.0.1:{port[1]}/healthz"
        if not job.watch.wait(lambda: job.is_back([], []), BOUND_SECONDS):
            raise Unavailable(f"no first step; see {base}")
        for number in range(options.pairs):
            for is_attacked in (False, True) if number % 2 == 0 else (True, False):
                look = Look(is_attacked, os.getloadavg()[0])
                with ExitStack() as both:
                    if is_attacked:
                        both.enter_context(attack(job, look))
                        job.watch.wait(lambda: False, CALM_SECONDS)
                    both.enter_context(observed(program, url, beside, base, look))
                    looks.append(look)
                    half(job, look, options, number)
                say(shown(look))
                job.watch.wait(lambda: False, CALM_SECONDS)


def shown(look: Look) -> str:
    """Show a half of a pair in a few lines."""

    def answers(seconds: list[float]) -> str:
        p50, p95 = (percentile(seconds, share) * 1e3 for share in (0.5, 0.95))
        return (
            f"{p50:.0f} p50, {p95:.0f} p95, {max(seconds) * 1e3:.0f} ms at most of {len(seconds)}"
        )

    half = f"{'attacked' if look.is_attacked else 'quiet'}, {look.seconds:.0f} s"
    uses = f"{look.mebibytes:.0f} MiB, {look.cores:.2f} cores"
    lines = [
        f"{half}, load {look.load:.1f}: {uses}, {look.lines_a_minute:.1f} lines a minute",
        f"  /healthz: {answers(look.health)}; an idle program: {answers(look.idle)}",
    ]
    lines += [f"  {kind}: {found}" for kind, found in look.tenant.items()]
    worst = sorted(look.turns, key=lambda turn: turn[1], reverse=True)[:TURNS_SHOWN]
    lines += [
        f"  turn of {s * 1e3:.0f} ms, {w * 1e3:.0f} ms of it work: {what}" for s, w, what in worst
    ]
    return "\n".join(lines)


def table(looks: list[Look]) -> str:
    """Show the recoveries of both halves, and their ratios."""
    rows = [["fault", "quiet", "attacked", "ratios"], ["---"] * 4]
    for fault in FAULTS:
        each = [
            [one.recoveries.get(fault, []) for one in looks if one.is_attacked is is_attacked]
            for is_attacked in (False, True)
        ]
        pairs = [
            (percentile(quiet, 0.5), percentile(bad, 0.5))
            for quiet, bad in zip(*each, strict=False)
            if quiet and bad
        ]
        if pairs:
            quiet, bad = ([f"{one[side]:.2f}" for one in pairs] for side in (0, 1))
            ratios = [f"{one[1] / one[0]:.2f}" for one in pairs]
            rows.append([fault, ", ".join(quiet), ", ".join(bad), ", ".join(ratios)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=count, default=3, help="pairs (default 3)")
    parser.add_argument(
        "--kills", type=count, default=3, help="workers killed in a half (default 3)"
    )
    parser.add_argument("--faults", default=",".join(FAULTS), help="default: %(default)s")
    text = "seconds before the first fault of a half (default 30)"
    parser.add_argument("--seconds", type=float, default=30.0, help=text)
    text = "check jobs when they are written, as with the webhook"
    parser.add_argument("--admission", action="store_true", help=text)
    parser.add_argument("--json", type=output_file, help="write the figures to this file")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    options = parser.parse_args()
    options.faults = [one for one in options.faults.split(",") if one]
    unknown = set(options.faults) - set(FAULTS)
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    return options


def main() -> int:
    """Measure, and print the table."""
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    base = Path(tempfile.mkdtemp(prefix="unbroken-beside-attack-"))
    say(f"in {base}")
    where, looks, failure = machine(), list[Look](), ""
    try:
        measure(options, base, looks)
    except (Unavailable, KeyboardInterrupt) as error:
        failure = str(error) or "interrupted"
    if options.json:
        document = {"machine": where, "looks": [asdict(one) for one in looks], "failure": failure}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{where}\n\n" + "\n".join(map(shown, looks)) + f"\n\n{table(looks)}\n{failure}")
    if not options.keep and not failure:
        shutil.rmtree(base, ignore_errors=True)
    return 1 if failure else 0


if __name__ == "__main__":
    raise SystemExit(main())
