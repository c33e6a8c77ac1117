"""Losses on real nodes: a pod, the network, a kubelet, power, and programs of the cluster.

Operators, node daemons and jobs run the images of deploy/Containerfile, as in the chart. After each
loss a job continues or recovers, and no two attempts of it are ever alive at once. Workers record
when they lived (`jobs.assert_apart`, when the job ends).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import pytest

from tests.apiservers import ROOT
from tests.operator.conftest import job as manifest
from tests.realnodes import images, machines
from tests.realnodes.jobs import GLOO, Job, named
from tests.realnodes.plane import SYSTEM, until
from tests.realnodes.releases import Release
from tests.realnodes.test_real_links import check

NODES = 3
IMAGES = True
TRAINING = images.NAMES["training"]
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
OUTAGE_SECONDS = 60.0
CUT_SECONDS = 20.0
STANDING_SECONDS = 5.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(900),
]


def recovers(job: Job) -> None:
    """Check that a killed worker is replaced, and that the job had no incident before."""
    job.kill_worker(job.running()[0].node)
    assert job.running(after=0)[0].attempt == 1
    assert job.incident(1)["remedy"] == "process"


def stays(job: Job, attempt: int, since: float) -> None:
    """Check that all ranks of this attempt have worked since then."""
    until(lambda: job.goes_on(since), f"all ranks of attempt {attempt} go on")
    assert job.newest() == attempt


def test_two_operators_on_two_nodes_of_which_one_leads(release: Release) -> None:
    assert len(set(release.operators().values())) == 2
    assert release.leader()
    daemons = release.cluster.get("-n", SYSTEM, "pods")["items"]
    assert sorted(one["spec"]["nodeName"] for one in daemons) == ["n1", "n2", "n3"]


def test_gloo_workers_of_the_built_image_recover_and_have_its_files_only(release: Release) -> None:
    job = Job(release.cluster, "gloo", script=GLOO, image=TRAINING)
    job.apply()
    first = job.running()
    for node in machines.names(job.cluster.directory):
        for pid in machines.pods_processes(node):
            assert borrowed(machines.mounts(pid)) == set(), f"a process on {node} has the host's"
    job.kill_worker(first[1].node)
    second = job.running(after=0)
    assert {one.pod for one in second.values()} == {one.pod for one in first.values()}
    assert job.incident(1)["remedy"] == "process"
    job.finish()


def borrowed(mounted: Mapping[str, str]) -> set[str]:
    """Return the mounts of a container that neither its image nor its volumes explain."""
    assert mounted.get("/", "overlay") == "overlay"
    return {one for one in mounted if one.startswith(("/usr", "/bin", "/sbin", "/lib", "/opt"))}


def test_the_operators_image_has_the_packages_of_the_lock_and_no_others(release: Release) -> None:
    locked = (ROOT / "deploy/requirements.lock").read_text()
    lock = dict(re.findall(r"^([\w-]+)==(\S+)", locked, re.M))
    listed = release.run(
        min(release.operators()), "sh", "-c", "ls /opt/unbroken/lib/*/site-packages"
    )
    found = re.findall(r"^(\S+)-([\w.]+)\.dist-info$", listed, re.M)
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}
    assert {one for one in versions if versions[one] != lock.get(one)} == {"unbroken"}
    assert not versions.keys() & {"pip", "setuptools"}


def test_a_bad_job_is_refused_at_apply_by_whichever_operators_there_are(release: Release) -> None:
    bad = manifest("bad")
    bad["spec"]["nprocPerNode"] = "all"
    until(lambda: release.refuses(bad, "--dry-run=server"), "the API server asks")
    first = release.operators()
    for name in first:
        release.delete(name)
        until(lambda: release.refuses(bad, "--dry-run=server"), "it asks who is left")
        release.rolled_out()
    assert not first.keys() & release.operators().keys()
    until(lambda: release.refuses(bad, "--dry-run=server"), "it asks those that are new")
    assert release.refuses(bad)
    assert release.cluster.get("hyperpodpytorchjobs")["items"] == []


def test_the_built_image_tests_the_links_of_nodes(release: Release) -> None:
    code, said = check(release.cluster)
    assert (code, said["phase"], said.get("faulty") or []) == (0, "Passed", []), said


@named("pod")
def test_a_deleted_pod_is_made_anew(job: Job) -> None:
    pod = job.running()[1].pod
    before = job.cluster.get("pod", pod)["metadata"]["uid"]
    job.cluster.kubectl("delete", "pod", pod, "--wait=false")
    assert job.running(after=0)[1].pod == pod
    assert job.cluster.get("pod", pod)["metadata"]["uid"] != before
    assert job.incident(1)["remedy"] == "pod"
    job.finish()


@named("deleted")
def test_a_job_does_not_feel_that_its_operator_is_deleted(release: Release, job: Job) -> None:
    leader = release.leader()
    release.delete(leader)
    until(lambda: release.leader() not in ("", leader), "another operator leads")
    recovers(job)
    job.finish()
    release.rolled_out()


@named("alone")
def test_a_job_goes_on_without_operators_and_recovers_with_the_next(
    release: Release, job: Job
) -> None:
    release.scale(0)
    until(lambda: not release.operators(), "there is no operator")
    stays(job, 0, time.time())
    job.kill_worker(job.running()[0].node)
    release.scale(2)
    job.running(after=0)
    stays(job, 1, time.time())
    job.finish()


@named("upgraded")
def test_a_job_does_not_feel_that_the_release_is_upgraded(release: Release, job: Job) -> None:
    before = release.operators().keys()
    release.upgrade(podAnnotations={"round": "2"})
    until(lambda: not release.operators().keys() & before, "the old operators are gone")
    until(lambda: release.leader(), "a new operator leads")
    since = time.time()
    until(lambda: time.time() - since >= STANDING_SECONDS, "it had the time to do harm")
    until(lambda: job.goes_on(since), "the job goes on")
    assert job.newest() == 0
    recovers(job)
    job.finish()


@named("silent")
def test_a_job_works_and_recovers_while_the_api_server_is_stopped(job: Job) -> None:
    with job.cluster.api_server_stopped():
        job.kill_worker(job.running()[1].node)
        began = time.time()
        job.running(after=0)
        # The job is to work through the outage: it lasts as long as it lasts.
        until(
            lambda: time.time() - began >= OUTAGE_SECONDS, "the outage is over", OUTAGE_SECONDS * 2
        )
        stays(job, 1, time.time())
    until(lambda: job.object()["status"]["restartCount"] == 1, "the restart is written down")
    stays(job, 1, time.time())
    assert job.incident(1)["outcome"] == "recovered"
    job.finish()


@named("frozen")
def test_a_frozen_kubelet_is_no_fault_of_the_job(job: Job) -> None:
    cluster, node = job.cluster, job.running()[1].node
    machines.freeze(cluster.directory, node, is_frozen=True)
    try:
        until(lambda: cluster.condition(node, "Ready") == "Unknown", f"{node} is missed")
        stays(job, 0, time.time())
    finally:
        machines.freeze(cluster.directory, node, is_frozen=False)
    until(lambda: cluster.condition(node, "Ready") == "True", f"{node} is back")
    stays(job, 0, time.time())
    job.finish()


@named("cut", fence_by="provider")
def test_nothing_starts_beside_the_workers_of_a_node_that_is_cut_off(job: Job) -> None:
    cluster, node = job.cluster, job.running()[1].node
    machines.cut_off(cluster.directory, node, is_cut=True)
    try:
        until(lambda: cluster.condition(node, "Ready") == "Unknown", f"{node} is missed")
        since = time.time()
        until(lambda: time.time() - since >= CUT_SECONDS, "it was cut off for a while")
        assert job.newest() == 0, "its workers may live, and others have begun"
    finally:
        machines.cut_off(cluster.directory, node, is_cut=False)
    job.running(after=0)
    job.finish()


@named("power", fence_by="provider")
def test_the_rank_of_a_dead_node_goes_to_another_once_it_is_fenced(job: Job) -> None:
    cluster, node = job.cluster, job.running()[1].node
    machines.switch_off(cluster.directory, node)
    until(lambda: cluster.condition(node, "Ready") == "Unknown", f"{node} is missed")
    cluster.kubectl("taint", "node", node, OUT_OF_SERVICE)
    second = job.running(after=0)
    assert node not in {one.node for one in second.values()}
    number = machines.number_of(cluster.directory, node)
    machines.switch_on(cluster.directory, node, number)
    cluster.kubectl("taint", "node", node, f"{OUT_OF_SERVICE}-")
    until(lambda: not job.workers(node), "what ran there is gone")
    stays(job, 1, time.time())
    assert not [one for one in job.lives() if one.node == node and one.attempt > 0]
    job.finish()
