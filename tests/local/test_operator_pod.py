"""The log of the operator of a local cluster."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from unbroken.errors import SpecError
from unbroken.local.up import OperatorLog, operator_log


async def text(log: OperatorLog, **query: str) -> str:
    """Return the log as a request with these options gets it."""
    return b"".join([chunk async for chunk in log.read(query)]).decode()


async def test_the_log_has_the_operators_lines_and_no_others(tmp_path: Path) -> None:
    with operator_log(tmp_path / "operator") as log:
        for name in ("operator.jobs.runner", "kube.lease", "local.scheduler", "cluster_api.api"):
            logging.getLogger(f"unbroken.{name}").warning("from %s", name)
        lines = (await text(log)).splitlines()
        assert [line.rsplit(" ", 1)[1] for line in lines] == ["operator.jobs.runner", "kube.lease"]
        assert (await text(log, tailLines="1")).endswith(
            "WARNING unbroken.kube.lease from kube.lease\n"
        )
        with pytest.raises(SpecError, match="previous terminated"):
            log.read({"previous": "true"})
    logging.getLogger("unbroken.operator").warning("too late")
    assert "too late" not in await text(log)


async def test_the_log_of_an_earlier_run_is_gone(tmp_path: Path) -> None:
    for word in ("first", "second"):
        with operator_log(tmp_path / "operator") as log:
            logging.getLogger("unbroken.operator").warning(word)
    assert "first" not in await text(log)
    assert "second" in await text(log)
