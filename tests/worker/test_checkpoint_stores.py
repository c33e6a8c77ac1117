"""Checkpoints at a URL: stores that are away, full, or lie; attempts; what is kept and deleted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.worker import stores
from tests.worker.stores import FaultyStore
from tests.worker.test_checkpoints import save
from unbroken import worker
from unbroken.worker.checkpointing import remote, storage
from unbroken.worker.checkpointing.checkpoints import CheckpointError, Superseded
from unbroken.worker.checkpointing.names import parse
from unbroken.worker.checkpointing.series import Series

DELAYS = storage.RETRY_DELAYS
URLS = ("memory", "oci", "hdfs", "file")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let retries follow at once, and let each test begin with empty stores without faults."""
    monkeypatch.setattr(storage, "RETRY_DELAYS", (0.0,) * 5)
    monkeypatch.setattr(storage, "READ_RETRIES", 2)
    stores.register()
    FaultyStore.before = staticmethod(lambda _what, _path: None)
    FaultyStore.is_exclusive = True
    yield
    fsspec.filesystem("memory").store.clear()
    FaultyStore.before = staticmethod(lambda _what, _path: None)


def restored(url: str) -> tuple[int, float] | None:
    """Restore as a new attempt; return the step, and the number that all weights are."""
    model = torch.nn.Linear(4, 4)
    found = worker.checkpoints(url).restore(model=model)
    if found is None:
        return None
    values = {value.item() for parameter in model.parameters() for value in parameter.flatten()}
    assert len(values) == 1, "the state is of more than one step"
    return found.step, values.pop()


