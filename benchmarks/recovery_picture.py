"""Draw the README's picture from a result file of `recovery.py`: one bar for each mode.

`python benchmarks/recovery_picture.py` writes the picture for light and for dark pages again.
A test compares the files with what this script draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/recovery-2026-11-24.json"
"""The run that the picture shows; its name has the day of the run."""
FOLDER = ROOT / "docs/images"
LABELS = {
    "in-process": "unbroken, restart in process",
    "in-process+snapshots": "unbroken, in process + snapshots",
    "warm": "unbroken, warm workers (default)",
    "torchrun-fresh-store": "torchrun, new store for each attempt",
    "torchrun": "torchrun as it ships",
    "ft_launcher": "NVRx 0.6.0, ft_launcher",
    "nvrx-inprocess": "NVRx 0.6.0, in process (on gloo)",
    "torchft": "torchft 0.2.0",
}
"""The name of each mode in the picture."""
OURS = "unbroken"
COLOURS: Mapping[str, Mapping[str, str]] = {
    "light": {"text": "#1f2328", "quiet": "#59636e", "ours": "#1a7f37", "other": "#afb8c1"},
    "dark": {"text": "#f0f6fc", "quiet": "#9198a1", "ours": "#3fb950", "other": "#656c76"},
}
TITLE = "Seconds from the kill of a worker to the next step of all ranks"
WIDTH, ROW, TOP, LABEL, BAR_MAX = 820, 30, 52, 270, 350
"""Pixels: width of the picture, height of a row, first row, column of names, longest bar."""


def rows(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The modes of a cell that have a label, the fastest first; those without a figure last."""
    found = [one for one in cell["results"] if one["mode"] in LABELS]
    return sorted(found, key=lambda one: (one["p50_seconds"] is None, one["p50_seconds"]))


def figure(row: Mapping[str, Any]) -> str:
    """Return the text next to a bar: the median, and the share of recovered kills below 100%."""
    recovered, kills = row["recovered"], row["kills"]
    if row["p50_seconds"] is None:
        why = next(iter(row.get("not_recovered", ())), "no step")
        return f"{why} (0 of {kills} kills recovered)"
    share = "" if recovered == kills else f" ({recovered} of {kills} kills recovered)"
    return f"{row['p50_seconds']:.2f} s{share}"


def words_of(document: Mapping[str, Any]) -> str:
    """Return the picture in words, for those who do not see it."""
    bars = (f"{LABELS[row['mode']]}: {figure(row)}" for row in rows(document["cells"][0]))
    return f"{TITLE}. {'; '.join(bars)}."


class Bar(NamedTuple):
    """A bar of a chart."""

    name: str
    seconds: float | None
    text: str
    """Text next to the bar."""
    is_ours: bool


def drawn(document: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """The picture as SVG."""
    cell = document["cells"][0]
    shown = rows(cell)
    kills = max(one["kills"] for one in shown)
    machine, _, loads = document["machine"].partition(", load ")
    before, after = loads.split(",")[0], document["took"].rpartition(" ")[2]
    names = [LABELS[row["mode"]] for row in shown]
    bars = [
        Bar(name, row["p50_seconds"], figure(row), name.startswith(OURS))
        for name, row in zip(names, shown, strict=True)
    ]
    where = f"{cell['shape'].replace('x', ' nodes x ')} ranks on one machine"
    notes = (
        f"{where}, DDP on gloo, {cell['parameters']:,} parameters, no GPU.",
        f"{machine}; load {before} at the start, {after} at the end. All modes in one run.",
    )
    return chart(f"median of {kills} kills; shorter is better", bars, notes, colours)


def chart(
    below: str, bars: Sequence[Bar], notes: tuple[str, str], colours: Mapping[str, str]
) -> str:
    """Return bars as SVG, with a line below the title and two below the bars."""
    height = TOP + ROW * len(bars) + 44
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="13" '
        'role="img">'
    )
    words = [
        head,
        f"<title>{TITLE}</title>",
        _text(0, 18, "Seconds from kill -9 of a worker to the next step of all ranks",
              colours["text"], "font-size='15' font-weight='600'"),
        _text(0, 37, below, colours["quiet"]),
        *_bars(bars, colours),
        _text(0, height - 24, notes[0], colours["quiet"]),
        _text(0, height - 7, notes[1], colours["quiet"]),
        "</svg>",
    ]  # fmt: skip
    return "\n".join(words) + "\n"


def _bars(bars: Sequence[Bar], colours: Mapping[str, str]) -> Iterator[str]:
    longest = max(one.seconds or 0.0 for one in bars) or 1.0
    for number, one in enumerate(bars):
        y = TOP + number * ROW
        weight = "font-weight='600'" if one.is_ours else ""
        yield _text(0, y + 16, one.name, colours["text"], weight)
        length = round(BAR_MAX * (one.seconds or 0.0) / longest, 1)
        if length:
            colour = colours["ours" if one.is_ours else "other"]
            yield (
                f'<rect x="{LABEL}" y="{y + 3}" width="{length}" height="18" rx="2" '
                f'fill="{colour}"/>'
            )
        yield _text(LABEL + length + 6, y + 16, one.text, colours["text"], weight)


def _text(x: float, y: float, words: str, colour: str, more: str = "") -> str:
    rest = f" {more}" if more else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{rest}>{escape(words)}</text>'


def files() -> Mapping[Path, str]:
    """The pictures by path."""
    document = json.loads(RESULT.read_text())
    return {
        FOLDER / f"recovery-{name}.svg": drawn(document, colours)
        for name, colours in COLOURS.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))
