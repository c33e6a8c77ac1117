"""`unbroken run`: manifests and scripts to their end, exit codes, being interrupted."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.cli_calls import COUNT, FAIL, TELL, UNBROKEN, Cli, manifest, read_until
from tests.e2e.clusters import SESSION, processes
from tests.watching import PATIENCE_SECONDS
from unbroken.kube.client import connect

pytestmark = pytest.mark.slow
MakeCli = Callable[..., Cli]
Process = subprocess.Popen[bytes]
SECRETS = "api/v1/namespaces/default/secrets"
MOVES_ON = """
import os, pathlib
from unbroken import worker
kept = pathlib.Path("kept-step")
step = int(kept.read_text()) if kept.exists() else 0
worker.progress(step)
if step < 6:
    kept.write_text(str(step + 1))
    os._exit(5)
"""


@pytest.mark.smoke
def test_a_manifest_runs_to_its_end_and_shows_rank_zero(cli: Cli) -> None:
    job = manifest("written", "sh", "-c", "echo rank $RANK of $WORLD_SIZE", replicas=2)
    (cli.folder / "written.json").write_text(json.dumps(job))
    done = cli.call("run", "written.json", "--dir", str(cli.directory))
    assert done.stdout == "rank 0 of 4\n"
    assert "written: Completed" in done.stderr
    assert cli.call("logs", "written", "--rank", "3").stdout == "rank 3 of 4\n"
    refused = cli.call("logs", "written", "--rank", "4", code=1)
    assert refused.stderr == "error: job written has ranks 0..3\n"
    everything = cli.call("logs", "written").stdout.splitlines()
    assert {f"[{rank}]: rank {rank} of 4" for rank in range(4)} <= set(everything)


def test_other_objects_of_a_manifest_are_applied_first(cli: Cli) -> None:
    job = manifest("mounts", "cat", "/data/word")
    pod = job["spec"]["replicaSpecs"][0]["template"]["spec"]
    pod["volumes"] = [{"name": "data", "configMap": {"name": "words"}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    words = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "words"}}
    text = "\n---\n".join(map(json.dumps, (words | {"data": {"word": "hello\n"}}, job)))
    assert cli.call("run", "-", stdin=text).stdout == "hello\n"


@pytest.mark.smoke
def test_a_script_gets_folder_arguments_environment_and_python(cli: Cli) -> None:
    script = cli.script("tell.py", TELL)
    environment = {**cli.environment, "CLI_TEST": "a $(RANK) b", "RANK": "77"}
    environment.pop("VIRTUAL_ENV", None)
    sizes = ("--nnodes", "2", "--nproc_per_node=2", "--standalone", "--max-restarts", "0")
    done = cli.call("run", *sizes, script, "--in=1", "$(RANK)", environment=environment)
    assert json.loads(done.stdout) == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "CLI_TEST": "a $(RANK) b",
        "JOB_RESTART_COUNT": "0",
        "argv": ["--in=1", "$(RANK)"],
        "cwd": str(cli.folder),
        "python": sys.executable,
    }
    logged = cli.json("logs", "tell")["lines"]
    told = [json.loads(line["text"]) for line in logged if line["rank"] is not None]
    assert sorted(one["RANK"] for one in told) == ["0", "1", "2", "3"]


def test_the_active_virtual_environment_runs_the_script(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    environment = {**cli.environment, "VIRTUAL_ENV": str(tmp_path)}
    script = cli.script("venv.py", "import os; print(open('/proc/self/cmdline').read())")
    done = cli.call("run", script, environment=environment)
    assert done.stdout.split("\0")[0] == f"{tmp_path}/bin/python"


@pytest.mark.smoke
def test_modules_and_programs_run_as_with_torchrun(cli: Cli) -> None:
    cli.script("as_module.py", "print(__name__, __spec__.name)")
    done = cli.call("run", "-m", "--name", "modular", "as_module")
    assert done.stdout == "__main__ as_module\n"
    done = cli.call("run", "--no-python", "--name", "program", "echo", "--detach")
    assert done.stdout == "--detach\n"


@pytest.mark.smoke
def test_the_exit_code_is_that_of_the_worker_that_failed(cli: Cli) -> None:
    script = cli.script("fail.py", FAIL)
    done = cli.call("run", "--nproc-per-node", "2", "--max-restarts", "1", script, code=7)
    assert done.stdout == "rank 0 is here\n" * 2
    told = [line for line in done.stderr.splitlines() if "unbroken: incident" in line]
    assert len(told) == 2
    assert "incident 1: rank 1 (fail-pods-0 on node-" in told[0]
    # The second failure may reach the operator together with the news that the ranks run again.
    ends = r"exit code 7; restarted the processes(; 0\.\d+ s lost|: failed again)$"
    assert re.search(ends, told[0]), told[0]
    assert "gave up: jobMaxRetryCount: the only restart is used" in told[1]
    assert done.stderr.splitlines()[-4:] == [
        told[1],
        "unbroken:   | rank 1 had enough",
        "unbroken: fail: Failed",
        "unbroken: for details: unbroken explain fail",
    ]
    assert done.stderr.count("the only restart is used") == 1


def test_a_job_that_makes_progress_outlives_more_faults_than_one_that_does_not(cli: Cli) -> None:
    found = cli.json("run", "-o", "json", cli.script("moves_on.py", MOVES_ON))
    assert (found["state"], found["restarts"], found["exitCode"]) == ("Completed", 6, 0)
    done = cli.call("run", cli.script("loops.py", "import os; os._exit(9)"), code=9)
    told = [line for line in done.stderr.splitlines() if "unbroken: incident" in line]
    assert len(told) == 4
    assert "gave up: all 3 restarts without progress are used; set jobMaxRetryCount" in told[3]


@pytest.mark.smoke
def test_json_holds_the_outcome_and_nothing_else(cli: Cli) -> None:
    script = cli.script("raise.py", "raise ValueError('no such thing')")
    found = cli.json("run", "--max-restarts", "0", "-o", "json", script, code=1)
    assert found["state"] == "Failed"
    assert found["exitCode"] == 1
    (incident,) = found["incidents"]
    assert incident["culprit"]["fault"] == "PythonException"
    assert incident["culprit"]["evidence"][-1] == "ValueError: no such thing"
    assert incident["remedy"] == "fail"


def test_names_of_scripts_never_clash_and_given_ones_are_refused(cli: Cli) -> None:
    script = cli.script("Twice_Named.py", "")
    first = cli.json("run", "--detach", "-o", "json", script)
    second = cli.json("run", "--detach", "-o", "json", script)
    assert (first["name"], second["name"]) == ("twice-named", "twice-named-2")
    done = cli.call("run", "--name", "twice-named", script, code=1)
    assert done.stderr.startswith("error: job twice-named already exists (")
    assert "unbroken delete twice-named" in done.stderr


async def test_no_secret_of_another_user_is_replaced_or_deleted(cli: Cli) -> None:
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine-environment"}}
    run = ("run", "--name", "mine", cli.script("mine.py", ""))

    async def secrets() -> dict[str, list[str]]:
        """Kinds of the owners of each Secret whose name begins with that of the job."""
        body = await client.raw("GET", SECRETS)
        found = [secret["metadata"] for secret in msgspec.json.decode(body)["items"]]
        return {
            meta["name"]: [owner["kind"] for owner in meta.get("ownerReferences", ())]
            for meta in found
            if meta["name"].startswith("mine-environment")
        }

    async with connect(cli.directory / "kubeconfig") as client:
        await client.raw("POST", SECRETS, body=theirs)
        cli.call(*run)
        first = await secrets()
        assert first.pop("mine-environment") == []
        assert list(first.values()) == [["HyperPodPyTorchJob"]]
        cli.call("delete", "mine")
        cli.call(*run)
        second = await secrets()
        assert second.pop("mine-environment") == []
        assert second.keys() - first.keys()


async def test_runs_at_the_same_time_share_no_name_environment_or_log(cli: Cli) -> None:
    script = cli.script("who.py", "import os, sys; print(os.environ['WHO'], *sys.argv[1:])")
    words = [f"{number}" for number in range(4)]

    def run(word: str) -> subprocess.Popen[str]:
        environment = {**cli.environment, "WHO": word}
        command = [*UNBROKEN, "run", script, word]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        return subprocess.Popen(
            command, cwd=cli.folder, env=environment, text=True, stderr=subprocess.PIPE, **streams
        )

    processes = [run(word) for word in words]
    said = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in said] == [f"{word} {word}\n" for word in words], said
    assert [process.returncode for process in processes] == [0] * len(words)
    jobs = {job["name"] for job in cli.json("jobs")["jobs"] if job["name"].startswith("who")}
    assert jobs == {"who", "who-2", "who-3", "who-4"}
    async with connect(cli.directory / "kubeconfig") as client:
        found = msgspec.json.decode(await client.raw("GET", SECRETS))["items"]
    secrets = [item["metadata"] for item in found if "-environment-" in item["metadata"]["name"]]
    owners = [one["ownerReferences"][0]["name"] for one in secrets]
    assert sorted(name for name in owners if name.startswith("who")) == sorted(jobs)


def test_a_name_that_another_run_takes_first_is_refused_in_one_line(cli: Cli) -> None:
    script = cli.script("taken.py", "")
    processes = [cli.start("run", "--name", "only", "--detach", script) for _ in range(3)]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1, 1], said
    refused = [text for text in said if not text.startswith("only: created")]
    assert all(text.startswith("error: job only already exists") for text in refused), said
    assert all(text.count("\n") == 1 for text in refused), said


def test_an_interrupt_without_a_terminal_stops_the_job(cli: Cli) -> None:
    script = cli.script("interrupted.py", COUNT)
    process = cli.start("run", script, "1000", SESSION)
    read_until(process, lambda line: line == "step 1")
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert "to continue it: unbroken resume interrupted" in rest
    assert "Traceback" not in rest
    assert cli.json("describe", "interrupted")["state"] == "Suspended"
    assert not processes(f"interrupted.py 1000 {SESSION}")


@pytest.mark.smoke
def test_ctrl_c_asks_once_and_the_second_stops_the_job(cli: Cli) -> None:
    with at_terminal(cli, "run", cli.script("asked.py", COUNT), "1000") as (process, shown):
        assert "step 1" in shown("step 1")
        process.send_signal(signal.SIGINT)
        asked = shown("step 8")
        process.send_signal(signal.SIGINT)
        rest = shown(None)
        assert process.wait(timeout=PATIENCE_SECONDS) == 130
    assert asked.count("stop the job? Press Ctrl-C again") == 1
    assert "to continue it: unbroken resume asked" in rest
    assert cli.json("describe", "asked")["state"] == "Suspended"


@pytest.mark.smoke
def test_a_job_that_fits_nowhere_says_why_while_it_waits(cli: Cli) -> None:
    job = manifest("huge", "true")
    container = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"example.com/net": 4}}
    (cli.folder / "huge.json").write_text(json.dumps(job))
    process = cli.start("run", "huge.json")
    *_, why, _ = read_until(process, lambda line: "--resource example.com/net=N" in line)
    assert "waits: pod huge-pods-0: Unschedulable: 0/" in why
    cli.call("delete", "huge")
    rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert "Traceback" not in rest


@pytest.mark.smoke
def test_sigterm_stops_the_job_without_asking(cli: Cli) -> None:
    process = cli.start("run", cli.script("terminated.py", COUNT), "1000", SESSION)
    read_until(process, lambda line: line == "step 1")
    process.terminate()
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143
    assert not processes(f"terminated.py 1000 {SESSION}")


def test_a_job_outlives_who_reads_its_output(cli: Cli) -> None:
    script = cli.script("unread.py", COUNT)
    command = f"{' '.join(UNBROKEN)} run {script} 20 | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=cli.folder,
        env=cli.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "step 0\n"
    assert "the reader of the output is gone; the job continues" in done.stderr
    assert "unread: Completed" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_a_job_that_is_deleted_while_followed_says_so(cli: Cli) -> None:
    process = cli.start("run", cli.script("vanishing.py", COUNT), "1000")
    read_until(process, lambda line: line == "step 1")
    cli.call("delete", "vanishing")
    rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert rest.endswith("error: job vanishing was deleted\n")


@contextmanager
def at_terminal(cli: Cli, *command: str) -> Iterator[tuple[Process, Callable[[str | None], str]]]:
    """The process, and what reads its terminal until there is a text; None: to its end."""
    ours, theirs = pty.openpty()
    environment = {**cli.environment, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        [*UNBROKEN, *command],
        cwd=cli.folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)

    def shown(text: str | None) -> str:
        found = b""
        while text is None or text.encode() not in found:
            assert select.select([ours], [], [], 60)[0], found.decode()
            try:
                found += os.read(ours, 65536)
            except OSError:
                break  # its end of the terminal is closed
        return found.decode()

    yield process, shown
    os.close(ours)


def test_a_terminal_shows_the_state_below_the_output(cli: Cli) -> None:
    script = cli.script("shown.py", COUNT)
    with at_terminal(cli, "run", "--nproc-per-node", "2", script, "40") as (process, shown):
        text = shown(None)
        assert process.wait(timeout=PATIENCE_SECONDS) == 0
    assert "step 39" in text
    assert "shown: Running, 0 restarts" in text
    assert "agent running  0:running 1:running" in text
    assert "shown: Completed" in text


def test_output_goes_on_when_the_cluster_was_killed_and_started_again(make_cli: MakeCli) -> None:
    cli = make_cli(1)
    process = cli.start("run", cli.script("outlives.py", COUNT), "60")
    read_until(process, lambda line: line == "step 5")
    pid = json.loads((cli.directory / "up.json").read_text())["pid"]
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([handle], [], [], 10)[0]
    os.close(handle)
    cli.call("up", "--detach")
    rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, rest
    steps = [line for line in rest.splitlines() if line.startswith("step ")]
    assert steps == [f"step {number}" for number in range(6, 60)]
    assert not cli.json("explain", "outlives")["incidents"]


def test_a_cluster_is_started_where_there_is_none(make_cli: MakeCli) -> None:
    cli = make_cli()
    script = cli.script("first.py", TELL)
    done = cli.call("run", "--nnodes", "2", "--spares", "1", script)
    assert f"starting a cluster of 3 node(s) in {cli.directory}" in done.stderr
    assert json.loads(done.stdout)["WORLD_SIZE"] == "2"
    assert len(cli.json("status")["nodes"]) == 3


def test_first_runs_at_the_same_time_start_one_cluster(make_cli: MakeCli) -> None:
    cli = make_cli()
    processes = [cli.start("run", cli.script(f"a{n}.py", f"print('is {n}')")) for n in range(3)]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert all(f"is {n}\n" in text for n, text in enumerate(said)), said


def test_a_run_waits_for_a_cluster_that_starts_in_another_terminal(make_cli: MakeCli) -> None:
    cli = make_cli()
    cluster = cli.start("up")
    done = cli.call("run", cli.script("beside.py", "print('ran')"))
    assert done.stdout == "ran\n"
    cli.call("down")
    cluster.communicate(timeout=PATIENCE_SECONDS)
