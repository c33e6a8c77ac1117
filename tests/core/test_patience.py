"""The table of how long silence may last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unbroken.core import patience
from unbroken.core.patience import ALLOWANCES, ASLEEP, Allowance, Limit, SilenceLimits, longest

SECONDS = st.floats(0.0, 1e5)
ROWS = st.lists(st.sampled_from(ALLOWANCES))


def test_every_allowance_is_a_row_of_the_table_with_words_of_its_own() -> None:
    found = [one for one in vars(patience).values() if isinstance(one, Allowance)]
    assert sorted(found, key=repr) == sorted(ALLOWANCES, key=repr)
    assert len({one.situation for one in found}) == len(found)


@given(ROWS, SECONDS, st.sampled_from([1.0, 8.0, 64.0]))
def test_the_longest_of_some_rows_satisfies_each_of_them_and_asks_for_no_more(
    rows: list[Allowance], usual: float, repeats: float
) -> None:
    found = longest(rows)
    wanted = [one.after(usual, repeats) for one in (ASLEEP, *rows)]
    assert found.after(usual, repeats) == max(wanted)
    assert found.looks == max(one.looks for one in (ASLEEP, *rows))


@given(st.sampled_from(ALLOWANCES), SECONDS, SECONDS)
def test_a_longer_usual_silence_and_a_restart_shorten_no_allowance(
    row: Allowance, usual: float, more: float
) -> None:
    least = row.after(usual)
    assert row.seconds <= least <= row.after(usual + more)
    # Not even a sleeping rank is stopped at once again: the first restart may have been wrong.
    assert row.after(usual, patience.REPEAT_FACTOR) >= max(least, 240.0)


def test_a_usual_silence_beyond_ten_minutes_counts_once() -> None:
    assert [patience.NOBODY.after(usual) for usual in (10.0, 100.0, 300.0, 1000.0)] == [
        60.0,
        300.0,
        600.0,
        1000.0,
    ]


@given(SECONDS, st.floats(1.0, 10.0), st.floats(0.0, 600.0))
def test_who_spins_or_works_is_given_more_than_who_is_idle(
    usual: float, caution: float, floor: float
) -> None:
    limits = [one.silence for one in patience.BY_SIGN.values()]
    limits += [patience.START, patience.NEW_PHASE, patience.RESTARTED, patience.EARLY]
    for one in limits:
        found = one.allowed(usual, caution, floor)
        assert floor <= found.idle <= found.spinning <= found.working


def test_limits_are_a_multiple_of_what_is_usual_and_no_less_than_their_seconds() -> None:
    limits = SilenceLimits("works", Limit(10.0, 4.0), Limit(20.0, 2.0), Limit(600.0, 6.0))
    assert limits.allowed(5.0) == patience.Allowed(20.0, 40.0, 600.0)
    assert limits.allowed(5.0, caution=3.0) == patience.Allowed(30.0, 60.0, 1800.0)
    assert limits.allowed(5.0, floor_seconds=35.0) == patience.Allowed(35.0, 70.0, 600.0)
