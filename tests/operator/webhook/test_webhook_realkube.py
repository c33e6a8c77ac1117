"""Answers of a real API server to kubectl's `apply` when it asks the operator's webhook."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiservers import Cluster, embedded_cluster
from tests.cluster_logs import assert_no_errors
from tests.e2e.clusters import UNBROKEN
from tests.operator.conftest import NUMBERS, job
from tests.operator.trained_jobs import until
from tests.watching import PATIENCE_SECONDS
from unbroken.kube.bounds import COMMAS_MAX
from unbroken.local.node.processes.supervisor import descendants

pytestmark = [pytest.mark.slow, pytest.mark.realkube]

Object = dict[str, Any]
CONFIGURATION = "validatingwebhookconfiguration/unbroken-jobs"
QUEUE = "kueue.x-k8s.io/queue-name"


@dataclass
class Asking:
    """kubectl in a namespace of its own, while an operator serves the webhook."""

    cluster: Cluster
    program: str
    namespace: str
    operator: int = 0
    """Pid of the operator."""

    def kubectl(self, *words: str, given: Object | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl; return the result, whatever the exit code."""
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
        return subprocess.run(
            [self.program, "-n", self.namespace, *words],
            input=yaml.safe_dump(given) if given else None,
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )

    def done(self, *words: str, given: Object | None = None) -> str:
        """Run kubectl, which must succeed; return its output."""
        found = self.kubectl(*words, given=given)
        assert found.returncode == 0, found.stderr
        return found.stdout

    def apply(self, given: Object, *words: str) -> subprocess.CompletedProcess[str]:
        """Apply a manifest."""
        return self.kubectl("apply", "-f", "-", *words, given=given)

    def refuses(self) -> bool:
        """Return whether a bad job is refused now; nothing is stored in any case."""
        found = self.apply(bad(), "--dry-run=server")
        return found.returncode != 0 and "spec.nprocPerNode" in found.stderr


def bad() -> Object:
    """Return a job with a problem in its spec and one in an annotation."""
    made = copy.deepcopy(job("bad"))
    made["spec"]["nprocPerNode"] = "all"
    made["metadata"]["annotations"] = {"unbroken.dev/oops": "1"}
    return made


@pytest.fixture(scope="module")
def asking(
    clusters: Callable[[str], Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asking]:
    """Run an operator as a process with a working webhook."""
    cluster = clusters("real")
    program = shutil.which("kubectl", path=Path(sys.executable).parent) or shutil.which("kubectl")
    assert program, "kubectl is missing; `make setup` installs it"
    found = Asking(cluster, str(program), f"webhook-{next(NUMBERS)}")
    found.done("create", "namespace", found.namespace)
    log = tmp_path_factory.mktemp("webhook") / "operator.log"
    command = [*UNBROKEN, "operator", "--kubeconfig", str(cluster.kubeconfig)]
    options = ["-n", found.namespace, "--lease-namespace", found.namespace]
    options += ["--key-file", str(log.with_name("operator.key"))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options, "--webhook-port", "0", "--metrics-port", "0"],
            stdout=output,
            stderr=output,
        )
    found.operator = process.pid
    try:
        found.done("wait", "--for=create", CONFIGURATION, "--timeout=60s")
        until(found.refuses, "the webhook is asked")
        yield found
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)
        found.kubectl("delete", CONFIGURATION)
    assert_no_errors(log)


def test_apply_refuses_with_every_problem_and_stores_nothing(asking: Asking) -> None:
    told = asking.apply(bad())
    assert told.returncode == 1
    assert told.stderr.startswith('The HyperPodPyTorchJob "bad" is invalid')
    assert "spec.nprocPerNode: " in told.stderr
    assert "metadata.annotations[unbroken.dev/oops]: Forbidden: unknown" in told.stderr
    assert "NotFound" in asking.kubectl("get", "hyperpodpytorchjobs", "bad").stderr


