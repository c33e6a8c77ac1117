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
    "lease_over",
    "keeper_ends_it",
    "vouched",
    "peers_checked",
    "ends_waiting",
)


def unreached(probes: Mapping[str, int]) -> list[str]:
    """Return the situations that no world reached."""
    wanted = {*REACHED, *FAULTS, *LEASE_FAULTS, *NOISE, *STALLS} - SILENT
    return sorted(name for name in wanted if not probes.get(name))
