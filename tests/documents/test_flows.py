"""Whole flows of the documents: their commands in order, with all parts real.

A flow is a file in `flows`. Each of its lines begins with a mark:

| mark | line |
|---|---|
| `## ` | comment; `## Needs: aws` names programs that the flow needs in addition to kubectl |
| `$ ` | command |
| `~ ` | command that is typed again until it prints what it should |
| `> ` | text that the command prints |
| `! ` | text that the command must not print |

Other lines continue the command above. A flow that cannot pass yet is in `NOT_YET`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.clients import hyp_program
from tests.cluster_api.conftest import aws_folder
from tests.e2e import test_ray
from tests.interop import stock_agent
from tests.tools import tool
from tests.watching import wait_until

__all__ = ["aws_folder"]
ROOT = Path(__file__).parents[2]
FLOWS = sorted((Path(__file__).parent / "flows").glob("*.sh"))
STATE_SECONDS = 600.0
"""Seconds that a state of a flow may take: training and the deep checks of a node take minutes."""
CLIENTS = ("aws", "hyp", "hyperpodrun", "ray")
"""Programs with a fixture that finds or installs them in an environment of their own."""
PACKAGES = {
    "kubectl": " (Debian's package kubernetes-client, or `make setup`)",
    "envsubst": " (Debian's package gettext-base)",
}
NOT_YET: dict[str, str] = {}
"""Flows that cannot pass yet, with the reason."""
IN_CI = ("quickstart_2", "training_operator")
"""The others take minutes."""
tutorials = tool("tutorials")


@pytest.fixture
def hyperpodrun_folder() -> Path:
    """Folder of HyperPod's own agent."""
    try:
        return stock_agent.installed().bin
    except stock_agent.NotInstalledError as error:
        pytest.skip(f"{error}")


@pytest.fixture
def hyp_folder() -> Path:
    """Folder of HyperPod's client, which reports to no one."""
    try:
        return hyp_program.installed().parent
    except hyp_program.NotInstalledError as error:
        pytest.skip(f"{error}")


@pytest.fixture
def ray_folder(tmp_path: Path) -> Path:
    """Folder of Ray; the flow's folder has what the tutorial uses of a checkout."""
    (tmp_path / ".ray-env").symlink_to(test_ray.ENVIRONMENT)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return test_ray.ENVIRONMENT / "bin"


@dataclass(slots=True)
class Command:
    """A command of a flow, with texts that it prints and texts that it must not print."""

    text: str
    is_repeated: bool = False
    wanted: list[str] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)

    def misses(self, printed: str) -> list[str]:
        """Return what is wrong with the output."""
        missing = [f"not printed: {text}" for text in self.wanted if text not in printed]
        return missing + [f"printed: {text}" for text in self.unwanted if text in printed]


def commands(flow: str) -> Iterator[Command]:
    """Yield the commands of a flow."""
    command: Command | None = None
    for line in flow.splitlines():
        mark, text = line[:2], line[2:]
        if mark in ("$ ", "~ "):
            if command is not None:
                yield command
            command = Command(text, is_repeated=mark == "~ ")
        elif command is None:
            assert line.startswith("## "), f"not a line of a flow: {line}"
        elif mark == "> ":
            command.wanted.append(text)
        elif mark == "! ":
            command.unwanted.append(text)
        else:
            command.text += f"\n{line}"
    if command is not None:
        yield command


def needs(flow: str) -> list[str]:
    """Return the names of the programs that a flow needs in addition to kubectl."""
    return [name for line in re.findall(r"^## Needs: (.*)$", flow, re.M) for name in line.split()]


def marked(flow: Path) -> list[pytest.MarkDecorator]:
    """Return the markers of a flow."""
    marks = [] if flow.stem in IN_CI else [pytest.mark.heavy]
    if "ray" in needs(flow.read_text()):
        marks.append(pytest.mark.frameworks)
    if reason := NOT_YET.get(flow.stem):
        marks.append(pytest.mark.xfail(reason=reason, strict=True))
    return marks


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "flow", [pytest.param(flow, id=flow.stem, marks=marked(flow)) for flow in FLOWS]
)
def test_a_flow_of_the_documents_works_as_written(
    flow: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("torch")
    variables = tutorials.environment(tmp_path)
    needed = ["kubectl", *needs(flow.read_text())]
    folders = [str(request.getfixturevalue(f"{name}_folder")) for name in needed if name in CLIENTS]
    variables |= {"HTTPS_PROXY": hyp_program.NOWHERE, "NO_PROXY": "127.0.0.1,localhost"}
    variables["PATH"] = os.pathsep.join([variables["PATH"], *folders])
    for name in needed:
        if shutil.which(name, path=variables["PATH"]) is None:
            pytest.skip(f"{name} is not installed{PACKAGES.get(name, '')}")
    (tmp_path / "unbroken").symlink_to(ROOT)
    exports: list[str] = []

    def type_it(command: Command) -> None:
        def seen() -> tuple[str, str, list[str]]:
            step = tutorials.Step(command=command.text)
            printed = str(tutorials.typed(step, tmp_path, variables, exports))
            return command.text, printed, command.misses(printed)

        if command.is_repeated:
            wait_until(seen, lambda result: not result[2], patience=STATE_SECONDS)
        else:
            text, printed, missing = seen()
            assert missing == [], f"$ {text}\n{printed}"

    try:
        for command in commands(flow.read_text()):
            type_it(command)
    finally:
        type_it(Command("unbroken down --purge"))


@pytest.mark.parametrize("number", [1, 2])
def test_a_quickstart_has_the_commands_of_the_readme(number: int) -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.split(f"## Quickstart {number}:")[1].split("\n## ")[0]
    block = re.search(r"\n\n((?:    .*\n)+)", section)
    assert block is not None
    flow = (Path(__file__).parent / f"flows/quickstart_{number}.sh").read_text()
    typed = [command.text for command in commands(flow)]
    told = [line.split("  #")[0].strip() for line in block[1].splitlines()]
    missing = [line for line in told if not any(text.startswith(line) for text in typed)]
    assert missing == []


def test_the_flow_of_ray_has_the_commands_of_the_tutorial() -> None:
    page = (ROOT / "docs/tutorials/ray.md").read_text()
    told = "\n".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).replace("\\\n", "")
    flow = (Path(__file__).parent / "flows/ray.sh").read_text()
    typed = [" ".join(one.text.replace("\\\n", "").split()) for one in commands(flow)]
    missing = [
        line
        for line in (" ".join(line.split("  #")[0].split()) for line in told.splitlines())
        if not any(line.replace(" POD", " ") in text for text in typed)
    ]
    assert missing == ["make ray-env", "source .venv/bin/activate"]


def test_a_flow_is_read_as_commands() -> None:
    first, second = commands("## Needs: aws hyp\n$ cat <<END\na\nEND\n> a\n! b\n~ ls\n")
    assert (first.text, first.is_repeated) == ("cat <<END\na\nEND", False)
    assert first.misses("b") == ["not printed: a", "printed: b"]
    assert (second.text, second.is_repeated, second.misses("")) == ("ls", True, [])
    assert needs("## Needs: aws hyp\n$ ls\n") == ["aws", "hyp"]
