"""Commands that the injected agent takes over, and those that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.errors import SpecError
from unbroken.spec.job.launch import Launch, read_launch
from unbroken.spec.job.parse import parse_job
from unbroken.spec.job.types import AgentSource

TAKEN = {
    "torchrun --nproc-per-node=2 train.py --lr 1": Launch(
        "torchrun", False, ("--nproc-per-node=2", "train.py", "--lr", "1")
    ),
    "/opt/conda/bin/torchrun -m package.train": Launch(
        "/opt/conda/bin/torchrun", False, ("-m", "package.train")
    ),
    "hyperpodrun --nnodes=$(NNODES) train.py": Launch(
        "hyperpodrun", False, ("--nnodes=$(NNODES)", "train.py")
    ),
    "unbrokenrun train.py": Launch("unbrokenrun", False, ("train.py",)),
    "python train.py -u --config x": Launch(
        "python", True, ("--", "train.py", "-u", "--config", "x")
    ),
    "/usr/bin/python3.9 -u train.py": Launch("/usr/bin/python3.9", True, ("--", "train.py")),
    "python3 -m package.train a": Launch(
        "python3", True, ("--module", "--", "package.train", "a")
    ),
    "python -u -m torch.distributed.run --nproc-per-node 2 train.py": Launch(
        "python", True, ("--nproc-per-node", "2", "train.py")
    ),
    "/opt/conda/bin/accelerate launch --mixed_precision bf16 train.py --lr 1": Launch(
        "/opt/conda/bin/accelerate", False,
        ("--mixed_precision", "bf16", "train.py", "--lr", "1"), is_accelerate=True,
    ),
    "accelerate-launch train.py": Launch(
        "accelerate-launch", False, ("train.py",), is_accelerate=True
    ),
    "python3 -m accelerate.commands.launch --multi_gpu -m package.train": Launch(
        "python3", True, ("--multi_gpu", "-m", "package.train"), is_accelerate=True
    ),
}  # fmt: skip
REFUSED = {
    "": "the container has no command",
    "sh -c hyperpodrun": "cannot take over 'sh'",
    "/bin/bash train.sh": "cannot take over 'bash'",
    "accelerate config": "cannot take over 'accelerate'",
    "accelerate": "cannot take over 'accelerate'",
    "deepspeed train.py": "cannot take over 'deepspeed'",
    "python": "python has no script",
    "python -c print()": "python has the option -c",
    "python -O train.py": "python has the option -O",
    "python -m": "python has the option -m",
    "pythonic train.py": "cannot take over 'pythonic'",
}


@pytest.mark.parametrize("command", TAKEN)
def test_commands_that_start_workers_are_read(command: str) -> None:
    assert read_launch(command.split()) == TAKEN[command]


@pytest.mark.parametrize("command", REFUSED)
def test_other_commands_are_refused_with_the_reason(command: str) -> None:
    with pytest.raises(SpecError, match=r"(expected|write) torchrun") as error:
        read_launch(command.split())
    assert REFUSED[command] in str(error.value)


def job(agent: str | None, *containers: dict[str, Any]) -> dict[str, Any]:
    template = {"spec": {"containers": list(containers)}}
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": "lm", "annotations": {"unbroken.dev/agent": agent} if agent else {}},
        "spec": {"replicaSpecs": [{"name": "pods", "replicas": 1, "template": template}]},
    }


def container(name: str = "main", **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "any", **fields}


def test_a_job_says_that_its_agent_is_injected() -> None:
    torchrun = container(command=["torchrun"], args=["train.py"])
    parsed = parse_job(job("injected", torchrun))
    assert not parsed.problems
    assert parsed.options.agent is AgentSource.INJECTED
    assert parse_job(job(None, torchrun)).options.agent is AgentSource.IMAGE
    assert parse_job(job("image", torchrun)).options.agent is AgentSource.IMAGE
    (problem,) = parse_job(job("yes", torchrun)).problems
    assert "unbroken.dev/agent" in str(problem)


def test_a_job_whose_command_cannot_be_taken_over_is_refused_at_its_place() -> None:
    given = [container("sidecar", command=["sh", "-c", "x"])]
    given.append(container("pytorch", command=["sh", "-c", "torchrun train.py"]))
    (problem,) = parse_job(job("injected", *given)).problems
    assert "spec.replicaSpecs[0].template.spec.containers[1].command" in str(problem)
    assert "cannot take over 'sh'" in str(problem)
    assert not parse_job(job(None, *given)).problems


@pytest.mark.parametrize("fields", [{}, {"args": ["torchrun", "train.py"]}, {"command": []}])
def test_the_entry_point_of_an_image_is_not_known(fields: dict[str, Any]) -> None:
    (problem,) = parse_job(job("injected", container(**fields))).problems
    assert "the container has no command" in str(problem)


@pytest.mark.parametrize("command", [["torchrun", 1], [None], "torchrun", 7, {"a": 1}])
def test_a_command_of_another_type_is_refused(command: object) -> None:
    assert parse_job(job("injected", container(command=command))).problems
