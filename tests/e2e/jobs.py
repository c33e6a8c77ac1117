"""Jobs of real processes whose every step the test hears of, and what must hold of any of them."""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from apiclient import Api
from e2e.clusters import Cluster, processes
from unbroken.wire.agent import PORT

Object = dict[str, Any]
JOBS = "sagemaker.amazonaws.com/v1:hyperpodpytorchjobs"
INCIDENTS = "unbroken.dev/v1:incidents"
GANG = Path(__file__).parent / "programs/gang.py"
COMMAND = "exec hyperpodrun --nnodes=$NNODES --nproc-per-node=$NPROC_PER_NODE"
PATIENCE_SECONDS = 60.0
"""Nothing in a test takes that long, except on a machine that is very busy."""


class ApiPlace(NamedTuple):
    """What `Api` needs to know of a server."""

    url: str
    token: str
    ca: str
    minor: int = 33

    @property
    def headers(self) -> dict[str, str]:
        """What a request must carry to be let in."""
        return {"Authorization": f"Bearer {self.token}"}


def api_of(cluster: Cluster, namespace: str = "default") -> Api:
    """Plain requests to a cluster."""
    config = yaml.safe_load((cluster.directory / "kubeconfig").read_text())
    place, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    ca = base64.b64decode(place.get("certificate-authority-data", "")).decode()
    return Api(ApiPlace(place["server"], user["token"], ca), namespace)  # type: ignore[arg-type]


class Event(NamedTuple):
    """What a worker has told."""

    what: str
    attempt: int
    master: str
    """Address of the attempt's store."""
    rank: int
    pid: int
    at: float
    """Seconds since boot, by the one clock of the machine."""
    more: Object


class Events:
    """Hears what the workers of a job tell, beside the test."""

    def __init__(self) -> None:
        self.name = f"unbroken-e2e-{uuid.uuid4().hex}"
        self.all: list[Event] = []
        self._news = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.name)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def until(self, holds: Callable[[list[Event]], Any], seconds: float = PATIENCE_SECONDS) -> Any:
        """What `holds` says of all events as soon as it is true."""
        with self._news:
            found = self._news.wait_for(lambda: holds(self.all), seconds)
        assert found, f"not in {seconds} s: {self.story()}"
        return found

    def story(self) -> str:
        """What was heard, the last steps only, for people."""
        last: dict[tuple[int, int, str], Event] = {}
        for event in self.all:
            last[(event.attempt, event.rank, event.what)] = event
        return "\n".join(map(str, sorted(last.values(), key=lambda event: event.at)))

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while text := self._socket.recv(1 << 16):
            found = json.loads(text)
            event = Event(*(found.pop(key) for key in Event._fields[:-1]), found)
            with self._news:
                self.all.append(event)
                self._news.notify_all()


@dataclass
class Job:
    """A job of the cluster, as the test sees it."""

    api: Api
    name: str
    directory: Path
    nnodes: int
    nproc: int
    events: Events = field(default_factory=Events)

    @property
    def ranks(self) -> list[int]:
        """All of them."""
        return list(range(self.nnodes * self.nproc))

    def starts(self, attempt: int) -> dict[int, Event]:
        """The workers of an attempt, by rank."""
        return {e.rank: e for e in self.events.all if (e.what, e.attempt) == ("start", attempt)}

    def steps(self, attempt: int, more: int = 1) -> dict[int, Event]:
        """Wait until every rank has made steps of the attempt from now on; its workers by rank."""
        heard = len(self.events.all)

        def holds(events: list[Event]) -> bool:
            made: dict[int, int] = defaultdict(int)
            for event in events[heard:]:
                made[event.rank] += (event.what, event.attempt) == ("step", attempt)
            return all(made[rank] >= more for rank in self.ranks)

        self.events.until(holds)
        return self.starts(attempt)

    def kill(self, *victims: Event) -> None:
        """SIGKILL to workers."""
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)

    def finish(self) -> Object:
        """Let the workers end by themselves; the job as it is then."""
        (self.directory / "finish").touch()
        return self.until_standing("Completed")

    def until(self, holds: Callable[[Object], Any]) -> Object:
        """The job once `holds` is true of it."""
        return self.api.until(JOBS, self.name, lambda job: bool(holds(job)))

    def until_standing(self, *types: str) -> Object:
        """The job once one of these is its true condition; all that it says is then written."""
        return self.until(lambda job: standing(job) in types)

    def incidents(self, count: int) -> list[Object]:
        """The specs of the job's incidents, in order, once so many have ended."""
        made = []
        for number in range(1, count + 1):
            name = f"{self.name}-{number}"
            self.until_there(INCIDENTS, name)
            found = self.api.until(INCIDENTS, name, lambda one: bool(read(one).get("outcome")))
            made.append(read(found))
        listed = self.api.get(INCIDENTS).made["items"]
        mine = [one for one in listed if one["metadata"]["name"].rpartition("-")[0] == self.name]
        assert len(mine) == count, [read(one) for one in mine]
        return made

    def until_there(self, collection: str, name: str) -> None:
        """Wait until an object exists."""
        listed = self.api.get(collection).made
        if any(one["metadata"]["name"] == name for one in listed["items"]):
            return
        version = listed["metadata"]["resourceVersion"]
        with self.api.watch(collection, resourceVersion=version) as watch:
            while watch.event()["object"]["metadata"]["name"] != name:
                pass

    def pods(self) -> dict[str, Object]:
        """Pods of the job by name."""
        listed = self.api.get("pods", labelSelector=f"HPJob={self.name}").made["items"]
        return {pod["metadata"]["name"]: pod for pod in listed}

    def report(self, worker: Event) -> Object:
        """What the agent of a worker says of itself."""
        secret = self.api.get(f"secrets/{self.name}-agent").made["data"]["token"]
        pod = self.pods()[worker.more["environment"]["UNBROKEN_POD"]]
        connection = http.client.HTTPConnection(pod["status"]["podIP"], PORT, timeout=20)
        headers = {"Authorization": f"Bearer {base64.b64decode(secret).decode()}"}
        with contextlib.closing(connection):
            connection.request("GET", "/v1/report", headers=headers)
            found: Object = json.loads(connection.getresponse().read())
        return found

    def patch(self, body: Object) -> None:
        """Merge into the job."""
        self.api.patch("merge", f"{JOBS}/{self.name}", body).done()


