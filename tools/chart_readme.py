"""Write the table of values in the chart's README from its schema and defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "deploy/helm/unbroken"
README = CHART / "README.md"
BEGIN, END = "<!-- values: written by tools/chart_readme.py -->\n", "<!-- end of values -->\n"


def rows(schema: Mapping[str, Any], values: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, default and description of each value."""
    for key, one in schema["properties"].items():
        name, default = f"{path}{key}", (values or {}).get(key)
        if "description" not in one:
            yield from rows(one, default, f"{name}.")
        elif name != "global":
            yield name, json.dumps(default), one["description"]


def text() -> str:
    """The README as it should be."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for name, default, meaning in rows(schema, values):
        lines.append(f"| `{name}` | `{default}` | {meaning.replace('|', '&#124;')} |")
    table = "\n".join(lines)
    head, _, rest = README.read_text().partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    README.write_text(text())
