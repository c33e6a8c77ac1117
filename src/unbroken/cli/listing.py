"""Lists that commands print: their forms, and `--watch`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unbroken.errors import SpecError, WorldError

from .options import ListOutput
from .show import note, print_table, print_value

if TYPE_CHECKING:
    from .connection import Cluster
    from .watch import ClusterWatch

PAUSE_SECONDS = 1.0
"""Shortest time between two looks of `--watch`: each look reads the whole list again."""
OTHER_SECONDS = 5.0
"""Seconds between two looks at kinds that are not followed: a cluster may not know them."""
AGAIN_SECONDS = 2.0
"""Seconds until lists are read again after the server did not answer."""
VOLATILE = frozenset({"AGE", "GOODPUT", "LOST MOST TO", "SCORE"})
"""Columns that change as time passes.  They alone do not print a row again."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A list: its values for programs, and its table for people."""

    value: Any
    """The list as JSON and YAML show it."""
    names: Sequence[str]
    """Name of each row, for `-o name`, in the order of the rows."""
    titles: Sequence[str]
    rows: Sequence[Sequence[object]]
    empty: str = field(default="", kw_only=True)
    """Text that is printed instead of an empty table."""


def show_list(listing: Listing, output: ListOutput) -> None:
    """Print a list in the form that the user wants."""
    if output in (ListOutput.JSON, ListOutput.YAML):
        print_value(listing.value, output)
    elif output is ListOutput.NAME:
        print(*listing.names, sep="\n", end="\n" if listing.names else "")
    elif listing.rows or not listing.empty:
        print_table(listing.titles, listing.rows)
    else:
        note(listing.empty)


def require_table(output: ListOutput) -> None:
    """Raise SpecError if `--watch` is given with a form that is not a table."""
    if output not in (ListOutput.TEXT, ListOutput.WIDE):
        raise SpecError(f"--watch prints a table: use -o text or -o wide, not -o {output.value}")


async def watch_list(
    cluster: Cluster,
    kinds: Callable[[ClusterWatch], object],
    read: Callable[[], Awaitable[Sequence[Listing]]],
    seconds: float | None = None,
) -> None:
    """Print lists, then each row that changes, until the command is ended.

    `kinds` names the objects to follow; a change of any of them reads the lists again, and so do
    `seconds` without a change.  A list other than the first is not printed while it is empty.
    """
    from unbroken.kube.clock import pause

    from .watch import ClusterWatch

    watch, shown = ClusterWatch(cluster), list[Shown]()
    kinds(watch)
    async with watch:
        while True:
            wait = seconds
            try:
                listings = await read()
            except WorldError:
                if not shown:
                    raise
                wait = AGAIN_SECONDS
            else:
                shown += [Shown() for _ in listings[len(shown) :]]
                for index, (one, listing) in enumerate(zip(shown, listings, strict=True)):
                    if listing.rows or one.has_printed or index == 0:
                        one.print(listing)
            await pause(PAUSE_SECONDS)
            await watch.change(wait)


class Shown:
    """The rows that `--watch` has printed."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[str, ...]] = {}
        self._widths: list[int] = []

    @property
    def has_printed(self) -> bool:
        """True after the titles were printed."""
        return bool(self._widths)

    def print(self, listing: Listing) -> None:
        """Print the rows that are new or have changed; names of rows that are gone are noted."""
        is_first = not self.has_printed
        kept = [title not in VOLATILE for title in listing.titles]
        result = {
            name: tuple(str(cell) for cell, is_kept in zip(row, kept, strict=True) if is_kept)
            for name, row in zip(listing.names, listing.rows, strict=True)
        }
        changed = [
            [str(cell) for cell in row]
            for name, row in zip(listing.names, listing.rows, strict=True)
            if self._rows.get(name) != result[name]
        ]
        lines = [list(listing.titles), *changed] if is_first else changed
        self._widths = [
            max(known, *(len(line[index]) for line in lines), 0)
            for index, known in enumerate(self._widths or [0] * len(listing.titles))
        ]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, self._widths, strict=True))
            print("   ".join(cells).rstrip(), flush=True)
        for name in self._rows.keys() - result.keys():
            note(f"{name}: deleted")
        if is_first and not listing.rows and listing.empty:
            note(listing.empty)
        self._rows = result
