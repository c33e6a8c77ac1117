"""`unbrokenrun`: the agent's command.

Exit codes:

- 0: the operator, or a signal after its workers had succeeded, shut it down.
- 128 + n: signal n ended it before that.
- 137: the agent itself was killed.
- 2: wrong usage.

Slow imports wait until the options are valid.
"""

from __future__ import annotations

import binascii
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unbroken.agent.workers.keeper import keep
from unbroken.errors import SpecError, UnbrokenError
from unbroken.spec.keys import AGENT_AUTH

from .options import SHELL_VARIABLE, LaunchOptions, parse

KEY_VARIABLE, AUTH_VARIABLE = "UNBROKEN_AGENT_KEY_FILE", "UNBROKEN_AGENT_AUTH"
KEY_BYTES, KEY_FILE_BYTES_MAX = 32, 4096
USAGE_ERROR = 2
LINK_VARIABLE = "UNBROKEN_AGENT_LINK"
"""Environment variable; `off`: use only the stock agent's protocol."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until its end is ordered; return its exit code."""
    shell = None
    if SHELL_VARIABLE in os.environ:
        from .shell import take

        shell = take()
        arguments = arguments if shell.arguments is None else shell.arguments
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        key = read_key(os.environ)
        has_link = os.environ.get(LINK_VARIABLE) != "off"
        if key is not None and not has_link:
            raise SpecError(
                f"{LINK_VARIABLE}=off speaks the stock agent's protocol, which knows no key: set "
                f"{AUTH_VARIABLE}=none as well (annotation {AGENT_AUTH}: none)"
            )
    except UnbrokenError as error:
        print(f"unbrokenrun: {error}", file=sys.stderr)  # noqa: T201
        return USAGE_ERROR
    if shell is not None:
        os.environ.update(shell.environment)
        notes = (*options.notes, *shell.notes)
        options = replace(options, notes=notes, error_file=shell.error_file, stdin=shell.stdin)
    for text in options.notes:
        print(f"unbrokenrun: {text}", file=sys.stderr)  # noqa: T201
    return keep(lambda *keeper: run_agent(options, key, keeper, has_link), options.signals)


def run_agent(
    options: LaunchOptions, key: bytes | None, keeper: tuple[int, int], has_link: bool
) -> int:
    """The agent's own process."""
    # It uses plain HTTP only. With ssl available, aiohttp reads all of the system's certificates
    # when it is imported, which is a quarter of the time until the agent listens.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    # Modules are never garbage; looking for some while they load is an eighth of that time.
    gc.disable()
    from . import driver

    gc.freeze()
    gc.enable()
    try:
        ends, lease_pipe = keeper
        return driver.run(options, key, ends, has_link=has_link, lease_pipe=lease_pipe)
    except UnbrokenError as error:
        print(f"unbrokenrun: {error}", file=sys.stderr)  # noqa: T201
        return 1


def read_key(environ: Mapping[str, str]) -> bytes | None:
    """Return the job's key; None: the job has none. Raises SpecError."""
    path = environ.get(KEY_VARIABLE)
    if path:
        try:
            with open(path, "rb") as file:
                text = file.read(KEY_FILE_BYTES_MAX).strip()
        except OSError as error:
            raise SpecError(f"cannot read the job's key in {path}: {error}") from None
        try:
            key = binascii.unhexlify(text)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise SpecError(f"{path} must hold the job's key: {2 * KEY_BYTES} hexadecimal digits")
        return key
    if environ.get(AUTH_VARIABLE) == "none":
        return None
    raise SpecError(
        f"no key: set {KEY_VARIABLE} to a file that holds the job's key (the operator mounts "
        f"one into its pods), or {AUTH_VARIABLE}=none to take commands from everyone who can "
        f"reach the port (annotation {AGENT_AUTH}: none on the job)"
    )


def script() -> None:
    """The console script."""
    sys.exit(main())
