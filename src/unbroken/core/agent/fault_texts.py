"""Error texts of libraries, and the kind of fault that each one means.

A text counts only if it names the library that writes it; the source is given with each text.
"""

from __future__ import annotations

import re

from unbroken.wire.agent import FaultKind

_COMMUNICATION = re.compile(
    r"gloo|nccl|tcpstore|c10d|processgroup|distnetworkerror|distbackenderror|diststoreerror"
    r"|client socket|tcp client|collective|monitoredbarrier|store based barrier|net/ib",
    re.IGNORECASE,
)
_PEER_GONE = re.compile(
    # gloo's pair.cc and unbound_buffer.cc, NCCL's socket.cc, torch's TCPStore.
    r"connection closed|connection reset|broken pipe|connection refused|remote ?error"
    r"|connection was likely closed|communicator was aborted|socket has failed to connect"
    r"|waiting for clients|failed to recv|socket closed|timed out|operation timeout"
    r"|timeout caused pair closure"
    # torch 2.13: TCPStore.cpp, socket.cpp, TCPStoreLibUvBackend.cpp, ProcessGroupGloo.cpp,
    # distributed_c10d.py.
    r"|(?:recvvalue\w*|sendbytes) failed|wait timeout after|socket timeout"
    r"|failed to pass monitoredbarrier|monitoredbarrier, but received errors"
    # torch ProcessGroupNCCL.cpp: watchdog and its heartbeat (pytorch/pytorch#112518).
    r"|got stuck for \d+ seconds|taking the entire process down|remote process exited"
    r"|work sequence was aborted|nccl operations have failed"
    # NCCL's error.cc and net_ib.cc (NVIDIA/nccl#1405, #1814): 12 is IBV_WC_RETRY_EXC_ERR.
    r"|ncclsystemerror|unhandled system error|with status=12|vendor err 129|retry_exc_err"
    r"|transport retry counter exceeded",
    re.IGNORECASE,
)
# CUDA runtime's error strings (cudaGetErrorString) for errors of a broken GPU, or of a kernel that
# broke it. A failed assertion of a kernel is about data, an invalid argument about code.
_CUDA = re.compile(
    r"uncorrectable (?:ecc|nvlink) error|hardware stack error|unspecified launch failure"
    r"|illegal memory access|illegal instruction was encountered|misaligned address"
    r"|launch timed out and was terminated|devices? (?:is|\(s\) is/are|are) busy or unavailable"
    r"|cuda error: unknown error|gpu is lost|fallen off the bus|unhandled cuda error"
    r"|cublas_status_execution_failed|cudnn_status_execution_failed|cudaerroreccuncorrectable",
    re.IGNORECASE,
)
_CUDA_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaMalloc failed"
)
# errno(3): ENOSPC and EDQUOT, in Python's words and in those of libc.
_DISK = re.compile(r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]")
# torch's data/_utils/signal_handling.py and MapAllocator.cpp.
_SHARED_MEMORY = re.compile(
    r"out of shared memory|unable to (?:allocate|open|resize|mmap) .{0,40}shared memory"
    r"|killed by signal: Bus error|unable to write to file </torch_|/dev/shm\b.{0,80}No space left"
)


def is_peer_lost(whole: str, said: str) -> bool:
    """True if the text reports a lost peer, and comes from a communication library or was raised by
    one."""
    return bool(_PEER_GONE.search(said) and _COMMUNICATION.search(whole))


def kind_of_text(said: str) -> FaultKind | None:
    """Return which part of the machine broke, according to the text; None: the text does not show
    it."""
    for pattern, kind in (
        (_SHARED_MEMORY, FaultKind.SHARED_MEMORY_FULL),
        (_DISK, FaultKind.DISK_FULL),
        (_CUDA_MEMORY, FaultKind.OUT_OF_MEMORY),
        (_CUDA, FaultKind.CUDA_ERROR),
    ):
        if pattern.search(said):
            return kind
    return None
