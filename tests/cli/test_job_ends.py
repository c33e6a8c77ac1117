"""Ends of a job, as a worker sees them: each row of the table of docs/guide/migrate-torchrun.md.

The test reads the rows from the page, ends a job in each of the ways that a row names, and compares
what rank 0 really got with the row.  A limit is shown to count without a clock: the other limit is
10 minutes, or the worker saves for longer than the other limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import Cli, manifest, read_until
from tests.e2e.clusters import find_kubectl
from tests.watching import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PAGE = Path(__file__).parents[2] / "docs/guide/migrate-torchrun.md"
WORKER = """
import os, signal, sys, time
said = open(sys.argv[1], "a", buffering=1)
def say(word):
    print(os.environ["RANK"], os.getpid(), word, file=said)
def get(number, _):
    say(signal.Signals(number).name)
    if sys.argv[2:]:
        time.sleep(float(sys.argv[2]))
        say("saved")
        os._exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, get)
say("runs")
while True:
    signal.pause()
"""
LONG, SHORT = 600, 1
"""Seconds of a limit that is never reached, and of one that is."""
SAVES = "4"
"""Seconds that a worker saves: longer than `SHORT`."""


@dataclass(frozen=True)
class Limits:
    """Options of a job, and what rank 0 must get then."""

    timeout: int
    grace: int
    signals: tuple[str, ...]
    saves: bool = False
    options: tuple[str, ...] = ()
    continues: bool = False
    """The workers are not to end."""


TERM = ("SIGTERM",)
ONLY_TIMEOUT = [Limits(SHORT, LONG, TERM), Limits(LONG, SHORT, TERM, saves=True)]
LIMITS = {
    ("SIGTERM", "timeout"): ONLY_TIMEOUT,
    ("SIGTERM", "the shorter of timeout and grace"): [
        Limits(SHORT, LONG, TERM),
        Limits(LONG, SHORT, TERM),
    ],
    ("`--shutdown-signal` (default SIGKILL)", "timeout, after SIGTERM"): [
        Limits(LONG, LONG, ()),
        *(
            Limits(one.timeout, one.grace, TERM, one.saves, ("--shutdown-signal=SIGTERM",))
            for one in ONLY_TIMEOUT
        ),
    ],
    ("SIGKILL", "at once"): [Limits(LONG, LONG, ())],
    ("none", "they continue"): [Limits(SHORT, LONG, (), continues=True)],
}
"""Jobs that show a row's signal and time until SIGKILL."""


class Job:
    """A job of two ranks, each of which writes down what it gets."""

    def __init__(self, cli: Cli, name: str, limits: Limits) -> None:
        self.cli, self.name, self.limits = cli, name, limits
        self.said = cli.folder / f"{name}.said"
        self.file = cli.folder / f"{name}.json"
        worker = cli.folder / "worker.py"
        worker.write_text(WORKER)
        job = manifest(name)
        pod = job["spec"]["replicaSpecs"][0]["template"]["spec"]
        pod["terminationGracePeriodSeconds"] = limits.grace
        pod["containers"][0]["command"] = [
            *("hyperpodrun", f"--shutdown-timeout={limits.timeout}", *limits.options),
            *(str(worker), str(self.said), *([SAVES] if limits.saves else ())),
        ]
        self.manifest = job
        self.first_pod = ""

    def write(self) -> str:
        """Write the manifest; return its file."""
        self.file.write_text(json.dumps(self.manifest))
        return str(self.file)

    def start(self) -> None:
        """Create the job; return when both ranks run."""
        self.cli.call("run", "--detach", self.write())
        self.wait_running()
        self.first_pod = self.pod()["metadata"]["uid"]

    def wait_running(self, attempts: int = 1) -> None:
        """Wait until both ranks have run so many times."""
        wait_until(lambda: min(len(self.pids(rank)) for rank in (0, 1)) >= attempts)

    def words(self) -> Iterator[tuple[int, int, str]]:
        """Yield rank, pid and word of each line of the workers."""
        for line in self.said.read_text().splitlines() if self.said.exists() else ():
            rank, pid, word = line.split()
            yield int(rank), int(pid), word

    def pids(self, rank: int) -> list[int]:
        """Return the processes of a rank, the oldest first."""
        return [pid for one, pid, word in self.words() if one == rank and word == "runs"]

    def got(self) -> tuple[str, ...]:
        """Return the words of the first process of rank 0, when it has ended if it is to end."""
        first = self.pids(0)[0]
        if self.limits.continues:
            assert not is_zombie(first)
        else:
            wait_until(lambda: not os.path.exists(f"/proc/{first}/exe") or is_zombie(first))
        return tuple(word for _, pid, word in self.words() if pid == first)[1:]

    def kubectl(self, *words: str, stdin: str = "") -> str:
        """Run kubectl on the cluster; return its output."""
        environment = {**os.environ, "KUBECONFIG": str(self.cli.directory / "kubeconfig")}
        command = [find_kubectl(), *words]
        done = subprocess.run(
            command, env=environment, input=stdin, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, kind: str, *words: str) -> list[Any]:
        """Return the objects of this job of a kind."""
        found = self.kubectl("get", kind, "-o", "json", *words)
        items: list[Any] = json.loads(found)["items"]
        return items

    def pods(self) -> list[Any]:
        """Return the pods of the job."""
        return self.objects("pods", "-l", f"HPJob={self.name}")

    def pod(self) -> Any:
        """Return the newest pod of the job."""
        return max(self.pods(), key=lambda one: one["metadata"]["creationTimestamp"])

    def state(self) -> str:
        """Return the job's state; empty if there is no such job."""
        listed = self.cli.json("jobs")["jobs"]
        return next((str(one["state"]) for one in listed if one["name"] == self.name), "")

    def remove(self) -> None:
        """Delete the job; its workers would use up their limits."""
        self.cli.call("delete", self.name, "--no-wait", code=None)

        def is_over() -> bool:
            for pid in {pid for _, pid, _ in self.words()}:
                with suppress(FileNotFoundError, ProcessLookupError):
                    if str(self.said) in Path(f"/proc/{pid}/cmdline").read_text():
                        os.kill(pid, signal.SIGKILL)
            return not self.state()

        wait_until(is_over)


