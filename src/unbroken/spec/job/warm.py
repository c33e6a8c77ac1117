"""Warm workers in a job: annotations in the manifest, variables in its pods."""

from __future__ import annotations

import re

from unbroken.errors import SpecError

WARM_VARIABLE, PRELOAD_VARIABLE = "UNBROKEN_WARM", "UNBROKEN_PRELOAD"
"""Variables of the agent; its workers do not see them."""
PRELOAD_MAX = 1000
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def read_preload(text: str) -> tuple[str, ...]:
    """Return names of modules, separated by commas. Raises SpecError."""
    names = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names:
        if not _NAME.fullmatch(name):
            raise SpecError(f"{name[:80]!r} is no name of a module; write them like torch,numpy")
    if len(names) > PRELOAD_MAX:
        raise SpecError(f"names {len(names)} modules; at most {PRELOAD_MAX}")
    return names
