"""torchrun on the same nodes: plain pods that nobody replaces, and one more as its spare."""

from __future__ import annotations

import time
from typing import Any

from node_loss_trials import BOUND_SECONDS, LOSSES, SCRIPT, Place, Trial, all_ranks, overlap, wait

from tests.realnodes import images
from tests.realnodes.jobs import Job
from tests.realnodes.releases import Release

START_SECONDS = 120.0
PORT = 29400
RESTARTS_MAX = 1000


def try_torchrun(release: Release, name: str, number: int, *, has_spare: bool) -> Trial:
    """Lose the node of the second pod; the first one has the rendezvous, which nobody survives."""
    (loss,) = (one for one in LOSSES if one.name == name)
    cluster, trial = release.cluster, Trial(name, has_spare)
    job = Job(cluster, f"torchrun-{number}", image=images.NAMES["training"])
    folder = cluster.shared / job.name
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "train.py").write_text(SCRIPT)
    names = [f"{job.name}-{index}" for index in range(3 if has_spare else 2)]
    try:
        cluster.apply(_pod(job, names[0], "n1", "$(POD_IP)"))
        if not wait(lambda: _address(job, names[0]), START_SECONDS):
            trial.why_wrong = "the first pod has no address"
            return trial
        for index, one in enumerate(names[1:], 2):
            cluster.apply(_pod(job, one, f"n{index}", _address(job, names[0])))
        if not wait(lambda: all_ranks(job, -1), START_SECONDS):
            trial.why_wrong = f"no first step in {START_SECONDS:.0f} s"
            return trial
        lost = next(life.node for life in all_ranks(job, -1).values() if life.node != "n1")
        struck_at = time.time()
        strike = loss.strike(Place(release, job, lost))
        next(strike)
        try:
            _look(job, trial, lost, struck_at)
        finally:
            next(strike, None)
        trial.overlap = overlap(job)
    finally:
        now = ("--grace-period=0", "--force", "--ignore-not-found", "--wait=false")
        cluster.kubectl("delete", "pods", *names, *now)
    return trial


def _look(job: Job, trial: Trial, lost: str, struck_at: float) -> None:
    """Wait until both ranks have made a step after the loss, and not on the lost node."""

    def lives() -> list[float]:
        found = [one for one in job.lives() if one.began_at > struck_at and one.node != lost]
        first = {one.rank: one.began_at for one in reversed(found)}
        return list(first.values()) if len(first) == job.replicas else []

    if wait(lives, BOUND_SECONDS):
        trial.marks["first step"] = max(lives()) - struck_at
    else:
        trial.why_wrong = f"no step in {BOUND_SECONDS:.0f} s"


def _address(job: Job, pod: str) -> str:
    found = job.cluster.kubectl(
        "get", "pod", pod, "-o", "jsonpath={.status.podIP}", check=False
    ).stdout
    return found.strip()


def _pod(job: Job, name: str, node: str, endpoint: str) -> dict[str, Any]:
    folder = str(job.cluster.shared / job.name)
    command = [
        *("torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
        *(f"--rdzv-endpoint={endpoint}:{PORT}", f"--rdzv-id={job.name}"),
        *(f"--max-restarts={RESTARTS_MAX}", f"{folder}/train.py", folder),
    ]
    env = [
        {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for variable, path in (("NODE", "spec.nodeName"), ("POD_IP", "status.podIP"))
    ]
    container = {
        "name": "train",
        "image": job.image,
        "command": command,
        "env": env,
        "volumeMounts": [{"name": "shared", "mountPath": folder}],
    }
    spec = {
        "nodeName": node,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 2,
        "containers": [container],
        "volumes": [{"name": "shared", "hostPath": {"path": folder}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
