"""Machines of a pool, and their addresses."""

from __future__ import annotations

from tests.tables import cases
from unbroken.local.machines.decisions.machine import Listed, changes, free_index, in_order
from unbroken.spec.nodes.kinds import MachineSpec


def listed(text: str) -> list[Listed]:
    """Machines from `name[/place][@cluster][-]`; `-` at the end: it leaves."""
    found = []
    for word in text.split():
        is_leaving = word.endswith("!")
        rest, _, cluster = word.rstrip("!").partition("@")
        name, _, place = rest.partition("/")
        found.append(Listed(name, MachineSpec(cluster=cluster, logical_id=place), is_leaving))
    return found


@cases
def test_what_is_made_and_deleted(machines: str, count: int, wanted: str) -> None:
    found = changes(listed(machines), count)
    words = [f"+{name}" for name in found.create]
    words += [f"-{name}" for name in found.delete]
    words += [f"?{name}" for name in found.blocked]
    assert " ".join(words) == wanted


def test_names_are_in_the_order_in_which_people_count() -> None:
    names = ["node-10", "node-9", "b", "node-1-ab", "node-1"]
    assert in_order(names) == ["b", "node-1", "node-1-ab", "node-9", "node-10"]


def test_the_lowest_free_index_is_taken() -> None:
    assert free_index({}, 4) == 0
    assert free_index({"a": 0, "b": 2}, 4) == 1
    assert free_index({"a": 0, "b": 1}, 2) is None
