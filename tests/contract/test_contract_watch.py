"""Watches: their start, their events, and their end."""

from __future__ import annotations

import pytest

from tests.apiclient import Api, Object, Watch
from tests.samples import config_map, define, definition, open_schema, pod

COUNT = 20


def fill(here: Api, names: str) -> str:
    """Make config maps named by single letters; the version after the last."""
    version = ""
    for name in names:
        version = here.post("configmaps", config_map(name)).made["metadata"]["resourceVersion"]
    return version


def version_of(here: Api) -> str:
    """The current version of the config maps' list."""
    version: str = here.get("configmaps").made["metadata"]["resourceVersion"]
    return version


def test_watch_from_a_version_tells_what_came_after(here: Api) -> None:
    version = fill(here, "ab")
    fill(here, "c")
    here.patch("merge", "configmaps/a", {"data": {"x": "1"}}).done()
    here.delete("configmaps/b").done()
    with here.watch("configmaps", resourceVersion=version) as events:
        assert events.events(3) == [("ADDED", "c"), ("MODIFIED", "a"), ("DELETED", "b")]


def test_watch_tells_what_comes_later(here: Api) -> None:
    with here.watch("configmaps", resourceVersion=version_of(here)) as events:
        fill(here, "a")
        assert events.events(1) == [("ADDED", "a")]
        here.delete("configmaps/a").done()
        assert events.events(1) == [("DELETED", "a")]


@pytest.mark.parametrize("query", [{"resourceVersion": "0"}, {}], ids=["zero", "none"])
def test_watch_without_a_version_starts_with_what_is_there(here: Api, query: Object) -> None:
    fill(here, "ab")
    with here.watch("configmaps", **query) as events:
        assert sorted(events.events(2)) == [("ADDED", "a"), ("ADDED", "b")]
        fill(here, "c")
        assert events.events(1) == [("ADDED", "c")]


def test_event_carries_the_whole_object(here: Api) -> None:
    with here.watch("configmaps", resourceVersion=version_of(here)) as events:
        made = here.post("configmaps", config_map("a", x="1")).made
        assert events.event() == {"type": "ADDED", "object": made}


def test_deleted_carries_the_last_state_at_the_version_of_the_deletion(here: Api) -> None:
    made = here.post("configmaps", config_map("a", x="1")).made
    version = made["metadata"]["resourceVersion"]
    here.delete("configmaps/a").done()
    with here.watch("configmaps", resourceVersion=version) as events:
        gone = events.event()
    assert (gone["type"], gone["object"]["data"]) == ("DELETED", {"x": "1"})
    assert int(gone["object"]["metadata"]["resourceVersion"]) > int(version)


def test_versions_of_events_grow(here: Api) -> None:
    with here.watch("configmaps", resourceVersion=version_of(here)) as events:
        fill(here, "abc")
        here.delete("configmaps/b").done()
        versions = [int(events.event()["object"]["metadata"]["resourceVersion"]) for _ in "1234"]
    assert versions == sorted(set(versions))


@pytest.mark.parametrize("what", ["configmaps", "pods"])
def test_timeout_ends_the_watch(here: Api, what: str) -> None:
    with here.watch(what, timeoutSeconds=1) as events:
        assert events.rest() == []


def test_bookmark_tells_the_version_before_the_end(here: Api) -> None:
    fill(here, "a")
    with here.watch("configmaps", timeoutSeconds=3, allowWatchBookmarks="true") as events:
        assert events.events(1) == [("ADDED", "a")]
        version = fill(here, "b")
        event = events.event()
        while event["type"] == "BOOKMARK":  # one may come at any time
            event = events.event()
        assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "b")
        *_, last = events.rest()
    assert (last["type"], last["object"]["kind"]) == ("BOOKMARK", "ConfigMap")
    assert int(last["object"]["metadata"]["resourceVersion"]) >= int(version)


def test_bookmarks_come_only_when_asked_for(here: Api) -> None:
    with here.watch("configmaps", timeoutSeconds=2) as events:
        assert events.rest() == []


def test_object_that_enters_or_leaves_a_selector(here: Api) -> None:
    fill(here, "a")
    start = version_of(here)
    for label, key in (("yes", "1"), ("yes", "2"), ("no", "3"), ("no", "4"), ("yes", "5")):
        change = {"metadata": {"labels": {"in": label}}, "data": {"key": key}}
        here.patch("merge", "configmaps/a", change).done()
    with here.watch("configmaps", resourceVersion=start, labelSelector="in=yes") as events:
        seen = [events.event() for _ in range(4)]
    assert [event["type"] for event in seen] == ["ADDED", "MODIFIED", "DELETED", "ADDED"]
    # An object that no longer matches is shown as it last matched, at the version of the change.
    assert seen[2]["object"]["metadata"]["labels"] == {"in": "yes"}
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in seen]
    assert versions == sorted(set(versions))


def test_deletion_of_what_does_not_match_is_not_told(here: Api) -> None:
    start = version_of(here)
    fill(here, "ab")
    here.delete("configmaps/a").done()
    here.delete("configmaps/b").done()
    selector = "metadata.name=b"
    with here.watch("configmaps", resourceVersion=start, fieldSelector=selector) as events:
        assert events.events(2) == [("ADDED", "b"), ("DELETED", "b")]


