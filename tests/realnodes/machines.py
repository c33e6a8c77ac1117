"""Machines of a real cluster: kubelet and containerd in their own namespaces, and their power.

`../shared/envtest/node` starts them from a folder, the room, that its `start` has made. Two
programs are put before those that it starts. The first is containerd's: it uses the built images,
or mounts this host's programs into every container. In the second case an empty image runs Python
and this package. The second is kubelet's: it gives each machine its own boot ID, since all machines
share this host's. It also lets the images stay on a disk that is 85 % full: no registry has them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import unbroken
from tests.apiservers import envtest_folder, unpacked
from tests.realnodes import images, services

IMAGE = images.NAMES["operator"]
"""Image that deploy/node-daemon.yaml names."""
SOURCE = Path(unbroken.__file__).parent.parent
OWN_TMP = Path("/opt/unbroken-host")
"""Folder in containers for files below this host's /tmp: some have a /tmp of their own."""
PROGRAMS = ("unbroken", "unbrokenrun", "python3")
"""Programs of this virtual environment; in containers they come first on the PATH of `image`."""
START_SECONDS = 180
GONE_SECONDS = 30
CGROUPS = Path("/sys/fs/cgroup")

CONTAINERD = """#!/usr/bin/env bash
# Started as `containerd -c FILE`; the file was just written, and ends in containerd's own table.
{change}# Pods find services behind the bridge.
sed -i 's#"ipam": {{#&"routes": [{{"dst": "{services}", "gw": "{gateway}"}}], #' cni/*.conflist
# The bridge of the node's pods keeps its hardware address, which else changes as pods come and go.
# (/sys shows the network of the host, whose address all nodes would have.)
ip link set cni0 address "$(ip -brief link show eth0 | awk '{{print $3}}')"
# As systemd has it: pods may see what is mounted later (mountPropagation).
mount --make-rshared /
exec {program} "$@"
"""
WITH_IMAGES = """# `native` would copy a whole image for each container.
sed -i 's/snapshotter = "native"/snapshotter = "overlayfs"/' "$2"
"""
WITHOUT_IMAGES = """cat >> "$2" <<C
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{room}/container.json"
C
"""
KUBELET = """#!/usr/bin/env bash
exec {program} --boot-id-file="$PWD/boot_id" "$@" --image-gc-high-threshold=100
"""


def equip(room: Path, *, has_images: bool = False) -> None:
    """Make the files with which the nodes of a room start: images, or this host's programs."""
    (room / "bin").mkdir(exist_ok=True)
    (room / "wrapped").mkdir(exist_ok=True)
    change = WITH_IMAGES if has_images else WITHOUT_IMAGES.format(room=room)
    program = shutil.which("containerd")
    places = {"services": services.NETWORK, "gateway": services.GATEWAY}
    text = CONTAINERD.format(change=change, program=program, **places)
    _write_program(room / "wrapped/containerd", text)
    _write_program(room / "bin/kubelet", KUBELET.format(program=unpacked("kubelet")))
    if has_images:
        (room / "store").symlink_to(images.store())
    else:
        _lend_programs(room)


def _lend_programs(room: Path) -> None:
    """Make an empty image, and this host's programs for its containers."""
    (room / "programs").mkdir()
    home = _within(sys.prefix)
    for name in PROGRAMS:
        # No link: Python finds its virtual environment by the path that it was called by.  The
        # other programs name Python by its path on this host.
        script = "" if name == "python3" else f" {home}/bin/{name}"
        text = f'#!/bin/sh\nexec {home}/bin/python3{script} "$@"\n'
        _write_program(room / "programs" / name, text)
    (room / "container.json").write_text(json.dumps(_container(room / "programs")))
    subprocess.run([envtest_folder() / "image", IMAGE, room / "image.tar"], check=True)


def _within(path: Path | str) -> str:
    """Return the path in containers of a path of this host."""
    is_hidden = Path(path).is_relative_to("/tmp")
    return f"{OWN_TMP}{path}" if is_hidden else str(path)


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _container(programs: Path) -> dict[str, Any]:
    """Return the specification of every container: runc's default with this host's programs."""
    made = subprocess.run(["ctr", "oci", "spec"], check=True, capture_output=True, text=True)
    spec: dict[str, Any] = json.loads(made.stdout)
    own = ["/usr", "/bin", "/sbin", "/lib", "/lib64", sys.base_prefix, sys.prefix, str(SOURCE)]
    places = {_within(one): os.path.realpath(one) for one in own}
    places["/usr/local/bin"] = str(programs)
    spec["mounts"] += [
        {"destination": one, "source": source, "type": "bind", "options": ["rbind", "ro"]}
        for one, source in places.items()
    ]
    # Torch asks for the user's name, of which a container without /etc/passwd knows nothing.
    spec["process"]["env"] = ["USER=root", "HOME=/root", f"PYTHONPATH={_within(SOURCE)}"]
    return spec


