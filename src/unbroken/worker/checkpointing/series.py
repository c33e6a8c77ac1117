"""The checkpoints of a storage, as one attempt sees them: claims, completion, deletion.

Every kind of storage has the same rules. There are no locks.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from .files import OWN
from .names import Name, Retention, complete, doomed, parse
from .storage import MANIFEST, File, Storage, Superseded

_CLAIM, _HEIRS = "claim-{}.json", "inherits-{}.json"
_CLAIMS = 8
"""Attempts that are examined; a worker as late as that was refused long before."""
_GAP = 1000
"""Numbers to draw from where a storage cannot refuse a name that is taken."""


@dataclass(frozen=True)
class Claim:
    """The claim of an attempt, made when training began."""

    number: int
    job: str
    job_attempt: int
    workers: int
    at: float
    """Time of day of the claim."""
    failures: int
    """Failures of the job before the claim."""
    job_began_at: float


@dataclass(frozen=True)
class Manifest:
    """Files of a complete checkpoint."""

    step: int
    attempt: int
    world_size: int
    ranks: tuple[int, ...]
    """Ranks whose state is here."""
    files: tuple[File, ...] = field(default=())
    metric: float | None = None
    """The value that `save` was given."""


class Series:
    """The checkpoints of a storage, as one attempt sees them."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.attempt = -1
        self.inherited: frozenset[str] = frozenset()
        self._metrics: dict[Name, float | None] = {}

    @property
    def path(self) -> object:
        """Return the path or URL, as users know it."""
        return self.storage.path

    def complete(self) -> list[Name]:
        """Return the checkpoints that count, newest first."""
        return complete(self.storage.entries(), self.attempt, self.inherited)

    def claims(self) -> list[Claim]:
        """Return the newest readable claims, oldest first."""
        claims = []
        for number in self._claimed(_CLAIM)[-_CLAIMS:]:
            with suppress(OSError, ValueError, TypeError):
                claims.append(Claim(**json.loads(self._read(_CLAIM, number))))
        return claims

    def newest_claim(self) -> int:
        """Return the number of the newest attempt; -1: there is none."""
        return max(self._claimed(_CLAIM), default=-1)

    def next_number(self) -> int:
        """Return a number for the next attempt, which is only this one's."""
        gap = 1 if self.storage.is_exclusive else 1 + secrets.randbelow(_GAP)
        return self.newest_claim() + gap

    def claim(self, claim: Claim) -> None:
        """Take the place of all attempts before. Raises Superseded if the number is taken."""
        try:
            self.storage.create(
                self._name(_CLAIM, claim.number), json.dumps(asdict(claim)).encode()
            )
        except FileExistsError:
            raise Superseded(f"attempt {claim.number} in {self.path} is another's") from None
        # The order matters: checkpoints that an older attempt completes before it can see the claim
        # are listed.
        before = max((n for n in self._claimed(_HEIRS) if n < claim.number), default=-1)
        heirs = map(str, complete(self.storage.entries(), before, self._heirs(before)))
        data = json.dumps(sorted(heirs)).encode()
        self.storage.write(self._name(_HEIRS, claim.number), data)
        self.adopt(claim.number)

    def look(self) -> None:
        """See what the newest attempt sees, to read only."""
        self.adopt(max(self._claimed(_HEIRS), default=-1))

    def adopt(self, number: int) -> None:
        """Join an attempt that another rank has claimed."""
        self.inherited = self._heirs(number)
        self.attempt = number

    def check(self) -> None:
        """Raise Superseded if a newer attempt has begun."""
        newest = self.newest_claim()
        if newest > self.attempt:
            raise Superseded(
                f"attempt {newest} has taken {self.path} over from attempt {self.attempt}"
            )

    def publish(self, name: Name, manifest: Manifest) -> None:
        """Make it count; everything in it is durable and verified."""
        content = asdict(manifest)
        if manifest.metric is None:
            del content["metric"]  # which older releases do not know
        self.storage.publish(name, json.dumps(content, indent=1).encode(), self.check)

    def manifest(self, name: Name) -> Manifest:
        """Return the expected contents of a checkpoint. Raises ValueError if they cannot be
        known."""
        try:
            result = json.loads(self.storage.read(f"{name}/{MANIFEST}"))
            files = tuple(File(**file) for file in result.pop("files"))
            manifest = Manifest(**{**result, "ranks": tuple(result["ranks"]), "files": files})
        except (ValueError, TypeError, KeyError, AttributeError, FileNotFoundError) as error:
            raise ValueError(f"{MANIFEST} cannot be read ({error!r})") from error
        if (manifest.step, manifest.attempt) != (name.step, name.attempt):
            raise ValueError(f"{MANIFEST} is of another checkpoint")
        return manifest

    def set_aside(self, name: Name) -> None:
        """Let a bad checkpoint not count any more, and keep it for examination."""
        # A newer attempt deletes files: a file that this attempt misses is not damaged.
        self.check()
        self.storage.set_aside(name)

    def prune(self, retention: Retention, safe: Name, is_heir: bool) -> None:
        """Delete checkpoints that are not kept; inherited ones only if training continued from
        them."""
        entries = [entry for entry in self.storage.entries() if is_heir or self._is_mine(entry)]
        counting = self.complete()
        metrics = {name: self._metric(name) for name in counting} if retention.keep_best else {}
        names = doomed(entries, counting, self.attempt, retention, safe, metrics)
        # An attempt that has begun since may need them.
        self.check()
        for entry in names:
            self.storage.delete(entry)

    def _metric(self, name: Name) -> float | None:
        if name not in self._metrics:
            try:
                self._metrics[name] = self.manifest(name).metric
            except ValueError:
                return None  # `restore` will find it bad
        return self._metrics[name]

    def _is_mine(self, entry: str) -> bool:
        result = parse(entry)
        return bool(result and result[0].attempt == self.attempt)

    def _name(self, form: str, number: int) -> str:
        return f"{OWN}/{form.format(number)}"

    def _read(self, form: str, number: int) -> bytes:
        return self.storage.read(self._name(form, number))

    def _claimed(self, form: str) -> list[int]:
        head, tail = form.split("{}")
        texts = [
            text.removeprefix(head).removesuffix(tail)
            for text in self.storage.names(OWN)
            if text.startswith(head) and text.endswith(tail)
        ]
        return sorted(int(text) for text in texts if text.isascii() and text.isdigit())

    def _heirs(self, number: int) -> frozenset[str]:
        if number < 0:
            return frozenset()
        return frozenset(json.loads(self._read(_HEIRS, number)))
