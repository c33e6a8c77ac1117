"""The container that has each GPU, by the kubelet's PodResources API (v1, a socket on the node).

The API is gRPC: a POST by HTTP/2 with one message in the form of Protocol Buffers, of which three
types with a few fields are read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2

from unbroken.errors import PeerError, WorldError

from .gpu_metrics import Owner

SOCKET = "var/lib/kubelet/pod-resources/kubelet.sock"
METHOD = "http://kubelet/v1.PodResourcesLister/List"
HEADERS = {"content-type": "application/grpc", "te": "trailers"}
NO_REQUEST = bytes(5)
"""An empty message, uncompressed: a flag and a length."""
ANSWER_MAX = 16 << 20
"""Bytes of an answer (the limit of the kubelet's own client)."""
SECONDS = 5.0
GPU_RESOURCES = "nvidia.com/"
"""Prefix of the resources of NVIDIA's device plugin: `gpu`, `gpu.shared`, `mig-1g.10gb`."""
VARINT, BYTES = 0, 2
"""Wire types of Protocol Buffers."""
FIXED = {1: 8, 5: 4}
"""Wire types of numbers with a fixed length, in bytes."""


async def gpu_owners(root: Path) -> dict[str, Owner]:
    """Return the owner of each GPU that one container has alone, by UUID.

    A node without a kubelet's socket has no owners. Raises WorldError if the kubelet does not
    answer, and PeerError if its answer cannot be read.
    """
    socket = root / SOCKET
    if not socket.exists():
        return {}
    try:
        return owners(await _ask(socket))
    except (httpx2.HTTPError, OSError) as error:
        raise WorldError(f"{socket}: {str(error) or type(error).__name__}") from error
    except (IndexError, ValueError) as error:
        raise PeerError(f"{socket}: the answer cannot be read: {error}") from error


async def _ask(socket: Path) -> bytes:
    transport = httpx2.AsyncHTTPTransport(uds=str(socket), http1=False, http2=True)
    async with (
        httpx2.AsyncClient(transport=transport, timeout=SECONDS) as client,
        client.stream("POST", METHOD, content=NO_REQUEST, headers=HEADERS) as response,
    ):
        answer = bytearray()
        async for part in response.aiter_raw():
            answer += part
            if len(answer) > ANSWER_MAX:
                raise ValueError(f"it is longer than {ANSWER_MAX} bytes")
    code = response.headers.get("grpc-status", "0")
    if response.status_code != 200 or code != "0" or len(answer) < len(NO_REQUEST):
        raise ValueError(f"status {response.status_code}, gRPC status {code}")
    if answer[0] or int.from_bytes(answer[1:5]) != len(answer) - len(NO_REQUEST):
        raise ValueError("it is not one uncompressed message")
    return bytes(answer[len(NO_REQUEST) :])


def owners(message: bytes) -> dict[str, Owner]:
    """Return the owners of GPUs in a ListPodResourcesResponse.  ValueError, IndexError."""
    found: dict[str, set[Owner]] = {}
    for pod in _messages(message, 1):
        name, namespace = _text(pod, 1), _text(pod, 2)
        for container in _messages(pod, 3):
            owner = Owner(namespace, name, _text(container, 1))
            for devices in _messages(container, 2):
                if _text(devices, 1).startswith(GPU_RESOURCES):
                    for identity in _messages(devices, 2):
                        # Replicas of a GPU that is shared by time are `UUID::NUMBER`.
                        uuid = identity.decode(errors="replace").partition("::")[0]
                        found.setdefault(uuid, set()).add(owner)
    return {uuid: next(iter(those)) for uuid, those in found.items() if len(those) == 1}


def _text(message: bytes, number: int) -> str:
    return next(_messages(message, number), b"").decode(errors="replace")


def _messages(message: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the fields of a number that hold bytes: texts and messages."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind, length = key & 7, 0
        if kind == VARINT:
            _, at = _varint(message, at)
        elif kind == BYTES:
            length, at = _varint(message, at)
        elif kind in FIXED:
            length = FIXED[kind]
        else:
            raise ValueError(f"unknown wire type {kind}")
        if at + length > len(message):
            raise ValueError("a field ends after its message")
        if kind == BYTES and key >> 3 == wanted:
            yield message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("a number has more than ten bytes")