def switch_on(room: Path, name: str, number: int) -> None:
    """Boot a machine with a new boot ID; return when its node is Ready."""
    folder = room / name
    folder.mkdir(exist_ok=True)
    (folder / "number").write_text(str(number))
    (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
    if (room / "store").exists() and not (folder / "containerd").exists():
        images.lend((room / "store").resolve(), folder / "containerd")
    command = [envtest_folder() / "node", room, name, str(number), *room.glob("image.tar")]
    path = f"{room / 'wrapped'}:{os.environ['PATH']}"
    with open(folder / "boot.log", "ab") as log:
        subprocess.run(
            command, check=True, stdout=log, stderr=log, timeout=START_SECONDS,
            env={**os.environ, "PATH": path},
        )  # fmt: skip


def number_of(room: Path, name: str) -> int:
    """Return the number of a machine: its link on this host is `un-NUMBER`."""
    return int((room / name / "number").read_text())


def names(room: Path) -> list[str]:
    """Return the names of all machines, on or off."""
    return sorted(path.parent.name for path in room.glob("*/number"))


def next_number(room: Path) -> int:
    """Return a number that no machine of the room has."""
    return max((number_of(room, name) for name in names(room)), default=0) + 1


def discard(room: Path, name: str) -> None:
    """Remove a machine that is off, with its disk."""
    for group in CGROUPS.glob(f"*/un-{name}"):
        for folder, _, _ in os.walk(group, topdown=False):
            os.rmdir(folder)
    shutil.rmtree(room / name)


def switch_off(room: Path, name: str) -> None:
    """End a machine like a loss of power: all its processes at once, without any message."""
    number, quiet = number_of(room, name), {"capture_output": True, "check": False}
    # Otherwise the kernel would close the connections of who is killed.
    subprocess.run(["ip", "link", "set", f"un-{number}", "down"], **quiet)
    deadline = time.monotonic() + GONE_SECONDS
    while pids := set(_processes(room, name)):
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, f"{name}: {pids} outlive SIGKILL"
        time.sleep(0.05)
    subprocess.run(["ip", "link", "del", f"un-{number}"], **quiet)
    subprocess.run(["ip", "netns", "del", f"un-{name}"], **quiet)
    folder = room / name
    # Files that a real machine would have in memory, and lose.
    shutil.rmtree(folder / "state", ignore_errors=True)
    (folder / "containerd.sock").unlink(missing_ok=True)


def freeze(room: Path, name: str, *, is_frozen: bool) -> None:
    """Send SIGSTOP, or SIGCONT, to the kubelet of a machine; its containers continue to run."""
    os.kill(kubelet_pid(room, name), signal.SIGSTOP if is_frozen else signal.SIGCONT)


def cut_off(room: Path, name: str, *, is_cut: bool) -> None:
    """Pull a machine's network cable, or put it back."""
    link = f"un-{number_of(room, name)}"
    subprocess.run(["ip", "link", "set", link, "down" if is_cut else "up"], check=True)


def pods_network(room: Path, name: str) -> str:
    """Return the addresses of a machine's pods, as a network."""
    return f"10.250.{number_of(room, name)}.0/24"


@contextmanager
def dropped(source: str, *destinations: str, but_to: Iterable[str] = ()) -> Iterator[None]:
    """Drop packets from an address or network to others on the bridge, until the block ends.

    Packets in the other direction arrive, and so do those to the addresses `but_to`.
    """
    targets = [*((one, "DROP") for one in destinations), *((one, "ACCEPT") for one in but_to)]
    rules = [
        [chain, "-s", source, "-d", destination, "-j", verdict]
        for destination, verdict in targets  # each is put before those that are there
        for chain in ("PREROUTING", "OUTPUT")
    ]
    command = ["iptables", "-w", "-t", "raw"]
    for rule in rules:
        subprocess.run([*command, "-I", *rule], check=True)
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run([*command, "-D", *rule], check=True)


@contextmanager
def paused(room: Path, name: str) -> Iterator[None]:
    """Stop all processes of a machine until the block ends, and its network with them."""
    cut_off(room, name, is_cut=True)
    stopped: set[int] = set()
    while new := set(_processes(room, name)) - stopped:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
    try:
        yield
    finally:
        cut_off(room, name, is_cut=False)
        for pid in stopped:
            _signal(pid, signal.SIGCONT)


def kill_kubelet(room: Path, name: str) -> None:
    """Kill the kubelet of a machine; its containers continue to run."""
    os.kill(kubelet_pid(room, name), signal.SIGKILL)


def kubelet_pid(room: Path, name: str) -> int:
    """Return the kubelet's pid of a machine that is on."""
    return int((room / name / "pids").read_text().split()[1])


def pods_processes(name: str) -> Iterator[int]:
    """Yield the pids of processes in a machine's containers."""
    root = CGROUPS / "pids" / f"un-{name}"
    for folder, _, _ in os.walk(root):  # unlike rglob, glob continues when a folder has just gone
        try:
            yield from map(int, Path(folder, "cgroup.procs").read_text().split())
        except OSError:
            continue  # the group has just gone


def mounts(pid: int) -> dict[str, str]:
    """Return the type of each mount of a process, by path; empty: the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/mounts").read_text().splitlines()
    except OSError:
        return {}
    return {place: type for _, place, type, *_ in (line.split() for line in lines)}


def writers(name: str, folder: Path) -> list[int]:
    """Return the pids in a machine's containers that have a file of a folder open."""
    found = []
    for pid in pods_processes(name):
        try:
            opened = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue  # it has ended
        if any(Path(one).parent == folder for one in opened):
            found.append(pid)
    return sorted(found)


def _processes(room: Path, name: str) -> Iterator[int]:
    """Yield the processes of its containers, and those started for the machine's folder."""
    yield from (pid for pid in pods_processes(name) if _lives(pid))
    folder = f"{room / name}"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        if any(word == folder or word.startswith(f"{folder}/") for word in words):
            pid = int(path.parent.name)
            if not _is_ours(words) and _lives(pid):
                yield pid


def _is_ours(words: list[str]) -> bool:
    """Return whether a process is a test, or called by one, rather than a part of the machine."""
    return Path(words[0]).name.startswith(("python", "pytest"))


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