def steps(url: str) -> list[int]:
    """Return the steps of which anything is left."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    names = {path.removeprefix(f"{root}/").partition("/")[0] for path in fs.find(root)}
    return sorted({found[0].step for name in names if (found := parse(name))})


@pytest.mark.parametrize("scheme", URLS)
def test_the_same_rules_hold_at_every_url(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}"
    saved = worker.checkpoints(url, keep=1, keep_every=4)
    assert saved.restore(model=torch.nn.Linear(4, 4)) is None
    for step in range(4, 7):
        save(saved, step)
    assert saved.failed == 0
    assert restored(url) == (6, 6.0)
    assert steps(url) == [4, 6]
    later = worker.checkpoints(url, keep=1)
    found = later.restore(model=torch.nn.Linear(4, 4))
    assert found is not None
    assert "/step-00000006.attempt-" in str(found.path)
    save(later, 7)
    assert steps(url) == [7]
    with pytest.raises(Superseded, match="has taken"):
        for step in (8, 9):
            saved.save(step, model=torch.nn.Linear(4, 4))
            saved.wait()
    assert restored(url) == (7, 7.0)


@pytest.mark.parametrize("scheme", ["memory", "oci"])
def test_a_damaged_one_is_kept_aside_and_the_older_taken(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}"
    saved = worker.checkpoints(url)
    save(saved, 1)
    save(saved, 2)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/step-00000002.attempt-0/rank-00000.state", b"damaged")
    later = worker.checkpoints(url, keep=1)
    model = torch.nn.Linear(4, 4)
    found = later.restore(model=model)
    assert found is not None
    assert found.step == 1
    save(later, 3)
    assert steps(url) == [2, 3], "the damaged one is there for examination"
    assert restored(url) == (3, 3.0)


def test_what_is_not_complete_does_not_count(tmp_path: Path) -> None:
    url = f"oci://{tmp_path}"
    save(worker.checkpoints(url), 1)
    saved = worker.checkpoints(url)
    save(saved, 2)
    (tmp_path / "step-00000002.attempt-1" / "complete.json").unlink()
    assert restored(url) == (1, 1.0)


def test_a_store_that_comes_back_gets_the_save(tmp_path: Path) -> None:
    url, failures = f"oci://{tmp_path}", [5]

    def before(what: str, path: str) -> None:
        if "step-" in path and what == "put" and failures[0]:
            failures[0] -= 1
            stores.away(what, path)

    saved = worker.checkpoints(url)
    save(saved, 1)
    FaultyStore.before = before
    save(saved, 2)
    assert (saved.failed, failures) == (0, [0])
    assert restored(url) == (2, 2.0)


@pytest.mark.parametrize("fault", [stores.away, stores.full, stores.lying])
def test_a_store_that_does_not_work_stops_no_training(
    fault: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"oci://{tmp_path}"
    saved = worker.checkpoints(url, keep=1)
    save(saved, 1)
    FaultyStore.before = staticmethod(fault)
    for step in (2, 3):
        save(saved, step)
    assert saved.failed == 2
    assert "checkpoint not saved; training continues" in caplog.text
    FaultyStore.before = staticmethod(lambda _what, _path: None)
    assert restored(url) == (1, 1.0)
    again = worker.checkpoints(url, keep=1)
    again.restore(model=torch.nn.Linear(4, 4))
    save(again, 4)
    assert restored(url) == (4, 4.0)
    assert steps(url) == [4]


def test_training_does_not_begin_anew_while_the_store_is_away(tmp_path: Path) -> None:
    url = f"oci://{tmp_path}"
    save(worker.checkpoints(url), 1)
    saved = worker.checkpoints(url)
    FaultyStore.before = staticmethod(stores.away)
    with pytest.raises(CheckpointError, match="no route to the store"):
        saved.restore(model=torch.nn.Linear(4, 4))

    def half(what: str, path: str) -> None:
        if what == "get" and path.endswith(".state"):
            stores.away(what, path)

    FaultyStore.before = half
    with pytest.raises(CheckpointError, match=r"step-00000001\.attempt-0: it cannot be read"):
        worker.checkpoints(url).restore(model=torch.nn.Linear(4, 4))
    FaultyStore.before = staticmethod(lambda _what, _path: None)
    assert restored(url) == (1, 1.0)


def test_a_store_that_is_away_when_training_begins_is_asked_again(tmp_path: Path) -> None:
    FaultyStore.before = staticmethod(stores.away)
    url, model = f"oci://{tmp_path}", torch.nn.Linear(4, 4)
    saved = worker.checkpoints(url)
    began = [saved.save(step, model=model) for step in range(4)]
    FaultyStore.before = staticmethod(lambda _what, _path: None)
    while not began[-1]:
        began.append(saved.save(len(began), model=model))
    saved.wait()
    assert (saved.skipped, saved.failed) == (6, 0)
    assert steps(url) == [6]


class Clock(threading.Event):
    """A clock that waits move, and the event that no wait brings."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        """Let the time pass at once."""
        self.now += timeout or 0
        return False


@pytest.mark.parametrize(
    ("delays", "limit", "try_seconds", "tries", "end"),
    [
        # The delays alone make up the time.
        (DELAYS[: storage.READ_RETRIES], storage.READ_SECONDS, 0, 7, 63),
        (DELAYS, storage.RETRY_SECONDS, 0, 16, 603),
        # s3fs takes 45 s to say that nobody answers.
        (DELAYS[: storage.READ_RETRIES], storage.READ_SECONDS, 45, 2, 91),
        (DELAYS, storage.RETRY_SECONDS, 45, 10, 693),
        (DELAYS, storage.RETRY_SECONDS, 700, 1, 700),
    ],
)
def test_a_store_that_takes_long_to_fail_is_asked_less_often(
    monkeypatch: pytest.MonkeyPatch,
    delays: tuple[float, ...],
    limit: float,
    try_seconds: float,
    tries: int,
    end: float,
) -> None:
    clock, made = Clock(), []
    monkeypatch.setattr(storage, "monotonic", lambda: clock.now)

    def fail() -> None:
        made.append(clock.now)
        clock.now += try_seconds
        raise CheckpointError("no route to the store", 1.0)

    with pytest.raises(CheckpointError):
        storage.retry(fail, delays, limit, clock)
    assert (len(made), clock.now) == (tries, end)


def test_training_never_asks_the_store_for_a_save(tmp_path: Path) -> None:
    saved, asked = worker.checkpoints(f"oci://{tmp_path}"), []
    save(saved, 1)

    def before(what: str, path: str) -> None:
        if threading.current_thread() is threading.main_thread():
            asked.append((what, path))

    FaultyStore.before = before
    save(saved, 2)
    assert (asked, saved.failed) == ([], 0)


def test_without_conditional_writes_attempts_draw_numbers(tmp_path: Path) -> None:
    """Two that begin at the same moment do not share a folder."""
    FaultyStore.is_exclusive = False
    url = f"oci://{tmp_path}"
    one, other = Series(remote.open_storage(url)), Series(remote.open_storage(url))
    assert not one.storage.is_exclusive
    assert len({series.next_number() for series in (one, other) for _ in range(8)}) > 8
    save(worker.checkpoints(url), 1)
    save(worker.checkpoints(url), 2)
    assert restored(url) == (2, 2.0)


def test_the_best_are_kept(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    saved = worker.checkpoints(url, keep=1, keep_best=2)
    model = torch.nn.Linear(4, 4)
    for step, loss in enumerate([5.0, 1.0, float("nan"), 2.0, 3.0, None, 4.0]):
        assert saved.save(step, model=model, metric=loss)
        saved.wait()
    assert steps(url) == [1, 3, 6]
    later = worker.checkpoints(url, keep=1, keep_best=1)
    assert later.restore(model=model)
    assert later.save(7, model=model, metric=6.0)
    later.wait()
    assert steps(url) == [1, 7]


def test_a_library_that_is_missing_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"s3://bucket/run needs .*pip install s3fs"):
        worker.checkpoints("s3://bucket/run")
    with pytest.raises(CheckpointError, match="no-such-thing://a cannot be used"):
        worker.checkpoints("no-such-thing://a")
    with pytest.raises(CheckpointError, match="leave out shared=False"):
        worker.checkpoints("memory://a", shared=False)


def test_restore_says_what_it_has_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    url = f"memory://{tmp_path}"
    save(worker.checkpoints(url), 1)
    restored(url)
    assert f"restored step=1 file={url}/step-00000001.attempt-0" in caplog.text


def test_a_snapshot_says_that_the_store_had_the_state(tmp_path: Path) -> None:
    url, model = f"oci://{tmp_path}", torch.nn.Linear(4, 4)
    save(worker.checkpoints(url), 3)
    snapshot = worker.Snapshot(name="stores", model=model, checkpoints=worker.checkpoints(url))
    found = snapshot.restore()
    snapshot.close()
    assert found is not None
    assert (found.step, found.source, model.weight[0, 0].item()) == (3, "oci", 3.0)
