"""Ports for the stores of attempts, kept from others until a store listens there.

Rank 0's store (`torch.distributed.TCPStore`) listens seconds to hours after its agent has offered a
port. Meanwhile a port that is only free at the offer may be taken by another job of this machine.
"""

from __future__ import annotations

import collections
import errno
import random
import socket
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from unbroken.errors import WorldError
from unbroken.foreign_numbers import whole_number

FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Below Kubernetes' node ports (30000-32767) and Linux' default ephemeral range (from 32768)."""
REMEMBERED = 1000
NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors of a kernel without IPv6, and of one where it is switched off."""
HELD = 2
"""The port of the attempt, and the one that is offered for the next."""


class HeldPort:
    """A port at which only a socket with SO_REUSEADDR can listen, as stores have, until `close`.

    No other HeldPort has it, nor is it given to a socket that asks for any free port. Where the
    kernel would keep stores from it as well, nothing is held.
    """

    def __init__(self, number: int) -> None:
        """Raises OSError if anything has this port, at any address."""
        self.number = number
        with ExitStack() as sockets:
            sockets.enter_context(_bound(socket.AF_INET, number))
            self._family = socket.AF_INET
            try:
                sockets.enter_context(_bound(socket.AF_INET6, number))
                self._family = socket.AF_INET6
            except OSError as error:
                if error.errno not in NO_IPV6:
                    raise
            self._sockets = sockets.pop_all()
        if not self._may_listen():
            self.close()

    def close(self) -> None:
        """Leave the port to all; a second call has no effect."""
        self._sockets.close()

    def _may_listen(self) -> bool:
        """Try what a store will do: bind at all addresses, those of IPv4 included."""
        with socket.socket(self._family) as store, suppress(OSError):
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", self.number))
            return True
        return False


def hold_port(taken: Collection[int], source: random.Random) -> HeldPort:
    """Hold a port that nothing has at any address, and that is not in `taken`. Raises
    WorldError."""
    for _ in range(1000):
        port = source.randint(FIRST_PORT, _last_port())
        if port not in taken:
            with suppress(OSError):
                return HeldPort(port)
    raise WorldError(f"no free port between {FIRST_PORT} and {LAST_PORT}")


class OfferedPorts:
    """The ports that an agent offers: none twice, the newest ones held."""

    def __init__(self) -> None:
        self._random = random.Random()
        self._offered: collections.deque[int] = collections.deque(maxlen=REMEMBERED)
        self._held: collections.deque[HeldPort] = collections.deque()

    def next(self, used: int | None) -> int:
        """Return another port. `used` is one that an attempt has, offered by this agent or not.

        Raises WorldError if all are taken.
        """
        if used is not None:
            self._offered.append(used)
        held = hold_port(self._offered, self._random)
        self._offered.append(held.number)
        self._held.append(held)
        if len(self._held) > HELD:
            self._held.popleft().close()
        return held.number

    def close(self) -> None:
        """Leave all ports to others."""
        for held in self._held:
            held.close()


def _bound(family: socket.AddressFamily, port: int) -> socket.socket:
    """Return a socket that has the port at all addresses of a family."""
    result = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family is socket.AF_INET6:
            result.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        result.bind(("", port))
        # Only now: before, the port of another one that is held like this would do.
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        result.close()
        raise
    return result


def _last_port() -> int:
    """Return the last port below those that the kernel gives to any socket."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return LAST_PORT
    first = whole_number(text.partition("\t")[0], FIRST_PORT + 1, LAST_PORT + 1)
    return LAST_PORT if first is None else first - 1
