"""A running cluster as the end-to-end tests see it, and pods for it."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cli_forks import UNBROKEN as UNBROKEN
from tests.cli_forks import run_unbroken
from tests.cluster_logs import assert_no_errors


def find_kubectl() -> str:
    """Return kubectl from the PATH or the virtual environment."""
    found = shutil.which("kubectl") or shutil.which("kubectl", path=Path(sys.executable).parent)
    assert found, "kubectl is missing; `make setup` installs it"
    return found


def kill(pid: int) -> None:
    """SIGKILL, and wait for the end of a process that is not a child."""
    handle = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        select.select([handle], [], [], 10)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Cluster:
    """A running `unbroken up` and ways to talk to it."""

    directory: Path
    kubectl_path: str
    allowed_errors: list[str] = field(default_factory=list)
    """Expressions for errors in its log that a test provokes."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment for kubectl and client libraries."""
        return {**os.environ, "KUBECONFIG": str(self.directory / "kubeconfig")}

    def unbroken(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the `unbroken` command on this cluster's directory."""
        words = [arguments[0], "--dir", str(self.directory), *arguments[1:]]
        done = run_unbroken(words, Path.cwd(), os.environ)
        if check:
            done.check_returncode()
        return done

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, seconds: int = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; its error output is shown when it fails."""
        done = subprocess.run(
            [self.kubectl_path, *arguments],
            input=stdin,
            text=True,
            capture_output=True,
            timeout=seconds,
            env=self.environment,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get ... -o json`, decoded."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)
        return found

    def apply(self, *objects: dict[str, Any]) -> None:
        """`kubectl apply` of objects."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(items))

    def wait(self, what: str, condition: str, *, seconds: int = 30) -> None:
        """`kubectl wait --for=CONDITION`."""
        arguments = (what, f"--for={condition}", f"--timeout={seconds}s")
        self.kubectl("wait", *arguments, seconds=seconds + 30)

    def wait_served(self) -> None:
        """Return once an operator has seen to it that jobs can be created."""
        kind = "crd/hyperpodpytorchjobs.sagemaker.amazonaws.com"
        self.wait(kind, "create", seconds=55)
        self.wait(kind, "condition=Established")

    def take_away(self) -> None:
        """Stop it, and fail if it said anything of an error or left a process behind."""
        self.unbroken("down", check=False)
        try:
            assert_no_errors(self.directory / "up.log", self.allowed_errors)
            assert not processes(str(self.directory)), "a process of the cluster was left behind"
        finally:
            self.unbroken("down", "--purge", check=False)

    @property
    def up_pid(self) -> int:
        """The process that serves the API: `unbroken up`."""
        pid: int = json.loads((self.directory / "up.json").read_text())["pid"]
        return pid

    @property
    def operator_options(self) -> tuple[str, ...]:
        """Options that select the cluster of an operator."""
        return ("--dir", str(self.directory))

    def restart(self) -> None:
        """Start again what served the API and was killed."""
        self.unbroken("up", "--detach")


def pod(name: str, *command: str, **spec: Any) -> dict[str, Any]:
    """A pod with one container; `spec` entries overrule, `container` entries join the container."""
    container = {"name": "main", "image": "any", "command": list(command)}
    container.update(spec.pop("container", {}))
    whole = {"terminationGracePeriodSeconds": 2, "containers": [container], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": whole}


SESSION = f"test-{os.getpid()}-"
"""Tells the processes of this session of tests from those of others on the machine."""


def python(code: str) -> tuple[str, str, str]:
    """Command of a container that runs Python code."""
    return (sys.executable, "-c", code)


def processes(text: str) -> list[int]:
    """Pids of live processes, but this one, whose command line holds `text`.

    It should hold the `SESSION` or a folder of the test: these tests may run elsewhere on the
    machine as well.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ")
        except OSError:
            continue  # it ended between the two looks
        if text.encode() in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return sorted(found)
