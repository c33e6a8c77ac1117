"""A program of another user of the machine that calls all that Ray serves at a pod's address.

It runs in Ray's own environment, of which no module is here, and begins as root, who may read that
environment.  Arguments: the pod's address and ports.  Each line of output: the protocol, the call,
the port and the answer.
"""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

GRPC = (
    *("NodeManagerService/GetSystemConfig", "NodeManagerService/RequestWorkerLease"),
    *("ObjectManagerService/Pull", "CoreWorkerService/PushTask", "ReporterService/GetTraceback"),
    *("JobInfoGcsService/AddJob", "InternalKVGcsService/InternalKVPut"),
    *("RayletDriver/Init", "RayletDriver/KVPut"),
)
NOBODY = 65534
HTTP = ("/api/jobs/", "/api/job_agent/jobs/", "/get_or_create_runtime_env", "/logs/")


def post(url: str, headers: dict[str, str]) -> str:
    """Post a job; return the status of the answer."""
    sent = {"Content-Type": "application/json", **headers}
    try:
        request = urllib.request.Request(url, b'{"entrypoint": "id"}', sent)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, http.client.HTTPException):
        return "none"


def call(grpc: Any, place: str, method: str, metadata: list[tuple[str, str]]) -> str:
    """Call a method with an empty request; return the status of the answer."""
    with grpc.insecure_channel(place) as channel:
        ask = channel.unary_unary(f"/ray.rpc.{method}")
        try:
            ask(b"", timeout=30, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def answers(grpc: Any, address: str, ports: list[str]) -> Iterator[tuple[str, ...]]:
    """Call everything without a token, and with one that is guessed."""
    bearer = f"Bearer {'0' * 64}"
    for port in ports:
        place = f"{address}:{port}"
        for path in HTTP:
            for headers in ({}, {"Authorization": bearer}, {"X-Ray-Authorization": bearer}):
                yield "HTTP", path, port, post(f"http://{place}{path}", headers)
        for method in GRPC:
            for metadata in ([], [("authorization", bearer)]):
                yield "gRPC", method, port, call(grpc, place, method, metadata)


def main() -> None:
    """Become another user, then call."""
    import grpc  # Ray's environment has it

    # Python imports parts late, which the other user may not read.
    nowhere = "127.0.0.1:1"
    post(f"http://{nowhere}", {})
    call(grpc, nowhere, "X/X", [])
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for row in answers(grpc, sys.argv[1], sys.argv[2:]):
        sys.stdout.write(" ".join(row) + "\n")


if __name__ == "__main__":
    main()
