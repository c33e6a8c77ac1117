"""Programs of `beside_attack.py`: the attackers, what they are compared with, a cluster.

beside_attack_programs.py dashboard KIND            # a false dashboard of Ray at POD_IP
beside_attack_programs.py tenant KUBECONFIG         # writes objects of jobs without end
beside_attack_programs.py up OPTIONS                # `unbroken up` that admits any job
beside_attack_programs.py idle                      # serves /healthz, and does nothing else
beside_attack_programs.py probe URL URL             # asks both in turn, until its stdin ends
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from unbroken.errors import UnbrokenError
from unbroken.kube.client import MERGE, KubeClient, connect
from unbroken.observe.server import HEALTH_PATH, serving_metrics
from unbroken.spec.job.types import GROUP, KIND, PLURAL, VERSION

WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
PORT = 8265
"""Port of Ray's dashboard."""
NAMESPACE = "attackers"
JOBS = f"apis/{GROUP}/{VERSION}/namespaces/{NAMESPACE}/{PLURAL}"
PROBE_SECONDS = 0.05
WRITE_SECONDS = 0.2
"""Seconds between two writes of a kind; LARGE kinds are written more rarely.  The API server of the
local cluster is one process, which is not under attack here."""
Object = dict[str, Any]


# --- a false dashboard


FRAMES = {
    "ping": b"\x89\x00" * 20_000,
    "empty": b"\x81\x00" * 20_000,
    "fill": bytes((0x81, 127)) + (4 * 1024 * 1024).to_bytes(8, "big"),
    "fill-small": bytes((0x81, 127)) + (255 * 1024).to_bytes(8, "big") + b"a" * 250 * 1024,
}
"""Beginning of a log, by kind: pings, messages without text, and messages that never end."""
REPEATED = ("ping", "empty")
LISTED = {"quiet": 4000, "fill": 150, "fill-small": 150, "new": 45_000}
"""Running jobs in the answer of each kind; one, if the kind is not here."""
ROW = b'"type":"SUBMISSION","status":"RUNNING","submission_id":"%s","entrypoint":"x"'
DASHBOARDS = ("ping", "empty", "quiet", "fill", "fill-small", "new", "wide")


def listed(kind: str, number: int) -> bytes:
    """The body of the answer of this number to the question for jobs."""
    if kind == "wide":  # below the longest list that is read
        return b'[{%s,"runtime_env":{"a":[%s]}}]' % (ROW % b"a", b",".join([b"[]"] * 1_390_000))
    first = number if kind == "new" else 0
    ids = [b"j%d-%d" % (first, place) for place in range(LISTED.get(kind, 1))]
    return b"[%s]" % b",".join([b"{%s}" % (ROW % id) for id in ids])


async def follow_log(kind: str, head: str, source: Any, out: asyncio.StreamWriter) -> None:
    """Accept a question for a log, and flood it."""
    key = next(line for line in head.split("\r\n") if line.lower().startswith("sec-websocket-key"))
    accepted = base64.b64encode(hashlib.sha1(key.split(": ")[1].encode() + WEBSOCKET).digest())
    out.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accepted + b"\r\n\r\n" + FRAMES.get(kind, b"")
    )
    reading = asyncio.ensure_future(source.read(-1))
    while kind in REPEATED and not reading.done():
        out.write(FRAMES[kind])
        await out.drain()
    for _ in range(60 if kind == "fill" else 0):
        out.write(b"a" * 65536)
        await out.drain()
    await reading


async def dashboard(kind: str) -> None:
    """Serve a false dashboard."""
    numbers = itertools.count()

    async def serve(source: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await source.readuntil(b"\r\n\r\n")).decode("latin-1")
                if "logs/tail" in head:
                    await follow_log(kind, head, source, out)
                    break
                body = listed(kind, next(numbers))
                out.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await out.drain()
        out.close()

    server = await asyncio.start_server(serve, os.environ["POD_IP"], PORT, backlog=4096)
    await server.serve_forever()


# --- objects of jobs


def job(name: str, rules: list[Object], **more: Any) -> Object:
    """A job whose only pod is never placed."""
    container = {"name": "main", "image": "any", "command": ["sleep", "1000"], **more}
    template = {"spec": {"nodeSelector": {"none": "none"}, "containers": [container]}}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name, "namespace": NAMESPACE, "annotations": {}},
        "spec": {
            "nprocPerNode": "1",
            "replicaSpecs": [{"name": "pods", "replicas": 1, "template": template}],
            "runPolicy": {"logMonitoringConfiguration": rules},
        },
    }  # fmt: skip


def rule(name: str, pattern: str) -> Object:
    """A log rule."""
    return {"name": name, "logPattern": pattern, "faultOnMatch": True}


def patterns(name: str, number: int) -> Object:
    """64 short patterns with large programs."""
    return job(name, [rule(f"r{i}", rf"\pL{{400}}x{number}x{i}") for i in range(64)])


