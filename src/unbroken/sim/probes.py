"""Situations that a long simulation must have reached to prove anything."""

from __future__ import annotations

from collections.abc import Mapping

from unbroken.core.job.recovery.ladder import RUNGS

from .draw import FAULTS, LEASE_FAULTS, NOISE, STALLS

SILENT = {"agent_crash_soon", "operator_crash_soon"}
"""Faults that are counted under another name, once they strike."""
REACHED = (
    "Completed",
    "Failed",
    "adoption",
    "fence",
    "forced_deletion",
    "spare_takes_over",
    "new_pod_takes_over",
    *(f"remedy_{rung.remedy.value}" for rung in RUNGS),
    "stock_restart",
    "suspended",
    "many_signals",
    "lost_write",
    "stop_short",
    "blamed",
    "dismissed",
    "false_stall",
    "crash_in_a_look",
    "operator_crash_in_a_look",
    "goes_on",
    "never_arrives",
    "dies_at_the_barrier",
    "kept_again",
    "harder",
    "holder_is_known",
    "taken_together",
    "ended_before_gone",
    "receipts",
    "restored_from_buddy",
    "samples",
    "spare_is_told",
)


LEASE_REACHED = ("lease_over", "keeper_ends_it", "vouched")
"""Situations that worlds with leases must have reached."""


def unreached(probes: Mapping[str, int]) -> list[str]:
    """Probes that no world reached; of those that old seeds lack only where there were any."""
    wanted = {*REACHED, *FAULTS, *NOISE, *STALLS} - SILENT
    if any(map(probes.get, LEASE_FAULTS)):
        wanted |= {*LEASE_REACHED, *LEASE_FAULTS}
    if probes.get("peers_checked"):
        wanted.add("peers_unreached")
    if probes.get("stock_waits"):
        wanted.add("ends_waiting")
    return sorted(name for name in wanted if not probes.get(name))
