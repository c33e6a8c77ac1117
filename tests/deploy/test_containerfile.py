"""The images, as far as tests can check them without a build; tests/realnodes builds them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.apiservers import ROOT
from tests.deploy.charts import of_kind, pod_of, render

FILE = ROOT / "deploy/Containerfile"
EXAMPLE = ROOT / "examples/fsdp/Containerfile"
HOME = "/opt/unbroken"
NOBODY = 65532
"""User id with which the chart runs its pods."""


@dataclass
class Stage:
    """A stage of the file: its name, its base, and (instruction, text) in order."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        """Return the texts of an instruction."""
        return [text for one, text in self.steps if one == instruction]


def instructions(file: Path = FILE) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a file, with continued lines joined."""
    lines = [one for one in file.read_text().splitlines() if not one.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, text = line.partition(" ")
            yield word, text.strip()


def stages() -> dict[str, Stage]:
    """Return the stages by name."""
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
    assert re.fullmatch(r"PYTHON=python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", first)
    found = stages()
    for stage in found.values():
        assert stage.base == "${PYTHON}" or stage.base in found
        for text in stage.of("COPY"):
            *sources, _ = [one for one in text.split() if not one.startswith("--")]
            if "--from=" not in text:
                assert all((ROOT / one).exists() for one in sources), text
    kept = (ROOT / "deploy/Containerfile.dockerignore").read_text().splitlines()
    copied = {
        one
        for stage in found.values()
        for text in stage.of("COPY")
        for one in text.split()[:-1]
        if "--from=" not in text
    }
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


def packages(name: str) -> dict[str, str]:
    """Return the versions of the packages in a lock file, each of which must have a hash."""
    found = {}
    for entry in re.split(r"\n(?=\w)", (ROOT / name).read_text().replace("\\\n", " ")):
        if match := re.match(r"([\w.-]+)==(\S+)", entry):
            assert "--hash=sha256:" in entry, f"{name}: {match[1]} has no hash"
            found[match[1]] = match[2]
    return found


def test_locks_have_hashes_and_agree() -> None:
    development, image = packages("requirements.lock"), packages("deploy/requirements.lock")
    assert image.items() <= development.items()
    assert "torch" not in development
    with_aws = packages("deploy/aws-requirements.lock")
    assert image.items() <= with_aws.items()
    assert {"boto3", "botocore"} <= with_aws.keys() - image.keys()
    assert {"opentelemetry-sdk", "setuptools"} <= image.keys()


def test_pip_takes_nothing_without_a_hash_but_torch() -> None:
    installs = [
        command
        for word, text in instructions()
        if word == "RUN"
        for command in re.findall(r"pip install ([^&]*)", text)
    ]
    assert len(installs) == 4
    for command in installs:
        locked = "--require-hashes" in command or "--no-deps /package/" in command
        assert locked or command.split()[-1] == "${TORCH}", command
    setup = (ROOT / "tools/setup.sh").read_text()
    assert "--require-hashes --requirement requirements.lock" in setup


def test_torch_is_the_one_that_is_tested() -> None:
    (wanted,) = re.findall(r"torch==([\d.]+)", (ROOT / "tools/setup.sh").read_text())
    assert f"torch=={wanted}" in stages()["torch"].of("ARG")[0]


def test_the_image_of_the_example_is_made_of_what_is_tested() -> None:
    steps = list(instructions(EXAMPLE))
    assert steps[0] == ("ARG", "TRAINING=unbroken-training:0.1.0")
    (install,) = [text for word, text in steps if word == "RUN"]
    tested = (ROOT / "tools/frameworks-requirements.txt").read_text().splitlines()
    packages = re.findall(r"\w+==[\w.]+", install)
    assert len(packages) == 2
    assert set(packages) <= set(tested)
    (script, place) = dict(steps)["COPY"].split()
    job = yaml.safe_load((ROOT / "tests/spec/manifests/fsdp-llama3-8b.yaml").read_text())
    (container,) = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    assert place in container["command"]
    assert (EXAMPLE.parent / script).exists()
    assert [text for word, text in steps if word == "USER"][-1] == f"{NOBODY}:{NOBODY}"
    own = list(yaml.safe_load_all((EXAMPLE.parent / "llama.yaml").read_text()))[-1]
    (container,) = own["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    assert f"-t {container['image']} examples/fsdp" in EXAMPLE.read_text()
