"""Programs of others: run for a limited time, with a limited amount of output."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OUTPUT_BYTES_MAX = 8 << 20
ERROR_BYTES_MAX = 64 << 10
LINE_MAX = 200
EFA_PROGRAMS = "/opt/amazon/efa/bin"
"""Folder of the EFA installer's programs, which is not in the path of every image."""


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """The end of a program, and what it wrote."""

    code: int
    """Exit code; negative: it was killed, by its time limit among others."""
    text: bytes
    errors: bytes

    def why(self) -> str:
        """The end in words: the exit code, and the last line of the errors, else of the text."""
        said = (self.errors or self.text).decode(errors="replace").strip().splitlines()
        last = said[-1][:LINE_MAX] if said else "no output"
        return f"ended with {self.code}: {last}" if self.code >= 0 else "did not end in time"


def find(program: str) -> str | None:
    """The path of a program; None: it is not installed."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{EFA_PROGRAMS}")


def with_environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process, and more."""
    return {**os.environ, **more}


def run(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> ProgramOutput:
    """Run a program to its end, or kill it after this time; OSError if it cannot be started."""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=with_environment(environment or {}),
        ) as process,
    ):
        assert process.stdout is not None
        late = threading.Timer(seconds, process.kill)
        late.start()
        try:
            text = process.stdout.read(OUTPUT_BYTES_MAX)
            if len(text) == OUTPUT_BYTES_MAX:
                process.kill()
            code = process.wait()
        finally:
            late.cancel()
        errors.seek(0)
        return ProgramOutput(code, text, errors.read(ERROR_BYTES_MAX))
