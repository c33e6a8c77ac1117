"""Pods whose agent never answers: replaced elsewhere where the job has trained before."""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import Script, running


def replaced() -> Script:
    """Return a job that has trained, whose new pod w-1 has a node since 20 s and no agent."""
    script = running()
    script.run("""
        10 gone w-1                -> stop w-0 in 0 keep, create w-1, status Faulted 1,
            event Faulted, incident 1 open
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
