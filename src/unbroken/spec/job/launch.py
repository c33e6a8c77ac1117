"""The command of a container that the injected agent takes over, and the Python that it means.

The agent takes torchrun's options as they are. Options of `accelerate launch` are for each worker:
accelerate itself reads them there. A command that the agent cannot read is refused with the reason,
because a program behind a shell or another launcher would start workers of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import SpecError
from unbroken.spec.problems import Report

from .types import JobSpec

AGENTS = ("unbrokenrun", "hyperpodrun")
PYTHON = re.compile(r"(python|pypy)[\d.]*")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
ACCELERATE_MODULE = "accelerate.commands.launch"
BACKEND_OPTION = "--rdzv-backend unbroken"
EXPECTED = (
    "torchrun ..., python SCRIPT ..., python -m MODULE ..., accelerate launch ..., or "
    "hyperpodrun ..."
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A command of a user as the agent takes it over."""

    program: str
    """The program that the command names; the workers' Python is the one that runs it."""
    is_python: bool
    """The program is the workers' Python itself."""
    arguments: tuple[str, ...]
    """Arguments of the agent: options of torchrun, the script, and its arguments."""
    is_accelerate: bool = False
    """The arguments are those of `accelerate launch`, which is to read them in each worker."""


def read_launch(words: Sequence[str]) -> Launch:
    """Read the words of a container's command and args. Raises SpecError if the agent cannot run
    them."""
    if not words:
        raise SpecError(f"the container has no command: write {EXPECTED}")
    program, *rest = words
    name = program.rpartition("/")[2]
    if name == "torchrun" or name in AGENTS:
        return Launch(program, False, tuple(rest))
    if PYTHON.fullmatch(name):
        return _python(program, rest)
    arguments = _of_accelerate(name, rest)
    if arguments is not None:
        return Launch(program, False, tuple(arguments), is_accelerate=True)
    raise SpecError(f"the agent cannot take over {name!r}; expected {EXPECTED}")


def lacks_agent(container: Mapping[str, Any]) -> bool:
    """True if a container starts torchrun or accelerate, whose workers nobody else would start and
    watch.

    Without an agent each pod would train on its own, all of them into one folder.
    """
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not container.get("command"):
        return False
    name, rest = words[0].rpartition("/")[2], [word for word in words[1:] if word != "-u"]
    is_module = PYTHON.fullmatch(name) is not None and rest[:1] == ["-m"]
    module = rest[1] if is_module and len(rest) > 1 else ""
    if module == ACCELERATE_MODULE or _of_accelerate(name, rest) is not None:
        return True
    if name != "torchrun" and module not in TORCHRUN_MODULES:
        return False
    variables = {one.get("name"): one.get("value") for one in container.get("env") or ()}
    options = " ".join(words).replace("_", "-").replace("=", " ")
    return BACKEND_OPTION not in options and variables.get("PET_RDZV_BACKEND") != "unbroken"


def _of_accelerate(name: str, rest: Sequence[str]) -> Sequence[str] | None:
    """Return the arguments of accelerate's launcher; None: the command is another."""
    if name == "accelerate-launch":
        return rest
    return rest[1:] if name == "accelerate" and rest[:1] == ["launch"] else None


def _python(program: str, words: Sequence[str]) -> Launch:
    """Return the command of an interpreter."""
    rest = [*words]
    while rest and rest[0] == "-u":  # workers are never buffered
        del rest[0]
    if rest[:1] == ["-m"] and len(rest) > 1:
        module, arguments = rest[1], rest[2:]
        if module in TORCHRUN_MODULES:
            return Launch(program, True, tuple(arguments))
        if module == ACCELERATE_MODULE:
            return Launch(program, True, tuple(arguments), is_accelerate=True)
        return Launch(program, True, ("--module", "--", module, *arguments))
    if not rest or rest[0].startswith("-"):
        result = f"the option {rest[0]}" if rest else "no script"
        raise SpecError(f"{program} has {result}; expected {EXPECTED}")
    return Launch(program, True, ("--", *rest))


def training_container(pod: Mapping[str, Any]) -> str:
    """Return the name of the container that trains: the one named pytorch..., else the first.

    (Kubeflow's and the stock client's containers are named so; sidecars come in any order.)
    """
    return training_name([container["name"] for container in pod.get("containers") or ()])


def training_name(names: Sequence[str]) -> str:
    """Return the name of the container that trains, from the containers' names in their order."""
    return next((name for name in names if name.startswith("pytorch")), names[0] if names else "")


def check_launches(spec: JobSpec, report: Report) -> None:
    """Report every container that is to train and whose command the agent cannot take over."""
    for number, replica in enumerate(spec.replica_specs):
        pod = replica.template["spec"]
        name = training_container(pod)
        for index, container in enumerate(pod["containers"]):
            if container["name"] == name:
                place = f"spec.replicaSpecs[{number}].template.spec.containers[{index}].command"
                _check(container, place, report)


def _check(container: Mapping[str, Any], place: str, report: Report) -> None:
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    try:
        # Without a command the image's entry point runs, whose words are not known.
        read_launch(words if container.get("command") else ())
    except SpecError as error:
        report.invalid(place, words, str(error))
