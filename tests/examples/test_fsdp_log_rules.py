"""The log rules of HyperPod's document, verbatim, over the FSDP example: its lines and its jobs."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli_forks import run_unbroken
from tests.e2e.clusters import Cluster
from tests.e2e.conftest import kubectl_path as kubectl_path
from tests.e2e.conftest import make_cluster as make_cluster
from tests.examples.test_fsdp import ROOT, TRAIN, train
from tests.watching import wait_until
from tests.worker.s3_stores import running_s3

pytestmark = pytest.mark.slow
DOCUMENT = ROOT / "tests/core/logs/log_corpus/main_example.yaml"
POLICY = yaml.safe_load(DOCUMENT.read_text())["spec"]["runPolicy"]
RULES = {rule["name"]: rule for rule in POLICY["logMonitoringConfiguration"]}
RANKS = 4
JOB_SECONDS = 1800.0
"""Seconds that no job takes to break a rule: the slowest rule waits 10 minutes."""


def test_each_rule_of_the_document_finds_its_line(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = ("--max_steps=12", "--checkpoint_freq=5", f"--checkpoint_dir={tmp_path}/saved")
    done = train(tmp_path, sys.executable, *words)
    assert done.returncode == 0, done.stderr
    matches = {
        name: [found for line in done.stdout.splitlines() if (found := re.match(pattern, line))]
        for name, pattern in ((name, rule["logPattern"]) for name, rule in RULES.items())
    }
    # Checkpoints are those of steps 5 and 10; the one of step 5 may end within the next save.
    assert {name: len(found) for name, found in matches.items()} == {
        "JobStart": 1,
        "JobHangingDetection": 12,
        "NoS3CheckpointingDetection": 2,
        "LowThroughputDetection": 12,
    }
    for name in ("JobHangingDetection", "LowThroughputDetection"):
        assert all(float(found[1]) > 0 for found in matches[name])


class Llama:
    """The job of llama.yaml with one of the document's rules, on a local cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def apply(self, folder: Path, rule: str, *options: str, **variables: str) -> None:
        """Apply the manifest, with more options and variables."""
        claim, job = yaml.safe_load_all(TRAIN.with_name("llama.yaml").read_text())
        job["spec"]["runPolicy"]["logMonitoringConfiguration"] = [RULES[rule]]
        # The rule alone has to find the hang.
        job["metadata"]["annotations"] = {"unbroken.dev/detectors": "*=off"}
        (container,) = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
        container["command"] += ["--max_steps=1000000", "--checkpoint_freq=10", *options]
        container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
        manifest = folder / "llama.yaml"
        manifest.write_text(yaml.safe_dump_all([claim, job]))
        self.cluster.kubectl("create", "configmap", "llama", f"--from-file={TRAIN}")
        self.cluster.kubectl("apply", "-f", str(manifest))

    def lines(self, pattern: str) -> list[str]:
        """Return the lines of all attempts in which a pattern is found."""
        output = self.cluster.unbroken("logs", "llama", check=False).stdout
        return [line for line in output.splitlines() if re.search(pattern, line)]

    def until_more(self, pattern: str, count: int = 1) -> None:
        """Wait for so many more lines with a pattern."""
        goal = len(self.lines(pattern)) + count
        wait_until(
            lambda: self.lines(pattern), lambda found: len(found) >= goal, patience=JOB_SECONDS
        )

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents."""
        listed: dict[str, Any] = self.cluster.get("incidents.unbroken.dev")
        return [one["spec"] for one in listed["items"]]


def write_texts(folder: Path, name: str, files: list[Path]) -> None:
    """Write a file of a data set, which appears whole."""
    rows = (json.dumps({"text": file.read_text(errors="replace")}) for file in files)
    (folder / "draft").write_text("".join(f"{row}\n" for row in rows))
    (folder / "draft").replace(folder / name)


def readers(file: Path) -> set[str]:
    """Return the processes that have a file open, other than this one."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(link) == str(file):
                found.add(link.parts[2])
    return found - {str(os.getpid())}


@contextmanager
def no_start(job: Llama, folder: Path) -> Iterator[None]:
    """Let each rank of the first attempt wait for the bytes of a file of its data set."""
    texts = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = folder / "data"
    data.mkdir()
    file = data / "0.jsonl"
    os.mkfifo(file)
    write_texts(data, "1.jsonl", texts[::2])
    held = os.open(file, os.O_RDWR)
    try:
        job.apply(folder, "JobStart", f"--dataset_path={data}")
        wait_until(lambda: readers(file), lambda found: len(found) == RANKS, patience=300)
        write_texts(data, file.name, texts[1::2])
        yield
    finally:
        os.close(held)


@contextmanager
def held_rank(job: Llama, folder: Path) -> Iterator[None]:
    """Stop a rank that trains."""
    job.apply(folder, "JobHangingDetection")
    job.until_more("'training_loss_step'", 5)
    words = ["chaos", "freeze-worker", "--dir", str(job.cluster.directory), "llama", "--rank", "1"]
    run_unbroken(words, Path.cwd(), os.environ).check_returncode()
    yield


@contextmanager
def no_store(job: Llama, folder: Path) -> Iterator[None]:
    """Let the object store give no answer, and the next attempt train without it."""
    with running_s3() as store:
        url = "--checkpoint_dir=s3://bucket/run"
        job.apply(folder, "NoS3CheckpointingDetection", url, **store.variables)
        job.until_more("The checkpoint is finalized")
        store.order(mode="away")
        yield
        store.order()
        job.until_more("The checkpoint is finalized")


@pytest.mark.heavy
@pytest.mark.timeout(2 * JOB_SECONDS)
@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("JobStart", no_start),
        ("JobHangingDetection", held_rank),
        ("NoS3CheckpointingDetection", no_store),
    ],
)
def test_the_rule_of_the_document_restarts_the_job_that_breaks_it(
    rule: str,
    broken: Callable[[Llama, Path], Any],
    make_cluster: Callable[..., Cluster],
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    job = Llama(make_cluster("--nodes", "3"))
    with broken(job, tmp_path):
        wait_until(job.incidents, patience=JOB_SECONDS)
        (incident,) = wait_until(
            job.incidents, lambda found: all(one.get("outcome") for one in found), patience=300
        )
        culprit = incident["culprit"]
        assert (culprit["fault"], culprit["rule"]) == ("LogRule", rule)
        assert (culprit["violation"], incident["outcome"]) == ("Hang", "recovered")
        job.until_more("'training_loss_step'", 5)
