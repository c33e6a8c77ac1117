"""Metrics of GPUs as the DCGM exporter names them, and the pods that have them."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import pytest
from prometheus_client import CollectorRegistry

from unbroken.core.nodes.signals import GpuSample, GpuValues
from unbroken.errors import PeerError, WorldError
from unbroken.nodes.gpu_metrics import FIELDS, LABELS, XIDS_MAX, GpuMetrics, Owner
from unbroken.nodes.pod_resources import SOCKET, gpu_owners

PCI = "00000000:3B:00.0"
GPU = GpuValues(0, PCI, "GPU-a", "NVIDIA H100", {"DCGM_FI_DEV_GPU_UTIL": 93.0, "OTHER": 1.0})
OWNER = Owner("team", "lm-0", "trainer")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """Return the only value of a family whose labels are these and perhaps others."""
    found = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) <= 1
    return found[0] if found else None


def test_labels_are_those_of_the_exporter() -> None:
    metrics = GpuMetrics(registry := CollectorRegistry())
    metrics.sampled("n1", GpuSample(shown=(GPU,)), {"GPU-a": OWNER})
    (family,) = (one for one in registry.collect() if one.name == "DCGM_FI_DEV_GPU_UTIL")
    (sample,) = family.samples
    assert tuple(sample.labels) == LABELS
    assert sample.labels == {
        **{"gpu": "0", "UUID": "GPU-a", "pci_bus_id": PCI, "device": "nvidia0"},
        **{"modelName": "NVIDIA H100", "Hostname": "n1"},
        **{"namespace": "team", "pod": "lm-0", "container": "trainer"},
    }
    assert value(registry, "OTHER") is None
    assert value(registry, "unbroken_node_gpus_readable", node="n1") == 1


def test_gpus_that_cannot_be_read_have_no_series() -> None:
    metrics = GpuMetrics(registry := CollectorRegistry())
    metrics.sampled("n1", GpuSample(shown=(GPU,)), {})
    metrics.sampled("n1", GpuSample(problem="NVML does not answer"), {})
    assert value(registry, "DCGM_FI_DEV_GPU_UTIL", Hostname="n1") is None
    assert value(registry, "unbroken_node_gpus_readable", node="n1") == 0
    metrics.sampled("n1", GpuSample(problem="there is no driver", has_driver=False), {})
    assert value(registry, "unbroken_node_gpus_readable", node="n1") is None
    metrics.sampled("n1", GpuSample(), {})
    metrics.node_gone("n1")
    assert value(registry, "unbroken_node_gpus_readable", node="n1") is None


def test_the_latest_xid_is_shown_at_its_gpu_and_others_are_bounded() -> None:
    metrics = GpuMetrics(registry := CollectorRegistry())
    metrics.sampled("n1", GpuSample(shown=(GPU,)), {})
    assert value(registry, "DCGM_FI_DEV_XID_ERRORS", gpu="0") == 0
    for number in (31, 79):
        metrics.xid("n1", "0000:3b:00", number)
    metrics.xid("n2", "0000:3b:00", 13)
    assert value(registry, "DCGM_FI_DEV_XID_ERRORS", gpu="0") == 79
    for number in range(1000):
        metrics.xid("n1", f"{number:04x}:00:00", 1)
    assert len(metrics._nodes["n1"].xids) == XIDS_MAX


def test_faults_are_counted_by_name_and_action() -> None:
    metrics = GpuMetrics(registry := CollectorRegistry())
    for _ in range(2):
        metrics.fault("n1", "Xid79", "Replace")
    assert value(registry, "unbroken_node_faults_total", fault="Xid79", action="Replace") == 2


def test_a_node_has_so_many_series_whatever_its_pods_are() -> None:
    metrics = GpuMetrics(registry := CollectorRegistry())
    gpus = tuple(
        GpuValues(index, PCI, f"GPU-{index}", "H100", dict.fromkeys(FIELDS, 1.0))
        for index in range(8)
    )
    for pod in range(100):
        owners = {gpu.uuid: Owner("team", f"lm-{pod}", "trainer") for gpu in gpus}
        metrics.sampled("n1", GpuSample(shown=gpus), owners)
    found = [sample for family in registry.collect() for sample in family.samples]
    assert len(found) == 8 * len(FIELDS) + 1


# --- The kubelet's socket


@pytest.fixture
def root() -> Iterator[Path]:
    """Provide a node's file system; the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="node-") as folder:
        yield Path(folder)


