#!/usr/bin/env python3
"""Run `make demo`: a training job loses a worker, then a node, and resumes by itself.

It starts a cluster of four nodes on this machine. The job has two pods of two ranks and a spare,
with real PyTorch processes. Every wait is for an event that must happen. If it does not happen, the
demo fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
UNBROKEN = [sys.executable, "-m", "unbroken.cli.main"]
JOB = "train-lm"
LOSS = re.compile(r"step (\d+) loss ([\d.]+)")
PREFIX = "[default0]:"
"""Prefix of each line of rank 0 in the log of its pod, as torchrun writes it."""


class DemoFailed(Exception):
    """An expected event did not happen."""


class Training:
    """Output of rank 0, read as it is written."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._changed = threading.Condition()
        self.losses: list[tuple[int, float]] = []
        self.resumptions = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        is_new = False
        for line in (one.rstrip().removeprefix(PREFIX) for one in self._process.stdout):
            found, is_resumption = LOSS.match(line), line.startswith("resumed at step")
            with self._changed:
                self.resumptions += is_resumption
                if found:
                    self.losses.append((int(found[1]), float(found[2])))
                self._changed.notify_all()
            if is_resumption or (found and (is_new or int(found[1]) % 50 == 0)):
                show(f"  {line}")
                is_new = is_resumption

    def wait(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until `holds()`; DemoFailed if it does not hold in time."""
        with self._changed:
            if not self._changed.wait_for(holds, seconds):
                raise DemoFailed(f"{what} did not happen within {seconds:.0f} s")

    def steps_after(self, count: int) -> Callable[[], bool]:
        """Return a function that is true once `count` more losses have been read."""
        goal = len(self.losses) + count
        return lambda: len(self.losses) >= goal

    def tell_loss(self) -> None:
        """Print the first and last loss; DemoFailed if the training has learned nothing."""
        (_, first), (step, last) = self.losses[0], self.losses[-1]
        show(f"\nfirst loss {first:.3f}, loss at step {step}: {last:.3f}")
        if last > 0.6 * first:
            raise DemoFailed("the loss has not fallen")

    def close(self) -> None:
        """Stop reading."""
        self._process.terminate()
        self._process.wait()


class LocalDemo:
    """A demo on a local cluster in its own folder, which is removed at the end."""

    def __init__(self, prefix: str, **variables: str) -> None:
        self.directory = tempfile.mkdtemp(prefix=prefix)
        self.environment = {
            **os.environ,
            "PATH": path_of_programs(),
            "KUBECONFIG": f"{self.directory}/kubeconfig",
            "UNBROKEN_DIR": self.directory,
            **variables,
        }

    def call(self, *words: str) -> None:
        """Print a command as a person would type it, and run it."""
        show(f"$ {' '.join(words)}")
        command = [*UNBROKEN, *words[1:]] if words[0] == "unbroken" else words
        subprocess.run(command, check=True, env=self.environment)

    def run(self) -> None:
        """Run the demo."""
        raise NotImplementedError

    def close(self) -> None:
        """End the programs that the demo started in addition to the cluster."""

    def play(self, *look: str) -> int:
        """Run the demo and remove its cluster; return the exit status.

        `look` is a command that shows the state of the cluster after a failure.
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            self.run()
        except (DemoFailed, subprocess.CalledProcessError) as error:
            print(f"\nfailed: {error}", file=sys.stderr)
            with suppress(subprocess.CalledProcessError):
                self.call(*look)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            self.close()
            quiet = {"stdout": subprocess.DEVNULL, "env": self.environment, "check": False}
            subprocess.run([*UNBROKEN, "down", "--purge"], **quiet)
            shutil.rmtree(self.directory, ignore_errors=True)
        print("the cluster is stopped and its folder removed")
        return 0


class Demo(LocalDemo):
    """The demo of a training job."""

    def described(self) -> dict[str, Any]:
        """Return the job as `unbroken describe -o json` prints it."""
        command = [*UNBROKEN, "describe", JOB, "-o", "json"]
        done = subprocess.run(command, check=True, env=self.environment, capture_output=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def run(self) -> None:
        """Run the demo."""
        title("A cluster of four nodes on this machine: no root, no containers, no network")
        self.call("unbroken", "up", "--detach", "--nodes", "4")
        title("A training job: 2 pods of 2 ranks each, and a spare pod")
        script = HERE / "train_lm.py"
        self.call("kubectl", "create", "configmap", JOB, f"--from-file={script}")
        self.call("kubectl", "apply", "-f", str(HERE / "train_lm.yaml"))
        training = Training([*UNBROKEN, "logs", "-f", JOB, "--rank", "0"], self.environment)
        try:
            # By then a process for a new rank waits, with its imports done.
            training.wait("training", training.steps_after(16), 90)
            self.call("kubectl", "get", "pods", "-o", "wide")
            title("A worker is killed")
            self.hurt(training, "kill-worker", rank=3)
            title("A node is switched off")
            self.hurt(training, "kill-node", rank=2)
            title("Training goes on to its end")
            self.call("kubectl", "wait", f"hpj/{JOB}", "--for=condition=Completed", "--timeout=2m")
        finally:
            training.close()
        self.tell(training)

    def hurt(self, training: Training, drill: str, *, rank: int) -> None:
        """Break a part of the job, and wait until training has continued for a while."""
        before = len(self.described()["incidents"])
        resumptions = training.resumptions
        self.call("unbroken", "chaos", drill, JOB, "--rank", str(rank))
        training.wait("recovery", lambda: training.resumptions > resumptions, 90)
        training.wait("training after it", training.steps_after(6), 90)
        for incident in self.described()["incidents"][before:]:
            show(f"  {incident['summary']}")

    def tell(self, training: Training) -> None:
        """Print the incidents, and check that all were recovered from."""
        title("What happened")
        self.call("unbroken", "explain", JOB)
        self.call("unbroken", "jobs")
        incidents = self.described()["incidents"]
        outcomes = [one.get("outcome") for one in incidents]
        if len(incidents) < 2 or set(outcomes) != {"recovered"}:
            raise DemoFailed(f"the incidents ended as {outcomes}")
        training.tell_loss()


def path_of_programs() -> str:
    """Return the PATH with the programs of `make setup`; those of the system come first."""
    return f"{os.environ['PATH']}{os.pathsep}{Path(sys.executable).parent}"


def show(text: str) -> None:
    """Print whole lines, even if several threads print at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def title(text: str) -> None:
    """Print the title of the next part."""
    show(f"\n\033[1m# {text}\033[0m" if sys.stdout.isatty() else f"\n# {text}")


def main() -> int:
    """Run the demo; return the exit status."""
    if shutil.which("kubectl", path=path_of_programs()) is None:
        print("kubectl is not on the PATH; `make setup` installs it", file=sys.stderr)
        return 1
    return Demo("unbroken-demo-").play("unbroken", "describe", JOB)


if __name__ == "__main__":
    sys.exit(main())
