"""Parts of the operator that somebody else may do, and the option that leaves them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Part(StrEnum):
    """What the operator does beside jobs of its own kind."""

    DEFINITIONS = "definitions"
    NODES = "nodes"
    PYTORCHJOBS = "pytorchjobs"
    QUEUES = "queues"


Without = Annotated[
    list[Part] | None,
    typer.Option(
        "--without",
        help="Leave this to somebody else, and ask for no right to do it: `definitions` of our "
        "kinds, `nodes` (repair, checks, clusters), `pytorchjobs` (auto-resume), `queues` (Kueue). "
        "Repeatable.",
        show_default="nothing is left out",
    ),
]
