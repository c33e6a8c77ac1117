"""Much-used packages of PyPI: is a worker that imports one warm, and equal to a cold start?

    python benchmarks/imports.py --env ENV --json FILE
    python benchmarks/imports.py --env ENV --packages numpy,torch

Each package has a script of two lines: it imports the package and uses it. Per package:

1. A cold start of a rank says which modules it imports, and prints all that they hold
   (`tests/worker/module_values.py`). Another cold start shows which values differ in any case.
2. A template imports these modules, as an agent has it do. A worker is parked from it and prepared
   for its rank.
3. The worker runs the script. It is warm if it did not start anew, and equal if its modules hold
   what those of the cold start hold.

Two kinds of differing values are counted by themselves. A list in another order was made from a set
of objects, whose order depends on their addresses. What differs in the same way in a cold start
that has forked is what libraries themselves change in a forked child.

A package that ENV lacks is a row that says so. The hash seed is fixed: it decides the order of
sets.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from arguments import output_file, words
from recovery_trials import say

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.watching import PATIENCE_SECONDS
from tests.worker import module_values
from tests.worker.module_values import differences, values
from tests.worker.templates import BOOT, Template, masked
from unbroken.wire.warm import IN_PROCESS_VARIABLE, LATER, LEARNT_VARIABLE

RANK = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0"}
ATTEMPT = {"MASTER_PORT": "29400"}
NAMES_IN_MESSAGE = 500
SHOWN_MAX = 20
"""Differing values that are kept of a package, at most."""
SECONDS, BEFORE, AFTER = "processor seconds", "modules before", "modules after"
PROGRAM = f"""\
import sys, time; print({BEFORE!r}, *sys.modules, sep="\\t"); _began = time.process_time()
{{lines}}
print({SECONDS!r}, time.process_time() - _began, sep="\\t")
print({AFTER!r}, *sys.modules, sep="\\t")
{{forks}}
import runpy; runpy.run_path({module_values.__file__!r}, run_name="__main__")
"""
FORKS = """\
import os; _pid = os.fork()
if _pid: os._exit(os.waitstatus_to_exitcode(os.waitpid(_pid, 0)[1]))
"""
COLD_STARTS_MAX = 5
"""Cold starts of a package of which values differ; else there are two. The last one of a set of two
functions is the same in half of any two starts."""
_PLACE = re.compile(r"\[\d+\]$")
Values = dict[str, str]
Object = dict[str, Any]


@dataclass(frozen=True)
class Package:
    """A package as PyPI names it, and a script that imports and uses it."""

    name: str
    lines: str


PACKAGES = tuple(
    Package(name, f"{first}\n{second}")
    for name, first, second in (
        ("accelerate", "import accelerate", "accelerate.Accelerator"),
        ("aiohttp", "import aiohttp", "aiohttp.ClientSession"),
        ("boto3", "import boto3", "boto3.session.Session(region_name='eu-west-1').client('s3')"),
        ("cryptography", "import cryptography", "from cryptography import x509"),
        ("datasets", "import datasets", "datasets.Dataset.from_dict({'a': [1, 2]})"),
        ("deepspeed", "import deepspeed", "deepspeed.DeepSpeedEngine"),
        ("fastapi", "import fastapi", "fastapi.FastAPI()"),
        ("grpcio", "import grpc", "grpc.insecure_channel"),
        ("h5py", "import h5py", "h5py.File('x', 'w', driver='core', backing_store=False).close()"),
        ("huggingface_hub", "import huggingface_hub", "huggingface_hub.snapshot_download"),
        ("hydra-core", "import hydra", "hydra.main"),
        ("lightning", "import lightning", "lightning.Trainer"),
        ("matplotlib", "import matplotlib.pyplot as plot", "plot.figure"),
        ("mlflow-skinny", "import mlflow", "mlflow.start_run"),
        ("nltk", "import nltk", "nltk.word_tokenize"),
        ("numba", "import numba", "numba.jit"),
        ("numpy", "import numpy", "numpy.linalg.inv(numpy.eye(3))"),
        ("opencv-python-headless", "import cv2", "cv2.resize"),
        ("pandas", "import pandas", "pandas.DataFrame({'a': [1, 2]}).sum()"),
        ("peft", "import peft", "peft.LoraConfig()"),
        ("pillow", "import PIL.Image", "PIL.Image.new('L', (2, 2)).resize((4, 4))"),
        ("polars", "import polars", "polars.DataFrame({'a': [1, 2]})"),
        ("protobuf", "import google.protobuf", "from google.protobuf import struct_pb2"),
        ("psutil", "import psutil", "psutil.cpu_count()"),
        ("pyarrow", "import pyarrow", "pyarrow.table({'a': [1, 2]})"),
        ("pydantic", "import pydantic", "pydantic.create_model('A', a=(int, 1))()"),
        ("PyYAML", "import yaml", "yaml.safe_load('a: 1')"),
        ("requests", "import requests", "requests.Session()"),
        ("rich", "import rich", "from rich import progress"),
        ("scikit-learn", "import sklearn", "from sklearn import linear_model"),
        ("scipy", "import scipy", "from scipy import optimize, stats"),
        ("tensorboard", "import tensorboard", "from torch.utils import tensorboard as writer"),
        ("tiktoken", "import tiktoken", "tiktoken.list_encoding_names()"),
        ("torch", "import torch", "torch.nn.Linear(2, 2)(torch.ones(2))"),
        ("transformers", "import transformers", "transformers.Trainer, transformers.GPT2Model"),
        ("wandb", "import wandb", "wandb.init"),
    )
)


@dataclass(slots=True)
class Row:
    """Findings for one package."""

    package: str
    lines: str
    version: str = ""
    modules: int = 0
    """Modules that the two lines import in a cold start. Imports that failed are not among them."""
    warm_modules: int = 0
    """Those of them that the parked worker had imported before."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reasons by module that neither template nor parked worker imports."""
    is_warm: bool = False
    why_cold: str = ""
    values: int = 0
    """Values that were compared: equal in cold starts."""
    differ: int = 0
    """Values that differ."""
    different: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    """The first of them, cold and warm, by path."""
    reordered: int = 0
    """Lists with the same values in another order."""
    after_fork: int = 0
    """Values that differ as they do in a cold start that has forked."""
    cold_seconds: float = 0.0
    """Processor time of the two lines."""
    warm_seconds: float = 0.0
    why_not: str = ""
    """Why nothing was compared."""


