"""Bad nodes on real local clusters: their repairs, and the state of a repair after `up` dies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.cli.test_cli_nodes import described, kubectl, node_names
from tests.cli_calls import Cli
from tests.e2e.clusters import kill
from tests.watching import wait_until

pytestmark = pytest.mark.slow
GSP = "NVRM: Xid (PCI:0000:01:00): 119, pid=1, Timeout waiting for RPC from GSP\n"
"""Line that requires a reset the first time."""
HEALTH = "sagemaker.amazonaws.com/node-health-status"


def break_node(cli: Cli, name: str, line: str = GSP) -> None:
    """Add a line to the node's kernel log."""
    with (cli.directory / "nodes" / name / "kernel.log").open("a") as file:
        file.write(line)


def rows(cli: Cli) -> dict[str, Any]:
    """Return the row of each node in `unbroken nodes`."""
    return {one["name"]: one for one in cli.json("nodes")["nodes"]}


def history(cli: Cli, name: str) -> list[tuple[str, str]]:
    """Return (action, state) of the repairs of a node that have ended."""
    record = described(cli, name)["record"]
    return [(one["action"], one["state"]) for one in record.get("history", ())]


@pytest.mark.heavy
def test_without_recovery_a_bad_node_is_labelled_and_left(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli()
    cli.call("up", "--detach", "--nodes", "2", "--node-recovery", "None")
    break_node(cli, "node-0")
    wait_until(lambda: rows(cli)["node-0"]["score"], lambda score: score > 0)
    # A repair of the other, which a person orders, is done from begin to end meanwhile.
    cli.call("nodes", "reset", "node-1", "--wait")
    left = described(cli, "node-0")
    assert left["health"] == "UnschedulablePendingReboot"
    assert (left["repair"], left["verified"], left["ordered"]) == (None, "", "")
    assert not left["record"].get("history")
    kubectl(cli, "annotate", "node", "node-0", "unbroken.dev/repair=reset")
    wait_until(lambda: history(cli, "node-0"), lambda ended: ended == [("reset-gpu", "Done")])
    assert rows(cli)["node-0"]["health"] == "Schedulable"


@pytest.mark.heavy
def test_repair_goes_on_in_the_next_up_and_is_made_once(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli(nodes=2)
    before = rows(cli)["node-0"]["bootId"]
    cli.call("nodes", "reboot", "node-0")
    wait_until(lambda: rows(cli)["node-0"]["repair"], lambda repair: repair is not None)
    kill(cli.json("status")["pid"])
    cli.call("up", "--detach")
    wait_until(lambda: history(cli, "node-0"), lambda ended: ended == [("reboot", "Done")])
    machine = kubectl(cli, "get", "machines.unbroken.dev", "node-0", "-o", "jsonpath={.spec.boots}")
    assert machine == "1"
    row = rows(cli)["node-0"]
    assert row["bootId"] != before
    assert (row["health"], row["schedulable"]) == ("Schedulable", True)


@pytest.mark.heavy
def test_dry_run_says_what_it_would_do(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli()
    cli.call("up", "--detach", "--nodes", "1", "--repair-dry-run")
    break_node(cli, "node-0")
    repair = wait_until(lambda: rows(cli)["node-0"]["repair"], lambda repair: repair is not None)
    assert repair["action"] == "reset-gpu"
    shown = wait_until(
        lambda: cli.call("nodes", "list", "-o", "wide").stdout, lambda text: "dry run" in text
    )
    assert "dry run: would reset-gpu the node" in shown
    told = kubectl(cli, "get", "events", "--field-selector", "reason=RepairDryRun")
    assert "would reset-gpu the node" in told


@pytest.mark.heavy
def test_five_bad_nodes_are_repaired_one_by_one_and_replaced_if_it_comes_back(
    make_cli: Callable[..., Cli],
) -> None:
    cli = make_cli(nodes=5)
    for index in range(5):
        break_node(cli, f"node-{index}")

    def under_repair() -> int:
        return sum(1 for one in rows(cli).values() if one["repair"])

    wait_until(under_repair, lambda count: count == 5)
    wait_until(under_repair, lambda count: count == 0)
    assert {tuple(history(cli, name)) for name in node_names(cli)} == {(("reset-gpu", "Done"),)}
    # Not by looks at the nodes: each record is written on its own.
    made = [described(cli, name)["record"]["history"][0] for name in node_names(cli)]
    spans = sorted((one["withdrawnAt"], one["endedAt"]) for one in made)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    break_node(cli, "node-0")
    wait_until(lambda: node_names(cli), lambda names: "node-0" not in names and len(names) == 5)
    ledger = cli.json("nodes", "blame", "node-0")
    assert {"fault", "relapse"} <= {one["kind"] for one in ledger["blame"]}


def test_command_must_be_said_and_can_be_called(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli()
    done = cli.call("up", "--detach", "--node-provider", "command", code=1)
    assert "--node-command" in done.stderr
    done = cli.call("up", "--detach", "--node-command", "run {nodes}", code=1)
    assert "it may use {node}" in done.stderr
    done = cli.call("operator", "--node-provider", "command", code=1)
    assert "--node-command" in done.stderr


@pytest.mark.heavy
def test_flapping_node_ends_in_quarantine_until_it_is_cleared(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli(nodes=2)
    for _ in range(5):
        kubectl(cli, "annotate", "node", "node-0", "unbroken.dev/power=off")
        wait_until(lambda: rows(cli)["node-0"]["ready"], lambda ready: not ready)
        kubectl(cli, "annotate", "node", "node-0", "unbroken.dev/power-")
        wait_until(lambda: rows(cli)["node-0"]["ready"], lambda ready: ready)
    row = wait_until(lambda: rows(cli)["node-0"], lambda row: row["quarantined"] is not None)
    assert "points are held against it" in row["quarantined"]
    wait_until(lambda: rows(cli)["node-0"]["schedulable"], lambda schedulable: not schedulable)
    assert "Quarantined" in cli.call("nodes").stdout
    assert "nodes clear node-0 --why" in cli.call("nodes", "describe", "node-0").stdout
    done = cli.call("nodes", "clear", "node-0", "--why", "new power supply")
    assert "a burn-in follows" in done.stdout
    row = wait_until(lambda: rows(cli)["node-0"], lambda row: row["repair"] is not None)
    assert (row["score"], row["repair"]["askedBy"]) == (0, "clear")
    kinds = kubectl(cli, "get", "nodechecks", "-o", "jsonpath={.items[*].spec.kinds}")
    assert "InstanceStress" in kinds
    ledger = cli.call("nodes", "blame", "node-0").stdout
    assert "new power supply" in ledger
    assert ledger.count("NotReady") == 5
