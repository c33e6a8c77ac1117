"""Output of commands on values: incidents, exit codes, names, parts of the command line."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unbroken.agent.options import SHELL_VARIABLE
from unbroken.cli.job.logs import split
from unbroken.cli.job.story import story
from unbroken.cli.job.views import advised, age, exit_code, first_line, stages, state, world_size
from unbroken.cli.local.up import _export_line
from unbroken.cli.run.manifests import (
    RunScript,
    Sizes,
    environment,
    environment_secret,
    held,
    of_script,
    python,
    released,
    script_name,
)
from unbroken.cli.show import size_text
from unbroken.core.job.recovery.words import incident_line
from unbroken.errors import SpecError
from unbroken.local.state import Paths
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.job.parse import parse_job

KILLED = Symptom(99.5, "Signal", "killed by SIGKILL", "a-pods-1", "node-1", 3, exit_code=137)
OPEN = Incident(1, 0, KILLED, (KILLED,), Remedy.PROCESS, "all pods are healthy", 100.0)
DONE = replace(
    OPEN, stopped_at=100.01, ready_at=100.02, started_at=100.3, first_output_at=100.2,
    progress_at=100.25, ended_at=100.3, outcome="recovered",
)  # fmt: skip
RANK_3 = "incident 1: rank 3 (a-pods-1 on node-1): killed by SIGKILL; "
NOT_READY = "pod a-pods-1 on node-1: the node is not ready"
GONE = Symptom(100.0, "NodeLost", "the node is not ready", "a-pods-1", "node-1")


def test_options_of_a_local_cluster_that_offers_what_is_missing_are_advised() -> None:
    lacks = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    unlabelled = "2 node(s) didn't match. No node has the label example.com/type=ml.p5."
    assert advised([lacks, unlabelled]).endswith("--gpu-per-node N --label example.com/type=ml.p5")
    assert not advised(["No node has the label $(x)=y", "0/2 nodes are available: 2 Too many pods"])


@pytest.mark.parametrize(
    ("incident", "said"),
    [
        (
            DONE,
            RANK_3 + "restarted the processes; 0.250 s lost",
        ),
        (
            OPEN,
            RANK_3 + "next: restart the processes in their pods",
        ),
        (
            replace(DONE, culprit=GONE, remedy=Remedy.POD),
            f"incident 1: {NOT_READY}; replaced the pod; 0.250 s lost",
        ),
        (
            replace(DONE, culprit=GONE, remedy=Remedy.POD, kept=2),
            (
                f"incident 1: {NOT_READY}; replaced the pod, 2 ranks kept their processes; "
                "0.250 s lost"
            ),
        ),
        (
            replace(OPEN, remedy=Remedy.FAIL, reason="the budget is used up", ended_at=100.1),
            RANK_3 + "gave up: the budget is used up",
        ),
        (
            replace(DONE, outcome="the job was suspended", progress_at=None),
            RANK_3 + "restarted the processes: the job was suspended",
        ),
    ],
    ids=["recovered", "open", "pod", "pod and kept", "fail", "other end"],
)
def test_one_line_tells_an_incident(incident: Incident, said: str) -> None:
    assert incident_line(incident) == said


@pytest.mark.parametrize(
    ("nproc", "told", "size"),
    [("2", [], 6), ("auto", [None, 4], 12), ("auto", [], None), ("2", [1, 1, 1], 3)],
)
def test_agents_say_how_many_ranks_there_are(
    nproc: str, told: list[int | None], size: int | None
) -> None:
    job = {"spec": {"nprocPerNode": nproc, "replicaSpecs": [{"replicas": 1}, {"replicas": 2}]}}
    assert world_size(job, told) == size


def test_stages_are_in_order_of_time_and_only_those_reached() -> None:
    reached = [(name, round(since, 3)) for name, _, since in stages(DONE)]
    assert reached == [
        ("detected", 0.0),
        ("stopped", 0.01),
        ("ready", 0.02),
        ("first output", 0.2),
        ("resumed", 0.25),
        ("started", 0.3),
    ]
    assert [name for name, *_ in stages(OPEN)] == ["detected"]
    with_steps = replace(DONE, resumed_step=7)
    assert "first output" not in [name for name, *_ in stages(with_steps)]


def test_the_story_has_evidence_and_what_else_was_seen() -> None:
    culprit = replace(KILLED, evidence=("Traceback", "ValueError"))
    lines = list(story(replace(DONE, culprit=culprit, signals=(culprit, GONE))))
    assert "             | ValueError" in lines
    assert "  also seen  +0.000 s  pod a-pods-1 on node-1: NodeLost: the node is not ready" in lines
    assert not [line for line in lines if line.startswith("  also seen") and "SIGKILL" in line]


def job(*conditions: tuple[str, str]) -> dict[str, Any]:
    """Return a job with these conditions."""
    listed = [{"type": kind, "status": status} for kind, status in conditions]
    return {"metadata": {"name": "a"}, "status": {"conditions": listed}}


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([], "Pending"),
        ([("Created", "True")], "Created"),
        ([("Created", "False"), ("Running", "True"), ("Faulted", "False")], "Running"),
        ([("Running", "False"), ("Faulted", "True")], "Faulted"),
        ([("Created", "True"), ("Completed", "True")], "Completed"),
    ],
)
def test_the_state_is_the_condition_that_holds(
    conditions: list[tuple[str, str]], expected: str
) -> None:
    assert state(job(*conditions)) == expected


@pytest.mark.parametrize(
    ("now", "incidents", "code"),
    [
        ("Completed", [DONE], 0),
        ("Failed", [OPEN], 137),
        ("Failed", [OPEN, replace(OPEN, culprit=replace(KILLED, exit_code=7))], 7),
        ("Failed", [replace(OPEN, culprit=GONE)], 1),
        ("Failed", [replace(OPEN, culprit=replace(KILLED, exit_code=0))], 1),
        ("Failed", [], 1),
    ],
)
def test_a_failed_job_never_ends_with_zero(now: str, incidents: list[Incident], code: int) -> None:
    assert exit_code(job((now, "True")), incidents) == code


@pytest.mark.parametrize(
    ("program", "taken", "name"),
    [
        ("train.py", [], "train"),
        ("dir/Train_LM.py", [], "train-lm"),
        ("train.py", ["train", "train-2"], "train-3"),
        ("2d.py", [], "job-2d"),
        ("_.py", [], "job"),
        ("/usr/bin/true", [], "true"),
        ("pkg.module", [], "pkg-module"),
        ("x" * 99 + ".py", [], "x" * 40),
    ],
)
def test_names_of_scripts_are_names_of_objects(program: str, taken: list[str], name: str) -> None:
    assert script_name(program, taken) == name
    made = of_script(RunScript(["--x", program], program, sizes=Sizes(2, "4", 1, 3)), name)
    assert not parse_job(made.job).problems
    assert made.parsed.spec.nnodes == 2


def test_kubernetes_leaves_the_words_of_a_script_alone() -> None:
    made = of_script(RunScript(["a.py", "$(RANK)", "$$"], "a.py"), "a")
    (container,) = made.job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    assert container["args"] == ["a.py", "$$(RANK)", "$$$$"]


def test_the_environment_is_a_secret_of_the_job_under_a_name_that_the_server_chooses() -> None:
    bare = of_script(RunScript(["a.py"], "a.py"), "a").job
    made = held(bare)
    made["metadata"] = {"name": "a", "uid": "u-1"}
    owner = {"apiVersion": bare["apiVersion"], "kind": bare["kind"], "name": "a", "uid": "u-1"}
    secret = environment_secret(made, {"A": "1"})
    assert secret["stringData"] == {"A": "1"}
    assert secret["metadata"] == {
        "generateName": "a-environment-",
        "ownerReferences": [owner],
    }
    patch = released(made, "a-environment-x2v4z")["spec"]
    assert (made["spec"]["runPolicy"].pop("suspend"), patch["runPolicy"]) == (
        True,
        {"suspend": False},
    )
    (container,) = patch["replicaSpecs"][0]["template"]["spec"]["containers"]
    assert container.pop("envFrom") == [{"secretRef": {"name": "a-environment-x2v4z"}}]
    assert made["spec"] | {"replicaSpecs": patch["replicaSpecs"]} == bare["spec"]


def test_a_shells_environment_is_passed_on_whole(tmp_path: Path) -> None:
    shell = {
        "HF_TOKEN": "secret",
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "RANK": "7",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "there",
        "UNBROKEN_WARM": "off",
    }
    kept = {"HF_TOKEN": "secret", "PATH": "/bin", "OMP_NUM_THREADS": "2"}
    kept |= {"PWD": "/x", "SHLVL": "1", "KUBECONFIG": "/x", "UNBROKEN_DIR": "/x"}
    late = {"BASH_FUNC_x%%": "() { :; }", "NNODES": "9", "PET_TEE": "3", "CITY": "caf\udce9"}
    found = environment(RunScript(["a.py"], "a.py"), "", {**shell, **kept, **late})
    assert json.loads(found.pop(SHELL_VARIABLE))["environment"] == late
    assert found == {"PYTHON_EXEC": sys.executable, **kept}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert python({"CONDA_PREFIX": str(tmp_path)}) == f"{tmp_path}/bin/python"
    assert python({"VIRTUAL_ENV": f"{tmp_path}/gone"}) == sys.executable


@pytest.mark.parametrize(
    ("line", "rank", "text"),
    [
        ("[default0]:step 1", 0, "step 1"),
        ("[default12]:  indented", 12, "  indented"),
        ("[trainer-33]:x", 33, "x"),
        ("unbrokenrun: waits", None, "unbrokenrun: waits"),
        ("[rank0]: Traceback", 0, " Traceback"),
        ("[no rank]: x", None, "[no rank]: x"),
        ("", None, ""),
    ],
)
def test_lines_of_workers_are_told_from_the_agents(line: str, rank: int | None, text: str) -> None:
    assert split(line) == (rank, text)


def test_ages_and_lines_are_short() -> None:
    created = "2026-01-01T00:00:00Z"
    start = 1767225600.0
    ages = [age(created, start + seconds) for seconds in (-5, 119, 120, 7200, 172800)]
    assert ages == ["0s", "119s", "2m", "2h", "2d"]
    assert first_line("a\nb") == "a"
    assert len(first_line("x" * 999)) == 200


@pytest.mark.parametrize(
    ("quantity", "shown"),
    [("24684084Ki", "23.5 GiB"), ("8Gi", "8.0 GiB"), ("500M", "0.5 GiB"), (None, "-")],
)
def test_a_memory_size_is_shown_in_gib(quantity: str | None, shown: str) -> None:
    assert size_text(quantity) == shown


def test_a_script_in_a_deleted_folder_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SpecError, match="this folder was deleted"):
        of_script(RunScript(["a.py"], "a.py"), "a")


@pytest.mark.parametrize("name", ["plain", "with blank", "quote'd", "dollar$x"])
def test_the_line_for_the_shell_exports_the_kubeconfig_of_any_folder(name: str) -> None:
    paths = Paths(Path("/x", name))
    words = shlex.split(_export_line(paths))
    assert words == ["export", f"KUBECONFIG=/x/{name}/kubeconfig"]
