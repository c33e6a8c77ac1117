"""Write the chart's Grafana dashboards from `observe/dashboards`: `python tools/dashboards.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from unbroken.observe.dashboards import DASHBOARDS, Panel

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy/helm/unbroken/files/dashboards"
SCHEMA = 39
"""Schema version of Grafana 10.4; later versions migrate it when they load it."""
WIDTH, HEIGHT = 24, 7


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    board = DASHBOARDS[name]
    return {
        "uid": f"unbroken-{name}",
        "title": f"unbroken: {board.title}",
        "tags": ["unbroken"],
        "schemaVersion": SCHEMA,
        "refresh": "30s",
        "time": {"from": "now-24h", "to": "now"},
        "templating": {"list": [_source(), *starmap(_variable, board.variables.items())]},
        "panels": _placed(board.panels),
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Place panels in rows, side by side while there is room."""
    placed, x, y = [], 0, 0
    for number, one in enumerate(panels, 1):
        if x + one.width > WIDTH:
            x, y = 0, y + HEIGHT
        place = {"x": x, "y": y, "w": one.width, "h": HEIGHT}
        placed.append(
            {
                "id": number,
                "type": one.kind.value,
                "title": one.title,
                "datasource": {"type": "prometheus", "uid": "$source"},
                "gridPos": place,
                "fieldConfig": {"defaults": {"unit": one.unit.value, "min": 0}, "overrides": []},
                "targets": [{"refId": "A", "expr": one.expr, "legendFormat": one.legend}],
            }
        )
        x += one.width
    return placed


def files() -> Mapping[Path, str]:
    """Return the content of each file in the folder."""
    return {
        FOLDER / f"{name}.json": json.dumps(dashboard(name), indent=1) + "\n" for name in DASHBOARDS
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
