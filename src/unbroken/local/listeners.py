"""Programs of this machine that listen at addresses of pods.

Pods have addresses of the loopback network, at which every local user may listen.  So who has a
secret for a program of a pod looks first whether that program is the one that listens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

LISTEN = "0A"
"""State of a listening socket in the tables."""
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""The second is missing where IPv6 is off."""
HEX_DIGITS = 8
"""Digits of an IPv4 address in the tables."""
MAPPED = "0000000000000000FFFF0000" if sys.byteorder == "little" else "00000000000000000000FFFF"
"""Beginning of an IPv4 address as IPv6 address in the tables."""


def strangers(host: str, port: int, spec: Mapping[str, Any]) -> list[str]:
    """List the uids of other users that listen at an IPv4 address and port of a pod of this spec.

    A program that listens at all addresses counts, too.  The users that the spec names are the
    pod's own: only root's pods have any.
    """
    contexts = [spec, *(spec.get("containers") or ())]
    own = {str((one.get("securityContext") or {}).get("runAsUser")) for one in contexts}
    return sorted(set(_listening(host, port)) - own - {str(os.geteuid())})


def listens_in(network: IPv4Network) -> bool:
    """True if any program listens at an address of the network, whoever runs it."""
    for fields in _sockets():
        address = fields[1].partition(":")[0].removeprefix(MAPPED)
        if len(address) == HEX_DIGITS:
            packed = bytes.fromhex(address)
            if IPv4Address(packed[::-1] if sys.byteorder == "little" else packed) in network:
                return True
    return False


def _listening(host: str, port: int) -> Iterator[str]:
    number = int.from_bytes(IPv4Address(host).packed, sys.byteorder)
    wanted = {f"{one}:{port:04X}" for one in (f"{number:08X}", f"{MAPPED}{number:08X}")}
    wanted |= {f"{'0' * digits}:{port:04X}" for digits in (HEX_DIGITS, 32)}
    for fields in _sockets():
        if fields[1] in wanted:
            yield fields[7]


def _sockets() -> Iterator[list[str]]:
    """Yield the fields of each listening socket in the tables."""
    for table in TABLES:
        if not table.exists():
            continue
        with table.open() as lines:
            next(lines)  # the names of the columns
            for line in lines:
                fields = line.split()
                # Linux lists the listening sockets first (net/ipv4/tcp_ipv4.c, tcp_get_idx). To
                # list the connections takes 35 ms, or more if a user of this machine has many.
                if fields[3] != LISTEN:
                    break
                yield fields
