"""Writer and reader of torch.distributed.checkpoint with the rules of `worker.checkpoints`.

    dcp.async_save(state, storage_writer=worker.StorageWriter("s3://bucket/run", step))
    dcp.load(state, storage_reader=worker.StorageReader("s3://bucket/run"))

Torch's planner and its collectives stay as they are. A process claims an attempt at its first save.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from time import time  # noqa: TID251  (the time of a claim)
from typing import Any

from unbroken.log_lines import Log
from unbroken.worker import checkpoint, context

from .dcp import METADATA, checkpoint_module, reader, write_items, write_metadata, writer
from .names import Name, Retention
from .remote import open_storage
from .series import Claim, Manifest, Series
from .storage import CheckpointError, File, difference

log = Log(__name__, "unbroken.worker: ")
_torch_storage = checkpoint_module("storage")
_filesystem = checkpoint_module("filesystem")


@dataclass
class _Place:
    """A place of this process, as its attempt sees it."""

    series: Series
    is_heir: bool = False
    """True if this process has read a checkpoint there."""


@cache
def _place(path: str, _attempt: int) -> _Place:
    return _Place(Series(open_storage(path)))


@dataclass(frozen=True)
class _Share:
    """What a rank needs to know to write its part."""

    folder: str
    prefix: Any


class _NamedByStep:
    """A writer or reader whose step names the checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Refuse a `checkpoint_id`: the step names the checkpoint."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save or a read. Raises CheckpointError for a `checkpoint_id`."""
        if checkpoint_id is not None:
            raise CheckpointError("leave out checkpoint_id: place and step name the checkpoint")


class StorageWriter(_NamedByStep, _torch_storage.StorageWriter):  # type: ignore[misc, name-defined]
    """Write one checkpoint of torch.distributed.checkpoint to a directory or a URL of fsspec.

    The checkpoint counts once all of it has been read back. `keep`, `keep_every`, `keep_best` and
    `metric` are those of `worker.checkpoints`. Saving raises Superseded if a newer attempt has
    begun. `dcp.async_save` needs its default, a thread.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        step: int,
        *,
        keep: int = 2,
        keep_every: int | None = None,
        keep_best: int = 0,
        metric: float | None = None,
    ) -> None:
        if keep < 1 or keep_best < 0 or (keep_every is not None and keep_every < 1) or step < 0:
            raise CheckpointError("keep and keep_every have to be positive, and step not negative")
        self._path, self._step = os.fspath(place), int(step)
        self._retention = Retention(keep, keep_every, keep_best)
        self._metric = None if metric is None else float(metric)
        self._name, self._world_size = Name(-1, -1), 0

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the coordinator decides when it has all plans."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Claim an attempt if none is claimed, and say to all ranks where they write."""
        series = self._series()
        if series.attempt < 0:
            now, where = time(), context()
            number = series.next_number()
            series.claim(Claim(number, where.job, where.attempt, len(plans), now, 0, now))
        series.check()
        self._name, self._world_size = Name(series.attempt, self._step), len(plans)
        storage = series.storage
        folder = storage.unfinished(self._name)
        if self._name in series.complete():
            raise CheckpointError(f"{storage.path}/{self._name} is there already")
        storage.remove(folder)
        storage.begin(folder)
        shared = writer(storage, folder, []).prepare_global_plan(plans)
        return [
            replace(plan, storage_data=_Share(folder, planned.storage_data))
            for plan, planned in zip(plans, shared)
        ]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's part; the coordinator gets its files beside torch's results."""
        share = plan.storage_data
        plan = replace(plan, storage_data=share.prefix)
        storage = self._series().storage
        results, files = write_items(storage, share.folder, plan, planner)
        told = import_module("torch.futures").Future()
        told.set_result([*results, *files])
        return told

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Complete the checkpoint, and delete those that are not kept."""
        series, name = self._series(), self._name
        files = [one for told in results for one in told if isinstance(one, File)]
        written = [[one for one in told if not isinstance(one, File)] for told in results]
        folder = series.storage.unfinished(name)
        files += write_metadata(series.storage, folder, metadata, written)
        ranks = tuple(range(self._world_size))
        manifest = Manifest(
            name.step, name.attempt, self._world_size, ranks, tuple(files), self._metric
        )
        series.publish(name, manifest)
        checkpoint(name.step)
        try:
            series.prune(self._retention, name, self._here().is_heir)
        except (OSError, CheckpointError) as error:
            log.warning("old checkpoints not deleted", error=error)

    def _here(self) -> _Place:
        return _place(self._path, context().attempt)

    def _series(self) -> Series:
        return self._here().series


class StorageReader(_NamedByStep, _filesystem.FileSystemReader):  # type: ignore[misc, name-defined]
    """Read the newest complete checkpoint of a directory or URL, or that of a step.

    It runs no code of the checkpoint, and compares each file with its checksum before it is read.
    `step` and `path` say what is read.
    """

    def __init__(self, place: str | os.PathLike[str], step: int | None = None) -> None:
        self._given, self._wanted = os.fspath(place), step
        self._names: tuple[Name, ...] = ()
        self._choose()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's metadata of the checkpoint."""
        return self._reader.read_metadata()

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read what this rank needs, from files that fit their checksums."""
        wanted = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        self._compare(wanted)
        result = super().read_data(plan, planner)
        _place(self._given, context().attempt).is_heir = True
        log.info("restored", step=self.step, file=self._shown)
        return result

    def _choose(self) -> None:
        series = Series(open_storage(self._given))
        series.look()
        names = [name for name in series.complete() if self._wanted in (None, name.step)]
        if not names:
            what = "no checkpoint" if self._wanted is None else f"no step {self._wanted}"
            raise FileNotFoundError(f"{series.path} has {what} that is complete")
        for name in names:
            try:
                self._files = {file.name: file for file in series.manifest(name).files}
                self._storage, self._folder = series.storage, str(name)
                self._compare({METADATA})
            except (CheckpointError, ValueError) as error:
                if name == names[-1] or getattr(error, "retry_after_seconds", None) is not None:
                    raise CheckpointError(
                        f"{series.path}/{name} cannot be read: {error}"
                    ) from error
                log.warning("checkpoint not used", file=f"{series.path}/{name}", error=error)
                continue
            self.step, self._shown = name.step, series.storage.place(name)
            self._reader = reader(series.storage, str(name))
            super().__init__(str(name))
            self.fs, self.path = self._reader.fs, self._reader.path
            return

    def _compare(self, names: set[str]) -> None:
        for name in sorted(names):
            file = self._files.get(name)
            problem = (
                self._storage.retried(lambda one=file: difference(self._storage, self._folder, one))  # type: ignore[misc]
                if file
                else f"{name} is in no list of its files"
            )
            if problem:
                raise CheckpointError(f"{self._storage.path}/{self._folder}: {problem}")
