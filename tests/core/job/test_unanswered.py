"""Pods whose agent never answers: replaced elsewhere where the job has trained before."""

from __future__ import annotations

from tests.core.job.drive_job import Script


def replaced() -> Script:
    """Return a job that has trained, whose new pod w-1 has a node since 20 s and no agent."""
    script = Script()
    script.up()
    script.run("""
        10 gone w-1                -> stop w-0 0, create w-1
        10.1 ready w-0 0
        20 pod w-1 uid=w-1.1 node=n7
    """)
    return script


def test_a_pod_whose_agent_never_answers_is_replaced_on_another_node() -> None:
    script = replaced()
    script.run("619.9 tick")
    assert script.job.deadline() == 620
    script.run("""
        620 tick     -> delete w-1.1
        625 gone w-1 -> create w-1 avoid=n7
    """)
    assert len(script.incidents) == 1, "no restart is charged for it"


def test_a_pod_that_its_ready_node_cannot_end_gives_its_name_up() -> None:
    script = replaced()
    script.run("""
        600 node n7 ready
        620 tick -> delete w-1.1
        739 tick -> delete w-1.1
        745 tick -> delete w-1.1 force
    """)


def test_an_agent_that_answers_in_time_is_kept() -> None:
    script = replaced()
    script.run("600 ready w-1\n601 tick")
    assert script.job.deadline() != 620
    script.run("620 tick")
    assert not script.job.state.plan.condemned


def test_a_first_start_waits_as_long_as_it_takes() -> None:
    script = Script()
    script.run("""
        0 job
        0 synced
        0 pod w-0 node=n0
        0 pod w-1 node=n1
        1 ready w-0
        2000 tick ->
    """)


def test_without_another_pod_that_has_answered_the_image_may_be_to_blame() -> None:
    script = Script()
    script.up()
    script.run("""
        10 gone w-0 -> stop w-1 0, create w-0
        10 gone w-1 -> create w-1
        20 pod w-0 uid=w-0.1 node=n0
        20 pod w-1 uid=w-1.1 node=n1
        620 tick    ->
    """)
    assert script.job.deadline() == 1220
