"""Draw the README's second picture from a result file of `frameworks.py`.

`python benchmarks/frameworks_picture.py` writes the picture for light and for dark pages again.
A test compares the files with what this script draws.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from recovery_picture import COLOURS, FOLDER, ROOT, TITLE, Bar, chart, figure

RESULT = ROOT / "benchmarks/results/frameworks-2026-11-29.json"
"""The run that the picture shows; its name has the day of the run."""
FRAMEWORKS = {"hf-trainer": "HF Trainer", "accelerate": "Accelerate", "lightning": "Lightning"}
MODES = {
    "second": "unbroken, second run",
    "first": "unbroken, first run",
    "torchrun": "torchrun, new store",
}


def rows(document: Mapping[str, Any], delay: float) -> list[dict[str, Any]]:
    """Return the cells of a delay with a figure, by framework and mode in the order above."""
    found = [one for one in document["figures"] if one["delay_seconds"] == delay]
    order = [(framework, mode) for framework in FRAMEWORKS for mode in MODES]
    known = {(one["framework"], one["mode"]): one for one in found}
    return [known[place] for place in order if place in known]


def bars(document: Mapping[str, Any], delay: float) -> list[Bar]:
    """Return a bar for each framework and mode."""
    return [
        Bar(
            f"{FRAMEWORKS[one['framework']]}: {MODES[one['mode']]}",
            one["p50_seconds"],
            figure(one),
            one["mode"] != "torchrun",
        )
        for one in rows(document, delay)
    ]


def delay_of(document: Mapping[str, Any]) -> float:
    """Return the shortest delay: what was not warm by then shows."""
    return float(min(one["delay_seconds"] for one in document["figures"]))


def words_of(document: Mapping[str, Any]) -> str:
    """Return the picture in words, for those who do not see it."""
    delay = delay_of(document)
    said = "; ".join(f"{one.name}: {one.text}" for one in bars(document, delay))
    return f"{TITLE}, {delay:g} s after the first step. {said}."


def drawn(document: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """The picture as SVG."""
    delay = delay_of(document)
    kills = max(one["kills"] for one in rows(document, delay))
    nodes, _, ranks = document["shape"].partition("x")
    first, last = document["load"]
    below = f"killed {delay:g} s after the first step; median of {kills} kills; shorter is better"
    where = f"{nodes} node x {ranks} ranks on one machine, DDP on gloo, small models, no GPU"
    loads = f"load {first:.1f} at the start, {last:.1f} at the end."
    notes = (f"{where}; {loads}", f"{document['machine'].partition(', nice')[0]}.")
    return chart(below, bars(document, delay), notes, colours)


def files() -> Mapping[Any, str]:
    """The pictures by path."""
    document = json.loads(RESULT.read_text())
    return {
        FOLDER / f"frameworks-{name}.svg": drawn(document, colours)
        for name, colours in COLOURS.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
