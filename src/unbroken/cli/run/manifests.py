"""The manifest of `unbroken run`: read from a file, or made for a script."""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.agent.shell import capture, is_text
from unbroken.cli.documents import read_documents
from unbroken.errors import SpecError
from unbroken.spec.job.parse import OTHER_KIND, Parsed, load_job, normalized
from unbroken.spec.job.types import GROUP, KIND, VERSION
from unbroken.spec.keys import OWN_GROUP

Object = dict[str, Any]
SUFFIXES = (".yaml", ".yml", ".json")
STOP_SECONDS = 10
"""Grace period of a script's pods after SIGTERM."""
KINDS_SHOWN, KIND_CHARACTERS = 5, 63
"""Most kinds of a file's objects that an error names, and most characters of each."""
NAME_LENGTH = 40
"""Longest name of a script's job: the names of its pods have 63 characters at most."""


@dataclass(frozen=True, slots=True)
class JobManifest:
    """A job to create, and the objects that it needs."""

    job: Object
    parsed: Parsed
    others: tuple[Object, ...] = ()


def read(path: str) -> JobManifest:
    """Read the only job of a file (`-`: standard input) and its other objects; SpecError."""
    documents = read_documents(path)
    for item in documents:
        if not isinstance(item, dict) or not isinstance(item.get("kind"), str):
            raise SpecError(f"{path}: every document must be an object with a kind")
    jobs = [item for item in documents if item["kind"] in (KIND, OTHER_KIND)]
    if documents and not jobs:
        kinds = sorted({item["kind"][:KIND_CHARACTERS] for item in documents})
        named = ", ".join(kinds[:KINDS_SHOWN] + ["others"] * (len(kinds) > KINDS_SHOWN))
        raise SpecError(
            f"{path} holds no {KIND}, but {named}; create it with: kubectl apply -f {path}"
        )
    if len(jobs) != 1:
        raise SpecError(f"{path} holds {len(jobs)} objects of kind {KIND}; it must hold one")
    job = normalized(jobs[0])
    return JobManifest(job, load_job(job), tuple(item for item in documents if item is not jobs[0]))


def renamed(manifest: JobManifest, name: str) -> JobManifest:
    """The manifest with another name of the job."""
    metadata = {**manifest.job["metadata"], "name": name}
    job = {**manifest.job, "metadata": metadata}
    return JobManifest(job, load_job(job), manifest.others)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of the job of a script."""

    nnodes: int = 1
    nproc_per_node: str = "1"
    spares: int = 0
    retries_max: int | None = None
    """Restarts of the job; None for no limit."""


@dataclass(frozen=True, slots=True)
class RunScript:
    """A script to run as torchrun would run it."""

    arguments: Sequence[str]
    """torchrun's options, the script, and its arguments."""
    program: str
    """The script, as it was typed."""
    is_module: bool = False
    sizes: Sizes = Sizes()


def check_script(script: RunScript, name: str | None) -> tuple[str, ...]:
    """Check a script and return notes about options without effect; SpecError if it cannot run."""
    from unbroken.agent.options import parse, workers_per_node

    notes = parse(script.arguments, {}).notes
    workers_per_node(script.sizes.nproc_per_node, os.environ)  # "gpu" without a GPU
    of_script(script, name or script_name(script.program, ()))
    if script.is_module:
        return notes
    if "--no-python" in script.arguments[: script.arguments.index(script.program)]:
        if shutil.which(script.program) is None:
            raise SpecError(f"no such program: {script.program}")
    elif not Path(script.program).exists():
        raise SpecError(f"no such script: {script.program} (in {folder()})")
    elif Path(script.program).is_dir() and not any(
        Path(script.program, name).is_file() for name in ("__main__.py", "__main__.pyc")
    ):
        raise SpecError(f"{script.program} is a folder without __main__.py: name a script in it")
    return notes


def folder() -> str:
    """The folder of the command; SpecError if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise SpecError("this folder was deleted; run the script from another one") from None


def is_manifest(program: str) -> bool:
    """True for `-` (standard input) and for names of YAML and JSON files."""
    return program == "-" or program.endswith(SUFFIXES)


def script_name(program: str, taken: Iterable[str]) -> str:
    """A free name for the job of a script."""
    stem = Path(program).stem if program.endswith(".py") else program.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:NAME_LENGTH].strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".strip("-")
    used = set(taken)
    candidates = (name if number == 1 else f"{name}-{number}" for number in range(1, 2**31))
    return next(candidate for candidate in candidates if candidate not in used)


def of_script(script: RunScript, name: str) -> JobManifest:
    """A job whose pods run the script in this folder; `released` adds the environment."""
    sizes = script.sizes
    container = {
        "name": "pytorch",
        "image": f"{OWN_GROUP}/this-machine",
        "workingDir": folder() if is_text(folder()) else "/",
        "command": [sys.executable, "-P", "-m", "unbroken.agent"],
        # Kubernetes would replace `$(NAME)`.
        "args": [as_text(word).replace("$", "$$") for word in script.arguments],
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
    return JobManifest(job, load_job(job))


def environment_secret(job: Object, variables: Mapping[str, str]) -> Object:
    """A Secret of this job with its environment, which may contain passwords and tokens.

    The API server chooses its name, so that no Secret of another job or user is replaced.
    """
    owner = {key: job["metadata"][key] for key in ("name", "uid")}
    owner |= {key: job[key] for key in ("apiVersion", "kind")}
    prefix = f"{job['metadata']['name']}-environment-"
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"generateName": prefix, "ownerReferences": [owner]},
        "stringData": dict(variables),
    }


def held(job: Object) -> Object:
    """The job of a script as it is created: it starts with the patch of `released`."""
    policy = {**job["spec"]["runPolicy"], "suspend": True}
    return {**job, "spec": {**job["spec"], "runPolicy": policy}}


def released(job: Object, secret: str) -> Object:
    """The patch that starts the job of a script, with this Secret as its pods' environment."""
    replicas = copy.deepcopy(job["spec"]["replicaSpecs"])
    replicas[0]["template"]["spec"]["containers"][0]["envFrom"] = [{"secretRef": {"name": secret}}]
    return {"spec": {"runPolicy": {"suspend": False}, "replicaSpecs": replicas}}


def environment(
    script: RunScript, stdin: str = "", environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment variables of a script's pods; `stdin` as in `agent.shell.capture`."""
    captured = capture(environ, script.arguments, folder(), stdin)
    return {"PYTHON_EXEC": python(environ), **captured}


def as_text(word: str) -> str:
    """The word as far as UTF-8 can hold it."""
    return word.encode(errors="surrogateescape").decode(errors="replace")


def python(environ: Mapping[str, str]) -> str:
    """The Python of the active virtual environment, else the one that runs this command."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        path = Path(environ.get(variable, "/nonexistent"), "bin", "python")
        if path.exists():
            return str(path)
    return sys.executable
