"""Plan of an agent's memory for snapshots."""

from __future__ import annotations

from unbroken.core.snapshots.memory import COPY_STATES, SLOT_STATES, memory_plan


def test_ranks_that_have_not_saved_count_as_the_largest_that_has() -> None:
    plan = memory_plan({("model", 3): 100, ("model", 1): 60}, 4, has_buddy=True)
    assert (plan.slots, plan.copies) == (SLOT_STATES * 360, COPY_STATES * 360)
    assert memory_plan({}, 4, has_buddy=True).slots == 0
    two = memory_plan({("model", 0): 100, ("data", 0): 1}, 2, has_buddy=False)
    assert (two.slots, two.copies) == (SLOT_STATES * 202, 0)


def test_slots_come_first_and_copies_only_if_all_have_room() -> None:
    plan = memory_plan({("model", 0): 10}, 1, has_buddy=True)
    missing = {
        room: (plan.slots_missing(room), plan.copies_missing(room)) for room in (0, 29, 30, 69, 70)
    }
    assert missing == {0: (30, 70), 29: (1, 41), 30: (0, 40), 69: (0, 1), 70: (0, 0)}
    assert memory_plan({("model", 0): 10}, 1, has_buddy=False).copies_missing(0) == 0
