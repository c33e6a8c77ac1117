"""Checkpoints on disk or at a URL: written while training continues, verified, complete or absent.

    saved = worker.checkpoints("s3://bucket/run")  # or a directory: "/data/checkpoints"
    found = saved.restore(model=model, optimizer=optimizer)
    for step in range(found.step + 1 if found else 0, steps):
        ...
        if saved.is_due(step):
            saved.save(step, model=model, optimizer=optimizer, rng=True)
    saved.wait()

Every rank makes every call, at the same steps. A save copies the state and returns; a thread
writes. The rank that is last to have its part stored and read back completes the checkpoint. So no
rank waits for another, and a lost rank leaves no thread waiting. Training waits for no store: only
the first call of an attempt asks it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic, time  # noqa: TID251  (the process's own clocks are read here)
from typing import Any
from zlib import crc32

from unbroken.log_lines import Log
from unbroken.worker import checkpoint, context
from unbroken.worker.typed_values import exchanged

from .advice import INTERVAL_SECONDS_MIN, Advice, advise, has_changed, steps_to_wait
from .advice import mtbf_seconds as mtbf
from .dcp import dcp_forms
from .names import Name, Retention
from .peers import Peers, peers
from .remote import open_storage
from .series import Claim, Series
from .state import Objects, Staged
from .storage import CheckpointError, Storage, Superseded, difference, reason
from .writing import Part

__all__ = ["CheckpointError", "Checkpoints", "Found", "Superseded", "checkpoints"]
log = Log(__name__, "unbroken.worker: ")


@dataclass(frozen=True)
class Found:
    """The checkpoint that training continues from."""

    step: int
    path: Path | str
    """Its directory, or its URL."""
    extra: Mapping[str, Any]
    """Values that this rank gave; those of rank 0 if this rank was not there."""
    world_size: int
    """World size of the ranks that saved it."""
    checksum: str = ""
    """Checksum of all its files; empty if each node has its own files."""


def checkpoints(
    place: str | os.PathLike[str],
    *,
    keep: int = 2,
    keep_every: int | None = None,
    keep_best: int = 0,
    every: int | None = None,
    seconds: float | None = None,
    shared: bool = True,
) -> Checkpoints:
    """Save to and restore from a directory, which must exist, or a URL; call it on every rank.

    The URL is one of fsspec: `s3://bucket/run` needs the package s3fs, `gs://` gcsfs. That library
    finds the credentials.

    The newest `keep` are kept, each whose step is a multiple of `keep_every`, and the `keep_best`
    with the lowest `metric`. A save is due after a number of steps or seconds, or at the best
    interval (`advice`). `shared=False`: each node has a directory of its own, and restores with the
    same ranks only.
    """
    numbers = (keep, keep_every, every, seconds)
    if keep_best < 0 or any(given is not None and given <= 0 for given in numbers):
        raise CheckpointError("keep, keep_every, every and seconds have to be positive")
    if every is not None and seconds is not None:
        raise CheckpointError("give `every` or `seconds`, not both")
    storage = open_storage(place)
    if storage.is_remote and not shared:
        raise CheckpointError(f"{storage.path} is the same on all nodes: leave out shared=False")
    rhythm = _Rhythm(every, seconds)
    return Checkpoints(storage, Retention(keep, keep_every, keep_best), rhythm, shared)


@dataclass
class _Rhythm:
    """Schedule of the next save."""

    every: int | None
    seconds: float | None
    began_at: float = 0.0
    """Start of the newest save, or of training."""
    looked_at: float = 0.0
    calls: int = 0
    """Calls since all ranks have looked."""
    wait: int = 1
    """Calls until all ranks look again."""


@exchanged
@dataclass(frozen=True)
class _Look:
    """Facts of one rank that all ranks have to agree on."""

    since: float
    step_seconds: float
    is_busy: bool
    cost: float | None
    write: float
    now: float


@exchanged
@dataclass(frozen=True)
class _Offer:
    """State of a rank before a save."""

    obstacle: str
    has_failed: bool
    digest: bytes
    newest: Name | None
    metric: float | None


class Checkpoints:
    """The checkpoints of a directory or URL; made by `checkpoints`.

    A process may stay for later attempts of its job, beside new processes (`worker.restartable`).
    Then it begins anew with them.
    """

    def __init__(
        self, storage: Storage, retention: Retention, rhythm: _Rhythm, shared: bool
    ) -> None:
        self.skipped = 0
        """Saves that did not begin, because the one before was still being written."""
        self.failed = 0
        """Saves that this rank began and could not write."""
        self.completed = -1
        """Step of the newest checkpoint that this rank completed, as the last of all ranks that had
        its part stored; -1: none. One rank completes a checkpoint in a directory or store."""
        self._retention, self._shared = retention, shared
        self._thread: Thread | None = None
        self._begin_attempt(storage, rhythm)

    def _begin_attempt(self, storage: Storage, rhythm: _Rhythm) -> None:
        self._attempt = context().attempt
        self._series = Series(storage)
        self._claimed_before = self._seen()
        self._rhythm = rhythm
        self._staged, self._part = Staged(is_alone=not self._shared), Part()
        self._is_heir = False
        self._reported_step: int | None = None
        self._known: list[Name] = []
        """Complete checkpoints, as this rank's thread last saw them at a URL."""
        self._overtaken: Superseded | None = None
        """The error that this rank's thread has met."""
        self._pause = self._paused = 0
        self._cost: float | None = None
        self._advice: Advice | None = None
        self._history = (0, time())
        rhythm.began_at = rhythm.looked_at = monotonic()

    def _renew(self) -> None:
        """Forget in a later attempt what the ranks of the one before have agreed on."""
        if context().attempt != self._attempt:
            self._settle()
            rhythm = _Rhythm(self._rhythm.every, self._rhythm.seconds)
            self._begin_attempt(self._series.storage.reopened(), rhythm)

    @property
    def advice(self) -> Advice:
        """Return the advised interval, from the measurements so far."""
        if self._advice is None:
            workers = max(1, context().world_size)
            return self._advise(self._cost or 0.0, self._part.seconds, workers, time())
        return self._advice

    def restore(self, **objects: Any) -> Found | None:
        """Load the newest complete checkpoint that all ranks can read; None: there is none.

        Its files are compared with their checksums first. A checkpoint that does not match is
        logged, renamed to `*.bad`, and the next older one is taken. Raises CheckpointError if there
        are complete ones and none fits the objects.
        """
        return self.restore_newer(-1, objects)

    def restore_newer(self, step: int, objects: Mapping[str, Any]) -> Found | None:
        """Restore only a checkpoint newer than `step`.

        On None, a rank that has that step in memory continues from it.
        """
        self._settle()
        self._renew()
        group, given = self._join(), Objects(objects)
        offers = group.together(lambda: self._readable(group))
        common = [name for name in offers[group.rank] if all(name in offer for offer in offers)]
        if not common and any(offers):
            log.warning("no checkpoint is on every node", file=self._series.path)
        self._is_heir = step >= 0
        failure = ""
        for name in (one for one in common if one.step > step):
            is_bad, unread = self._is_bad(name, group)
            failure = unread or failure
            if is_bad:
                continue
            # Each rank reports its own error; if one rank cannot load, none has loaded.
            result = self._load(name, group, given)
            results = group.gather(result if isinstance(result, str) else "")
            errors = [f"rank {rank}: {one}" for rank, one in enumerate(results) if one]
            if not errors and not isinstance(result, str):
                self._is_heir = True
                self._rhythm.began_at = monotonic()
                log.info("restored", step=result.step, file=result.path)
                return result
            failure = f"{name} cannot be loaded: {errors[0]}"
            log.warning("checkpoint not loaded", file=self._series.path, error=failure)
        if failure:
            group.together(self._series.check)
            raise CheckpointError(failure)
        return None

    def is_due(self, step: int) -> bool:
        """True if a save is due now; all ranks get the same answer.

        Without `every` all ranks exchange their measurements at a few of the steps, those before a
        save is due; in between it is a comparison.
        """
        rhythm = self._rhythm
        if rhythm.every is not None:
            return step > 0 and step % rhythm.every == 0
        self._renew()
        rhythm = self._rhythm
        rhythm.calls += 1
        if rhythm.calls < rhythm.wait:
            return False
        now = monotonic()
        pace = (now - rhythm.looked_at) / rhythm.calls
        mine = _Look(
            now - rhythm.began_at, pace, self._is_busy(), self._cost, self._part.seconds, time()
        )
        looks = peers(self._shared).gather(mine)
        remaining = self._interval(looks) - max(look.since for look in looks)
        wait = steps_to_wait(remaining, max(look.step_seconds for look in looks))
        rhythm.looked_at, rhythm.calls, rhythm.wait = monotonic(), 0, max(1, wait)
        return wait == 0 and not any(look.is_busy for look in looks)

    def save(
        self,
        step: int,
        *,
        rng: bool = False,
        extra: Mapping[str, Any] | None = None,
        metric: float | None = None,
        **objects: Any,
    ) -> bool:
        """Copy the state, and write it in a thread; return False if no save was begun (the reason
        is logged).

        Modules and optimizers are saved once if they are the same on all ranks, and each shard
        where it is. All other objects with `state_dict()`, the random generators (`rng`) and
        `extra` are each rank's own. `metric` of the first rank is what `keep_best` compares. Raises
        Superseded if a newer attempt has begun.
        """
        self._renew()
        began, group = monotonic(), self._joined(step)
        if group is None:
            return False
        name = Name(self._series.attempt, int(step))
        if name.step < 0:
            raise CheckpointError(f"step {step} is negative")
        if not objects and not rng and not extra:
            raise CheckpointError("a checkpoint of nothing: give model=, optimizer=, extra=...")
        plan: list[Any] = []
        offers = group.together(lambda: self._offer(name, group, Objects(objects), plan, metric))
        obstacle = next((offer.obstacle for offer in offers if offer.obstacle), "")
        if obstacle:
            return self._skip(step, obstacle)
        self._report(offers)
        if any(offer.has_failed for offer in offers):
            group.together(lambda: self._discard(group))
        digest = hashlib.blake2b(b"".join(offer.digest for offer in offers)).digest()
        if not self._staged.has(digest):
            plans = group.gather(plan[0], forms=dcp_forms())
            # State that several ranks have is assigned to the first of them, within this directory.
            first = set(group.members)
            order = [*group.members, *(at for at in range(group.world_size) if at not in first)]
            self._staged.agree(digest, [plans[rank] for rank in order], len(group.members))
        own = Objects(objects).own(rng, extra)
        self._rhythm.began_at, self._part.metric = began, offers[0].metric
        return self._begin(name, group, own, self._safe(offers, name))

    def wait(self) -> None:
        """Wait until this rank's files are written; the end of the program waits for this too."""
        if self._thread is not None:
            self._thread.join()

    def _settle(self) -> None:
        """Wait as `wait`, but not for a store that does not work."""
        storage = self._series.storage
        storage.set_patient(False)
        self.wait()
        storage.set_patient(True)

    def _seen(self) -> int:
        """Return the newest attempt; if the store does not answer, one that is newer than all."""
        try:
            return self._series.newest_claim()
        except CheckpointError as error:
            if error.retry_after_seconds is None:
                raise
            log.warning("store does not answer; its checkpoints are not known", error=error)
            return sys.maxsize

    def _skip(self, step: int, obstacle: str) -> bool:
        self.skipped += 1
        log.warning("checkpoint skipped", step=step, error=obstacle)
        return False

    def _joined(self, step: int) -> Peers | None:
        """Return the other ranks; None: no attempt can be claimed now, as the store is away.

        It is then asked again after 1, 3, 7 ... calls, since training waits for that.
        """
        if self._paused < self._pause:
            self._paused += 1
            self._skip(step, f"{self._series.path} did not answer when it was asked last")
            return None
        try:
            group = self._join()
        except CheckpointError as error:
            if error.retry_after_seconds is None:
                raise
            self._pause, self._paused = 2 * self._pause + 1, 0
            self._skip(step, str(error))
            return None
        self._pause = self._paused = 0
        return group

    def _join(self) -> Peers:
        """Return the other ranks; on the first call, all of them claim the next attempt
        together."""
        group = peers(self._shared)
        if self._series.attempt >= 0:
            return group
        number = max(group.together(lambda: self._series.next_number() if group.is_leader else 0))
        if group.is_leader:
            group.together(lambda: self._claim(number, group.world_size))
        else:
            group.together(lambda: None)
        told = group.together(lambda: self._adopt(number, group))
        self._history = told[0]
        self._rhythm.looked_at = monotonic()
        return group

    def _claim(self, number: int, workers: int) -> None:
        where, began_at = context(), _began_at()
        for claim in self._series.claims():
            is_same = bool(where.job) and claim.job == where.job
            is_newer = is_same and claim.job_attempt > where.attempt and claim.at > began_at
            # Claimed since this object was made, and not by an older attempt that was merely slow.
            is_rival = claim.number > self._claimed_before and not (
                is_same and claim.job_attempt < where.attempt
            )
            if is_newer or is_rival:
                raise Superseded(f"attempt {claim.number} has taken {self._series.path} over")
        now = time()
        same = [claim for claim in self._series.claims() if claim.job == where.job]
        failures = same[-1].failures + 1 if same else 0
        first_at = same[-1].job_began_at if same else now
        self._series.claim(
            Claim(number, where.job, where.attempt, workers, now, failures, first_at)
        )

    def _adopt(self, number: int, group: Peers) -> tuple[int, float]:
        """Return the failures of this job so far, and its start."""
        try:
            self._series.adopt(number)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self._series.path} is not the same directory as that of rank"
                f" {group.members[0]}: mount a shared one, or say shared=False"
            ) from None
        claims = (claim for claim in self._series.claims() if claim.number == number)
        return next(((claim.failures, claim.job_began_at) for claim in claims), (0, time()))

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _readable(self, group: Peers) -> list[Name]:
        """Return the checkpoints that this rank could load."""
        if self._shared:
            return self._series.complete()
        names = []
        for name in self._series.complete():
            try:
                manifest = self._series.manifest(name)
            except ValueError:
                names.append(name)  # all ranks will find it bad
                continue
            if manifest.world_size == group.world_size and group.rank in manifest.ranks:
                names.append(name)
        return names

    def _is_bad(self, name: Name, group: Peers) -> tuple[bool, str]:
        """Return whether it is not used, and the reason if it may be good and was not read."""
        problems = group.gather(self._examine(name, group))
        for rank, (problem, _) in enumerate(problems):
            if problem:
                log.warning(
                    "checkpoint not used",
                    file=f"{self._series.path}/{name}",
                    rank=rank,
                    error=problem,
                )
        damaged = any(problems[member][1] for member in group.members)
        group.together(
            lambda: self._series.set_aside(name) if damaged and group.is_leader else None
        )
        unread = [problem for problem, is_lasting in problems if problem and not is_lasting]
        text = f"{self._series.path}/{name}: {unread[0]}" if unread and not damaged else ""
        return any(problem for problem, _ in problems), text

    def _examine(self, name: Name, group: Peers) -> tuple[str, bool]:
        """Return the fault of this rank's share of the files, and whether it is lasting."""
        try:
            files = self._series.manifest(name).files
            share = files[group.members.index(group.rank) :: len(group.members)]
            storage = self._series.storage
            problems = (
                storage.retried(partial(difference, storage, str(name), file)) for file in share
            )
            problem = next(filter(None, problems), "")
            return problem, bool(problem)
        except ValueError as error:
            return str(error), True
        except (OSError, CheckpointError) as error:
            return f"it cannot be read ({reason(error)})", False

    def _load(self, name: Name, group: Peers, given: Objects) -> Found | str:
        try:
            manifest, storage = self._series.manifest(name), self._series.storage
            given.load_sharded(storage, str(name))
            rank = group.rank
            if manifest.world_size != group.world_size:
                rank = rank if rank in manifest.ranks else manifest.ranks[0]
                log.warning(
                    "world size has changed: generators and extras are taken from one rank",
                    file=name,
                    world_size=manifest.world_size,
                    rank=rank,
                )
            extra = given.load_own(storage, str(name), rank)
            files = repr(sorted((file.name, file.crc32) for file in manifest.files))
            checksum = f"{crc32(files.encode()):08x}" if self._shared else ""
            return Found(name.step, storage.place(name), extra, manifest.world_size, checksum)
        except Exception as error:  # noqa: BLE001  (told to all ranks; raised if none can be loaded)
            return str(error) or repr(error)

    def _offer(
        self, name: Name, group: Peers, given: Objects, plan: list[Any], metric: float | None
    ) -> _Offer:
        is_busy = self._is_busy()
        digest, result = (b"", None) if is_busy else self._staged.plan(given.sharded())
        plan.append(result)
        obstacle, newest = "the one before is still being written" if is_busy else "", None
        if group.is_leader and not is_busy:
            obstacle, newest = self._looked(name)
        return _Offer(
            obstacle,
            self._part.has_failed,
            digest,
            newest,
            None if metric is None else float(metric),
        )

    def _looked(self, name: Name) -> tuple[str, Name | None]:
        """Return the obstacle to a save, and the newest complete checkpoint."""
        if self._series.storage.is_remote:
            # Training does not wait for a store: what the thread has seen has to do.
            if self._overtaken is not None:
                raise self._overtaken
            has_begun = name == self._part.name
            return (
                "it was begun before" if has_begun else "",
                self._known[0] if self._known else None,
            )
        try:
            self._series.check()
            known = self._series.complete()
        except OSError as error:
            return f"{self._series.path} cannot be read ({error.strerror})", None
        return "it is there already" if name in known else "", known[0] if known else None

    def _discard(self, group: Peers) -> None:
        self._part.has_failed = False
        storage = self._series.storage
        # At a URL a step is begun once, and `prune` deletes what is left of it.
        if group.is_leader and not storage.is_remote:
            storage.remove(storage.unfinished(self._part.name))

    def _safe(self, offers: list[_Offer], name: Name) -> Name:
        """Return the oldest name that is not deleted: the newest that every node is known to
        have."""
        if self._shared:
            return name
        known = [offer.newest for offer in offers if offer.newest is not None]
        return min(known, default=Name(0, 0))

    def _begin(self, name: Name, group: Peers, own: bytes, safe: Name) -> bool:
        part, began = self._part, self._rhythm.began_at
        part.name, part.group, part.own, part.safe = name, group, own, safe
        part.has_failed = False
        try:
            self._staged.copy(group.members.index(group.rank))
        except (MemoryError, RuntimeError) as error:
            self._fail(f"it cannot be copied: {error}")
            return False
        self._thread = Thread(target=self._write, name="unbroken-checkpoint")
        self._thread.start()
        self._cost = monotonic() - began
        return True

    def _write(self) -> None:
        part, began = self._part, monotonic()
        try:
            is_complete = part.write(self._series, self._staged)
        except Superseded as error:
            self._overtaken = error
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001  (training goes on; the older ones are there)
            with suppress(CheckpointError):
                part.withdraw(self._series.storage)
            self._fail(f"{error}")
        else:
            part.seconds = monotonic() - began
            if is_complete:
                self.completed = part.step
                checkpoint(part.step)
                self._prune(part.safe)
            self._learn()

    def _prune(self, safe: Name) -> None:
        try:
            self._series.prune(self._retention, safe, self._is_heir)
        except (OSError, CheckpointError) as error:
            log.warning("old checkpoints not deleted", error=error)

    def _learn(self) -> None:
        """Look which checkpoints are complete; at a URL `save` itself does not ask."""
        if self._series.storage.is_remote and self._part.group.is_leader:
            try:
                self._known = self._series.complete()
            except CheckpointError as error:
                log.warning("checkpoints not listed", error=error)

    def _fail(self, reason: str) -> None:
        self.failed += 1
        self._part.has_failed = True
        log.warning("checkpoint not saved; training continues", step=self._part.step, error=reason)

    def _report(self, offers: list[_Offer]) -> None:
        """Report it on the page of every worker, not only of the one that completed it."""
        newest = offers[0].newest
        if newest and newest.attempt == self._series.attempt and newest.step != self._reported_step:
            self._reported_step = newest.step
            checkpoint(newest.step)

    def _interval(self, looks: list[_Look]) -> float:
        costs = [look.cost for look in looks if look.cost is not None]
        if costs:
            write = max(look.write for look in looks)
            now = self._advise(max(costs), write, len(looks), looks[0].now)
            if has_changed(self._advice, now):
                log.info("advice", message=now)
                self._advice = now
        if self._rhythm.seconds is not None:
            return self._rhythm.seconds
        # Used until a save has been measured.
        return self._advice.interval_seconds if self._advice else INTERVAL_SECONDS_MIN

    def _advise(self, cost: float, write: float, workers: int, now: float) -> Advice:
        failures, began_at = self._history
        return advise(cost, write, mtbf(workers, failures, now - began_at))


def _began_at() -> float:
    """Return the time of day at which this process began."""
    with open("/proc/self/stat") as own, open("/proc/stat") as system:
        ticks = float(own.read().rpartition(")")[2].split()[19])
        booted_at = next(float(line.split()[1]) for line in system if line.startswith("btime"))
    return booted_at + ticks / os.sysconf("SC_CLK_TCK")
