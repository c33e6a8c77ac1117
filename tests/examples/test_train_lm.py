"""The example trains, is killed, and resumes to the same end; its manifest is valid."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.agent.running import linked, running, start, stop
from tests.watching import PATIENCE_SECONDS
from unbroken.spec.job.parse import parse_job
from unbroken.wire.agent import AgentState

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--steps=60", "--batch=4", "--width=32", "--print-every=5", "--checkpoint-every=20")


@pytest.mark.parametrize("name", ["train_lm.yaml", "fsdp/llama.yaml"])
def test_the_manifest_is_a_good_one(name: str) -> None:
    claim, job = yaml.safe_load_all((EXAMPLES / name).read_text())
    parsed = parse_job(job)
    assert not parsed.problems
    assert not parsed.warnings
    (replica,) = parsed.spec.replica_specs
    assert (replica.replicas, replica.spares, parsed.spec.nproc_per_node) == (2, 1, "2")
    volumes = {volume["name"]: volume for volume in replica.template["spec"]["volumes"]}
    assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def launch(directory: Path) -> list[subprocess.Popen[str]]:
    """Start two ranks of the example."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # Two ranks cannot share a GPU.
    world = {
        "CUDA_VISIBLE_DEVICES": "",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, EXAMPLES / "train_lm.py", *SMALL, f"--checkpoint-dir={directory}"]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **world, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]


def finish(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """Wait until all ranks have ended well; return the lines of rank 0."""
    text, _ = ranks[0].communicate(timeout=PATIENCE_SECONDS)
    assert [rank.wait(timeout=PATIENCE_SECONDS) for rank in ranks] == [0, 0]
    return text.splitlines()


@pytest.mark.slow
@pytest.mark.heavy
def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = finish(launch(tmp_path / "whole"))
    ranks = launch(tmp_path / "killed")
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        if line.startswith("step 45 "):
            break
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    ranks[0].stdout.close()
    resumed = finish(launch(tmp_path / "killed"))
    assert resumed[0] == "resumed at step 40"
    assert resumed[1:] == [line for line in whole if int(line.split()[1]) >= 40]
    first, last = (float(whole[index].split()[-1]) for index in (0, -1))
    assert whole[-1].startswith("step 59 ")
    assert last < 0.75 * first


@pytest.mark.heavy
@pytest.mark.slow
async def test_a_rank_that_is_killed_costs_the_other_no_process_and_no_step(tmp_path: Path) -> None:
    example = str(EXAMPLES / "train_lm.py")
    endless = ("--steps=100000", "--batch=1", "--width=32", "--snapshot-every=1", "--print-every=1")

    async def scenario() -> tuple[int, ...]:
        async with linked(agent) as operator:
            ready = await operator.state(AgentState.READY)
            operator.send(start(master_port=ready.offered_port))
            await asyncio.to_thread(agent.stdout.wait_for, r"step 30 loss")
            os.kill(operator.reports[-1].workers[1].pid, signal.SIGKILL)
            await operator.state(AgentState.FAULTED)
            operator.send(stop(0, restart_mode="in_process_restart"))
            ready = await operator.state(AgentState.READY)
            operator.send(start(1, master_port=ready.offered_port))
            await asyncio.to_thread(agent.stdout.wait_for, r"resumed at step \d+ from")
            return ready.kept

    with running(tmp_path, example, *endless, CUDA_VISIBLE_DEVICES="") as agent:
        assert await scenario() == (0,)
        text = agent.stdout.wait_for(r"(?s).*resumed at step (\d+) from memory")
    told = [int(step) for step in re.findall(r"step (\d+) loss", text[0].decode())]
    assert int(text[1]) - max(told) in (0, 1, 2)
