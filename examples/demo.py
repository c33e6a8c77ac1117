#!/usr/bin/env python3
"""What `make demo` shows: a cluster from nothing, three pods, a custom resource, all away again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
UNBROKEN = [sys.executable, "-m", "unbroken.cli.main"]


def show(title: str) -> None:
    """Say what comes next."""
    print(f"\n\033[1m# {title}\033[0m" if sys.stdout.isatty() else f"\n# {title}", flush=True)


def call(*command: str, environment: dict[str, str]) -> None:
    """Print a command and run it; its failure ends the demo."""
    shown = ["unbroken", *command[3:]] if list(command[:3]) == UNBROKEN else list(command)
    print("$", " ".join(shown), flush=True)
    subprocess.run(command, check=True, env=environment)


def main() -> int:
    """Run the demo; the exit status is that of the first command that failed."""
    path = f"{os.environ['PATH']}{os.pathsep}{Path(sys.executable).parent}"
    kubectl = shutil.which("kubectl", path=path)
    if kubectl is None:
        print("kubectl is not on the PATH; `make setup` installs it", file=sys.stderr)
        return 1
    directory = tempfile.mkdtemp(prefix="unbroken-demo-")
    environment = {**os.environ, "PATH": path, "KUBECONFIG": f"{directory}/kubeconfig"}

    def kube(*arguments: str) -> None:
        call("kubectl", *arguments, environment=environment)

    try:
        show("A cluster of two nodes on this machine: no root, no containers, no network")
        call(
            *UNBROKEN, "up", "--dir", directory, "--nodes", "2", "--detach", environment=environment
        )
        kube("get", "nodes")
        show("Three pods")
        kube("apply", "-f", str(HERE / "three-pods.yaml"))
        kube("wait", "--for=condition=Ready", "pod/web", "--timeout=30s")
        kube("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/sums", "--timeout=30s")
        kube("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/stubborn", "--timeout=60s")
        kube("get", "pods", "-o", "wide")
        kube("logs", "sums")
        show("A custom resource: validated, defaulted, explained")
        kube("apply", "-f", str(HERE / "experiment.yaml"))
        kube("wait", "--for=condition=Established", "crd/experiments.example.com")
        kube("apply", "--server-side", "-f", str(HERE / "experiment-object.yaml"))
        kube("get", "experiments")
        kube("explain", "experiment.spec.nodes")
        show("All away again")
        call(*UNBROKEN, "down", "--dir", directory, environment=environment)
    except subprocess.CalledProcessError as error:
        print(f"failed: {error}", file=sys.stderr)
        return error.returncode or 1
    except KeyboardInterrupt:
        return 130
    finally:
        quiet = {"stdout": subprocess.DEVNULL, "check": False}
        subprocess.run([*UNBROKEN, "down", "--dir", directory, "--purge"], **quiet)
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
