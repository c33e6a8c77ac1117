"""Install the wheel in clean environments and run a job of two ranks in each.

    python tools/matrix.py                    # every Python that is found, by pip, pipx and uvx
    python tools/matrix.py --short            # the Python of this command, by pip
    python tools/matrix.py --python /usr/bin/python3.14 --wheel build/dist/unbroken-....whl
    python tools/matrix.py --workers VENV   # workers on a virtual environment that has torch

A row is one environment. The wheel must install with its dependencies, and `unbroken --version` and
`unbroken --help` must work. `unbroken run` must complete a job of two pods whose two ranks exchange
messages (without torch), and `unbroken down` must end the local cluster. The row "lowest" has the
lowest versions that pyproject.toml allows, and also runs some of the tests.

With `--workers`, agents run on the Python of this command and workers on that of the environment.
The example trains on four ranks, one of them is killed, and the job must complete: once with a
checkpoint, once with snapshots in memory and in-process restart.

Exit status 1: a check failed. Results are added to build/matrix/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build/matrix"
RESULTS = WORK / "results.json"
MINORS = (11, 12, 13, 14)
VARIABLE = "UNBROKEN_PYTHONS"
"""Programs of more Pythons to try, separated by colons."""
LIMIT_SECONDS = 600.0
RANKS = """\
import os, socket, sys
rank, where = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(where) as server:
        server.settimeout(60)
        peer, _ = server.accept()
        with peer:
            said = peer.recv(16).decode()
else:
    while True:
        try:
            with socket.create_connection(where, 1) as peer:
                peer.sendall(b"rank 1")
            break
        except OSError:
            continue
    said = "-"
print(f"rank {rank} of {os.environ['WORLD_SIZE']} heard {said}, python 3.{sys.version_info.minor}")
"""
"""A script of two ranks that needs the standard library only."""
TESTS = (
    *("tests/spec", "tests/wire", "tests/observe"),
    *(f"tests/cli/test_cli_{one}.py" for one in ("arguments", "options", "views", "story")),
)
"""Tests of the row of lowest versions: readers, codecs, and what typer and rich make of them."""
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "jsonschema", "pydantic")


TRAIN = ("--nnodes", "2", "--nproc-per-node", "2", "train_lm.py", "--checkpoint-dir", "saved")
SMALL = ("--steps", "300", "--batch", "4", "--width", "32")
WAYS = {"checkpoint": (), "snapshots": ("--snapshot-every", "1")}
"""Options of the example by how its state comes back."""


@dataclass(frozen=True)
class Row:
    """One environment and what came of it."""

    python: str
    installer: str
    dependencies: str
    result: str
    seconds: float


class FailedError(Exception):
    """A check failed."""


def lowest(project: Mapping[str, object]) -> list[str]:
    """Constraints with the lowest version that each requirement of the project allows."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    wanted = [*_texts(project["dependencies"]), *_texts(extras["otel"])]
    found = []
    for one in wanted:
        match = re.fullmatch(r"([\w.-]+)>=([\w.]+)", one)
        if match is None:
            raise ValueError(f"{one}: a dependency must have the form NAME>=VERSION")
        found.append(f"{match[1]}=={match[2]}")
    return found


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(one) for one in value]


def pythons() -> Iterator[str]:
    """Programs of the versions to try that this machine has, one for each."""
    extra = [one for one in os.environ.get(VARIABLE, "").split(":") if one]
    homes = [str(one) for one in sorted(Path.home().glob(".pyenv/versions/*/bin"))]
    path = os.pathsep.join([*(str(Path(one).parent) for one in extra), *homes, os.environ["PATH"]])
    for minor in MINORS:
        found = shutil.which(f"python3.{minor}", path=path)
        if found is None:
            print(f"python3.{minor}: not on this machine; {VARIABLE} may name it", flush=True)
        else:
            yield found