def permitted(name: str, number: int) -> Object:
    """Patterns that take longest to compile of those that are permitted."""
    return job(name, [rule(f"r{i}", f"{number}.{i}x{{0,1000}}") for i in range(16)])


def numbers(name: str, number: int) -> Object:
    """Numbers of thousands of digits, wherever a job has one."""
    digits = f"{number}" + "9" * 5000
    made = job(name, [], env=[{"name": "AGENT_PORT", "value": digits}])
    made["spec"]["nprocPerNode"] = digits
    made["metadata"]["annotations"] = {
        "unbroken.dev/lease-seconds": digits,
        "unbroken.dev/log-rule-ranks": f"{{{digits}: {digits}}}",
    }
    return made


def large(name: str, number: int) -> Object:
    """A job with 20,000 values, each of which takes memory of its own."""
    return job(name, [], env=[{"name": f"A{i}", "value": f"{number}"} for i in range(20_000)])


def wide(name: str, number: int) -> Object:
    """Nearly 1 MiB of empty lists, where any field is stored."""
    return job(name, [], unknown=[number, *([[]] * 340_000)])


LARGE = ("large", "wide")
OBJECTS: dict[str, Callable[[str, int], Object]] = {
    one.__name__: one for one in (patterns, permitted, numbers, large, wide)
}


async def tenant(kubeconfig: Path) -> None:
    """Create and change jobs of each kind as fast as the API server answers; say the counts at the
    end of stdin."""
    counts: dict[str, list[float]] = {}
    async with connect(kubeconfig, manager="tenant") as client:
        writers = [asyncio.ensure_future(write(client, kind, counts)) for kind in OBJECTS]
        await asyncio.to_thread(sys.stdin.read)
        for one in writers:
            one.cancel()
    print(json.dumps({
        kind: {
            "admitted": found[0], "refused": found[1],
            "seconds": found[2] / max(1.0, found[0] + found[1]), "longest": found[3],
        }
        for kind, found in counts.items()
    }), flush=True)  # fmt: skip


async def write(client: KubeClient, kind: str, counts: dict[str, list[float]]) -> None:
    """Write jobs of one kind: change one of four, and create it again now and then."""
    found = counts[kind] = [0.0, 0.0, 0.0, 0.0]
    for number in itertools.count():
        name = f"{kind}-{number % 4}"
        made, began = OBJECTS[kind](name, number), time.monotonic()
        try:
            if number % 64 < 4:
                with suppress(UnbrokenError):
                    await client.raw("DELETE", f"{JOBS}/{name}")
                began = time.monotonic()
                await client.raw("POST", JOBS, body=made)
            else:
                change = {
                    "metadata": {"annotations": made["metadata"]["annotations"]},
                    "spec": made["spec"],
                }
                await client.raw("PATCH", f"{JOBS}/{name}", body=change, headers=MERGE)
            found[0] += 1
        except UnbrokenError:
            found[1] += 1
        took = time.monotonic() - began
        found[2] += took
        found[3] = max(found[3], took)
        await asyncio.sleep(WRITE_SECONDS * (300 if kind in LARGE else 1))


# --- what is measured


def probe(urls: list[str]) -> None:
    """Ask each URL in turn; write a line with its place in the list, the time and the seconds."""
    os.set_blocking(0, False)
    for place, url in itertools.cycle(enumerate(urls)):
        if sys.stdin.buffer.read(1) == b"":
            return
        began = time.monotonic()
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                answer.read()
        except OSError as error:
            print(place, time.time(), 30.0, error, flush=True)
        print(place, time.time(), time.monotonic() - began, flush=True)
        time.sleep(PROBE_SECONDS)


async def idle() -> None:
    """Serve /healthz as the operator does; write its URL."""
    async with serving_metrics(CollectorRegistry(), "127.0.0.1", 0) as url:
        print(url.replace("/metrics", HEALTH_PATH), flush=True)
        await asyncio.Event().wait()


def up(arguments: list[str]) -> None:
    """Run `unbroken up` without the check of jobs, as where the webhook has timed out."""
    from unbroken.cli.main import run
    from unbroken.local import job_programs
    from unbroken.local import up as program
    from unbroken.spec.job_kinds import HYPERPOD_JOB

    kept = {
        key: check for key, check in job_programs.ADMISSIONS.items() if key != HYPERPOD_JOB.resource
    }
    program.ADMISSIONS = kept  # type: ignore[misc]
    sys.argv[1:] = ["up", *arguments]
    run()


def main() -> None:
    """Run the program of the command line."""
    match sys.argv[1:]:
        case ["dashboard", kind]:
            asyncio.run(dashboard(kind))
        case ["tenant", kubeconfig]:
            asyncio.run(tenant(Path(kubeconfig)))
        case ["idle"]:
            asyncio.run(idle())
        case ["probe", *urls]:
            probe(urls)
        case ["up", *arguments]:
            up(arguments)


if __name__ == "__main__":
    main()
