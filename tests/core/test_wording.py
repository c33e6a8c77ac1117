"""Numbers and plurals in texts."""

from __future__ import annotations

from unbroken.core.wording import all_of, counted, plural


def test_one_is_no_plural() -> None:
    assert [counted(n, "agent") for n in (0, 1, 2)] == ["0 agents", "1 agent", "2 agents"]
    assert [all_of(n, "agent") for n in (1, 2)] == ["the only agent", "all 2 agents"]


def test_several_wait_where_one_waits() -> None:
    said = ("waits in all_reduce", "reads or writes files", "is in f (a.py:1)", "has ended")
    several = ["wait in all_reduce", "read or write files", "are in f (a.py:1)", "have ended"]
    assert list(map(plural, said)) == several
    assert plural("stopped by a signal") == "stopped by a signal"
