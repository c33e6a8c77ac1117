"""What `unbroken run` sends: a manifest read from a file, or one made for a script."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.cli.documents import read_documents
from unbroken.errors import SpecError
from unbroken.spec.job.parse import OTHER_KIND, Parsed, load_job, normalized
from unbroken.spec.job.types import GROUP, KIND, VERSION
from unbroken.spec.keys import OWN_GROUP

Object = dict[str, Any]
SUFFIXES = (".yaml", ".yml", ".json")
STOP_SECONDS = 10
"""A script's pods get this long to end after SIGTERM."""
NAME_LENGTH = 40
"""Leaves room for the names of pods, which are host names of 63 characters at most."""

# Variables of the shell's own, and what every worker is given anew.
_LEFT_OUT = re.compile(
    r"_|PWD|OLDPWD|SHLVL|KUBECONFIG|UNBROKEN_.*|NNODES|NPROC_PER_NODE|AGENT_(HOST|PORT)"
    r"|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|PET_.*"
    r"|TORCHELASTIC_.*|COLUMNS|LINES"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A job to be created, and the objects that it needs."""

    job: Object
    parsed: Parsed
    others: tuple[Object, ...] = ()


def read(path: str) -> Manifest:
    """The one job in a file (`-`: standard input), and what else is in it; SpecError."""
    found = read_documents(path)
    for one in found:
        if not isinstance(one, dict) or not isinstance(one.get("kind"), str):
            raise SpecError(f"{path}: every document must be an object with a kind")
    jobs = [one for one in found if one["kind"] in (KIND, OTHER_KIND)]
    if len(jobs) != 1:
        raise SpecError(f"{path} holds {len(jobs)} objects of kind {KIND}; it must hold one")
    job = normalized(jobs[0])
    return Manifest(job, load_job(job), tuple(one for one in found if one is not jobs[0]))


def renamed(manifest: Manifest, name: str) -> Manifest:
    """The same under another name."""
    metadata = {**manifest.job["metadata"], "name": name}
    job = {**manifest.job, "metadata": metadata}
    return Manifest(job, load_job(job), manifest.others)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the job of a script is."""

    nnodes: int = 1
    nproc_per_node: str = "1"
    spares: int = 0
    retries_max: int | None = None
    """None: no limit."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script to be run as torchrun would run it."""

    arguments: Sequence[str]
    """torchrun's options, the script, and its arguments."""
    program: str
    """The script, as it was typed."""
    is_module: bool = False
    sizes: Sizes = Sizes()


def check_script(script: Script, name: str | None) -> tuple[str, ...]:
    """Notes for the user about options without effect; SpecError if the script cannot run."""
    from unbroken.agent.options import parse

    notes = parse(script.arguments, {}).notes
    of_script(script, name or script_name(script.program, ()))
    if script.is_module:
        return notes
    if "--no-python" in script.arguments[: script.arguments.index(script.program)]:
        if shutil.which(script.program) is None:
            raise SpecError(f"no such program: {script.program}")
    elif not Path(script.program).is_file():
        raise SpecError(f"no such script: {script.program} (in {os.getcwd()})")
    return notes


def is_manifest(program: str) -> bool:
    """True for `-` (standard input) and for files that are manifests by their names."""
    return program == "-" or program.endswith(SUFFIXES)


def script_name(program: str, taken: Iterable[str]) -> str:
    """A name for the job of a script that no other job has."""
    stem = Path(program).stem if program.endswith(".py") else program.rpartition("/")[2]
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:NAME_LENGTH].strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".strip("-")
    used = set(taken)
    candidates = (name if number == 1 else f"{name}-{number}" for number in range(1, 2**31))
    return next(one for one in candidates if one not in used)


def of_script(script: Script, name: str) -> Manifest:
    """A job whose pods run the script here: in this folder, with this shell's environment."""
    sizes = script.sizes
    container = {
        "name": "pytorch",
        "image": f"{OWN_GROUP}/this-machine",
        "workingDir": os.getcwd(),
        "command": [sys.executable, "-P", "-m", "unbroken.agent"],
        # Kubernetes replaces `$(NAME)`; a script means what it says.
        "args": [word.replace("$", "$$") for word in script.arguments],
        "envFrom": [{"secretRef": {"name": environment_name(name)}}],
    }
    replica: Object = {
        "name": "pods",
        "replicas": sizes.nnodes,
        "template": {
            "spec": {"containers": [container], "terminationGracePeriodSeconds": STOP_SECONDS}
        },
    }
    if sizes.spares:
        replica["spares"] = sizes.spares
    policy: Object = {"cleanPodPolicy": "None"}
    if sizes.retries_max is not None:
        policy["jobMaxRetryCount"] = sizes.retries_max
    spec = {
        "nprocPerNode": sizes.nproc_per_node,
        "runPolicy": policy,
        "replicaSpecs": [replica],
    }
    job: Object = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": spec,
    }
    return Manifest(job, load_job(job))


def environment_name(job: str) -> str:
    """Of the Secret that holds the environment of a script's job."""
    return f"{job}-environment"


def environment_secret(job: str, environ: Mapping[str, str] = os.environ) -> Object:
    """This shell's environment.  A Secret: it is full of them."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": environment_name(job)},
        "stringData": environment(environ),
    }


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a script's pods get."""
    found = {
        name: value
        for name, value in environ.items()
        if _VARIABLE.fullmatch(name) and not _LEFT_OUT.fullmatch(name)
    }
    return {"PYTHON_EXEC": python(environ), **found}


def python(environ: Mapping[str, str]) -> str:
    """The interpreter that the user means: of the active environment, else the one of this."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        found = Path(environ.get(variable, "/nonexistent"), "bin", "python")
        if found.exists():
            return str(found)
    return sys.executable
