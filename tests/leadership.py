"""Leaders over time, from the requests that each candidate's proxy has recorded.

The module also checks that no other candidate wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.fault_proxy import READS, Call


class Takeover(NamedTuple):
    """A candidate's first successful write of the lease after another's."""

    at: float
    holder: str


def is_lease(call: Call) -> bool:
    """Return whether a call is about the lease of an election; leases of nodes are others."""
    return "/leases" in call.path and "/kube-node-lease/" not in call.path


def takeovers(histories: Mapping[str, Sequence[Call]]) -> list[Takeover]:
    """Return the takeovers in order; `histories` has the calls of each candidate by its name."""
    written = sorted(
        (call.at, name)
        for name, calls in histories.items()
        for call in calls
        if call.method in ("POST", "PUT") and is_lease(call) and call.status in (200, 201)
        if json.loads(call.body)["spec"]["holderIdentity"]
    )
    found: list[Takeover] = []
    for at, name in written:
        if not found or found[-1].holder != name:
            found.append(Takeover(at, name))
    return found


def assert_no_stale_writes(histories: Mapping[str, Sequence[Call]]) -> None:
    """Assert that only the holder of the lease writes other objects."""
    terms = takeovers(histories)
    assert terms, "nobody ever led"
    for name, calls in histories.items():
        for call in calls:
            # Each operator sees to the definitions before it stands for election.
            if call.method in READS or is_lease(call) or "/customresourcedefinitions" in call.path:
                continue
            held = [term for term in terms if term.at <= call.at]
            assert held, f"{name} wrote before anybody led: {call}"
            assert held[-1].holder == name, (
                f"{name} wrote {call.method} {call.path} "
                f"{call.at - held[-1].at:.3f} s after {held[-1].holder} took over"
            )
