"""Probes, hooks and other short work inside or towards a container, carried out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from unbroken.errors import WorldError
from unbroken.foreign_numbers import PORT_MAX, whole_number
from unbroken.kube import clock
from unbroken.local.node.processes.process import Launcher, Run

from .events import Object

OUTPUT_MAX = 10 * 1024
"""Bytes of a probe's output that are kept (kubelet, prober.go maxProbeMessageLength)."""
HOOK_SECONDS = 3600.0
"""Seconds after which a hook is ended that nothing waits for; otherwise its container's grace ends
it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A container that runs, as probes and hooks see it."""

    run: Run
    spec: Object
    pod_ip: str
    isolation: str
    cgroups: Sequence[str] = field(default=())


def exec_request(target: Target, argv: Sequence[str], *, tty: bool = False) -> Object:
    """Return the launcher's request for a command in this container."""
    return {
        "argv": list(argv),
        "cwd": target.run.details["cwd"],
        "join": target.run.main,
        "isolation": target.isolation,
        "cgroups": list(target.cgroups),
        "uid": target.run.details.get("uid"),
        "gid": target.run.details.get("gid"),
        "tty": tty,
        "env": {"TERM": "xterm"} if tty else {},
    }


async def output_of(
    launcher: Launcher, target: Target, argv: Sequence[str], seconds: float
) -> tuple[int, str]:
    """Exit code and output of a command; TimeoutError kills it, WorldError: not started."""
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(read, "rb"))
    try:
        async with asyncio.timeout(seconds):
            try:
                command = await launcher.command(exec_request(target, argv), [null, write, write])
            finally:
                os.close(write)
                os.close(null)
            try:
                code = await command.ended()
                # Processes that it left running may hold the pipe, so only available data is read.
                text = await _available(reader)
            finally:
                command.close()
    finally:
        transport.close()
    return code, text


async def _available(reader: asyncio.StreamReader) -> str:
    try:
        async with asyncio.timeout(0.05):
            data = await reader.read(OUTPUT_MAX)
    except TimeoutError:
        data = b""
    return data.decode("utf-8", "replace").rstrip("\n")


def port_number(port: int | str, spec: Object) -> int:
    """A port by number or by the name it has in the container."""
    number = whole_number(str(port), 1, PORT_MAX)
    if number is not None:
        return number
    for entry in spec.get("ports") or ():
        if entry.get("name") == port:
            return int(entry["containerPort"])
    raise WorldError(f"couldn't find port {port!r} in the container")


async def perform(
    action: Object,
    target: Target,
    launcher: Launcher,
    session: aiohttp.ClientSession,
    seconds: float,
) -> tuple[bool, str]:
    """Carry out a probe's or hook's action; return whether it succeeded, and its output."""
    try:
        if command := action.get("exec"):
            code, text = await output_of(launcher, target, command.get("command") or (), seconds)
            return code == 0, text
        async with asyncio.timeout(seconds):
            if get := action.get("httpGet"):
                return await _http_get(get, target, session)
            if tcp := action.get("tcpSocket"):
                return await _connect(tcp, target)
            if pause := action.get("sleep"):
                await clock.pause(float(pause["seconds"]))
                return True, ""
    except TimeoutError:
        return False, f"timed out after {seconds:g}s"
    except (WorldError, aiohttp.ClientError, OSError) as error:
        return False, str(error)
    return False, "this node runs exec, httpGet, tcpSocket and sleep only"


async def _http_get(
    get: Object, target: Target, session: aiohttp.ClientSession
) -> tuple[bool, str]:
    host = get.get("host") or target.pod_ip
    scheme = (get.get("scheme") or "HTTP").lower()
    port = port_number(get["port"], target.spec)
    path = get.get("path") or "/"
    url = f"{scheme}://{host}:{port}/{path.lstrip('/')}"
    headers: Mapping[str, str] = {
        "User-Agent": "kube-probe/1.33",
        "Accept": "*/*",
        **{h["name"]: h["value"] for h in get.get("httpHeaders") or ()},
    }
    async with session.get(url, headers=headers, ssl=False, allow_redirects=False) as answer:
        if 200 <= answer.status < 400:
            return True, ""
        return False, f"HTTP probe failed with statuscode: {answer.status}"


async def _connect(tcp: Object, target: Target) -> tuple[bool, str]:
    host = tcp.get("host") or target.pod_ip
    _, writer = await asyncio.open_connection(host, port_number(tcp["port"], target.spec))
    writer.close()
    return True, ""
