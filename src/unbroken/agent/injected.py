"""The agent in an image without it: `run.py COMMAND...`, where the container had `COMMAND...`.

`spec.job.launch` lists the commands that it takes over. The agent has a Python and packages of its
own (`deploy/relocatable.py`). Workers run on the image's Python, which finds only the package
`unbroken` in addition to its own packages.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import MutableMapping

from unbroken.errors import SpecError
from unbroken.spec.job.launch import Launch, read_launch

from .main import USAGE_ERROR, main
from .workers.environment import ACCELERATE_LAUNCH

PYTHONS = ("python3", "python")
"""Names of the image's Python, the first choice first."""
LINE_BYTES = 512
_EXEC = re.compile(r"'''exec' +\"?([^\"]+?)\"? +\"\$0\"")
"""Second line of a pip script whose interpreter's path is long or has a space."""


def script(library: str | None = None, scratch: str | None = None) -> None:
    """Run the agent for the command of the container, which is in `sys.argv`.

    `library`: folder that gives the workers' Python the package `unbroken`; None: nothing is added.
    `scratch`: folder for temporary files if the image has no writable one; None: none.
    """
    try:
        launch = read_launch(sys.argv[1:])
        prepare(launch, os.environ, library)
    except SpecError as error:
        print(f"unbrokenrun: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(USAGE_ERROR)
    if scratch is not None:
        _have_temporary_folder(scratch)
    before = ("--", ACCELERATE_LAUNCH) if launch.is_accelerate else ()
    sys.exit(main((*before, *launch.arguments)))


def prepare(launch: Launch, environ: MutableMapping[str, str], library: str | None) -> None:
    """Set the variables by which workers get their Python and the package `unbroken`. Raises
    SpecError."""
    if "PYTHON_EXEC" not in environ:
        environ["PYTHON_EXEC"] = interpreter(launch, environ.get("PATH", os.defpath))
    if library is not None:
        # Last, so that the user's own folders come first.
        given = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{given}{os.pathsep}{library}" if given else library


def interpreter(launch: Launch, path: str) -> str:
    """Return the Python that would run the user's command in this image. Raises SpecError if there
    is none."""
    program = shutil.which(launch.program, path=path)
    if launch.is_python:
        if program is None:
            raise SpecError(f"{launch.program} is not in the image (PATH: {path})")
        return program
    named = None if program is None else _named_in(program, path)
    beside = [] if program is None else [f"{os.path.dirname(program)}/{name}" for name in PYTHONS]
    for candidate in (named, *beside, *PYTHONS):
        result = None if candidate is None else shutil.which(candidate, path=path)
        if result is not None:
            return result
    raise SpecError(f"there is no python3 in the image (PATH: {path}); workers need one")


def _named_in(program: str, path: str) -> str | None:
    """Return the interpreter that a script names in its first lines; None: it names no Python."""
    try:
        with open(program, "rb") as file:
            lines = file.read(LINE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    if not lines or not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    if len(words) > 1 and os.path.basename(words[0]) == "env":
        return shutil.which(words[-1], path=path)
    if len(lines) > 1 and (match := _EXEC.match(lines[1])):
        return match[1]
    is_python = bool(words) and os.path.basename(words[0]).startswith(PYTHONS)
    return words[0] if is_python else None


def _have_temporary_folder(scratch: str) -> None:
    """Make `scratch` the temporary folder of the agent and its workers if no usual folder is
    writable."""
    try:
        result = tempfile.gettempdir()
    except FileNotFoundError:
        result = ""
    # Python takes the working directory as a last resort, which is the user's.
    if result in ("", os.getcwd()):
        tempfile.tempdir = os.environ["TMPDIR"] = scratch


if __name__ == "__main__":
    script()
