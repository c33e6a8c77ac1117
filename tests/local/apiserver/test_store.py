"""The store keeps what it acknowledged, and history is exact or refused."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.errors import WorldError
from unbroken.local.apiserver import store as module
from unbroken.local.apiserver.http.status import ApiError, Object
from unbroken.local.apiserver.store import Entry, Store, encode, reframe


def thing(name: str, value: int = 0) -> Object:
    """A small object."""
    return {"apiVersion": "v1", "kind": "Thing", "metadata": {"name": name}, "value": value}


def opened(path: Path) -> Store:
    """A store on a file."""
    store = Store(path)
    store.open()
    return store


def state(store: Store, resource: str = "things") -> dict[tuple[str, str], bytes]:
    """Present bodies by key."""
    return {key: entry.body for key, entry in store.collection(resource).entries.items()}


def test_what_was_written_is_there_after_reopening(tmp_path: Path) -> None:
    first = opened(tmp_path / "objects.db")
    first.write("things", ("a", "x"), thing("x", 1))
    first.write("things", ("a", "y"), thing("y", 1))
    first.write("things", ("a", "x"), thing("x", 2))
    first.write("things", ("a", "y"), thing("y", 1), delete=True)
    first.close()
    second = opened(tmp_path / "objects.db")
    assert state(second) == state(first)
    assert second.version == first.version
    assert list(second.collection("things").changes)[-1].is_deleted
    second.close()


def test_versions_grow_by_one_over_all_resources(tmp_path: Path) -> None:
    store = opened(tmp_path / "objects.db")
    start = store.version
    for count, resource in enumerate(["a", "b", "a"], start=1):
        entry = store.write(resource, ("", "x"), thing("x"))
        assert entry.version == start + count
        assert entry.decode()["metadata"]["resourceVersion"] == str(start + count)
    store.close()


def test_a_version_is_never_used_twice_even_if_the_last_write_was_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HISTORY_EVENTS", 2)
    monkeypatch.setattr(module, "COMPACT_EVERY", 1)
    store = opened(tmp_path / "objects.db")
    for _ in range(5):
        store.write("things", ("", "x"), thing("x"))
        store.write("things", ("", "x"), thing("x"), delete=True)
    version = store.version
    store.close()
    again = opened(tmp_path / "objects.db")
    assert again.version == version
    again.close()


@pytest.mark.parametrize("seed", range(20))
def test_the_past_is_rebuilt_exactly_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(module, "HISTORY_EVENTS", 30)
    monkeypatch.setattr(module, "COMPACT_EVERY", 7)
    rng = random.Random(seed)
    path = tmp_path / "objects.db"
    store = opened(path)
    past = {store.version: state(store)}
    for _ in range(150):
        key = ("ns", rng.choice("abcdef"))
        exists = key in store.collection("things").entries
        store.write(
            "things", key, thing(key[1], rng.random()), delete=exists and rng.random() < 0.3
        )
        past[store.version] = state(store)
        if rng.random() < 0.05:
            store.close()
            store = opened(path)
            assert state(store) == past[store.version]
    known = 0
    for version, expected in past.items():
        try:
            found = store.collection("things").at(version)
        except ApiError as error:
            assert error.code == 410
            assert version < store.collection("things").compacted
            continue
        known += 1
        assert {key: entry.body for key, entry in found.items()} == expected
    assert known >= 30
    rows = sqlite3.connect(path).execute("SELECT count(*) FROM log").fetchone()[0]
    assert rows <= 30 + 7 + 6 + 7
    store.close()


@pytest.mark.parametrize("seed", range(10))
def test_replaying_changes_from_any_version_gives_the_present(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = opened(tmp_path / "objects.db")
    past = {store.version: state(store)}
    for _ in range(60):
        key = ("ns", rng.choice("abcd"))
        exists = key in store.collection("things").entries
        store.write(
            "things", key, thing(key[1], rng.random()), delete=exists and rng.random() < 0.3
        )
        past[store.version] = state(store)
    collection = store.collection("things")
    for version, objects in past.items():
        for change in collection.since(collection.position(version)):
            if change.is_deleted:
                del objects[change.entry.key]
            else:
                objects[change.entry.key] = change.entry.body
        assert objects == state(store)
    store.close()


def test_a_watcher_that_fell_behind_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HISTORY_EVENTS", 3)
    store = opened(tmp_path / "objects.db")
    collection = store.collection("things")
    position = collection.position(store.version)
    for _ in range(5):
        store.write("things", ("", "x"), thing("x"))
    with pytest.raises(ApiError) as caught:
        collection.since(position)
    assert caught.value.code == 410
    store.close()


async def test_a_write_wakes_who_waits(tmp_path: Path) -> None:
    store = opened(tmp_path / "objects.db")
    async with asyncio.TaskGroup() as tasks:
        waiters = [tasks.create_task(store.collection("things").changed()) for _ in range(3)]
        other = tasks.create_task(store.collection("others").changed())
        while len(store.collection("things").waiters) < 3:
            await asyncio.sleep(0)
        store.write("things", ("", "x"), thing("x"))
        await asyncio.wait(waiters)
        assert not other.done()
        other.cancel()
    assert not store.collection("things").waiters
    store.close()


def test_a_refused_write_changes_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path / "objects.db")
    store.write("things", ("", "x"), thing("x", 1))
    before = (store.version, state(store))
    database = sqlite3.connect(tmp_path / "objects.db", isolation_level=None)
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    assert store._database is not None
    store._database.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(ApiError) as caught:
        for _ in range(100):
            big = thing("big")
            big["text"] = "x" * 10_000
            before = (store.version, state(store))
            store.write("things", ("", "big"), big)
    assert caught.value.code == 500
    assert (store.version, state(store)) == before
    store.close()
    database.close()
    again = opened(tmp_path / "objects.db")
    assert (again.version, state(again)) == before
    again.close()


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to look at" * 10])
def test_a_broken_file_is_an_error_that_names_it_or_an_empty_store(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "objects.db"
    path.write_bytes(content)
    if not content:
        opened(path).close()
        return
    with pytest.raises(WorldError, match=r"objects\.db"):
        opened(path)


WRITE_FOREVER = """
import itertools, sys
from pathlib import Path
from unbroken.local.apiserver.store import Store
store = Store(Path(sys.argv[1])); store.open()
for count in itertools.count():
    content = {"apiVersion": "v1", "kind": "T", "metadata": {}, "count": count, "x": "y" * 500}
    store.write("things", ("", str(count % 7)), content)
    sys.stdout.write(f"{store.version} {count}\\n"); sys.stdout.flush()
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 50, 1300])
def test_kill_minus_nine_loses_no_acknowledged_write(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "objects.db"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOREVER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(lines)]
    os.kill(process.pid, signal.SIGKILL)
    # The last line may be cut in the middle.
    seen += [line for line in process.stdout if line.endswith("\n")]
    process.stdout.close()
    process.wait()
    version, count = map(int, seen[-1].split())
    store = opened(path)
    assert store.version in (version, version + 1, version + 2)
    entry = store.collection("things").entries["", str(count % 7)]
    assert entry.decode()["count"] in (count, count + 7)
    store.close()


def test_reframing_changes_only_the_head() -> None:
    body = encode({"kind": "Pod", "metadata": {"name": 'a"b'}, "apiVersion": "v1"})
    assert reframe(body, "v1") == body
    assert reframe(body, "apps/v2").startswith(b'{"apiVersion":"apps/v2","kind":"Pod","metadata"')
    assert reframe(body, None) == b'{"metadata":{"name":"a\\"b"}}'


def test_fields_are_compared_as_text() -> None:
    content = {"spec": {"unschedulable": True, "count": 3, "none": None}}
    paths = ("spec.unschedulable", "spec.count", "spec.none", "spec.count.deep")
    entry = Entry(("", "x"), 1, encode({"metadata": {}, **content}))
    assert list(entry.fields(paths).values()) == ["true", "3", "", ""]
