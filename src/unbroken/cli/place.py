"""The `--dir` option that every command of the embedded cluster takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT = Path("~/.unbroken")

Directory = Annotated[
    Path,
    typer.Option(
        "--dir",
        envvar="UNBROKEN_DIR",
        help="Folder that holds all state of the cluster, and its kubeconfig.",
        show_default=str(DEFAULT),
    ),
]


def resolve(directory: Path) -> Path:
    """An absolute path, `~` expanded."""
    return directory.expanduser().absolute()
