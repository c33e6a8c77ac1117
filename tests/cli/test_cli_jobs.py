"""Commands about jobs that run: what they show is what is, and what they ask for happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import COUNT, Cli, read_until
from tests.e2e.control import api_of, is_ready, is_tainted
from tests.operator.pytorchjobs import pytorchjob
from tests.watching import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow
SET_UP_SECONDS = 3
SETS_UP = """
import sys, time
print("starting", flush=True)
time.sleep(float(sys.argv[1]))
with open("trained", "a") as file:
    file.write(f"{time.time()}\\n")
for step in range(100_000):
    print("loss", 1 / (step + 1), "at step", step, flush=True)
    time.sleep(0.05)
"""
"""Program that sets up for some seconds, notes the time, and trains."""
SAYS_LITTLE = """
import os, time
print("starting", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
"""
JOBS = "sagemaker.amazonaws.com/v1:hyperpodpytorchjobs"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


@pytest.fixture
def counting(
    cli: Cli, request: pytest.FixtureRequest
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A job of two pods with two ranks each that counts, and the command that follows it."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:30].strip("-")
    script = cli.script(f"{name}.py", COUNT)
    command = ["run", "--nnodes", "2", "--nproc-per-node", "2", "--name", name, script, "100000"]
    process = cli.start(*command)
    read_until(process, lambda line: line == "step 1")
    # A worker's first output may come before the operator has a report of every worker.
    wait_until(lambda: cli.json("describe", name)["state"], lambda state: state == "Running")
    yield name, process
    process.terminate()
    process.communicate(timeout=PATIENCE_SECONDS)
    cli.call("delete", name, code=None)


def wait_recovered(process: subprocess.Popen[str], number: int) -> str:
    """Return the line about an incident."""
    lines = read_until(process, lambda line: f"unbroken: incident {number}: " in line)
    read_until(process, lambda line: line.startswith("step "))
    return lines[-1]


def workers(found: dict[str, Any]) -> dict[int, int]:
    """Pids by rank."""
    agents = [pod["agent"] for pod in found["pods"] if pod["agent"]]
    return {one["rank"]: one["pid"] for agent in agents for one in agent["workers"]}


def test_describe_names_every_process(cli: Cli, counting: tuple[str, Any]) -> None:
    name, _ = counting
    found = cli.json("describe", name)
    assert found["state"] == "Running"
    assert (found["replicas"], found["ready"], found["restarts"]) == (2, 2, 0)
    assert sorted(pod["node"] for pod in found["pods"]) == ["node-0", "node-1"]
    # The job of a script begins suspended: its name is claimed before its Secret is made.
    reasons = ["JobInitiallySuspended", "Resumed", "Running"]
    assert [one["reason"] for one in found["events"]][:3] == reasons
    for rank, pid in workers(found).items():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert f"RANK={rank}".encode() in variables
    assert sorted(workers(found)) == [0, 1, 2, 3]
    text = cli.call("describe", name).stdout
    assert re.search(rf"{name}-pods-0 +node-\d +Running +0 +running +0 \(\d+\) 1 \(\d+\)", text)


def test_jobs_lists_one_line_each(cli: Cli, counting: tuple[str, Any]) -> None:
    name, _ = counting
    (one,) = (job for job in cli.json("jobs")["jobs"] if job["name"] == name)
    assert one["state"] == "Running"
    assert kubectl_ready(cli, name) == "2/2"
    lines = cli.call("jobs").stdout.splitlines()
    titles = "NAME +STATE +READY +SPARES +RESTARTS +LAST FAULT +GOODPUT +AGE"
    assert re.fullmatch(titles, lines[0])
    share = r"(-|\d+\.\d%)"
    assert any(re.fullmatch(rf"{name} +Running +2/2 +0 +0 +{share} +\d+s", line) for line in lines)
    wide = cli.call("jobs", "-o", "wide").stdout.splitlines()
    assert wide[0].split("AGE")[1].split() == ["LOST", "MOST", "TO", "LOST", "STEPS"]
    assert any(re.search(rf"^{name} .* start-up \d+\.\d+ s +0$", line) for line in wide)
    assert any(line.startswith("default ") for line in cli.call("jobs", "-A").stdout.splitlines())
    assert cli.json("jobs", "-n", "elsewhere") == {"jobs": [], "resumed": []}


def test_jobs_lists_those_of_other_kinds_that_are_resumed(cli: Cli) -> None:
    job = pytorchjob("other-kind")
    job["spec"]["runPolicy"] = {"suspend": True}
    plain = {**job, "metadata": {"name": "not-resumed"}}
    with closing(api_of(cli)) as api:
        for one in (job, plain):
            api.post("kubeflow.org/v1:pytorchjobs", one).done()
    (shown,) = cli.json("jobs")["resumed"]
    assert (shown["kind"], shown["name"], shown["state"]) == (
        "PyTorchJob",
        "other-kind",
        "Suspended",
    )
    lines = cli.call("jobs").stdout.splitlines()
    assert re.fullmatch("KIND +NAME +STATE +RESTARTS +LAST FAULT +RAN AGAIN +AGE", lines[-2])
    assert re.fullmatch(r"PyTorchJob +other-kind +Suspended +0 of 1 +- +- +\d+s", lines[-1])
    assert cli.call("jobs", "-A").stdout.splitlines()[-1].startswith("default ")


def test_the_cost_of_a_fault_lasts_until_training_resumes(cli: Cli) -> None:
    name, script = "sets-up", cli.script("sets-up.py", SETS_UP)
    process = cli.start("run", "--name", name, script, str(SET_UP_SECONDS))
    read_until(process, lambda line: line.startswith("loss 0.2 "))
    wait_until(lambda: cli.json("describe", name)["state"], lambda state: state == "Running")
    os.kill(workers(cli.json("describe", name))[0], signal.SIGKILL)
    read_until(process, lambda line: line == "starting")
    told = read_until(process, lambda line: "unbroken: incident 1: " in line)
    (incident,) = cli.json("explain", name)["incidents"]
    text = cli.call("explain", name).stdout
    process.terminate()
    process.communicate(timeout=30)
    cli.call("delete", name, code=None)

    _, trained_at = (float(line) for line in (cli.folder / "trained").read_text().splitlines())
    assert incident["seconds"] >= SET_UP_SECONDS
    assert datetime.fromisoformat(incident["progressAt"]).timestamp() >= trained_at
    assert incident["firstOutputAt"] < incident["progressAt"]
    assert told[-1].endswith(f"; {incident['seconds']:.3f} s lost")
    assert re.search(r"  first output .*\n.*  resumed ", text)
    assert f"cost       {incident['seconds']:.3f} s at most, until a line of training\n" in text


def test_without_a_sign_of_training_the_cost_is_not_known(cli: Cli) -> None:
    name, script = "says-little", cli.script("says-little.py", SAYS_LITTLE)
    process = cli.start("run", "--name", name, script)
    read_until(process, lambda line: line == "starting")
    wait_until(lambda: cli.json("describe", name)["state"], lambda state: state == "Running")
    os.kill(workers(cli.json("describe", name))[0], signal.SIGKILL)
    read_until(process, lambda line: line == "starting")
    wait_until(
        lambda: cli.json("describe", name),
        lambda found: (found["state"], found["restarts"]) == ("Running", 1),
    )
    (cli.folder / "go").touch()
    told = read_until(process, lambda line: "unbroken: incident 1: " in line)
    process.communicate(timeout=60)
    found = cli.json("explain", name)
    assert re.search(r"restarted the processes; \d+\.\d{3} s until the first output$", told[-1])
    assert found["incidents"][0]["seconds"] is None
    assert (found["goodput"]["share"], found["goodput"]["incidentsOfUnknownCost"]) == (None, 1)
    text = cli.call("explain", name).stdout
    assert re.search(r"cost +not known; \d+\.\d{3} s until the first output, and no later", text)


def test_a_killed_worker_is_explained(cli: Cli, counting: tuple[str, Any]) -> None:
    name, process = counting
    before = workers(cli.json("describe", name))
    done = cli.json("chaos", "kill-worker", name, "--rank", "3")
    assert (done["rank"], done["pid"]) == (3, before[3])
    line = wait_recovered(process, 1)
    assert f"rank 3 ({name}-pods-1 on node-" in line
    assert re.search(r"killed by SIGKILL; restarted the processes; \d+\.\d{3} s lost$", line)
    after = workers(cli.json("describe", name))
    assert sorted(after) == [0, 1, 2, 3]
    assert not set(after.values()) & set(before.values())
    (incident,) = cli.json("explain", name)["incidents"]
    assert incident["culprit"]["fault"] == "Signal"
    assert incident["culprit"]["exitCode"] == 128 + signal.SIGKILL
    assert cli.json("describe", name)["lastFault"] == "SIGKILL"
    assert incident["outcome"] == "recovered"
    assert 0 < incident["seconds"] < 30
    text = cli.call("explain", name, "--incident", "1").stdout
    for stage in ("detected", "stopped", "ready", "started", "first output"):
        assert re.search(rf"\d\d:\d\d:\d\d\.\d{{3}}  {stage}", text), stage
    assert "culprit    rank 3" in text
    assert "remedy     process: restart the processes in their pods" in text
    assert re.search(r"cost       \d+\.\d{3} s", text)
    spent = cli.json("explain", name)["goodput"]
    assert spent["lostSeconds"]["Signal"] == pytest.approx(incident["seconds"], abs=0.01)
    parts = [spent["startupSeconds"], spent["productiveSeconds"], *spent["lostSeconds"].values()]
    assert sum(parts) == pytest.approx(spent["totalSeconds"], abs=0.01)
    assert re.search(r"^goodput +\d+\.\d% of \S+.*; start-up .* s, Signal \S+ s", text, re.M)
    shown = cli.call("describe", name).stdout
    assert re.search(r"^  productive +\S.* +\d+\.\d%$", shown, re.M)
    assert re.search(r"^  lost: Signal +\S.* +\d+\.\d%$", shown, re.M)
    refused = cli.call("explain", name, "--incident", "2", code=1)
    assert f"job {name} has no incident 2 (it has: 1)" in refused.stderr


def test_detectors_are_shown_and_set(cli: Cli, counting: tuple[str, Any]) -> None:
    name, _ = counting
    modes = {one["detector"]: one["mode"] for one in cli.json("detectors", name)["detectors"]}
    assert (modes["silent"], modes["spike"]) == ("act", "shadow")
    cli.call("detectors", name, "spike=act")
    done = cli.call("detectors", name, "*=off")
    assert f"now: unbroken restart {name}" in done.stderr
    assert re.search(r"^spike +act +0 +0 +the loss", done.stdout, re.M)
    assert re.search(r"^silent +off +0 +0 ", done.stdout, re.M)
    shown = cli.call("describe", name).stdout
    assert "detectors:\n  act:    spike\n  off:    stopped, silent," in shown
    refused = cli.call("detectors", name, "smoke=act", code=1)
    assert "'smoke=act' is not DETECTOR=MODE with one of: checkpoint, nan," in refused.stderr
    assert {one["mode"] for one in cli.json("detectors", name)["detectors"]} == {"act", "off"}


def test_a_killed_agent_and_a_deleted_pod_come_back(cli: Cli, counting: tuple[str, Any]) -> None:
    name, process = counting
    agents = {pod["name"]: pod["agent"]["pid"] for pod in cli.json("describe", name)["pods"]}
    done = cli.json("chaos", "kill-agent", name, "--rank", "2")
    assert done["pid"] == agents[done["pod"]]
    assert "AgentLost" in wait_recovered(process, 1) or cli.json("explain", name)["incidents"]
    assert not Path(f"/proc/{done['pid']}").exists()
    done = cli.json("chaos", "kill-pod", name, "--pod", f"{name}-pods-1")
    wait_recovered(process, 2)
    found = cli.json("explain", name)["incidents"]
    assert [one["outcome"] for one in found] == ["recovered", "recovered"]
    assert found[1]["culprit"]["pod"] == f"{name}-pods-1"
    refused = cli.call("chaos", "kill-pod", name, "--pod", "other", code=1)
    assert f"it has: {name}-pods-0, {name}-pods-1" in refused.stderr


def state_of(pid: int) -> str:
    """The state of a process as the kernel names it: R, S, T, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_frozen_worker_stands_still_until_it_is_thawed(
    cli: Cli, counting: tuple[str, Any]
) -> None:
    name, _ = counting
    done = cli.json("chaos", "freeze-worker", name, "--rank", "1")
    while (state := state_of(done["pid"])) == "R":  # it stops when it gets a processor
        os.sched_yield()
    assert state == "T"
    os.kill(done["pid"], signal.SIGCONT)
    refused = cli.call("chaos", "freeze-worker", name, "--rank", "9", code=1)
    assert "rank 9 of job" in refused.stderr
    assert "(running: 0, 1, 2, 3)" in refused.stderr


def test_suspend_gives_the_pods_up_and_resume_goes_on(cli: Cli, counting: tuple[str, Any]) -> None:
    name, process = counting
    pids = workers(cli.json("describe", name)).values()
    cli.call("suspend", name)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    cli.call("resume", name)
    read_until(process, lambda line: line == "step 1")
    assert cli.json("describe", name)["restarts"] == 0


def test_restart_runs_the_next_attempt_in_the_same_pods(
    cli: Cli, counting: tuple[str, Any]
) -> None:
    name, process = counting
    before = cli.json("describe", name)
    assert "restart requested" in cli.call("restart", name).stdout
    wait_recovered(process, 1)
    after = cli.json("describe", name)
    assert after["restarts"] == 1
    assert [p["agent"]["pid"] for p in after["pods"]] == [p["agent"]["pid"] for p in before["pods"]]
    assert not set(workers(after).values()) & set(workers(before).values())


def test_followed_logs_of_a_rank_go_on_over_a_restart(cli: Cli, counting: tuple[str, Any]) -> None:
    name, process = counting
    logs = cli.start("logs", "-f", name, "--rank", "2")
    read_until(logs, lambda line: line == "step 5")
    cli.call("chaos", "kill-pod", name, "--rank", "2")
    wait_recovered(process, 1)
    read_until(logs, lambda line: line == "step 0")
    cli.call("delete", name)
    logs.communicate(timeout=PATIENCE_SECONDS)
    assert logs.returncode == 0


def test_delete_returns_when_nothing_is_left(cli: Cli, counting: tuple[str, Any]) -> None:
    name, process = counting
    pids = workers(cli.json("describe", name)).values()
    assert cli.call("delete", name).stdout == f"{name}: deleted\n"
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    process.communicate(timeout=PATIENCE_SECONDS)
    refused = cli.call("describe", name, code=1)
    assert refused.stderr == f'error: no job "{name}" in namespace default; see: unbroken jobs -A\n'


def kubectl_ready(cli: Cli, name: str) -> str:
    """READY of the job in the table that `kubectl get hpj` shows."""
    with closing(api_of(cli)) as api:
        table = api.send("GET", f"{JOBS}/{name}", headers={"Accept": TABLE}).made
    titles = [column["name"] for column in table["columnDefinitions"]]
    return str(table["rows"][0]["cells"][titles.index("Ready")])


def test_jobs_and_kubectl_show_the_same_pods_as_ready(cli: Cli) -> None:
    cli.call("run", "--name", "one-truth", "--spares", "1", cli.script("one_truth.py", ""))
    assert kubectl_ready(cli, "one-truth") == "0/1"
    (row,) = (line for line in cli.call("jobs").stdout.splitlines() if "one-truth" in line)
    assert row.split()[1:4] == ["Completed", "0/1", "1"]
    assert cli.json("describe", "one-truth")["ready"] == 0


def test_ended_jobs_refuse_to_be_changed(cli: Cli) -> None:
    cli.call("run", "--name", "ended", cli.script("ended.py", ""))
    for command in ("restart", "suspend", "resume"):
        done = cli.call(command, "ended", code=1)
        assert "job ended has ended (Completed); delete it and run it again" in done.stderr


def test_names_of_jobs_are_completed(cli: Cli) -> None:
    cli.call("run", "--name", "completable", cli.script("completable.py", ""))
    environment = {
        **cli.environment,
        "_UNBROKEN_COMPLETE": "complete_bash",
        "COMP_WORDS": "unbroken describe compl",
        "COMP_CWORD": "2",
    }
    code = "import sys; sys.argv[0] = 'unbroken'; from unbroken.cli.main import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["completable"]


def test_a_node_that_is_switched_off_is_replaced_by_the_spare(make_cli: Any) -> None:
    cli = make_cli(3)
    script = cli.script("train.py", COUNT)
    process = cli.start("run", "--nnodes", "2", "--spares", "1", script, "100000")
    read_until(process, lambda line: line == "step 1")
    done = cli.json("chaos", "kill-node", "train", "--rank", "1")
    *lines, line = read_until(process, lambda line: "unbroken: incident 1: " in line)
    lines += read_until(process, lambda line: line.startswith("step "))
    assert f"on {done['node']}" in line
    assert "replaced the pod" in line
    # People are told once that the output is not read, without the address of the request.
    assert sum("the connection to the output of" in each for each in lines) <= 1
    assert not any("api/v1" in each or ":10250" in each for each in lines)
    found = cli.json("describe", "train")
    ranks = {
        worker["rank"]: pod["node"]
        for pod in found["pods"]
        for worker in (pod["agent"] or {}).get("workers", ())
    }
    assert sorted(ranks) == [0, 1]
    assert ranks[1] != done["node"]
    on = f"unbroken chaos start-node {done['node']}"
    assert done["hint"] == f"switch it on again: {on} --dir {cli.directory}"
    said = cli.call(*on.split()[1:]).stdout
    assert said == f"switched on (node {done['node']})\n"
    with closing(api_of(cli)) as api:
        api.until(
            "/api/v1/nodes", done["node"], lambda node: is_ready(node) and not is_tainted(node)
        )
    for command in (["start-node", "nobody"], ["kill-node", "--node", "nobody"]):
        refused = cli.call("chaos", *command, code=1)
        assert "there is no node nobody; there are: node-0, node-1, node-2" in refused.stderr
    process.terminate()
    process.communicate(timeout=PATIENCE_SECONDS)
    said = cli.call("chaos", "kill-node", "--node", done["node"]).stdout
    assert said.startswith(f"switched off (node {done['node']})\nswitch it on again: {on} ")
    with closing(api_of(cli)) as api:
        api.until("/api/v1/nodes", done["node"], is_tainted)


def test_commands_that_follow_end_with_the_local_cluster(make_cli: Any) -> None:
    cli = make_cli(1)
    script = cli.script("train.py", COUNT)
    cli.call("run", "--detach", script, "100000")
    logs = cli.start("logs", "-f", "train")
    read_until(logs, lambda line: line.endswith("step 1"))
    jobs = cli.start("jobs", "--watch")
    read_until(jobs, lambda line: line.startswith("train "))
    cli.call("down")
    for process in (logs, jobs):
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 1
        assert f"error: no cluster runs from {cli.directory}; start one with" in said
