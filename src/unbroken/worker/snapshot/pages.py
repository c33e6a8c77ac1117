"""The pages of a slot, taken from the kernel at once.

They are populated by several threads, and in huge pages if the machine allows them for shared
memory. That takes half as long as fallocate(2) and then a fault at each page of the first copy.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from unbroken.errors import WorldError

MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23
"""linux/mman.h; the second is known since Linux 5.14."""
PART_BYTES = 64 * 1024 * 1024
THREADS_MAX = 4
AGAIN = (errno.EINTR, errno.EAGAIN)


def take(memory: mmap.mmap, fd: int) -> None:
    """Take all pages now: if memory is short, an error is better than SIGBUS in a copy. Raises
    WorldError."""
    # Not mmap.madvise, which holds the interpreter's lock.
    ctypes = import_module("ctypes")
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = len(memory)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    madvise(begin, size, MADV_HUGEPAGE)

    def populate(at: int) -> int:
        while madvise(begin + at, min(PART_BYTES, size - at), MADV_POPULATE_WRITE):
            number: int = ctypes.get_errno()
            if number not in AGAIN:
                return number
        return 0

    with ThreadPoolExecutor(min(THREADS_MAX, os.cpu_count() or 1)) as pool:
        failed = [number for number in pool.map(populate, range(0, size, PART_BYTES)) if number]
    if not failed:
        return
    try:
        if failed[0] != errno.EINVAL:
            raise OSError(failed[0], os.strerror(failed[0]))
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise WorldError(f"no memory for a snapshot of {size} bytes: {error.strerror}") from error
