"""The stock client `hyp` as a child process, in a virtual environment of its own.

It pins libraries that differ from ours and takes a minute to install, so it is installed once for
all runs.  Each of its commands reports to AWS, with the names of jobs and without a timeout: here
that goes to a port of this machine that refuses it, so that nothing leaves and nothing hangs.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("sagemaker-hyperpod==3.12.0", "hyperpod-pytorch-job-template==1.5.0")
SECONDS = 60
NOWHERE = "http://127.0.0.1:9"


class NotInstalledError(Exception):
    """The client cannot be installed here; the text says why."""


@dataclass(frozen=True, slots=True)
class Hyp:
    """`hyp` with the kubeconfig of one cluster."""

    program: Path
    kubeconfig: Path
    home: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "KUBECONFIG": str(self.kubeconfig),
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1,localhost",
            "COLUMNS": "200",
        }
        command = [str(self.program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env)

    def __call__(self, verb: str, *arguments: str) -> str:
        """Run `hyp VERB hyp-pytorch-job ...`, check that it succeeds, give what it printed."""
        done = self.run(verb, "hyp-pytorch-job", *arguments)
        assert done.returncode == 0, f"{verb} {arguments}: {done.stdout}{done.stderr[:2000]}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """Name and state of each job, as `hyp list` shows them."""
        rows = [line.split() for line in self("list").splitlines()]
        return {row[0]: row[2] for row in rows if len(row) >= 4 and row[1] == "default"}


def installed() -> Path:
    """The program, installed by the first that asks."""
    folder = Path(tempfile.gettempdir()) / "unbroken-hyp-3.12.0"
    folder.mkdir(exist_ok=True)
    python = folder / "environment/bin/python"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            venv = [sys.executable, "-m", "venv", "--clear", str(folder / "environment")]
            pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *PACKAGES]
            # It pins a library that has no wheel for this Python, and uses it for nothing here.
            env = {**os.environ, "CFLAGS": "-O0"}
            for command in (venv, pip):
                done = subprocess.run(command, capture_output=True, text=True, env=env)
                if done.returncode != 0:
                    last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                    raise NotInstalledError(f"{' '.join(PACKAGES)}: {' '.join(last)}")
            (folder / "done").touch()
    return python.with_name("hyp")