class Failed(Exception):
    """A script or a template failed; the text says how."""


def try_package(package: Package, python: Path, folder: Path) -> Row:
    """Compare a warm start with cold ones."""
    row = Row(package.name, package.lines)
    try:
        row.version = version(python, package.name)
        environment = {k: v for k, v in os.environ.items() if k not in {**RANK, **ATTEMPT}}
        # Imports are compared, and not what a template changes in torch for fast restarts.
        environment |= {"PYTHONHASHSEED": "0", IN_PROCESS_VARIABLE: "off"}
        environment.pop("PYTHONPATH", None)
        (folder / "train.py").write_text(PROGRAM.format(lines=package.lines, forks=""))
        (folder / "forked.py").write_text(PROGRAM.format(lines=package.lines, forks=FORKS))
        start = partial(cold_start, python, folder, environment)
        learned, first = start()
        # Looking at all values may import more.
        names = [name for name in learned if name in names_in(first, AFTER)]
        warm = warm_start(row, names, python, folder, environment)
        compare(row, [first], warm, start)
    except (Failed, OSError) as error:
        row.why_not = str(error)
    return row


def version(python: Path, name: str) -> str:
    """Return the version of an installed package."""
    asks = "import sys; from importlib.metadata import version as v; print(v(sys.argv[1]))"
    command = [str(python), "-c", asks, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed("not installed")
    return done.stdout.strip()


def cold_start(
    python: Path, folder: Path, environment: Mapping[str, str], script: str = "train.py"
) -> tuple[list[str], Values]:
    """Run the script in a new interpreter; return the modules that it imported, and its values."""
    learnt = os.memfd_create("learnt")
    try:
        done = subprocess.run(
            [str(python), "-u", BOOT, "run", "script", script],
            cwd=folder,
            env={**environment, **RANK, **ATTEMPT, LEARNT_VARIABLE: str(learnt)},
            pass_fds=[learnt],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        names = os.pread(learnt, os.fstat(learnt).st_size, 0).decode().split()
    finally:
        os.close(learnt)
    if done.returncode != 0:
        raise Failed(f"a cold start ended with {done.returncode}: {last_line(done.stderr)}")
    return names, values(masked(done.stdout))


def warm_start(
    row: Row, names: Sequence[str], python: Path, folder: Path, environment: Mapping[str, str]
) -> Values:
    """Run the script in a parked worker; return its values, and note in the row how it started."""
    with Template(["script", "train.py"], folder, environment, str(python)) as template:
        template.pair.settimeout(PATIENCE_SECONDS)
        *parts, last = parts_of(names)
        for part in parts:
            template.send({"type": "import", "modules": part, "more": True})
        answer = template.prepare(*last)
        if answer["type"] != "ready":
            raise Failed(f"the template is {answer['type']}: {answer.get('reason')}")
        reasons = {**answer["skipped"], **template.found["left_out"]}
        left: dict[str, str] = {}
        worker = template.park()
        while (prepared := worker.prepare(RANK, left))["left_out"]:
            left |= prepared["left_out"]
            worker.end()
            worker = template.park()
        row.left_out = remaining(reasons, left)
        worker.start(environment={**environment, **RANK, **ATTEMPT})
        said = worker.said()
        row.is_warm, row.why_cold = said["type"] == "end", said.get("reason", "")
        ended = worker.end()
    if ended.code != 0:
        raise Failed(f"the warm start ended with {ended.code}: {last_line(ended.stderr)}")
    return values(ended.stdout)


def parts_of(names: Sequence[str]) -> list[Sequence[str]]:
    """Return the names in messages that are not too long; at least one, which may be empty."""
    starts = range(0, max(1, len(names)), NAMES_IN_MESSAGE)
    return [names[start : start + NAMES_IN_MESSAGE] for start in starts]


def remaining(reasons: Mapping[str, str], left: Mapping[str, str]) -> dict[str, str]:
    """Return what neither imports: not what a parked worker imports for its rank."""
    return {name: why for name, why in reasons.items() if not why.endswith(LATER)} | {**left}


def compare(
    row: Row, cold: list[Values], warm: Values, start: Callable[..., tuple[list[str], Values]]
) -> None:
    """Note what the two lines import, and which values differ; `start` makes cold starts."""
    first = cold[0]
    imported = names_in(first, AFTER) - names_in(first, BEFORE)
    row.modules = len(imported)
    row.warm_modules = len(imported & names_in(warm, BEFORE))
    row.left_out = {name: why for name, why in row.left_out.items() if name in imported}
    for path in (BEFORE, AFTER):
        warm[path] = first[path]
    cold.append(start()[1])
    while differences(cold, warm) and len(cold) < COLD_STARTS_MAX:
        cold.append(start()[1])
    row.cold_seconds = min(float(one[SECONDS]) for one in cold)
    row.warm_seconds = float(warm[SECONDS])
    row.values = sum(all(one.get(path) == first[path] for one in cold) for path in first)
    found = differences(cold, warm)
    lists = reordered([*found], first, warm)
    row.reordered = len(lists)
    found = {path: found[path] for path in found if _PLACE.sub("", path) not in lists}
    forked = start("forked.py")[1] if found else {}
    ours = {path: found[path] for path in found if not is_of_fork(path, first, forked, warm)}
    row.differ, row.after_fork = len(ours), len(found) - len(ours)
    row.different = {path: ours[path] for path in [*ours][:SHOWN_MAX]}


def reordered(paths: Sequence[str], cold: Values, warm: Values) -> set[str]:
    """Return the lists among these paths that hold the same values in another order."""
    lists = {_PLACE.sub("", path) for path in paths if _PLACE.search(path)}
    return {one for one in lists if members(one, cold) == members(one, warm)}


def members(path: str, found: Values) -> list[str]:
    """Return the values in a list, sorted."""
    result = []
    while (value := found.get(f"{path}[{len(result)}]")) is not None:
        result.append(value)
    return sorted(result)


def is_of_fork(path: str, cold: Values, forked: Values, warm: Values) -> bool:
    """True for a value that a fork changes; a new one may be another in each process."""
    is_new = path not in cold and path in forked and path in warm
    return is_new or forked.get(path) == warm.get(path)


def names_in(found: Mapping[str, str], key: str) -> set[str]:
    """Return the modules that a script has listed."""
    return {*found[key].split("\t")}


def last_line(text: str) -> str:
    """Return the last line of an output."""
    return (text.strip().splitlines() or [""])[-1][:300]


HEADS = (
    "package",
    "warm",
    "modules",
    "left out, and why",
    "values",
    "differ",
    "other order",
    "after a fork",
    "cold, s",
    "warm, s",
)


def table(rows: Sequence[Row]) -> str:
    """Rows of Markdown."""
    lines = [HEADS, ("---",) * len(HEADS), *map(shown, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(row: Row) -> tuple[str, ...]:
    """Return the cells of a row."""
    name = f"{row.package} {row.version}".strip()
    if row.why_not:
        return (name, row.why_not.replace("|", "\\|"), *[""] * 8)
    return (
        name,
        "yes" if row.is_warm else f"no: {row.why_cold}",
        f"{row.warm_modules} of {row.modules}",
        ", ".join(summary(row.left_out)),
        f"{row.values:,}",
        f"{row.differ:,}",
        str(row.reordered),
        str(row.after_fork),
        f"{row.cold_seconds:.2f}",
        f"{row.warm_seconds:.2f}",
    )


def summary(left_out: Mapping[str, str]) -> Iterator[str]:
    """Yield each reason, with a module of it or how many there are."""
    for why, count in Counter(left_out.values()).most_common():
        names = [name for name in left_out if left_out[name] == why]
        what = f"`{names[0]}`" if count == 1 else f"{count} modules"
        yield f"{what}: {why}".replace("|", "\\|")


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    names = [one.name for one in PACKAGES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", type=Path, required=True, help="environment with the packages")
    parser.add_argument("--packages", type=words(names), default=names, help="(default all)")
    parser.add_argument("--json", type=output_file, help="write all that was seen to this file")
    options = parser.parse_args(given)
    options.env = options.env.absolute()
    if not (options.env / "bin/python").exists():
        parser.error(f"{options.env} is no environment: it has no bin/python")
    return options


def document(rows: Sequence[Row]) -> Object:
    """Return all that was seen."""
    machine = f"Linux {platform.release()}, Python {platform.python_version()}"
    return {
        "machine": machine,
        "command": shlex.join(sys.argv[1:]),
        "packages": [*map(asdict, rows)],
    }


def measure(options: argparse.Namespace, note: Callable[[Row], None]) -> None:
    """Try each package, in a folder of its own."""
    for package in PACKAGES:
        if package.name in options.packages:
            with tempfile.TemporaryDirectory(prefix="unbroken-imports-") as folder:
                note(try_package(package, options.env / "bin/python", Path(folder)))


def main() -> int:
    """Try all, and print the table; 1 if a package is cold or not equal."""
    options = parse()
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        say(" | ".join(shown(row)))
        if options.json:
            options.json.write_text(json.dumps(document(rows), indent=1) + "\n")

    try:
        measure(options, note)
    except KeyboardInterrupt:
        say("interrupted: what was seen so far")
    print(table(rows))
    return int(len(rows) < len(options.packages) or not all(map(is_good, rows)))


def is_good(row: Row) -> bool:
    """True for a package that is warm and equal."""
    return row.is_warm and not row.differ and not row.why_not


if __name__ == "__main__":
    raise SystemExit(main())
