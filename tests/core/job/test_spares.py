"""Orders to spares to import in advance: their receivers, sources and number."""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import Script, running
from unbroken.core.job.events import AskAgent
from unbroken.core.job.moves import REPEAT_SECONDS


@pytest.fixture
def script() -> Script:
    """Two pods train since 4.0, a third is a spare."""
    return running(2, spares=1)


def warmed(script: Script) -> list[str]:
    """Return the pods that got an order."""
    return [one.pod for one in script.effects if isinstance(one, AskAgent)]


def test_a_spare_is_told_until_it_reports_what_the_others_have(script: Script) -> None:
    script.run("""
        10 runs w-0 0 imports=7
        10.5 ready w-2 imports=0
        11 tick -> warm w-2 by=10.0.0.0:8080
        12 tick ->
        20 runs w-1 0 imports=9 ->
        21 tick -> warm w-2 by=10.0.0.1:8080/10.0.0.0:8080
        22 ready w-2 imports=9 ->
        31 tick ->
    """)
    assert REPEAT_SECONDS == 10.0
    assert script.job.deadline() != 31 + REPEAT_SECONDS, "nobody waits for anything any more"


def test_while_the_gang_restarts_nobody_imports(script: Script) -> None:
    script.run("""
        10 runs w-0 0 imports=7
        10 ready w-2 imports=0
        10.5 failed w-1 0 imports=7
        12 tick
        12 ready w-0 0 imports=7
        12 ready w-1 0 imports=7
        13 tick
    """)
    assert warmed(script) == []
    for name in ("w-0", "w-1"):
        script.run(f"14 runs {name} 1 imports=7")
    assert warmed(script) == ["w-2.0"]
