"""Decisions of the garbage collector, on small graphs of owners and dependents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.kube.cache import Key
from unbroken.local.controllers.collector import (
    FOREGROUND,
    ORPHAN,
    Ask,
    Await,
    Delete,
    Finish,
    Graph,
    Orphan,
    Release,
    Unblock,
    Verdict,
    judge,
)
from unbroken.local.controllers.inventory import Item, Owner, ResourceKind

THING = ResourceKind("", "v1", "Thing", "things", namespaced=True)
GLOBE = ResourceKind("", "v1", "Globe", "globes", namespaced=False)


def item(
    name: str,
    *owners: str,
    deleting: bool = False,
    finalizers: tuple[str, ...] = (),
    namespace: str = "ns",
    kind: ResourceKind = THING,
) -> Item:
    """Return an object; an owner `x!` is blocked by it, an owner `X` is cluster-wide."""
    references = tuple(
        Owner(
            "v1",
            "Globe" if one[0].isupper() else "Thing",
            one.rstrip("!"),
            f"uid-{one.rstrip('!')}",
            blockOwnerDeletion=one.endswith("!") or None,
        )
        for one in owners
    )
    return Item(kind, Key(namespace, name), f"uid-{name}", "1", references, finalizers, deleting)


def decided(of: str, items: list[Item], missing: str = "") -> Verdict:
    """Return the decision about the object `of`; `missing` are owners that the API lacks."""
    graph = Graph()
    for one in items:
        graph.change(None, one)
    subject = graph.get(f"uid-{of}")
    assert subject is not None
    gone = {
        (owner.uid, subject.key.namespace, owner)
        for owner in subject.owners
        if owner.name in missing
    }
    return judge(subject, graph, gone, set())


GOING: Any = {"deleting": True, "finalizers": (FOREGROUND,)}


@pytest.mark.parametrize(
    ("claim", "of", "items", "missing", "verdict"),
    [
        ("without owners nothing is done", "b", [item("b")], "", None),
        ("an owner that is there holds", "b", [item("a"), item("b", "a")], "", None),
        (
            "an owner that is not seen is asked for",
            "b",
            [item("b", "a")],
            "",
            Ask(item("b", "a").owners),
        ),
        ("without any owner left it goes", "b", [item("b", "a")], "a", Delete("Background")),
        (
            "one owner left holds, the lost one is dropped",
            "b",
            [item("c"), item("b", "a", "c")],
            "a",
            Release(frozenset({"uid-a"})),
        ),
        (
            "an owner in another namespace does not hold",
            "b",
            [item("a", namespace="other"), item("b", "a")],
            "",
            Ask(item("b", "a").owners),
        ),
        (
            "a cluster-wide owner holds in any namespace",
            "b",
            [item("A", namespace="", kind=GLOBE), item("b", "A")],
            "",
            None,
        ),
        (
            "an object with the owner's uid but another kind does not hold",
            "b",
            [item("A", kind=THING), item("b", "A")],
            "",
            Ask(item("b", "A").owners),
        ),
        ("what goes already is let be", "b", [item("b", "a", deleting=True)], "a", None),
        (
            "a leaf goes when its owner waits for it",
            "b",
            [item("a", **GOING), item("b", "a!")],
            "",
            Delete("Background"),
        ),
        (
            "a branch goes from its leaves",
            "b",
            [item("a", **GOING), item("b", "a!"), item("c", "b!")],
            "",
            Delete("Foreground"),
        ),
        (
            "a circle is cut",
            "b",
            [item("a", "b!", **GOING), item("b", "a!")],
            "",
            Unblock(),
        ),
        (
            "an owner waits for those that block it",
            "a",
            [item("a", **GOING), item("b", "a!"), item("c", "a", deleting=True)],
            "",
            Await((item("b", "a!"),)),
        ),
        (
            "but not for others",
            "a",
            [item("a", **GOING), item("b", "a")],
            "",
            Finish(FOREGROUND),
        ),
        (
            "orphans are released first",
            "a",
            [item("a", deleting=True, finalizers=(ORPHAN,)), item("b", "a")],
            "",
            Orphan((item("b", "a"),)),
        ),
        (
            "then their owner goes",
            "a",
            [item("a", deleting=True, finalizers=(ORPHAN,)), item("b")],
            "",
            Finish(ORPHAN),
        ),
        (
            "a finalizer of orphans decides how it goes",
            "b",
            [item("b", "a", finalizers=(ORPHAN,))],
            "a",
            Delete("Orphan"),
        ),
    ],
)
def test_verdicts(claim: str, of: str, items: list[Item], missing: str, verdict: Verdict) -> None:
    """Judge one object of a graph."""
    assert decided(of, items, missing) == verdict, claim


@pytest.mark.parametrize(
    ("claim", "items", "change", "touched"),
    [
        ("dependents of what is gone", [item("a"), item("b", "a")], (item("a"), None), "b"),
        (
            "an owner that waits",
            [item("a", **GOING), item("b", "a!")],
            (item("b", "a!"), None),
            "a",
        ),
        (
            "dependents of what starts to wait",
            [item("a"), item("b", "a")],
            (item("a"), item("a", **GOING)),
            "ab",
        ),
        ("what has owners, when it comes", [], (None, item("b", "a")), "b"),
        ("nothing, when a free object comes", [], (None, item("b")), ""),
    ],
)
def test_what_is_looked_at(
    claim: str, items: list[Item], change: tuple[Item | None, Item | None], touched: str
) -> None:
    """Compare the objects to look at after a change."""
    graph = Graph()
    for one in items:
        graph.change(None, one)
    assert graph.change(*change) == {f"uid-{name}" for name in touched}, claim


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef")), min_size=1))
def test_everything_below_a_deleted_root_goes_and_nothing_else(owners: dict[str, set[str]]) -> None:
    """Delete one object in the background, until nothing changes any more."""
    root = sorted(owners)[0]
    present = {name: item(name, *sorted(above - {name})) for name, above in owners.items()}
    graph = Graph()
    for one in present.values():
        graph.change(None, one)
    queue = list(graph.change(present.pop(root), None)) + [f"uid-{name}" for name in present]
    while queue:
        subject = graph.get(queue.pop())
        if subject is None:
            continue
        missing = {
            (owner.uid, "ns", owner) for owner in subject.owners if owner.name not in present
        }
        verdict = judge(subject, graph, missing, set())
        assert not isinstance(verdict, Ask)
        if isinstance(verdict, Delete):
            del present[subject.key.name]
            queue += graph.change(subject, None)
        elif isinstance(verdict, Release):
            kept = [one.name for one in subject.owners if one.uid not in verdict.uids]
            present[subject.key.name] = item(subject.key.name, *kept)
            queue += graph.change(subject, present[subject.key.name])
    for name, one in present.items():
        assert all(owner.name in present for owner in one.owners), name
    survivors = set(present)
    for name, above in owners.items():
        if name != root and not above - {name}:
            assert name in survivors, "an object without owners was deleted"
