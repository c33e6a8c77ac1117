"""Tables of cases: YAML files beside the tests that read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

T = TypeVar("T", bound=Callable[..., None])


def cases(test: T) -> T:
    """Give a test the rows under its name in the YAML file beside it: `test_crds.yaml`.

    A row has a value for each argument, and may be named by `case`.
    """
    rows = [dict(row) for row in _read(inspect.getfile(test))[test.__name__]]
    ids = [row.pop("case", None) for row in rows]
    names = list(rows[0])
    assert all(row.keys() == rows[0].keys() for row in rows), f"{test.__name__}: other arguments"
    values = [tuple(row[name] for name in names) for row in rows]
    return pytest.mark.parametrize(names, values, ids=ids)(test)


@cache
def _read(path: str) -> dict[str, list[dict[str, Any]]]:
    found = yaml.safe_load(Path(path).with_suffix(".yaml").read_text())
    assert isinstance(found, dict)
    return found
