"""The disk: how fast it takes and gives, and whether it gives what it was given."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from unbroken.kube.clock import monotonic

from .findings import CheckSettings, Finding, Test, against, failed, passed, unknown
from .sides import Stopwatch

BLOCK = 2**20
SEGMENT = 4
"""Blocks between two looks at the clock: the fastest stretch counts, so that a neighbour who is
busy for a moment is not taken for a slow disk."""
SEGMENTS_LEAST = 5
FILE_BYTES_MAX = 8 * 2**30
FREE_SHARE = 0.25
FLOOR = 25.0
"""MB/s.  The slowest volumes that clouds give to such machines have 125 (EBS gp3's baseline); a
checkpoint of 10 GB would take 7 minutes (judgement)."""
SLOW = "the disk is far too slow for checkpoints: look for throttling, a failing disk or a full one"


class _Brake:
    """Keeps to a speed that was planted; without one it does nothing."""

    def __init__(self, megabytes_per_second: int | None) -> None:
        self._speed = megabytes_per_second

    def pass_on(self, size: int, watch: Stopwatch) -> None:
        if self._speed is not None:
            left = size / 1e6 / self._speed - watch.seconds()
            threading.Event().wait(max(0.0, left))


class _File:
    """A file without the kernel's cache where that can be; `is_direct` says it."""

    def __init__(self, directory: Path) -> None:
        handle, self.path = tempfile.mkstemp(prefix="unbroken-check-", dir=directory)
        self.is_direct = True
        try:
            self.handle = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        except OSError:
            # tmpfs and some network file systems do not do this.
            self.is_direct = False
            self.handle = os.dup(handle)
        os.close(handle)
        os.unlink(self.path)

    def forget(self) -> None:
        """Have the disk hold all, and the kernel's cache nothing."""
        os.fsync(self.handle)
        with suppress(OSError):
            os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _content(seed: bytes, index: int) -> bytes:
    """A block that no other is equal to."""
    return hashlib.shake_128(seed + index.to_bytes(8, "big")).digest(BLOCK // 64) * 64


def read_back(settings: CheckSettings) -> Iterator[Finding]:
    """Write for half of the time, then read all of it and compare."""
    try:
        free = os.statvfs(settings.directory)
        file = _File(settings.directory)
    except OSError as error:
        yield unknown("disk-read-back", f"{settings.directory}: {error.strerror}")
        return
    most = int(min(FILE_BYTES_MAX, free.f_bavail * free.f_frsize * FREE_SHARE)) // BLOCK
    if most < SEGMENT * SEGMENTS_LEAST:
        os.close(file.handle)
        yield unknown("disk-read-back", f"{settings.directory} has too little room")
        return
    seed = os.urandom(16)
    buffer = mmap.mmap(-1, BLOCK)
    try:
        count, written = _write(file, buffer, seed, most, settings)
        damaged = settings.plants.number("disk-flip")
        if damaged is not None:
            _damage(file, buffer, damaged % count)
        file.forget()
        wrong, read = _read(file, buffer, seed, count, settings)
    except OSError as error:
        # Others may have filled it meanwhile: that it is full is what another test says.
        say = unknown if error.errno == errno.ENOSPC else failed
        yield say("disk-read-back", f"{settings.directory}: {error.strerror}")
        return
    finally:
        buffer.close()
        os.close(file.handle)
    how = "" if file.is_direct else "through the kernel's cache"
    if wrong:
        text = f"{len(wrong)} of {count} blocks are not what was written, first {wrong[0]}"
        yield failed("disk-read-back", f"{settings.directory}: {text}")
    else:
        yield passed("disk-read-back", how, round(count * BLOCK / 2**20), "MiB")
    yield against("disk-write", written, FLOOR, "MB/s", SLOW)
    yield against("disk-read", read, FLOOR, "MB/s", SLOW)


def _write(
    file: _File, buffer: mmap.mmap, seed: bytes, most: int, settings: CheckSettings
) -> tuple[int, float]:
    """Blocks written, and the best speed of a stretch."""
    brake = _Brake(settings.plants.number("slow-disk"))
    count, best, end = 0, 0.0, monotonic() + settings.seconds / 2
    while count + SEGMENT <= most:
        patience = 0.0 if best >= FLOOR else settings.doubt_seconds
        if count >= SEGMENT * SEGMENTS_LEAST and monotonic() >= end + patience:
            break
        taken = 0.0
        for index in range(count, count + SEGMENT):
            buffer[:] = _content(seed, index)
            watch = Stopwatch()
            _whole(os.pwrite(file.handle, buffer, index * BLOCK))
            brake.pass_on(BLOCK, watch)
            taken += watch.seconds()
        if not file.is_direct:
            # Else it is on the disk already, and this would wait for what others write.
            watch = Stopwatch()
            os.fdatasync(file.handle)
            taken += watch.seconds()
        count += SEGMENT
        best = max(best, SEGMENT * BLOCK / taken / 1e6)
    return count, best


def _read(
    file: _File, buffer: mmap.mmap, seed: bytes, count: int, settings: CheckSettings
) -> tuple[list[int], float]:
    """Blocks that differ, and the best speed of a stretch."""
    brake = _Brake(settings.plants.number("slow-disk"))
    wrong, best, first = [], 0.0, 0
    end = monotonic() + settings.doubt_seconds
    while first < count:
        taken = 0.0
        for index in range(first, first + SEGMENT):
            watch = Stopwatch()
            _whole(os.preadv(file.handle, [buffer], index * BLOCK))
            brake.pass_on(BLOCK, watch)
            taken += watch.seconds()
            if buffer[:] != _content(seed, index):
                wrong.append(index)
        best = max(best, SEGMENT * BLOCK / taken / 1e6)
        first += SEGMENT
        if first >= count and best < FLOOR and monotonic() < end:
            first = 0
            file.forget()
    return sorted(set(wrong)), best


def _whole(size: int) -> None:
    if size != BLOCK:
        raise OSError(5, f"only {size} of {BLOCK} bytes were taken or given")


def _damage(file: _File, buffer: mmap.mmap, index: int) -> None:
    """Change one bit of a block on the disk."""
    os.preadv(file.handle, [buffer], index * BLOCK)
    buffer[BLOCK // 2] ^= 1
    os.pwrite(file.handle, buffer, index * BLOCK)


TESTS = (Test("disk-read-back", read_back, 300.0),)
