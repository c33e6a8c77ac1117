"""Jobs of real processes that report every step to the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.agent_requests import AgentRequests
from tests.apiclient import Api
from tests.e2e.clusters import Cluster, processes
from tests.e2e.control import api_of
from tests.e2e.job_events import Event, Events, check
from tests.job_keys import key_in, secret_of
from unbroken.wire.agent import PORT

Object = dict[str, Any]
JOBS = "sagemaker.amazonaws.com/v1:hyperpodpytorchjobs"
INCIDENTS = "unbroken.dev/v1:incidents"
GANG = Path(__file__).parent / "programs/gang.py"
COMMAND = "exec hyperpodrun --nnodes=$NNODES --nproc-per-node=$NPROC_PER_NODE"


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
        """All ranks of the job."""
        return list(range(self.nnodes * self.nproc))

    def starts(self, attempt: int) -> dict[int, Event]:
        """Return the workers of an attempt, by rank."""
        return {e.rank: e for e in self.events.all if (e.what, e.attempt) == ("start", attempt)}

    def steps(self, attempt: int, more: int = 1) -> dict[int, Event]:
        """Wait until every rank has made more steps of the attempt; return its workers by rank."""
        heard = len(self.events.all)

        def holds(events: list[Event]) -> bool:
            made: dict[int, int] = defaultdict(int)
            for event in events[heard:]:
                made[event.rank] += (event.what, event.attempt) == ("step", attempt)
            return all(made[rank] >= more for rank in self.ranks)

        self.events.until(holds)
        return self.starts(attempt)

    def kill(self, *victims: Event) -> None:
        """Send SIGKILL to workers, which must live."""
        # Else one dies of the loss of another, or is killed by its agent, before its own turn.
        several = victims if len(victims) > 1 else ()
        agents = {victim.more["agent"] for victim in several}
        for pid in [*agents, *(victim.pid for victim in several)]:
            assert self.signal(pid, signal.SIGSTOP), f"process {pid} is dead"
        for victim in victims:
            assert self.signal(victim.pid, signal.SIGKILL), f"rank {victim.rank} is dead already"
        for pid in agents:
            self.signal(pid, signal.SIGCONT)

    def signal(self, pid: int, number: int) -> bool:
        """Send a signal to a process of the job; return False if there is no such process."""
        mark = f"EVENTS={self.events.name}".encode()
        try:
            handle = os.pidfd_open(pid)
            try:
                # After the descriptor was had, so that the number cannot change hands in between.
                if mark not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return False
                signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)
        except (ProcessLookupError, FileNotFoundError):
            return False
        return True

    def workers(self) -> dict[int, Event]:
        """Return the newest worker of each rank."""
        with self.events.news:
            return {event.rank: event for event in self.events.all if event.what == "start"}

    def settle(self) -> int:
        """Wait until all ranks make steps of one attempt; return its number."""
        heard = len(self.events.all)

        def whole(events: list[Event]) -> int:
            made: dict[int, set[int]] = defaultdict(set)
            for event in events[heard:]:
                if event.what == "step":
                    made[event.attempt].add(event.rank)
            return next((1 + n for n, ranks in made.items() if len(ranks) == len(self.ranks)), 0)

        return int(self.events.until(whole)) - 1

    def finish(self) -> Object:
        """Let the workers end by themselves; return the job at its end."""
        (self.directory / "finish").touch()
        return self.until_standing("Completed")

    def until(self, holds: Callable[[Object], Any]) -> Object:
        """Wait until `holds` is true of the job; return the job."""
        return self.api.until(JOBS, self.name, lambda job: bool(holds(job)))

    def until_standing(self, *types: str) -> Object:
        """Wait until one of these is its true condition; return the complete job."""
        return self.until(lambda job: standing(job) in types)

    def incidents(self, count: int | None) -> list[Object]:
        """Wait until `count` incidents have ended, or all; return their specs in order."""
        number = 0
        made: list[Object] = []
        while number < (self._incidents_made() if count is None else count):
            number += 1
            name = f"{self.name}-{number}"
            self.until_there(INCIDENTS, name)
            found = self.api.until(INCIDENTS, name, lambda one: bool(one["spec"].get("outcome")))
            made.append(found["spec"])
        assert self._incidents_made() == number, self._listed()
        return made

    def _incidents_made(self) -> int:
        return len(self._listed())

    def _listed(self) -> list[Object]:
        listed = self.api.get(INCIDENTS).made["items"]
        return [i for i in listed if i["metadata"]["name"].rpartition("-")[0] == self.name]

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
        """Return the pods of the job by name."""
        listed = self.api.get("pods", labelSelector=f"HPJob={self.name}").made["items"]
        return {pod["metadata"]["name"]: pod for pod in listed}

    def report(self, worker: Event) -> Object:
        """Return the report of a worker's agent."""
        found: Object = self.ask(worker, "/v1/report")
        return found

    def ask(self, worker: Event, path: str) -> Any:
        """Send a GET to the agent of a worker."""
        pod = self.pods()[worker.more["environment"]["UNBROKEN_POD"]]
        key = key_in(self.api.get(f"secrets/{secret_of(pod)}").made)
        place, uid = pod["status"]["podIP"], pod["metadata"]["uid"]
        with contextlib.closing(AgentRequests(place, PORT, key, uid)) as agent:
            return json.loads(agent.request("GET", path, None, {})[1])

    def patch(self, body: Object) -> None:
        """Merge a patch into the job."""
        self.api.patch("merge", f"{JOBS}/{self.name}", body).done()


def standing(job: Object) -> str:
    """Return the job's last condition that is true."""
    listed = (job.get("status") or {}).get("conditions") or []
    return next((one["type"] for one in reversed(listed) if one["status"] == "True"), "")


def message(job: Object) -> str:
    """Return the reason and the message of the job's last condition that is true."""
    listed = [one for one in job["status"]["conditions"] if one["status"] == "True"]
    return f"{listed[-1]['reason']}: {listed[-1]['message']}"


def manifest(name: str, words: str, environment: dict[str, str], **spec: Any) -> Object:
    """Return a job; `spec` gives replicas, nproc, spares, annotations and the run policy."""
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
        "metadata": {"name": name, "annotations": spec.get("annotations") or {}},
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
    options: str = "",
    environment: Mapping[str, str] | None = None,
    **spec: Any,
) -> Iterator[Job]:
    """Run a job until the block ends, and then check the invariants of every job."""
    name = f"job-{uuid.uuid4().hex[:6]}"
    made = Job(api_of(cluster), name, directory, replicas, nproc)
    whole = {"EVENTS": made.events.name, "PLAN": json.dumps(plan), **(environment or {})}
    words = f"{options} {program} {directory}"
    wanted = manifest(name, words, whole, replicas=replicas, nproc=nproc, **spec)
    made.api.post(JOBS, wanted).done()
    try:
        yield made
        made.api.delete(f"{JOBS}/{name}").done()
        made.api.until(JOBS, name, lambda _: False)
        for pod in made.pods():
            made.api.until("pods", pod, lambda _: False)
        assert not processes(str(directory)), "a process of the job was left behind"
        check(made.events.all, replicas * nproc, nproc)
    except BaseException:
        sys.stderr.write(made.events.story())
        made.api.delete(f"{JOBS}/{name}")
        raise
    finally:
        made.events.close()
        made.api.close()
