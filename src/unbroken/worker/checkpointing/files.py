"""A directory of checkpoints: claims, files that are read back, completion by rename, deletion.

It relies only on properties of shared file systems: link and rename are atomic, mkdir and link fail
if the name exists. There are no locks.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from unbroken.errors import WorldError

from .names import BAD, TRASH, UNFINISHED, Name, Retention, complete, doomed, parse

MANIFEST = "complete.json"
_OWN = ".unbroken"
_CHUNK_BYTES = 4 << 20
_CLAIMS = 8
"""Attempts that are examined; a worker as late as that was refused long before."""


class CheckpointError(WorldError):
    """Checkpoints cannot be saved or restored; the text gives the action to take."""


class Superseded(CheckpointError):
    """A newer attempt has taken this one's place: this one must not save here any more."""


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
class File:
    """Expected contents of a file."""

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Files of a complete checkpoint."""

    step: int
    attempt: int
    world_size: int
    ranks: tuple[int, ...]
    """Ranks whose state is here."""
    files: tuple[File, ...] = field(default=())


class Directory:
    """The checkpoints in a directory, as one attempt sees them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = path / _OWN
        try:
            if not path.is_dir():
                raise CheckpointError(f"{path} is no directory: make it, or mount it, first")
            self._own.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
        for place in (path, self._own):
            if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
                raise CheckpointError(
                    f"{place} cannot be written by user {os.geteuid()}: it belongs to user"
                    f" {place.stat().st_uid}; give it to this user, or take another directory"
                )
        self.attempt = -1
        self.inherited: frozenset[str] = frozenset()

    def entries(self) -> list[str]:
        """Return all names."""
        return os.listdir(self.path)

    def complete(self) -> list[Name]:
        """Return the checkpoints that count, newest first."""
        return complete(self.entries(), self.attempt, self.inherited)

    def claims(self) -> list[Claim]:
        """Return the newest readable claims, oldest first."""
        claims = []
        for number in self._claimed()[-_CLAIMS:]:
            with suppress(OSError, ValueError, TypeError):
                claims.append(Claim(**json.loads(self._claim(number).read_bytes())))
        return claims

    def newest_claim(self) -> int:
        """Return the number of the newest attempt; -1: there is none."""
        return max(self._claimed(), default=-1)

    def claim(self, claim: Claim) -> None:
        """Take the place of all attempts before. Raises Superseded if the number is taken."""
        draft = self._own / f"draft-{os.getpid()}-{claim.number}"
        write_file(draft, json.dumps(asdict(claim)).encode())
        try:
            os.link(draft, self._claim(claim.number))
        except FileExistsError:
            raise Superseded(f"attempt {claim.number} in {self.path} is another's") from None
        finally:
            draft.unlink()
        # The order matters: checkpoints that an older attempt completes before it can see the claim
        # are listed.
        before = max((n for n in self._claimed(_HEIRS) if n < claim.number), default=-1)
        heirs = frozenset(map(str, complete(self.entries(), before, self._heirs(before))))
        write_file(draft, json.dumps(sorted(heirs)).encode())
        draft.rename(self._own / _HEIRS.format(claim.number))
        sync_directory(self._own)
        self.adopt(claim.number)

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

    def unfinished(self, name: Name) -> Path:
        """Return the folder of a checkpoint while it is written."""
        return self.path / f"{name}{UNFINISHED}"

    def publish(self, name: Name, manifest: Manifest) -> None:
        """Make it count; everything in it is on disk and verified."""
        place = self.unfinished(name)
        write_file(place / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
        sync_directory(place)
        self.check()
        place.rename(self.path / str(name))
        sync_directory(self.path)

    def manifest(self, name: Name) -> Manifest:
        """Return the expected contents of a checkpoint. Raises ValueError if they cannot be
        known."""
        try:
            result = json.loads((self.path / str(name) / MANIFEST).read_bytes())
            files = tuple(File(**file) for file in result.pop("files"))
            manifest = Manifest(**{**result, "ranks": tuple(result["ranks"]), "files": files})
        except (ValueError, TypeError, KeyError, AttributeError, FileNotFoundError) as error:
            raise ValueError(f"{MANIFEST} cannot be read ({error!r})") from error
        if (manifest.step, manifest.attempt) != (name.step, name.attempt):
            raise ValueError(f"{MANIFEST} is of another checkpoint")
        return manifest

    def set_aside(self, name: Name) -> None:
        """Rename a bad checkpoint, so that it can be examined."""
        # A newer attempt deletes files: a file that this attempt misses is not damaged.
        self.check()
        (self.path / str(name)).rename(self.path / f"{name}{BAD}")

    def prune(self, retention: Retention, safe: Name, is_heir: bool) -> None:
        """Delete checkpoints that are not kept; inherited ones only if training continued from
        them."""
        entries = [entry for entry in self.entries() if is_heir or self._is_mine(entry)]
        names = doomed(entries, self.complete(), self.attempt, retention, safe)
        # An attempt that has begun since may need them.
        self.check()
        for entry in names:
            self._delete(entry)

    def discard(self, name: Name) -> None:
        """Delete the remains of a checkpoint that will not be completed."""
        shutil.rmtree(self.unfinished(name), ignore_errors=True)

    def _is_mine(self, entry: str) -> bool:
        result = parse(entry)
        return bool(result and result[0].attempt == self.attempt)

    def _delete(self, entry: str) -> None:
        doomed = self.path / entry
        if not entry.endswith((TRASH, UNFINISHED)):
            # From here on it does not count, however far the deletion proceeds.
            doomed = doomed.rename(self.path / f"{entry}{TRASH}")
        shutil.rmtree(doomed)

    def _claim(self, number: int) -> Path:
        return self._own / _CLAIM.format(number)

    def _claimed(self, form: str = "claim-{}.json") -> list[int]:
        head, tail = form.split("{}")
        texts = [
            text.removeprefix(head).removesuffix(tail)
            for text in os.listdir(self._own)
            if text.startswith(head) and text.endswith(tail)
        ]
        return sorted(int(text) for text in texts if text.isascii() and text.isdigit())

    def _heirs(self, number: int) -> frozenset[str]:
        if number < 0:
            return frozenset()
        return frozenset(json.loads((self._own / _HEIRS.format(number)).read_bytes()))


_CLAIM, _HEIRS = "claim-{}.json", "inherits-{}.json"


class Checksum:
    """A stream that computes the checksum of the written data."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.bytes, self.crc32 = 0, 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of the data."""
        view = memoryview(data).cast("B")
        try:
            self._stream.write(view)
        except OSError as error:
            # torch turns it into an error without a reason.
            self.failure = error
            raise
        self.bytes += len(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        return len(view)

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self.bytes

    def flush(self) -> None:
        """Flush to the operating system."""
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: torch closes its transforms; the stream ends with the block."""


@contextmanager
def verified(path: Path, files: list[File]) -> Iterator[Checksum]:
    """Open a new file; when the block ends it is on disk, has been read back, and is in `files`."""
    with path.open("xb") as stream:
        through = Checksum(stream)
        try:
            yield through
        except Exception:
            if through.failure is not None:
                raise through.failure from None
            raise
        stream.flush()
        os.fsync(stream.fileno())
    file = File(path.name, through.bytes, through.crc32)
    problem = difference(path.parent, file)
    if problem:
        raise CheckpointError(f"{path}: {problem}, right after it was written")
    files.append(file)


def difference(directory: Path, file: File) -> str:
    """Return the fault of a file; empty: none. It is read from the disk if the system allows it."""
    crc32, length = 0, 0
    try:
        stream = (directory / file.name).open("rb", buffering=0)
    except FileNotFoundError:
        return f"{file.name} is missing"
    with stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while data := stream.read(_CHUNK_BYTES):
            crc32, length = zlib.crc32(data, crc32), length + len(data)
    if length != file.bytes:
        return f"{file.name} has {length} bytes instead of {file.bytes}"
    return "" if crc32 == file.crc32 else f"{file.name} does not fit its checksum"


def write_file(path: Path, data: bytes) -> None:
    """Write a file; it is on disk on return."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Sync a directory; its names are on disk on return."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
