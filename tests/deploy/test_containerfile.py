"""The images, as far as they can be tried without anything that builds images."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from apiservers import ROOT
from deploy.charts import of_kind, pod_of, render

FILE = ROOT / "deploy/Containerfile"
HOME = "/opt/unbroken"
NOBODY = 65532
"""As the chart runs its pods."""


@dataclass
class Stage:
    """From one FROM to the next: its name, its base, and (instruction, text) in order."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        """Texts of an instruction."""
        return [text for one, text in self.steps if one == instruction]


def instructions() -> Iterator[tuple[str, str]]:
    """Those of the file, continued lines joined."""
    lines = [one for one in FILE.read_text().splitlines() if not one.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, text = line.partition(" ")
            yield word, text.strip()


def stages() -> dict[str, Stage]:
    """By name."""
    found: dict[str, Stage] = {}
    last: Stage | None = None
    for word, text in instructions():
        if word == "FROM":
            base, _, name = text.partition(" AS ")
            found[name] = last = Stage(name, base)
        elif last is not None:
            last.steps.append((word, text))
    return found


def test_bases_are_pinned_and_files_are_there() -> None:
    first = next(text for word, text in instructions() if word == "ARG")
    assert re.fullmatch(r"PYTHON=python:3\.\d+\.\d+-slim-\w+", first)
    found = stages()
    for stage in found.values():
        assert stage.base == "${PYTHON}" or stage.base in found
        for text in stage.of("COPY"):
            *sources, _ = [one for one in text.split() if not one.startswith("--")]
            if "--from=" not in text:
                assert all((ROOT / one).exists() for one in sources), text
    kept = (ROOT / "deploy/Containerfile.dockerignore").read_text().splitlines()
    copied = {one for text in found["build"].of("COPY") for one in text.split()[:-1]}
    assert {one[1:] for one in kept if one.startswith("!")} == copied


def test_images_run_as_nobody_what_the_chart_calls() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name in ("operator", "training"):
        stage = stages()[name]
        assert stage.of("USER") == [f"{NOBODY}:{NOBODY}"]
        assert f"PATH={HOME}/bin:" in stage.of("ENV")[0]
        assert re.findall(r'"(\w+)"', stage.of("CMD")[0])[0] in scripts
    found = render()
    for workload in (*of_kind(found, "Deployment"), *of_kind(found, "DaemonSet")):
        for container in pod_of(workload)["containers"]:
            assert container["command"][0] in scripts
    operator = pod_of(of_kind(found, "Deployment")[0])
    assert operator["securityContext"]["runAsUser"] == NOBODY


def test_the_image_can_send_traces() -> None:
    assert any("[otel]" in text for word, text in instructions() if word == "RUN")


def test_torch_is_the_one_that_is_tested() -> None:
    (wanted,) = re.findall(r"torch==([\d.]+)", (ROOT / "tools/setup.sh").read_text())
    assert f"torch=={wanted}" in stages()["build-training"].of("RUN")[0]


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_what_it_runs_makes_a_program_that_nobody_can_start(tmp_path: Path) -> None:
    """The steps of the operator's image, with a folder of ours for its own."""
    source, home = tmp_path / "src", tmp_path / "opt"
    source.mkdir()
    for text in stages()["build"].of("COPY"):
        *names, _ = text.split()
        for name in names:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(ROOT / name, source / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, source)
    for stage in ("build", "build-operator"):
        for text in stages()[stage].of("RUN"):
            command = ["bash", "-euc", text.replace(HOME, str(home))]
            subprocess.run(command, cwd=source, check=True, timeout=500, capture_output=True)
    assert not (home / "bin/pip").exists()
    _pinned(home)
    # Folders of pytest's are for their owner only.
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    nobody = nobody if os.getuid() == 0 else []
    interpreter = str((home / "bin/python").resolve())
    if subprocess.run([*nobody, interpreter, "-V"], check=False, capture_output=True).returncode:
        pytest.skip(f"nobody may start {interpreter}, which an image has of its own")
    done = subprocess.run(
        [*nobody, str(home / "bin/unbroken"), "operator", "--help"],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "COLUMNS": "100"},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--lease-namespace" in done.stdout


def _pinned(home: Path) -> None:
    """Nothing is installed but in the version of the lock."""
    lock = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.M))
    found = {
        path.name.removesuffix(".dist-info").rpartition("-")
        for path in home.glob("lib/python*/site-packages/*.dist-info")
    }
    for name, _, version in found:
        normal = re.sub(r"[-_.]+", "-", name).lower()
        assert normal == "unbroken" or lock.get(normal) == version, name
