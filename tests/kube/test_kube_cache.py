"""The informer's copy takes lists and events in any order a server may send them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap

from unbroken.kube.cache import TOMBSTONES, Cache, Key


def item(name: str, version: int, uid: str = "") -> ConfigMap:
    """A small object."""
    uid = uid or f"uid-{name}"
    return ConfigMap(
        metadata=ObjectMeta(name=name, namespace="ns", uid=uid, resourceVersion=str(version))
    )


def told(cache: Cache[ConfigMap], event: str, new: ConfigMap) -> list[str]:
    """The changes an event makes: `+name@version`, `~`, `-`."""
    return [text(change.old, change.new) for change in cache.apply(event, new)]


def text(old: ConfigMap | None, new: ConfigMap | None) -> str:
    """One change in short."""
    sign = "+" if old is None else "-" if new is None else "~"
    shown = new or old
    assert shown is not None
    assert shown.metadata is not None
    return f"{sign}{shown.metadata.name}@{shown.metadata.resourceVersion}"


@pytest.mark.parametrize(
    ("claim", "events", "changes"),
    [
        ("a doubled event changes nothing", [("ADDED", "a", 5), ("ADDED", "a", 5)], ["+a@5"]),
        (
            "an event older than what is known changes nothing",
            [("ADDED", "a", 5), ("MODIFIED", "a", 4)],
            ["+a@5"],
        ),
        (
            "versions are compared as numbers",
            [("ADDED", "a", 9), ("MODIFIED", "a", 10)],
            ["+a@9", "~a@10"],
        ),
        (
            "a late event does not bring a deleted object back",
            [("ADDED", "a", 5), ("DELETED", "a", 7), ("MODIFIED", "a", 6)],
            ["+a@5", "-a@7"],
        ),
        (
            "a deletion older than what is known changes nothing",
            [("ADDED", "a", 5), ("DELETED", "a", 4)],
            ["+a@5"],
        ),
        ("deleting what is not there changes nothing", [("DELETED", "a", 4)], []),
        ("an unknown type of event changes nothing", [("SHINY", "a", 4)], []),
    ],
)
def test_cache_takes_events(
    claim: str, events: list[tuple[str, str, int]], changes: list[str]
) -> None:
    """Apply events to a cache; each row is one claim."""
    cache: Cache[ConfigMap] = Cache()
    seen = [change for kind, name, v in events for change in told(cache, kind, item(name, v))]
    assert seen == changes, claim


def test_object_remade_under_its_name_is_gone_then_new() -> None:
    """A change never joins two objects that share a name."""
    cache: Cache[ConfigMap] = Cache()
    cache.apply("ADDED", item("a", 1, "first"))
    assert told(cache, "MODIFIED", item("a", 2, "second")) == ["-a@1", "+a@2"]
    assert told(cache, "MODIFIED", item("a", 3, "first")) == []


def test_list_deletes_what_it_lacks() -> None:
    """After a gap the list says what was deleted unseen."""
    cache: Cache[ConfigMap] = Cache()
    for name in "abc":
        cache.apply("ADDED", item(name, 1))
    changes = cache.replace([item("b", 1), item("c", 4), item("d", 5)])
    assert [text(*change) for change in changes] == ["-a@1", "~c@4", "+d@5"]
    assert cache.get(Key("ns", "a")) is None
    assert len(cache) == 3


def test_only_the_last_deletions_are_remembered() -> None:
    """Memory stays bounded; what is forgotten is long past."""
    cache: Cache[ConfigMap] = Cache()
    for number in range(TOMBSTONES + 1):
        cache.apply("DELETED", item(f"n{number}", 1))
    assert told(cache, "ADDED", item("n1", 1)) == []
    assert told(cache, "ADDED", item("n0", 1)) == ["+n0@1"]


NAMES = st.sampled_from("abc")


@given(st.lists(st.tuples(NAMES, st.booleans()), max_size=30), st.randoms(use_true_random=False))
def test_replayed_history_leaves_the_same_copy(history: list[tuple[str, bool]], random) -> None:  # type: ignore[no-untyped-def]
    """Whatever part of the past is sent again at any point, the end is the same."""
    alive: dict[str, int] = {}
    events: list[tuple[str, ConfigMap]] = []
    for version, (name, delete) in enumerate(history, start=1):
        if name not in alive:
            alive[name] = version
            events.append(("ADDED", item(name, version, f"{name}-{version}")))
            continue
        uid = f"{name}-{alive[name]}"
        if delete:
            del alive[name]
        events.append(("DELETED" if delete else "MODIFIED", item(name, version, uid)))
    straight: Cache[ConfigMap] = Cache()
    broken: Cache[ConfigMap] = Cache()
    for position, event in enumerate(events):
        straight.apply(*event)
        broken.apply(*event)
        if random.random() < 0.3:
            start = random.randint(0, position)
            # Only what concerns the present objects or deleted ones may come again.
            for old in events[start : position + 1]:
                broken.apply(*old)
    assert {str(i.metadata) for i in broken} == {str(i.metadata) for i in straight}