def test_a_template_that_makes_no_pod_is_refused_in_the_api_servers_words(asking: Asking) -> None:
    made = copy.deepcopy(job("template"))
    pod = made["spec"]["replicaSpecs"][0]["template"]["spec"]
    pod["containers"][0]["resources"] = {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}
    told = asking.apply(made)
    assert told.returncode == 1
    place = "spec.replicaSpecs[0].template.spec.containers[0].resources.requests"
    assert f"{place}: Invalid value" in told.stderr
    pod["containers"][0]["resources"] = {"limits": "all"}
    assert "spec.replicaSpecs[0].template" in asking.apply(made).stderr


def test_a_job_that_the_operator_would_not_read_is_refused(asking: Asking) -> None:
    wide, deep = (copy.deepcopy(job(name)) for name in ("wide", "deep"))
    wide["spec"]["replicaSpecs"][0]["template"]["spec"]["x"] = ["a"] * COMMAS_MAX
    inner = deep["spec"]["replicaSpecs"][0]["template"]["spec"]
    for _ in range(100):
        inner["x"] = inner = {}
    for made, why in ((wide, "has more than 65536 commas"), (deep, "more than 64 levels deep")):
        told = asking.kubectl("create", "-f", "-", given=made)
        assert told.returncode == 1
        assert why in told.stderr


def test_while_the_webhook_hangs_jobs_are_stored_and_the_operator_refuses_them(
    asking: Asking,
) -> None:
    (webhook,) = (
        pid
        for pid in descendants(asking.operator)
        if b"operator.webhook.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(webhook, signal.SIGSTOP)
    try:
        asking.done("apply", "-f", "-", given=bad())
    finally:
        os.kill(webhook, signal.SIGCONT)
    wait = ("--for=condition=Failed", "hyperpodpytorchjobs/bad", f"--timeout={PATIENCE_SECONDS}s")
    asking.done("wait", *wait)
    found = json.loads(asking.done("get", "hyperpodpytorchjobs", "bad", "-o", "json"))
    failed = [one for one in found["status"]["conditions"] if one["type"] == "Failed"]
    assert "spec.nprocPerNode: " in failed[0]["message"]
    asking.done("delete", "hyperpodpytorchjobs", "bad")


def test_warnings_reach_the_user_and_changes_are_judged(asking: Asking) -> None:
    made = copy.deepcopy(job("lm"))
    made["metadata"]["labels"] = {QUEUE: "a"}
    made["spec"]["runPolicy"] = {"ttlSecondsAfterFinished": 0}
    told = asking.apply(made)
    assert told.returncode == 0, told.stderr
    assert (
        "Warning: spec.runPolicy.ttlSecondsAfterFinished: 0 keeps the finished job" in told.stderr
    )
    asking.done("wait", "hyperpodpytorchjobs/lm", "--for=condition=Created", "--timeout=60s")
    made["metadata"]["labels"] = {QUEUE: "b"}
    moved = asking.apply(made)
    assert moved.returncode == 1
    assert f"metadata.labels[{QUEUE}]: Forbidden" in moved.stderr
    made["metadata"]["labels"] = {QUEUE: "a"}
    made["spec"]["replicaSpecs"][0]["replicas"] = 3
    assert "Warning: spec.replicaSpecs" in asking.apply(made).stderr
    asking.done("delete", "hyperpodpytorchjobs", "lm")


def test_what_somebody_removes_comes_back(asking: Asking) -> None:
    def bundle() -> str:
        path = "-o=jsonpath={.webhooks[0].clientConfig.caBundle}"
        return asking.kubectl("get", CONFIGURATION, path).stdout

    before = bundle()
    asking.done("delete", CONFIGURATION)
    until(lambda: bundle() == before, "the webhook is registered again")
    patch = '[{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": ""}]'
    asking.done("patch", CONFIGURATION, "--type=json", "-p", patch)
    until(lambda: bundle() == before, "the authority is registered again")
    until(asking.refuses, "the webhook is asked again")
    assert "NotFound" in asking.kubectl("get", "secret", "unbroken-webhook").stderr


def test_the_embedded_cluster_needs_no_webhook(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path / "server") as server:
        command = [*UNBROKEN, "operator", "--kubeconfig", str(server.kubeconfig)]
        told = subprocess.run(
            [*command, "--webhook-port", "0", "--key-file", str(tmp_path / "key")],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert told.returncode == 1
    assert "the local cluster judges jobs by itself" in told.stderr
    assert "Traceback" not in told.stderr
