"""kubectl as a child process, without the caller's configuration."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.apiservers import Cluster

SECONDS = 60


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl with the kubeconfig of one cluster, in one namespace."""

    program: str
    cluster: Cluster
    namespace: str
    home: Path
    """Folder of its discovery cache; the cases of one cluster share it."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the process, without the caller's configuration."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "KUBECACHEDIR": str(self.home / "cache"),
            "KUBECONFIG": str(self.cluster.kubeconfig),
        }

    def command(self, *arguments: str) -> list[str]:
        """Return the command line; `--` in the arguments stays last."""
        return [self.program, "-n", self.namespace, *arguments]

    def run(self, *arguments: str, stdin: object = None) -> subprocess.CompletedProcess[str]:
        """Run it to its end; `stdin` that is no text is sent as YAML."""
        text = stdin if isinstance(stdin, str) else yaml.safe_dump(stdin) if stdin else None
        return subprocess.run(
            self.command(*arguments),
            input=text,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=self.environment,
        )

    def __call__(self, *arguments: str, stdin: object = None) -> str:
        """Run it, check that it succeeds, and return its output."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def refused(self, *arguments: str, stdin: object = None) -> str:
        """Run it, check that it fails, and return its error text."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode != 0, f"{arguments}: {done.stdout}"
        return done.stderr

    def load(self, *arguments: str) -> Any:
        """Return the object that `-o json` prints."""
        return json.loads(self(*arguments, "-o", "json"))

    @contextmanager
    def lines(self, *arguments: str) -> Iterator[Iterator[str]]:
        """Yield the lines of a command that runs until the block ends."""
        process = subprocess.Popen(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )
        assert process.stdout is not None
        with process.stdout:
            try:
                yield iter(process.stdout.readline, "")
            finally:
                process.kill()
                process.wait()


def program() -> str | None:
    """Return the path of kubectl: in the folder of this Python, or on the PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return shutil.which("kubectl", path=places)
