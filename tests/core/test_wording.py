"""How numbers are told."""

from __future__ import annotations

from unbroken.core.wording import all_of, counted


def test_one_is_no_plural() -> None:
    assert [counted(n, "agent") for n in (0, 1, 2)] == ["0 agents", "1 agent", "2 agents"]
    assert [all_of(n, "agent") for n in (1, 2)] == ["the only agent", "all 2 agents"]
