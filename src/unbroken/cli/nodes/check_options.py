"""Options of the commands that run a checker of nodes."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

CheckImage = Annotated[
    str,
    typer.Option(
        "--check-image",
        help="Image of the pods that test nodes: has this package and torch.",
        show_default="none: only embedded nodes can be tested",
    ),
]
CheckLink = Annotated[
    list[str] | None,
    typer.Option(
        "--check-link",
        metavar="TYPE=GB/s",
        help="What a link between nodes of this instance type must reach in a deep check.",
        show_default="learned from other nodes of the type",
    ),
]
CheckLogs = Annotated[
    Path | None,
    typer.Option(
        "--check-logs", help="Folder for the log files of deep checks.", show_default="none"
    ),
]


def link_bandwidth(texts: Iterable[str] | None) -> dict[str, float]:
    """GB/s by instance type, from `--check-link`; BadParameter names the first that is none."""
    found = {}
    for text in texts or ():
        kind, _, amount = text.partition("=")
        try:
            found[kind] = float(amount)
        except ValueError:
            found[kind] = 0.0
        if not kind or not isfinite(found[kind]) or found[kind] <= 0:
            what = f"{text!r} is not TYPE=GB/s, such as ml.p5.48xlarge=30"
            raise typer.BadParameter(what, param_hint="--check-link")
    return found
