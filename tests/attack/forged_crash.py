"""Crashes under a chosen name in code of a chosen file, so that the kernel logs both names.

Run as `python forged_crash.py NAME FD`: FD is an open file that holds `CODE`.  The process gives up
root before it crashes.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_NAME = 15
NOBODY = 65534
PROT_READ_EXEC, MAP_PRIVATE = 1 | 4, 2
CODE = bytes.fromhex("31c08900")
"""x86-64: xor eax, eax; mov [rax], eax.  It writes to address 0."""


def crash(name: str, fd: int) -> None:
    """Die of a segmentation fault, as a user without any right."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(4096), PROT_READ_EXEC, MAP_PRIVATE, fd, 0)
    libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    ctypes.CFUNCTYPE(None)(address)()


if __name__ == "__main__":
    crash(sys.argv[1], int(sys.argv[2]))