def field(number: int, content: bytes | str) -> bytes:
    """Return a field of bytes in the form of Protocol Buffers."""
    data = content.encode() if isinstance(content, str) else content
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def varint(number: int) -> bytes:
    """Return a number in the form of Protocol Buffers."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def pod(name: str, container: str, resource: str, *devices: str) -> bytes:
    """Return a pod with one container, as the first field of the kubelet's answer."""
    topology = field(3, field(1, bytes([8, 1])))  # a message in a message, with a number
    listed = field(1, resource) + b"".join(field(2, one) for one in devices) + topology
    inside = field(1, container) + field(2, listed) + bytes([0x20, *varint(300)])
    return field(1, field(1, name) + field(2, "team") + field(3, inside))


@asynccontextmanager
async def kubelet(root: Path, message: bytes, *, status: str = "0") -> AsyncIterator[None]:
    """Serve one answer at the socket, by HTTP/2 as gRPC does."""
    path = root / SOCKET
    path.parent.mkdir(parents=True)

    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        wire.initiate_connection()
        while data := await reader.read(65536):
            for event in wire.receive_data(data):
                if isinstance(event, h2.events.StreamEnded):
                    answer(wire, event.stream_id)
            writer.write(wire.data_to_send())
        writer.close()
        await writer.wait_closed()
        ended.set()

    def answer(wire: h2.connection.H2Connection, stream: int) -> None:
        kind = (":status", "200"), ("content-type", "application/grpc")
        if status != "0":
            wire.send_headers(stream, [*kind, ("grpc-status", status)], end_stream=True)
            return
        wire.send_headers(stream, kind)
        body = bytes(1) + len(message).to_bytes(4) + message
        for at in range(0, len(body), 1000):
            wire.send_data(stream, body[at : at + 1000])
        wire.send_headers(stream, [("grpc-status", "0")], end_stream=True)

    async with await asyncio.start_unix_server(serve, path):
        yield
        await ended.wait()


async def test_the_kubelet_says_which_container_has_a_gpu_alone(root: Path) -> None:
    message = (
        pod("lm-0", "trainer", "nvidia.com/gpu", "GPU-a", "GPU-b")
        + pod("web", "server", "cpu", "GPU-c")
        + pod("one", "x", "nvidia.com/gpu.shared", "GPU-d::0")
        + pod("two", "x", "nvidia.com/gpu.shared", "GPU-d::1")
        + b"".join(pod(f"other-{number}", "x", "vendor.io/nic", "1") for number in range(200))
    )
    async with kubelet(root, message):
        assert await gpu_owners(root) == {"GPU-a": OWNER, "GPU-b": OWNER}


async def test_a_node_without_a_kubelet_has_no_owners(root: Path) -> None:
    assert await gpu_owners(root) == {}


@pytest.mark.parametrize(
    "message", [b"\x0a\xff", b"\x0a", b"\xff" * 11, field(1, b"\x0a\x7fshort"), b"\x0b"]
)
async def test_an_answer_that_cannot_be_read_says_so(root: Path, message: bytes) -> None:
    async with kubelet(root, message):
        with pytest.raises(PeerError, match=r"kubelet\.sock: the answer cannot be read"):
            await gpu_owners(root)


async def test_an_error_of_the_kubelet_or_a_dead_socket_says_so(root: Path) -> None:
    async with kubelet(root, b"", status="12"):
        with pytest.raises(PeerError, match="gRPC status 12"):
            await gpu_owners(root)
    (root / SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(root / SOCKET))
    with pytest.raises(WorldError, match=r"kubelet\.sock"):
        await gpu_owners(root)