def read(incident: Object) -> Object:
    """What an Incident says."""
    found: Object = incident.get("spec") or incident
    return found


def standing(job: Object) -> str:
    """The job's last condition that is true."""
    listed = (job.get("status") or {}).get("conditions") or []
    return next((one["type"] for one in reversed(listed) if one["status"] == "True"), "")


def message(job: Object) -> str:
    """Of the same condition, with its reason."""
    listed = [one for one in job["status"]["conditions"] if one["status"] == "True"]
    return f"{listed[-1]['reason']}: {listed[-1]['message']}"


def manifest(name: str, words: str, environment: dict[str, str], **spec: Any) -> Object:
    """A job; `spec` gives replicas, nproc, spares and the run policy."""
    whole = {"OMP_NUM_THREADS": "1", **environment}
    container = {
        "name": "train",
        "image": "none",
        "command": ["/bin/sh", "-c", f"{COMMAND} {words}"],
        "env": [{"name": key, "value": value} for key, value in whole.items()],
    }
    pods = {"terminationGracePeriodSeconds": 2, "containers": [container]}
    replica = {"name": "pods", "replicas": spec["replicas"], "spares": spec.get("spares", 0)}
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(spec["nproc"]),
            "replicaSpecs": [{**replica, "template": {"spec": pods}}],
            "runPolicy": spec.get("policy", {"jobMaxRetryCount": 100}),
        },
    }


@contextlib.contextmanager
def job(
    cluster: Cluster,
    directory: Path,
    *plan: Object,
    replicas: int = 2,
    nproc: int = 2,
    program: Path = GANG,
    **spec: Any,
) -> Iterator[Job]:
    """Run a job until the block ends, and check then what must hold of any job."""
    name = f"job-{uuid.uuid4().hex[:6]}"
    made = Job(api_of(cluster), name, directory, replicas, nproc)
    environment = {"EVENTS": made.events.name, "PLAN": json.dumps(plan)}
    words = f"{program} {directory}"
    wanted = manifest(name, words, environment, replicas=replicas, nproc=nproc, **spec)
    made.api.post(JOBS, wanted).done()
    try:
        yield made
        made.api.delete(f"{JOBS}/{name}").done()
        made.api.until(JOBS, name, lambda _: False)
        for pod in made.pods():
            made.api.until("pods", pod, lambda _: False)
        assert not processes(str(directory)), "a process of the job was left behind"
        check(made)
    except BaseException:
        sys.stderr.write(made.events.story())
        made.api.delete(f"{JOBS}/{name}")
        raise
    finally:
        made.events.close()
        made.api.close()


def check(job: Job) -> None:
    """Attempts never overlap, and every rank of an attempt was told the same."""
    attempts: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in job.events.all:
        assert not event.more.get("others"), f"another attempt lives beside {event}"
        assert event.what != "stranger", f"a worker of another attempt came: {event}"
        attempts[(event.attempt, event.master)].append(event)
    masters = [master for _, master in attempts]
    assert len(set(masters)) == len(masters), f"two attempts share an address: {masters}"
    ordered = sorted(attempts.values(), key=lambda events: events[0].at)
    numbers = [events[0].attempt for events in ordered]
    assert numbers == sorted(numbers)
    for earlier, later in itertools.pairwise(ordered):
        last, first = max(e.at for e in earlier), min(e.at for e in later)
        assert last < first, f"attempt {earlier[0].attempt} went on beside the next"
    for events in ordered:
        check_ranks(job, [event for event in events if event.what == "start"])


def check_ranks(job: Job, starts: list[Event]) -> None:
    """No rank of an attempt is there twice, and each is where its node rank says."""
    found = [event.rank for event in starts]
    assert len(set(found)) == len(found), f"a rank was started twice: {starts}"
    assert set(found) <= set(job.ranks)
    for event in starts:
        env = event.more["environment"]
        assert int(env["WORLD_SIZE"]) == len(job.ranks)
        assert event.rank == int(env["GROUP_RANK"]) * job.nproc + int(env["LOCAL_RANK"])


def places(starts: dict[int, Event]) -> dict[int, str]:
    """Rank -> pod."""
    return {rank: e.more["environment"]["UNBROKEN_POD"] for rank, e in starts.items()}


def parent(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def await_end(pid: int, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for the end of a process that is not a child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], seconds)[0], f"process {pid} lives"
    finally:
        os.close(handle)
