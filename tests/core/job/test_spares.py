"""Orders to spares to import in advance: their receivers, sources and number."""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import Script, spec
from unbroken.core.job.events import AskAgent
from unbroken.core.job.spares import REPEAT_SECONDS


@pytest.fixture
def script() -> Script:
    """Two pods train since 4.0, a third is a spare."""
    made = Script(spec(2, spares=1))
    made.up()
    return made


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


def test_nobody_is_told_who_cannot_use_it_or_cannot_be_reached(script: Script) -> None:
    script.run("""
        10 runs w-0 0 imports=7
        10 ready w-2
        12 tick ->
        13 ready w-2 imports=0 ->
        13 lost w-2 ->
        15 tick ->
        16 ready w-2 imports=0 ->
        17 tick -> warm w-2 by=10.0.0.0:8080
        18 lost w-2
        27 tick ->
        28 ready w-2 imports=0
        29 tick -> warm w-2 by=10.0.0.0:8080
    """)


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


def test_a_new_operator_tells_them_too(script: Script) -> None:
    for name in script.views:
        script.run(f"5 pod {name} phase=Running")
    held = "master=10.0.0.0 port=29000"
    script.successor(20.0).run(f"""
        20 synced
        20 runs w-0 0 rank=0 {held} imports=7
        20 runs w-1 0 rank=1 {held}
        20 ready w-2 imports=0 -> warm w-2 by=10.0.0.0:8080
    """)


def test_a_new_pod_is_told_at_once(script: Script) -> None:
    script.run("""
        10 runs w-0 0 imports=7
        11 tick
        20 gone w-2
        21 pod w-2 uid=w-2.1 node=n3
        23 ready w-2 imports=0 -> warm w-2.1 by=10.0.0.0:8080
    """)


def test_a_spare_on_the_node_that_is_lost_takes_no_rank() -> None:
    """The proof that the node is off comes for one pod after the other."""
    script = Script(spec(1, spares=1))
    script.run("""
        0 job
        0 synced
        0 pod w-0 node=n0
        0 pod w-1 node=n0
        1 ready w-0
        1 ready w-1
        3 runs w-0 0 rank=0
        9 node n0 not-ready fenced -> prove n0 w-0, prove n0 w-1
        9 proven w-0 -> delete w-0 force, status Faulted 1, event NodeFault, incident 1 open
        9 proven w-1 -> delete w-1 force
    """)
    assert len(script.incidents) == 1
    assert script.status.restart_count == 1
