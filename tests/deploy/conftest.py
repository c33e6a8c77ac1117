"""The real control plane of a file's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.apiservers import CannotStartError
from tests.deploy import planes


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[planes.Plane]:
    """One for all tests of a file."""
    try:
        with planes.plane(tmp_path_factory.mktemp("plane")) as found:
            yield found
    except CannotStartError as error:
        pytest.skip(str(error))
