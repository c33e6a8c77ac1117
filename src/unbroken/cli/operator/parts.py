"""`--without`, the option that leaves out parts of the operator."""

from __future__ import annotations

from typing import Annotated

import typer

from unbroken.operator.parts import PARTS, WITHOUT, PartName

LEFT = {name: part for name, part in PARTS.items() if part.option == WITHOUT}
"""Parts that can be left out."""


def part_of(text: str) -> PartName:
    """Read the name of a part that can be left out; BadParameter lists these parts."""
    if text not in LEFT:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(LEFT)}")
    return PartName(text)


Without = Annotated[
    list[PartName] | None,
    typer.Option(
        WITHOUT,
        parser=part_of,
        metavar="PART",
        help="Leave out a part; the operator then needs no rights for it. Repeatable. "
        + " ".join(f"{name}: {part.help}" for name, part in LEFT.items()),
        show_default="nothing is left out",
    ),
]
