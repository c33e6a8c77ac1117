"""Runs `unbroken` in forks of a process that has imported it: 0.5 s of a processor less each."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile

UNBROKEN = [sys.executable, "-m", "unbroken.cli.main"]
SECONDS = 100.0
"""Seconds until a command must have ended."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["unbroken.cli.job.jobs", "unbroken.cli.nodes.commands", "unbroken.cli.local.up",
     "unbroken.cli.local.down", "unbroken.local.node.driver"]
)  # fmt: skip


def run_unbroken(
    arguments: list[str], folder: Path, environment: Mapping[str, str], stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, which is when nobody can write to its output any more.

    `stdin` is its whole input.
    """
    ours, theirs = zip(FORKS.Pipe(duplex=False), FORKS.Pipe(duplex=False), strict=True)
    given = (arguments, folder, dict(environment), stdin)
    process = FORKS.Process(target=_run, args=(*given, *theirs))
    process.start()
    for end in theirs:
        end.close()
    with ThreadPoolExecutor(2) as pool:
        texts = [pool.submit(_read, end) for end in ours]
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, SECONDS)
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(arguments, code, *(text.result() for text in texts))


def _read(end: Connection) -> str:
    with open(end.fileno(), "rb", closefd=False) as file, end:
        return file.read().decode().replace("\r\n", "\n")


def _run(
    arguments: list[str],
    folder: Path,
    environment: Mapping[str, str],
    stdin: str,
    output: Connection,
    errors: Connection,
) -> None:
    """Be the command; the child of the server."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, end in ((1, output), (2, errors)):
        os.dup2(end.fileno(), number)
        end.close()
    with TemporaryFile() as file:
        file.write(stdin.encode())
        file.seek(0)
        os.dup2(file.fileno(), sys.stdin.fileno())
    sys.argv = ["unbroken", *arguments]
    from unbroken.cli.main import run

    run()
