"""Names of checkpoints that count, and of those to delete, in a directory with any other files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unbroken.worker.checkpointing.names import (
    BAD,
    TRASH,
    UNFINISHED,
    Name,
    Retention,
    complete,
    doomed,
    parse,
)

names = st.builds(Name, st.integers(0, 6), st.integers(0, 40))
suffixes = st.sampled_from(["", UNFINISHED, BAD, TRASH])
ours = st.builds(lambda name, suffix: f"{name}{suffix}", names, suffixes)
strange = st.sampled_from(
    ["step-12", "step-00000012", "step-00000012.attempt-03", "step-000000012.attempt-3",
     ".unbroken", "step-00000012.attempt-3.old", "xstep-00000012.attempt-3",
     "step-00000012.attempt-3\n", "step-٠٠٠٠٠٠١٢.attempt-3", "model.pt"]
)  # fmt: skip
listings = st.lists(ours | strange | st.text(max_size=30), unique=True, max_size=30)
retentions = st.builds(Retention, st.integers(1, 4), st.none() | st.integers(1, 10))


@given(name=names, suffix=suffixes)
def test_names_read_as_they_are_written(name: Name, suffix: str) -> None:
    assert parse(f"{name}{suffix}") == (name, suffix)


@given(text=strange)
def test_only_exact_names_are_ours(text: str) -> None:
    assert parse(text) is None


@given(listing=listings, attempt=st.integers(0, 6), inherited=st.frozensets(names))
def test_what_counts_is_our_own_or_inherited(
    listing: list[str], attempt: int, inherited: frozenset[Name]
) -> None:
    found = complete(listing, attempt, frozenset(map(str, inherited)))
    assert found == sorted(found, reverse=True)
    assert all(str(name) in listing for name in found)
    assert all(name.attempt == attempt or name in inherited for name in found)


@given(listing=listings, attempt=st.integers(0, 6), retention=retentions, safe=names)
def test_deletion_spares_what_it_should(
    listing: list[str], attempt: int, retention: Retention, safe: Name
) -> None:
    counting = complete(listing, attempt, frozenset(listing))
    counting = [name for name in counting if name.attempt <= attempt]
    gone = doomed(listing, counting, attempt, retention, safe)
    left = complete(set(listing) - set(gone), attempt, frozenset(listing))
    assert counting[: retention.keep] == [
        name for name in left if name in counting[: retention.keep]
    ]
    for entry in gone:
        name, suffix = parse(entry) or (None, "")
        assert name is not None
        assert name.attempt <= attempt
        assert suffix != BAD
        assert suffix or not (retention.spares(name) or (name in counting and name >= safe))
    # The checkpoint that an attempt is writing is newer than any complete one.
    writing = Name(attempt, max((name.step for name in counting), default=0) + 1)
    assert f"{writing}{UNFINISHED}" not in gone


def test_the_newest_is_what_was_made_last() -> None:
    """After going back to step 100, a later attempt's 105 is newer than 130 of the one before."""
    listing = [str(Name(3, 130)), str(Name(4, 105)), str(Name(3, 100))]
    found = complete(listing, 4, frozenset(listing))
    assert [name.step for name in found] == [105, 130, 100]


def test_old_ones_go_and_every_tenth_stays() -> None:
    listing = [str(Name(0, step)) for step in range(5, 45, 5)]
    gone = doomed(listing, complete(listing, 0, frozenset()), 0, Retention(2, 10), Name(0, 40))
    assert gone == [str(Name(0, step)) for step in (5, 15, 25)]


def test_what_an_older_attempt_completed_too_late_is_deleted() -> None:
    late, own = Name(1, 90), Name(2, 50)
    counting = complete([str(late), str(own)], 2, frozenset())
    assert counting == [own]
    assert doomed([str(late), str(own)], counting, 2, Retention(), own) == [str(late)]
