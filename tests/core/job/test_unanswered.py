"""Pods whose agent never answers: replaced elsewhere where the job has trained before."""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import Script


def replaced() -> Script:
    """Return a job that has trained, whose new pod w-1 has a node since 20 s and no agent."""
    script = Script()
    script.up()
    script.run("""
        10 gone w-1                -> stop w-0 0 keep, create w-1, status Faulted 1, event Faulted,
            incident 1 open
        10.1 ready w-0 0
        20 pod w-1 uid=w-1.1 node=n7
    """)
    return script


@pytest.mark.parametrize(("line", "at", "status"), [
    ("", 3620, ""),  # it may load its image
    ("30 pod w-1 uid=w-1.1 why=FailedMount says=none", 630, ", status Faulted 1"),
    # It has loaded its image meanwhile.
    ("1000 pod w-1 uid=w-1.1 phase=Running", 1600, ", status Faulted 1"),
])  # fmt: skip
def test_a_pod_whose_agent_never_answers_is_replaced_on_another_node(
    line: str, at: float, status: str
) -> None:
    script = replaced()
    script.run(f"{line}\n{at - 0.1} tick")
    assert script.job.deadline() == at
    script.run(f"""
        {at} tick         -> delete w-1.1
        {at + 5} gone w-1 -> create w-1 avoid=n7{status}
    """)
    assert len(script.incidents) == 1, "no restart is charged for it"


def test_a_reason_that_comes_and_goes_is_one() -> None:
    script = replaced()
    script.run("""
        30 pod w-1 uid=w-1.1 why=ErrImagePull says=refused
        100 pod w-1 uid=w-1.1 why= says=
        630 tick -> delete w-1.1
    """)


def test_a_pod_that_its_ready_node_cannot_end_gives_its_name_up() -> None:
    script = replaced()
    script.run("""
        600 node n7 ready
        3620 tick -> delete w-1.1
        4219 tick -> delete w-1.1
        4225 tick -> delete w-1.1 force
    """)


def test_an_agent_that_answers_in_time_is_kept() -> None:
    script = replaced()
    script.run("600 ready w-1\n601 tick\n3620 tick")
    assert not script.job.state.plan.condemned


def test_a_first_start_waits_as_long_as_it_takes() -> None:
    script = Script()
    script.run("""
        0 job
        0 synced
        0 pod w-0 node=n0
        0 pod w-1 node=n1
        1 ready w-0
        9000 tick ->
    """)


def test_without_another_pod_that_has_answered_the_image_may_be_to_blame() -> None:
    script = Script()
    script.up()
    script.run("""
        10 gone w-0 -> stop w-1 0 keep, create w-0, status Faulted 1, event Faulted,
            incident 1 open
        10 gone w-1 -> create w-1, status Faulted 1, incident 1 open
        20 pod w-0 uid=w-0.1 node=n0
        20 pod w-1 uid=w-1.1 node=n1
        3620 tick    ->
    """)
    assert script.job.deadline() == 7220