def is_zombie(pid: int) -> bool:
    """True if the process has ended and was not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# --- ways to end a job


def at_run(number: signal.Signals) -> Callable[[Job], None]:
    def end(job: Job) -> None:
        process = job.cli.start("run", job.write())
        job.wait_running()
        process.send_signal(number)
        read_until(process, lambda line: "unbroken resume" in line)
        process.communicate()

    return end


def command(*words: str) -> Callable[[Job], None]:
    def end(job: Job) -> None:
        job.start()
        job.cli.call(*words, job.name)

    return end


def cordon(job: Job) -> None:
    job.start()
    node = job.pod()["spec"]["nodeName"]
    job.kubectl("cordon", node)
    job.wait_running(2)
    job.kubectl("uncordon", node)


def fail(job: Job) -> None:
    job.manifest["spec"]["runPolicy"]["jobMaxRetryCount"] = 0
    lose_a_rank(job)


def limit(job: Job) -> None:
    job.start()
    patch = json.dumps({"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
    job.kubectl("patch", f"hyperpodpytorchjob/{job.name}", "--type=merge", "-p", patch)


def lose_a_rank(job: Job) -> None:
    job.start()
    os.kill(job.pids(1)[0], signal.SIGKILL)


def lose_a_pods_rank(job: Job) -> None:
    job.manifest["spec"]["nprocPerNode"] = "1"
    job.manifest["spec"]["replicaSpecs"][0]["replicas"] = 2
    lose_a_rank(job)


def resize(job: Job) -> None:
    job.manifest["spec"]["nprocPerNode"] = "1"
    replica = job.manifest["spec"]["replicaSpecs"][0]
    replica["replicas"] = 2
    job.start()
    replica["replicas"] = 1
    job.write()
    job.kubectl("apply", "-f", str(job.file))
    about = f"--field-selector=involvedObject.name={job.name},reason=SpecChanged"
    wait_until(lambda: job.objects("events", about))


def with_kubectl(*words: str) -> Callable[[Job], None]:
    def end(job: Job) -> None:
        job.start()
        pod = job.pod()
        job.kubectl(*(word.format(POD=pod["metadata"]["name"], JOB=job.name) for word in words))

    return end


def drain(job: Job) -> None:
    job.start()
    node = job.pod()["spec"]["nodeName"]
    job.kubectl("drain", node, "--force", "--ignore-daemonsets", "--delete-emptydir-data")
    job.kubectl("uncordon", node)


def evict(job: Job) -> None:
    job.manifest["metadata"]["annotations"] = {"unbroken.dev/planned-moves": "off"}
    job.start()
    name = job.pod()["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/default/pods/{name}/eviction"
    job.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def down(job: Job) -> None:
    job.start()
    job.cli.call("down")


def kill_the_agent(job: Job) -> None:
    job.start()
    stat = Path(f"/proc/{job.pids(0)[0]}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)


WAYS: dict[str, tuple[Callable[[Job], None], ...]] = {
    "Ctrl-C twice, or SIGTERM, at `unbroken run`": (at_run(signal.SIGINT), at_run(signal.SIGTERM)),
    "`unbroken suspend`": (command("suspend"),),
    "`unbroken restart`": (command("restart"),),
    "a planned move, such as `kubectl cordon` or `kubectl drain`": (cordon, drain),
    "the job reaches `activeDeadlineSeconds`": (limit,),
    "`unbroken delete`": (command("delete"),),
    "deletion of the job": (with_kubectl("delete", "hyperpodpytorchjob/{JOB}"),),
    "the pod is deleted": (with_kubectl("delete", "pod", "{POD}"),),
    "the pod is evicted": (evict,),
    "a fault of another rank in the same pod": (lose_a_rank, fail),
    "a fault of a rank in another pod": (lose_a_pods_rank,),
    "`unbroken down`": (down,),
    "the lease on the workers has run out": (),  # tests/e2e/test_job_lease.py
    "the agent was killed": (kill_the_agent,),
    "fewer or more `replicas` in the manifest": (resize,),
}
"""Functions that end a job, by the phrases of the first column."""

# --- what comes next


def is_suspended(job: Job) -> None:
    wait_until(job.state, lambda state: state == "Suspended")
    assert len(job.pids(0)) == 1
    job.cli.call("resume", job.name)
    job.wait_running(2)


def runs_again(job: Job) -> None:
    job.wait_running(2)


def runs_in_a_new_pod(job: Job) -> None:
    job.wait_running(2)
    wait_until(lambda: job.pod()["metadata"]["uid"] != job.first_pod)


def runs_again_or_has_failed(job: Job) -> None:
    is_limited = "jobMaxRetryCount" in job.manifest["spec"]["runPolicy"]
    (has_ended if is_limited else runs_again)(job)


def has_ended(job: Job) -> None:
    wait_until(job.state, lambda state: state == "Failed")
    assert len(job.pids(0)) == 1


def is_gone(job: Job) -> None:
    wait_until(lambda: (job.state(), job.pods()) == ("", []))
    assert len(job.pids(0)) == 1


def gets_its_size(job: Job) -> None:
    assert (len(job.pids(0)), len(job.pids(1)), len(job.pods())) == (1, 1, 2)
    job.cli.call("suspend", job.name)
    wait_until(job.state, lambda state: state == "Suspended")
    job.cli.call("resume", job.name)
    wait_until(lambda: len(job.pids(0)) == 2)
    assert (len(job.pids(1)), len(job.pods())) == (1, 1)


def comes_back(job: Job) -> None:
    job.cli.call("up", "--detach")
    job.wait_running(2)


NEXT = {
    "the job is suspended; `unbroken resume` starts a new attempt": is_suspended,
    "a new attempt": runs_again,
    "a new attempt, or the job has failed": runs_again_or_has_failed,
    "the job has ended": has_ended,
    "nothing": is_gone,
    "a new pod, and a new attempt": runs_in_a_new_pod,
    "the job stays for the next `unbroken up`": comes_back,
    "a new attempt elsewhere": runs_in_a_new_pod,
    "the new size begins with `unbroken suspend` and `unbroken resume`": gets_its_size,
}


@dataclass(frozen=True)
class Row:
    """A row of the page."""

    ends: str
    signal: str
    time: str
    next: str

    @property
    def ways(self) -> Iterator[Callable[[Job], None]]:
        """The functions that end a job as the row says."""
        for phrase in self.ends.split("; "):
            yield from WAYS[phrase]


def rows() -> list[Row]:
    """Read the rows from the page."""
    table = PAGE.read_text().partition("## What a worker gets when its job ends")[2]
    lines = [line for line in table.partition("\n\n- ")[0].splitlines() if line.startswith("|")]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines[2:]]


CASES = [
    pytest.param(
        *(row, way, limits),
        id=f"{number}{'abcde'[index]}-{row.ends[:24]}-{kind}",
        marks=[pytest.mark.heavy] if index and kind else [],
    )
    for number, row in enumerate(rows())
    for index, way in enumerate(row.ways)
    for kind, limits in enumerate(LIMITS[row.signal, row.time])
]


@pytest.mark.parametrize(("row", "way", "limits"), CASES)
def test_a_worker_gets_what_the_page_says(
    cli: Cli, make_cli: Callable[..., Cli], row: Row, way: Callable[[Job], None], limits: Limits
) -> None:
    name = f"end-{CASES_BY_ID.index((row, way, limits))}"
    job = Job(make_cli(1) if way is down else cli, name, limits)
    try:
        way(job)
        assert job.got() == (*limits.signals, *(["saved"] if limits.saves else ()))
        NEXT[row.next](job)
    finally:
        job.remove()


CASES_BY_ID = [case.values for case in CASES]


def test_each_row_of_the_page_is_tried() -> None:
    found = rows()
    assert len(found) >= 8
    assert {phrase for row in found for phrase in row.ends.split("; ")} == set(WAYS)
    assert {row.next for row in found} == set(NEXT)
    assert {(row.signal, row.time) for row in found} == set(LIMITS)
