"""A file system that stops answering: a FUSE server that answers the mount and nothing more."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from pathlib import Path

HEADER = struct.Struct("IIQQIIII")
"""Length, operation, number of the request, node, user, group, process, padding."""
ANSWER = struct.Struct("IiQ")
WELCOME = struct.Struct("IIIIHHIIHHI28x")
"""Version, read ahead, flags, requests in the background, size of a write, times, pages."""
INIT, REQUEST_BYTES, WRITE_BYTES = 26, 1 << 17, 1 << 16
VERSION, REVISION = 7, 31


class SilentFileSystem:
    """Mounted while it is open; every access to a name in it waits until it is closed."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other"
        words = (b"stalled", os.fsencode(place), b"fuse", ctypes.c_ulong(0), options.encode())
        if ctypes.CDLL(None, use_errno=True).mount(*words) != 0:
            number = ctypes.get_errno()
            os.close(self._device)
            raise OSError(number, os.strerror(number))
        request = os.read(self._device, REQUEST_BYTES)
        _, operation, unique, *_ = HEADER.unpack_from(request)
        if operation != INIT:
            raise OSError(f"the kernel began with FUSE operation {operation} instead of INIT")
        body = WELCOME.pack(VERSION, REVISION, 0, 0, 8, 6, WRITE_BYTES, 1, 16, 0, 0)
        os.write(self._device, ANSWER.pack(ANSWER.size + len(body), 0, unique) + body)

    def close(self) -> None:
        """Take it away; who still waits is answered that it has gone."""
        subprocess.run(["umount", "--lazy", str(self._place)], check=False)
        os.close(self._device)