def test_field_selector_on_a_node_sees_a_pod_bound(here: Api) -> None:
    selector = f"spec.nodeName={here.namespace}"
    with here.watch("pods", fieldSelector=selector) as events:
        here.post("pods", pod("a")).done()
        binding = {"metadata": {"name": "a"}, "target": {"kind": "Node", "name": here.namespace}}
        here.post("pods/a/binding", binding).done()
        event = events.event()
    assert (event["type"], event["object"]["spec"]["nodeName"]) == ("ADDED", here.namespace)


def test_path_of_one_object_cannot_be_watched(here: Api) -> None:
    fill(here, "ab")
    found = here.get("configmaps/b", watch="true").made
    assert (found["kind"], found["metadata"]["name"]) == ("ConfigMap", "b")


def test_watch_over_namespaces(here: Api, api: Api) -> None:
    with api.watch("configmaps", resourceVersion=version_of(here)) as events:
        fill(here, "a")
        event = events.event()
    assert event["object"]["metadata"]["namespace"] == here.namespace


def test_watchers_see_one_order(here: Api) -> None:
    start = version_of(here)
    with (
        here.watch("configmaps", resourceVersion=start) as one,
        here.watch("configmaps", resourceVersion=start) as two,
        here.watch("configmaps", resourceVersion=start) as three,
    ):
        for number in range(COUNT):
            here.post("configmaps", config_map(f"m-{number % 7}-{number}")).done()
            here.delete(f"configmaps/m-{number % 7}-{number}").done()
        seen = [watch.events(2 * COUNT) for watch in (one, two, three)]
    assert seen[0] == seen[1] == seen[2]


def test_resumed_watch_neither_loses_nor_doubles(here: Api) -> None:
    expected = []
    version = version_of(here)
    seen: list[tuple[str, str]] = []
    for number in range(COUNT):
        here.post("configmaps", config_map(f"m-{number}")).done()
        expected.append(("ADDED", f"m-{number}"))
        if number % 3 == 2:
            with here.watch("configmaps", resourceVersion=version) as events:
                # Not all of what is there: the rest must come to the next one.
                for _ in range(2):
                    version = resume(events, seen)
    with here.watch("configmaps", resourceVersion=version) as events:
        while len(seen) < COUNT:
            version = resume(events, seen)
    assert seen == expected


def resume(events: Watch, seen: list[tuple[str, str]]) -> str:
    """Take one event; return the version from which to resume."""
    event = events.event()
    metadata = event["object"]["metadata"]
    seen.append((event["type"], metadata["name"]))
    version: str = metadata["resourceVersion"]
    return version


def test_list_and_watch_join_without_a_gap(here: Api) -> None:
    fill(here, "abc")
    listed = here.get("configmaps").made
    fill(here, "d")
    with here.watch("configmaps", resourceVersion=listed["metadata"]["resourceVersion"]) as events:
        assert events.events(1) == [("ADDED", "d")]


def test_version_that_is_forgotten_is_gone(here: Api) -> None:
    """An error event, or the answer itself, says 410 Expired; then the watch ends."""
    group = f"{here.namespace}.example.com"
    # The watch cache of a new kind begins now, so that version 1 is before its time.
    define(here, definition(group, open_schema()))
    answer = here.get(f"{group}/v1:widgets", watch="true", resourceVersion="1", timeoutSeconds=5)
    status = answer.object if answer.code == 410 else answer.object["object"]
    if answer.code == 200:
        assert answer.object["type"] == "ERROR"
    assert (status["kind"], status["code"], status["reason"]) == ("Status", 410, "Expired")
    assert "too old resource version" in status["message"]


@pytest.mark.parametrize("version", ["x", "-1", "1.5"])
def test_watch_from_what_is_no_version_is_refused(here: Api, version: str) -> None:
    answer = here.get("configmaps", watch="true", resourceVersion=version, timeoutSeconds=5)
    if here.cluster.is_real:
        assert answer.code == 500  # v1.20 blames itself
    else:
        assert answer.failure in {(400, "BadRequest"), (422, "Invalid")}


@pytest.mark.since(27, "streaming lists")
def test_initial_events_end_with_a_bookmark(here: Api) -> None:
    fill(here, "ab")
    with here.watch(
        "configmaps",
        sendInitialEvents="true",
        allowWatchBookmarks="true",
        resourceVersionMatch="NotOlderThan",
    ) as events:
        assert sorted(events.events(2)) == [("ADDED", "a"), ("ADDED", "b")]
        mark = events.event()
    assert mark["type"] == "BOOKMARK"
    metadata = mark["object"]["metadata"]
    assert metadata["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert int(metadata["resourceVersion"]) > 0


@pytest.mark.since(27, "streaming lists")
def test_initial_events_need_a_version_match(here: Api) -> None:
    answer = here.get("configmaps", watch="true", sendInitialEvents="true")
    assert answer.failure == (422, "Invalid")


@pytest.mark.only_real("deprecated since v1.11, and no client uses it")
def test_old_watch_path_is_a_watch(here: Api) -> None:
    fill(here, "a")
    with here.watch(f"/api/v1/watch/namespaces/{here.namespace}/configmaps") as events:
        assert events.events(1) == [("ADDED", "a")]
