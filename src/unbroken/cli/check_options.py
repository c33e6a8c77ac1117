"""Options of the commands that run a checker of nodes."""

from __future__ import annotations

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
CheckLogs = Annotated[
    Path | None,
    typer.Option(
        "--check-logs", help="Folder for the log files of deep checks.", show_default="none"
    ),
]
