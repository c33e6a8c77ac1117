"""A part of kube-proxy: addresses of services lead to their endpoints.

The API server reaches webhooks this way, and pods reach the API server. Requests between pods by a
service are not forwarded, since nothing here needs them.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any

Object = dict[str, Any]

NETWORK = "10.96.0.0/16"
"""Network of services, as in ../shared/envtest/start."""
BRIDGE, GATEWAY = "unbr0", "10.250.0.1"
NOBODY = f"{GATEWAY}:1"
"""Address that refuses connections, for services without endpoints."""
CHAIN = "UNBROKEN-SERVICES"
WAYS = ("PREROUTING", "OUTPUT")
"""Chains for packets from pods and from programs of this host."""
PAUSE_SECONDS = 0.5


@contextmanager
def reachable(server: str, token: str) -> Iterator[None]:
    """Forward the addresses of services until the block ends; the bridge must exist."""
    # Otherwise programs of this host would say that they are somewhere else.
    route = ["ip", "route", "replace", NETWORK, "dev", BRIDGE, "src", GATEWAY]
    subprocess.run(route, check=True)
    is_over = threading.Event()
    thread = threading.Thread(target=_follow, args=(server, token, is_over))
    _write([])
    for way in WAYS:
        if _iptables("-C", way, "-j", CHAIN, check=False):
            _iptables("-I", way, "-j", CHAIN)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for way in WAYS:
            _iptables("-D", way, "-j", CHAIN)
        _iptables("-F", CHAIN)
        _iptables("-X", CHAIN)


def _follow(server: str, token: str, is_over: threading.Event) -> None:
    written: list[str] = []
    while not is_over.wait(PAUSE_SECONDS):
        try:
            rules = list(
                _rules(*(_listed(server, token, kind) for kind in ("services", "endpoints")))
            )
        except (OSError, HTTPException):
            continue  # the API server is away
        if rules != written:
            _write(rules)
            written = rules


def _listed(server: str, token: str, kind: str) -> list[Object]:
    request = urllib.request.Request(
        f"{server}/api/v1/{kind}", headers={"Authorization": f"Bearer {token}"}
    )
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(request, context=anybody, timeout=5) as answer:
        items: list[Object] = json.load(answer)["items"]
    return items


def _rules(services: list[Object], endpoints: list[Object]) -> Iterator[str]:
    """Yield a rule for each endpoint that is ready; connections are spread evenly."""
    behind = {_key(one): one.get("subsets") or [] for one in endpoints}
    for service in services:
        address = service["spec"].get("clusterIP") or "None"
        for port in service["spec"].get("ports") or [] if address != "None" else []:
            places = [
                f"{ready['ip']}:{target['port']}"
                for subset in behind.get(_key(service), [])
                for target in subset.get("ports") or []
                for ready in subset.get("addresses") or []
                if target.get("name") == port.get("name")
            ]
            places = places or [NOBODY]
            for number, place in enumerate(places):
                share = f"-m statistic --mode random --probability {1 / (len(places) - number)}"
                to = f"-d {address} -p tcp --dport {port['port']}"
                yield f"-A {CHAIN} {to} {share} -j DNAT --to-destination {place}"


def _key(one: Object) -> tuple[str, str]:
    return one["metadata"]["namespace"], one["metadata"]["name"]


def _write(rules: list[str]) -> None:
    """Replace the rules of the chain."""
    text = "\n".join(["*nat", f":{CHAIN} - [0:0]", *rules, "COMMIT", ""])
    subprocess.run(["iptables-restore", "--noflush"], input=text, text=True, check=True)


def _iptables(*arguments: str, check: bool = True) -> int:
    command = ["iptables", "-w", "-t", "nat", *arguments]
    return subprocess.run(command, check=check, capture_output=True).returncode
