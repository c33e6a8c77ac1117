"""Ports of an agent's offers: nobody else gets one, and a store can listen there."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from unbroken.agent.ports import FIRST_PORT, LAST_PORT, HeldPort, OfferedPorts, hold_port
from unbroken.errors import WorldError

STORE = """
import sys, torch.distributed as dist
for use_libuv in (True, False):
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 1, True, use_libuv=use_libuv)
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
"""


def test_a_port_is_free_at_every_address_and_never_offered_twice() -> None:
    seen: set[int] = set()
    for seed in range(50):
        with closing(hold_port(seen, random.Random(seed))) as held:
            assert FIRST_PORT <= held.number <= LAST_PORT
            assert held.number not in seen
            seen.add(held.number)
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((address, 0)) as server, pytest.raises(OSError, match="in use"):
            HeldPort(server.getsockname()[1])
    with pytest.raises(WorldError, match="no free port"):
        hold_port(range(65536), random.Random(0))


def test_two_agents_never_offer_one_port() -> None:
    """Though each draws the same numbers: what one holds is no free port of the other."""
    with closing(hold_port((), random.Random(7))) as first:
        with closing(hold_port((), random.Random(7))) as second:
            assert second.number != first.number
        with pytest.raises(OSError, match="in use"):
            HeldPort(first.number)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", first.number))


@pytest.mark.slow
def test_a_store_of_torch_listens_at_a_port_that_is_held() -> None:
    pytest.importorskip("torch")
    with closing(hold_port((), random.Random())) as held:
        subprocess.run([sys.executable, "-c", STORE, str(held.number)], check=True)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", held.number))


def test_an_agent_holds_the_port_of_its_attempt_and_the_one_it_offers_next() -> None:
    before = os.listdir("/proc/self/fd")
    with closing(OfferedPorts()) as ports:
        offered = [ports.next(None)]
        for _ in range(20):
            offered.append(ports.next(used=offered[-1]))
        assert len(set(offered)) == len(offered)
        for number in offered[-2:]:
            with pytest.raises(OSError, match="in use"):
                HeldPort(number)
        sockets = len(os.listdir("/proc/self/fd")) - len(before)
        assert sockets in (2, 4), "of one family, or of both, for two ports"
    assert os.listdir("/proc/self/fd") == before
