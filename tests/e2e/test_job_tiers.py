"""The sources of a job's state: memory, then the buddy, then the store. `explain` names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.control import power
from tests.e2e.job_events import Event, places
from tests.e2e.jobs import Job, job
from tests.watching import wait_until
from tests.worker.s3_stores import running_s3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROGRAM = Path(__file__).parent / "programs/tiers.py"


def saved(one: Job, attempt: int) -> None:
    """Wait until the store has a checkpoint of an attempt, and the ranks have made steps since."""

    def there(events: list[Event]) -> bool:
        made = (event.more for event in events if (event.what, event.attempt) == ("step", attempt))
        return any(step["saved"] and step["step"] > step["saved"] for step in made)

    one.events.until(there)


def sources(one: Job, attempt: int) -> list[str]:
    """Wait until all ranks have restored; return the source of each."""

    def told(events: list[Event]) -> dict[int, str]:
        return {
            event.rank: event.more["source"] for event in events
            if (event.what, event.attempt) == ("restored", attempt)
        }  # fmt: skip

    found = one.events.until(lambda events: len(told(events)) == len(one.ranks) and told(events))
    return [source for _, source in sorted(found.items())]


def node_of(one: Job, attempt: int, rank: int) -> str:
    """Return the node of a rank."""
    name: str = one.pods()[places(one.starts(attempt))[rank]]["spec"]["nodeName"]
    return name


def explained(cluster: Cluster, one: Job, count: int) -> str:
    """Return what is said of the newest incident, once so many have ended."""
    one.incidents(count)
    return str(cluster.unbroken("explain", one.name).stdout)


def test_a_lost_node_costs_no_more_than_describe_said(nodes: Cluster, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    environment = {"RUN_URL": str(tmp_path / "run")}
    sizes = {"program": PROGRAM, "nproc": 1, "spares": 1}
    with job(nodes, tmp_path, environment=environment, **sizes) as one:
        saved(one, 0)

        def told() -> dict[str, dict[str, Any]]:
            shown = json.loads(nodes.unbroken("describe", one.name, "-o", "json").stdout)
            (found,) = shown["snapshots"]
            assert len(found["copies"]) == len(one.ranks)
            assert found["stateBytes"] > 0
            return {cost["loss"]: cost for cost in found["losses"]}

        def is_kept() -> dict[str, dict[str, Any]] | None:
            """The costs, once the buddy has a copy and an agent has reported a checkpoint."""
            costs = told()
            places = (costs["node"]["source"], costs["node and its buddy"]["source"])
            return costs if places == ("buddy", "checkpoint") else None

        costs = wait_until(is_kept)
        assert {loss: cost["source"] for loss, cost in costs.items()} == {
            "worker": "memory",
            "rank 0": "memory",
            "node": "buddy",
            "node and its buddy": "checkpoint",
        }
        assert costs["node"]["resumeStep"] >= 1
        assert costs["node and its buddy"]["resumeStep"] >= 10
        text = nodes.unbroken("describe", one.name).stdout
        assert "the copy at its buddy, after step" in text
        power(nodes, node_of(one, 0, 1), "off")
        # A checkpoint that is newer than the copy by now is taken in its place.
        found = sorted(source.split()[0] for source in sources(one, 1))
        assert found in (["buddy", "memory"], ["disk", "disk"])
        (restored,) = {
            event.more["step"] for event in one.events.all
            if (event.what, event.attempt) == ("restored", 1)
        }  # fmt: skip
        assert restored >= costs["node"]["resumeStep"]
        one.finish()


@pytest.mark.heavy
def test_the_nearest_place_that_has_the_state_is_taken_and_named(
    nodes: Cluster, tmp_path: Path
) -> None:
    sizes = {"program": PROGRAM, "nproc": 1, "spares": 1}
    with running_s3() as store:
        environment = {**store.variables, "RUN_URL": "s3://bucket/run"}
        with job(nodes, tmp_path, environment=environment, **sizes) as one:
            saved(one, 0)
            one.kill(one.starts(0)[1])
            assert sources(one, 1) == ["memory", "memory"]
            assert "from memory (2 ranks)" in explained(nodes, one, 1)
            saved(one, 1)
            lost = node_of(one, 1, 1)
            power(nodes, lost, "off")
            assert sorted(source.split()[0] for source in sources(one, 2)) == ["buddy", "memory"]
            assert "buddy " in explained(nodes, one, 2)
            saved(one, 2)
            left = {node_of(one, 2, rank) for rank in one.ranks}
            for name in left:
                power(nodes, name, "off")
            for name in {*left, lost}:
                power(nodes, name, None)
            newest = max(event.attempt for event in one.events.all) + 1
            assert sources(one, newest) == ["s3", "s3"]
            assert "from s3 (2 ranks)" in explained(nodes, one, 3)
            one.steps(newest)
            one.finish()