def run(
    *words: str | Path, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """The output of a program; FailedError if it fails."""
    shown = [str(one) for one in words]
    try:
        done = subprocess.run(
            shown,
            cwd=folder,
            env=dict(environment or clean()),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"{' '.join(shown)}: not done after {LIMIT_SECONDS:g} s") from error
    except OSError as error:
        raise FailedError(f"cannot start {shown[0]}: {error}") from error
    if done.returncode:
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise FailedError(f"{' '.join(shown)} ended with {done.returncode}:\n{said}")
    return done.stdout


def clean() -> dict[str, str]:
    """The environment of a person who has no virtual environment and no local cluster."""
    left_out = re.compile(r"VIRTUAL_ENV|CONDA_.*|PYTHON.*|KUBECONFIG|UNBROKEN_.*|PET_.*")
    return {name: value for name, value in os.environ.items() if not left_out.fullmatch(name)}


def check(command: Sequence[str | Path], version: str, expected_minor: str) -> None:
    """Try an installed `unbroken`: version, help, a job of two ranks."""
    said = run(*command, "--version").strip()
    if said != f"unbroken {version}":
        raise FailedError(f"--version says {said!r}, not {version}")
    if "explain" not in run(*command, "--help"):
        raise FailedError("--help does not name the command explain")
    with tempfile.TemporaryDirectory(prefix="unbroken-matrix-") as name:
        folder = Path(name)
        (folder / "ranks.py").write_text(RANKS)
        environment = {**clean(), "UNBROKEN_DIR": str(folder / "cluster")}
        try:
            words = (*command, "run", "--nnodes", "2", "ranks.py")
            printed = run(*words, folder=folder, environment=environment)
            wanted = f"rank 0 of 2 heard rank 1, python 3.{expected_minor}"
            if wanted not in printed:
                raise FailedError(f"no line {wanted!r} in the job's output:\n{printed}")
            text = run(*command, "jobs", "-o", "json", folder=folder, environment=environment)
            (job,) = json.loads(text)["jobs"]
            if job["state"] != "Completed":
                raise FailedError(f"the job is {job['state']}")
        finally:
            run(*command, "down", "--purge", folder=folder, environment=environment)


def venv(python: str, name: str) -> Path:
    """A new virtual environment with a current pip; its folder of programs."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    return folder / "bin"


def pip(binaries: Path, *words: str | Path) -> None:
    """Install packages in a virtual environment."""
    run(binaries / "python", "-m", "pip", "install", "--quiet", *words)


def by_pip(python: str, minor: str, wheel: Path) -> Sequence[str | Path]:
    """Install with pip in a virtual environment."""
    binaries = venv(python, f"pip-{minor}")
    pip(binaries, wheel)
    return [binaries / "unbroken"]


def by_lowest(python: str, minor: str, wheel: Path) -> Sequence[str | Path]:
    """Install the lowest versions that are allowed, and run some of the tests with them."""
    binaries = venv(python, f"lowest-{minor}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    constraints = WORK / "lowest.txt"
    constraints.write_text("\n".join(lowest(project)) + "\n")
    pip(binaries, "--constraint", constraints, f"{wheel}[otel]")
    pip(binaries, "--constraint", constraints, *TEST_TOOLS)
    options = ("-p", "no:cacheprovider", "-m", "not slow and not heavy and not realkube")
    words = (binaries / "python", "-m", "pytest", *options, *TESTS)
    print(run(*words, folder=ROOT).strip().splitlines()[-1], flush=True)
    return [binaries / "unbroken"]


def by_pipx(python: str, minor: str, wheel: Path) -> Sequence[str | Path]:
    """Install with pipx."""
    home = WORK / f"pipx-{minor}"
    shutil.rmtree(home, ignore_errors=True)
    environment = {**clean(), "PIPX_HOME": str(home), "PIPX_BIN_DIR": str(home / "bin")}
    program = tool("pipx")
    run(program, "install", "--python", python, wheel, environment=environment)
    return [home / "bin" / "unbroken"]


def by_uvx(python: str, minor: str, wheel: Path) -> Sequence[str | Path]:
    """Run by uvx, which installs at the first call."""
    return [tool("uvx"), "--no-python-downloads", "--python", python, "--from", wheel, "unbroken"]


def tool(name: str) -> Path:
    """A program of pipx or uv, from PyPI, in an environment of its own."""
    binaries = WORK / "tools/bin"
    if not (binaries / name).exists():
        pip(venv(sys.executable, "tools"), "pipx", "uv")
    return binaries / name


INSTALLERS = {"pip": by_pip, "pipx": by_pipx, "uvx": by_uvx, "lowest": by_lowest}


def try_one(installer: str, python: str, wheel: Path) -> Row:
    """One row of the table."""
    began = time.perf_counter()
    found = run(python, "-c", "import sys; print(*sys.version_info[:3], sep='.')").strip()
    minor, version = found.split(".")[1], wheel.name.split("-")[1]
    try:
        check(INSTALLERS[installer](python, minor, wheel), version, minor)
        result = "works"
    except FailedError as error:
        print(error, file=sys.stderr, flush=True)
        result = "fails"
    dependencies = "lowest allowed" if installer == "lowest" else "newest"
    shown = "pip" if installer == "lowest" else installer
    row = Row(found, shown, dependencies, result, round(time.perf_counter() - began, 1))
    print(f"Python {found}, {shown}, {dependencies}: {result}, {row.seconds} s", flush=True)
    return row


def try_workers(environment: Path) -> Iterator[Row]:
    """A row for each way in which workers of an environment get their state back."""
    if not (environment / "bin/python").exists():
        raise FailedError(f"{environment} is no virtual environment: it has no bin/python")
    asks = "import sys, torch; print(sys.version.split()[0], 'torch', torch.__version__)"
    found, _, torch = run(environment / "bin/python", "-c", asks).strip().partition(" ")
    for way, options in WAYS.items():
        began = time.perf_counter()
        try:
            result = _trained(environment, options)
        except FailedError as error:
            print(error, file=sys.stderr, flush=True)
            result = "fails"
        row = Row(found, f"workers, {way}", torch, result, round(time.perf_counter() - began, 1))
        print(f"Python {found}, {torch}, {way}: {result}, {row.seconds} s", flush=True)
        yield row


def _trained(environment: Path, options: Sequence[str]) -> str:
    """Train with a killed rank; how it went on. FailedError: it did not, or not to the end."""
    unbroken = str(Path(sys.executable).with_name("unbroken"))
    with tempfile.TemporaryDirectory(prefix="unbroken-matrix-") as name:
        folder = Path(name)
        shutil.copy(ROOT / "examples/train_lm.py", folder)
        variables = {
            **clean(),
            "UNBROKEN_DIR": str(folder / "cluster"),
            "VIRTUAL_ENV": str(environment),
            "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
        }
        words, said = [unbroken, "run", *TRAIN, *SMALL, *options], ""
        try:
            with subprocess.Popen(
                words, cwd=folder, env=variables, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            ) as training:  # fmt: skip
                assert training.stdout is not None
                for line in training.stdout:
                    said += line
                    if line.startswith("step 50 "):
                        kill = ("chaos", "kill-worker", "train-lm", "--rank", "3")
                        run(unbroken, *kill, folder=folder, environment=variables)
            text = run(unbroken, "incidents", "-o", "json", folder=folder, environment=variables)
        finally:
            run(unbroken, "down", "--purge", folder=folder, environment=variables)
    incidents = json.loads(text)["incidents"]
    if training.returncode or [one["outcome"] for one in incidents] != ["recovered"]:
        raise FailedError(
            f"exit code {training.returncode}, incidents {incidents}:\n{said[-3000:]}"
        )
    return f"works, remedy {incidents[0]['remedy']}"


def plan(short: bool, given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of installer and Python.  Lowest versions have wheels for the oldest Python only."""
    if short:
        yield "pip", sys.executable
        return
    for number, python in enumerate(given or list(pythons())):
        yield from ((one, python) for one in ("pip", "pipx", "uvx"))
        if number == 0:
            yield "lowest", python


def main() -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="Try this Python with pip only.")
    parser.add_argument("--python", action="append", default=[], help="Try this Python only.")
    parser.add_argument("--installer", choices=INSTALLERS, help="Try this installer only.")
    parser.add_argument("--wheel", type=Path, help="Use this wheel instead of a new one.")
    parser.add_argument("--workers", type=Path, action="append", default=[], metavar="VENV",
                        help="Only train with workers of this virtual environment.")  # fmt: skip
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        earlier = _earlier()
        rows = _workers_rows(given.workers) if given.workers else _wheel_rows(given)
        return _keep(earlier, rows)
    except FailedError as error:
        print(f"matrix: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("matrix: interrupted; the rows up to now are kept", file=sys.stderr)
        return 130


def _workers_rows(environments: Sequence[Path]) -> Iterator[Row]:
    for one in environments:
        yield from try_workers(one.absolute())


def _wheel_rows(given: argparse.Namespace) -> Iterator[Row]:
    wheel = given.wheel.resolve() if given.wheel else _twice()
    pairs = list(plan(given.short, given.python))
    if given.installer:
        pairs = [(given.installer, one) for one in dict.fromkeys(python for _, python in pairs)]
    for installer, python in pairs:
        yield try_one(installer, python, wheel)


def _earlier() -> list[object]:
    """The rows of earlier runs; FailedError if their file is cut off."""
    try:
        found = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    except ValueError as error:
        raise FailedError(f"{RESULTS} cannot be read: {error}. Move it away") from error
    return found if isinstance(found, list) else [found]


def _keep(earlier: Sequence[object], rows: Iterator[Row]) -> int:
    """Add each row to the results once it is there; the exit status."""
    done: list[Row] = []
    for row in rows:
        done.append(row)
        new = RESULTS.with_suffix(".new")
        new.write_text(json.dumps([*earlier, *map(asdict, done)], indent=1))
        new.replace(RESULTS)
    failed = sum(one.result == "fails" for one in done)
    print(f"{len(done) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _twice() -> Path:
    """Build the packages twice; FailedError if the bytes differ."""
    import dist

    made = [dist.build(WORK / name) for name in ("dist", "again")]
    for one, other in zip(*made, strict=True):
        if one.read_bytes() != other.read_bytes():
            raise SystemExit(f"{one.name}: two builds of one commit differ")
        print(f"{one.name}: {one.stat().st_size} bytes, two builds are the same", flush=True)
    wheel: Path = made[0][0]
    return wheel


if __name__ == "__main__":
    sys.exit(main())
