"""The dashboards fit the types of Grafana's own SDK for the version whose schema they name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.packages import NotInstalledError, installed
from tests.deploy.test_monitoring import dashboards

pytestmark = [pytest.mark.clients, pytest.mark.slow]
SDK = "grafana-foundation-sdk==1769699796!10.4.0"
"""Grafana's types of version 10.4, the oldest that the dashboards are for."""
PROGRAM = Path(__file__).with_name("grafana_program.py")
Object = dict[str, Any]


@pytest.fixture(scope="module")
def sdk() -> Path:
    """The folder of the SDK."""
    try:
        return installed("grafana-sdk-10.4.0", SDK)
    except NotInstalledError as error:
        pytest.fail(str(error))


def refused(sdk: Path, board: Object) -> list[str]:
    """Return what Grafana's types refuse of a dashboard."""
    done = subprocess.run(
        [sys.executable, PROGRAM],
        input=json.dumps(board),
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(sdk)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_every_dashboard_fits(sdk: Path) -> None:
    boards = list(dashboards())
    assert len(boards) == 5
    for board in boards:
        assert refused(sdk, board) == [], board["uid"]


def training() -> Object:
    """The dashboard of training."""
    (board,) = (one for one in dashboards() if one["uid"] == "unbroken-training")
    return board


PLANTED: dict[str, tuple[Callable[[Object], object], str]] = {
    "dashboard": (lambda board: board.update(tittle="x"), "/tittle: unknown field"),
    "type": (lambda board: board.update(schemaVersion="39"), "/schema_version: '39' is not"),
    "panel": (lambda board: board["panels"][0].update(gridpos={}), "/panels/0/gridpos: unknown"),
    "kind": (lambda board: board["panels"][0].update(type="stats"), "/panels/0/type: no panel"),
    "place": (
        lambda board: board["panels"][1]["gridPos"].update(w="wide"),
        "/panels/1/grid_pos",
    ),
    "field": (
        lambda board: board["panels"][0]["fieldConfig"]["defaults"].update(units="s"),
        "/panels/0/fieldConfig/defaults/units: unknown field",
    ),
    "option": (
        lambda board: board["panels"][0].update(options={"graphMode": "arae"}),
        "/panels/0/options",
    ),
    "query": (
        lambda board: board["panels"][0]["targets"][0].update(expression="up"),
        "/panels/0/targets/0/expression: unknown field",
    ),
    "source": (
        lambda board: board["panels"][0]["datasource"].update(type="promotheus"),
        "/panels/0/targets/0: query of an unknown data source",
    ),
    "variable": (
        lambda board: board["templating"]["list"][1].update(type="queries"),
        "/templating/list_val/1/type_val: 'queries' is not",
    ),
}
"""A wrong field -> how it is planted, and how its finding begins."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_field_is_found(sdk: Path, name: str) -> None:
    board = training()
    plant, expected = PLANTED[name]
    plant(board)
    found = refused(sdk, board)
    assert [one for one in found if one.startswith(expected)], found
