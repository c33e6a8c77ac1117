"""The log rules of HyperPod's documentation, verbatim, over jobs of real processes.

Each job breaks one rule. Others with the same rules break none, and run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.clusters import Cluster
from tests.e2e.jobs import GANG, Job, Object, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CORPUS = Path(__file__).parents[1] / "core/logs/log_corpus"
PROGRAM = GANG.parent / "rules_train.py"
MAIN_SHARES = {"expectedStartCutOffInSeconds": 0.05, "expectedRecurringFrequencyInSeconds": 0.025}
"""The main example waits for minutes, here for seconds: a minute has three until the first line,
when all jobs start at once, and half of that later.  Nothing else is changed."""

BREACHES: dict[str, tuple[str, int | None]] = {
    "spike": ("LogSlow_LossSpikeDetection", 1),
    "tflops": ("LogSlow_TFLOPs", 0),
    "memory": ("LogFault_GPU Error", 1),
    "main-slow": ("LogSlow_LowThroughputDetection", 0),
    "main-unstarted": ("LogHang_JobStart", None),
    "main-stuck": ("LogHang_JobHangingDetection", 0),
    "epoch": ("LogHang_JobHangingDetection", 0),
    "main-unsaved": ("LogHang_NoS3CheckpointingDetection", 0),
}
"""Reason and culprit, soonest first; None: nobody in particular."""
HEALTHY = ("healthy-epoch", "healthy-spike", "healthy-tflops", "healthy-memory", "healthy-main")
SETS = ("epoch", "spike", "tflops", "memory")


def policy(kind: str) -> Object:
    """The rules that a job of this kind has."""
    if "main" not in kind:
        documents = list(yaml.safe_load_all((CORPUS / "usage_fragments.yaml").read_text()))
        index = next(i for i, name in enumerate(SETS) if name in kind)
        found: Object = documents[index]["runPolicy"]
        return found
    found = yaml.safe_load((CORPUS / "main_example.yaml").read_text())["spec"]["runPolicy"]
    rules = [
        {k: v * MAIN_SHARES[k] if k in MAIN_SHARES else v for k, v in rule.items()}
        for rule in found["logMonitoringConfiguration"]
    ]
    return {**found, "logMonitoringConfiguration": rules}


def start(stack: ExitStack, cluster: Cluster, folder: Path, kind: str) -> Job:
    directory = folder / kind
    directory.mkdir()
    nproc = 1 if kind in HEALTHY else 2
    made = job(cluster, directory, replicas=1, nproc=nproc, program=PROGRAM, policy=policy(kind))
    return stack.enter_context(made)


def reasons(found: Object) -> Iterator[Any]:
    for condition in (found.get("status") or {}).get("conditions") or ():
        yield condition.get("reason")


@pytest.mark.heavy
def test_each_rule_restarts_the_job_that_breaks_it_and_no_other(
    cluster: Cluster, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        healthy = [start(stack, cluster, tmp_path, kind) for kind in HEALTHY]
        broken = {kind: start(stack, cluster, tmp_path, kind) for kind in BREACHES}
        for kind, (reason, rank) in BREACHES.items():
            one = broken[kind]
            # A condition's reason has no spaces.
            word = reason.replace(" ", "")
            one.until(lambda found, word=word: word in reasons(found))
            (incident,) = one.incidents(1)
            culprit = incident["culprit"]
            assert culprit["fault"] == "LogRule", kind
            assert culprit["text"].startswith(f"{reason}: "), kind
            assert culprit.get("rank") == rank, kind
            one.steps(1, more=10)
            assert one.finish()["status"]["restartCount"] == 1, kind
        for one in healthy:
            one.steps(0)
            assert not one.finish()["status"].get("restartCount"), one.directory
            assert one.incidents(None) == []
