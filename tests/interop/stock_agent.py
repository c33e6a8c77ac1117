"""HyperPod's own agent from PyPI, in its own virtual environment.

No part of it is in this repository: its licence forbids copies. It pins a torch that is older than
ours, but works with ours, except for its command line. A launcher replaces that.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

AGENT = "hyperpod-elastic-agent==1.1.3"
NEEDS = ("fastapi==0.115.14", "uvicorn==0.35.0", "psutil==7.0.0")
LAUNCHER = Path(__file__).parent / "programs/stock_launcher.py"
OPTIONS = "--server-host=$AGENT_HOST --server-port=$AGENT_PORT --tee=3 --log_dir=$UNBROKEN_LOG_DIR"
"""Options of the documented entrypoint, with a log directory, since pods share this machine's."""
CONFIG = Path("/opt/ml/input/config")
"""Folder of its table of addresses; it does not start if it cannot write there."""


class NotInstalledError(Exception):
    """The agent cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class StockAgent:
    """An installed agent; `bin` is the folder of its `hyperpodrun`."""

    bin: Path

    @property
    def environment(self) -> dict[str, str]:
        """PATH of a container that finds this agent before our substitute for it."""
        return {"PATH": f"{self.bin}:{os.environ['PATH']}"}


def installed() -> StockAgent:
    """Return the agent; the first caller installs it."""
    folder = Path(tempfile.gettempdir()) / "unbroken-stock-agent-1.1.3"
    folder.mkdir(exist_ok=True)
    python = folder / "environment/bin/python"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _run(sys.executable, "-m", "venv", "--clear", str(folder / "environment"))
            pip = (str(python), "-m", "pip", "install", "--quiet")
            _run(*pip, *NEEDS)
            _run(*pip, "--no-deps", AGENT)
        # Again each time: the checkout whose torch an earlier run has used may be gone.
        _run(str(python), "-c", _SEE_OUR_TORCH, sysconfig.get_paths()["purelib"])
        if not (folder / "done").exists():
            _run(str(python), "-c", "import hyperpod_elastic_agent.run, torch")
            (folder / "done").touch()
    script = folder / "bin/hyperpodrun"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec {python} {LAUNCHER} "$@"\n')
    script.chmod(0o755)
    try:
        CONFIG.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotInstalledError(f"the agent needs {CONFIG}: {error.strerror}") from None
    return StockAgent(script.parent)


_SEE_OUR_TORCH = """
import pathlib, sys, sysconfig
path = pathlib.Path(sysconfig.get_paths()["purelib"]) / "torch_of_the_tests.pth"
path.write_text(sys.argv[1] + "\\n")
"""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise NotInstalledError(f"{' '.join(command[:6])}: {last}")
