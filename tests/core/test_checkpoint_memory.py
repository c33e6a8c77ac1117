"""Decisions of a member of the checkpoint memory: shards to keep, refuse and copy."""

from __future__ import annotations

from itertools import combinations

import pytest

from unbroken.core.checkpoint_memory import (
    COPIES,
    IDLE_SECONDS,
    NAMESPACES_MAX,
    RANKS_MAX,
    CheckpointMemory,
    CheckpointRefusal,
    NamespaceSettings,
    Shard,
    ShardKey,
    in_order,
    is_namespace,
    key_of,
    repairs,
    settings_of_file,
    shard_of_file,
    whole_steps,
)
from unbroken.foreign_numbers import INT64_MAX

META = '{"checksum": "nUaihFhKmyOouFgTnz7GcYw==", "algorithm": "xxh3_128"}'
SETTINGS = NamespaceSettings(num_ranks=3, steps_retained=2, stamp=1)


def shard(rank: int, step: int, size: int = 10, stamp: int = 1, namespace: str = "job") -> Shard:
    """Return a shard."""
    return Shard(ShardKey(namespace, rank, step), size, stamp, META)


def memory(capacity: int = 100) -> CheckpointMemory:
    """Return the memory of a member that knows one namespace."""
    made = CheckpointMemory(capacity)
    assert made.configure("job", SETTINGS, 0.0) is None
    return made


def put(
    of: CheckpointMemory, one: Shard, now: float = 0.0, retained: int = 2
) -> CheckpointRefusal | None:
    """Have a shard come whole."""
    admitted = of.admit(one, now)
    if isinstance(admitted, CheckpointRefusal):
        return admitted
    of.accept(one, retained)
    return None


def test_a_smaller_memory_keeps_the_newest_saves_and_room_for_what_is_coming() -> None:
    of = memory()
    for step in (1, 2, 3):
        assert put(of, shard(0, step, size=20, stamp=step), retained=9) is None
    assert put(of, shard(0, 9, size=20, stamp=0, namespace="other")) is None
    assert of.resize(100) == []
    coming = shard(1, 4, size=20, stamp=4)
    assert of.admit(coming, 0.0) == []
    assert [one.key.step for one in of.resize(50)] == [9, 1, 2]
    assert of.accept(coming, 9) == []
    assert (steps(of), of.used()) == ([(0, 3), (1, 4)], 40)
    assert put(of, shard(2, 4, size=20, stamp=5)) is not None
    assert of.resize(60) == []
    assert put(of, shard(2, 4, size=20, stamp=5)) is None


def steps(of: CheckpointMemory, namespace: str = "job") -> list[tuple[int, int]]:
    """Return (rank, step) of all shards of a namespace."""
    return sorted((one.key.rank, one.key.step) for one in of.shards(namespace))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a\0b", "-a", ".a", "a b", "ä", "a" * 129, "a\n"],
)
def test_a_namespace_is_never_another_path(name: str) -> None:
    assert not is_namespace(name)
    assert isinstance(key_of(name, "0", "0"), CheckpointRefusal)


@pytest.mark.parametrize(
    ("rank", "step"),
    [
        *(("-1", "0"), ("x", "0"), ("", "0"), (str(RANKS_MAX + 1), "0"), ("0", "-1")),
        *(("0", str(INT64_MAX + 1)), ("0", "9" * 5000), ("0", "1_0"), ("٣", "0")),
    ],
)
def test_a_rank_or_step_that_is_no_number_is_refused(rank: str, step: str) -> None:
    refusal = key_of("job", rank, step)
    assert isinstance(refusal, CheckpointRefusal)
    assert refusal.status == 400


def test_all_that_is_known_of_a_shard_is_in_the_name_of_its_file() -> None:
    one = Shard(ShardKey("job", RANKS_MAX, INT64_MAX), 7, INT64_MAX, "x" * 120)
    assert len(one.file_name) < 255
    assert "/" not in Shard(ShardKey("job", 0, 0), 7, 1, "???>>>///" * 13).file_name
    assert shard_of_file("job", one.file_name, 7) == one
    assert settings_of_file(SETTINGS.file_name) == SETTINGS


@pytest.mark.parametrize(
    "name", ["", "1.shard", "a.b.c.d.shard", "1.2.3.%.shard", "1.2.3.eA==", "1.2.3.4.5.shard"]
)
def test_a_file_of_another_name_is_no_shard(name: str) -> None:
    assert shard_of_file("job", name, 1) is None
    assert settings_of_file(name) is None


def test_the_oldest_step_of_the_rank_goes_with_the_newest() -> None:
    one = memory()
    for step in (1, 2, 3):
        assert put(one, shard(0, step)) is None
    assert put(one, shard(1, 1)) is None
    assert steps(one) == [(0, 2), (0, 3), (1, 1)]


def test_the_save_that_began_last_wins() -> None:
    one = memory()
    late, early = shard(0, 5, stamp=20), shard(0, 5, stamp=10)
    assert isinstance(one.admit(early, 0.0), list)
    assert put(one, late) is None
    # The bytes of the earlier one are all there only now.
    assert one.accept(early, 2) == [early]
    assert one.find(late.key) == late
    refusal = one.admit(early, 0.0)
    assert isinstance(refusal, CheckpointRefusal)
    assert refusal.status == 409


def test_a_shard_that_arrives_twice_is_kept_once() -> None:
    """Two members that hold it send it to a third one at the same time."""
    one = memory()
    for _ in range(2):
        assert one.admit(shard(0, 5), 0.0) == []
    assert one.accept(shard(0, 5), 2) == []
    assert one.accept(shard(0, 5), 2) == []
    assert (one.find(shard(0, 5).key), one.used()) == (shard(0, 5), 10)
    # The next one need not be sent at all.
    refusal = one.admit(shard(0, 5), 0.0)
    assert isinstance(refusal, CheckpointRefusal)
    assert (refusal.status, one.used()) == (409, 10)


def test_of_two_shards_with_one_stamp_the_first_stays() -> None:
    one = memory()
    other = Shard(shard(0, 5).key, 10, 1, "another checksum")
    assert put(one, shard(0, 5)) is None
    assert one.admit(other, 0.0) == []
    assert one.accept(other, 2) == [other]
    assert one.find(other.key) == shard(0, 5)


def test_a_shard_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    one = memory(100)
    assert put(one, shard(0, 1, size=60)) is None
    refusal = one.admit(shard(1, 1, size=50), 0.0)
    assert isinstance(refusal, CheckpointRefusal)
    assert refusal.status == 507
    assert "60 of 100 bytes" in refusal.reason
    assert steps(one) == [(0, 1)]
    # What is under way is counted as well, until it is given up.
    under_way = shard(1, 1, size=40)
    assert isinstance(one.admit(under_way, 0.0), list)
    assert isinstance(one.admit(shard(2, 1, size=1), 0.0), CheckpointRefusal)
    one.release(under_way)
    assert put(one, shard(2, 1, size=40)) is None


def test_a_rank_gives_up_older_steps_but_not_its_last() -> None:
    one = memory(100)
    for step in (1, 2):
        assert put(one, shard(0, step, size=40)) is None
    assert put(one, shard(0, 3, size=40)) is None
    assert steps(one) == [(0, 2), (0, 3)]
    assert isinstance(one.admit(shard(0, 4, size=70), 0.0), CheckpointRefusal)
    assert steps(one) == [(0, 2), (0, 3)]


def test_a_namespace_takes_from_others_only_what_is_above_their_share() -> None:
    one = memory(100)
    for step in range(1, 10):
        assert put(one, shard(0, step), retained=9) is None
    for step in range(1, 6):
        assert put(one, shard(0, step, namespace="other"), retained=9) is None
    # 50 bytes each; the oldest steps have gone.
    assert steps(one) == [(0, step) for step in range(5, 10)]
    assert put(one, shard(0, 6, namespace="other"), retained=9) is None
    assert steps(one) == [(0, step) for step in range(5, 10)]
    assert steps(one, "other") == [(0, step) for step in range(2, 7)]


def test_a_namespace_that_nobody_uses_yields_first() -> None:
    one = memory(100)
    assert put(one, shard(0, 1, size=40)) is None
    assert put(one, shard(0, 1, size=40, namespace="other"), now=10.0) is None
    late = 5.0 + IDLE_SECONDS
    assert put(one, shard(0, 1, size=60, namespace="third"), now=late) is None
    assert steps(one) == []
    assert steps(one, "other") == [(0, 1)]


def test_namespaces_are_bounded() -> None:
    one = memory()
    for number in range(1, NAMESPACES_MAX):
        assert one.configure(f"job-{number}", SETTINGS, 0.0) is None
    assert isinstance(one.configure("one-more", SETTINGS, 1.0), CheckpointRefusal)
    assert isinstance(one.admit(shard(0, 1, namespace="one-more"), 1.0), CheckpointRefusal)
    assert one.yielding("one-more", 1.0) is None


def test_the_namespace_that_was_idle_for_longest_makes_room_with_its_shards() -> None:
    one = CheckpointMemory(1000)
    for number in range(NAMESPACES_MAX):
        assert one.configure(f"job-{number}", SETTINGS, 10.0) is None
        assert put(one, shard(0, 1, size=1, namespace=f"job-{number}"), now=10.0) is None
    one.use("job-0", 9.0)
    one.use("job-1", 5.0)
    late = 9.5 + IDLE_SECONDS
    assert one.yielding("job-7", late) is None
    assert one.yielding("one-more", late) == "job-1"
    # What is being received is in use.
    under_way = shard(0, 2, size=1, namespace="job-1")
    assert one.admit(under_way, 5.0) == []
    assert one.yielding("one-more", late) == "job-0"
    assert one.forget("job-0")
    assert one.configure("one-more", SETTINGS, late) is None


@pytest.mark.parametrize(
    "wrong", [NamespaceSettings(0, 3, 1), NamespaceSettings(3, 0, 1), NamespaceSettings(3, 101, 1)]
)
def test_settings_out_of_bounds_are_refused(wrong: NamespaceSettings) -> None:
    assert isinstance(memory().configure("other", wrong, 0.0), CheckpointRefusal)


@pytest.mark.parametrize(
    ("held", "listed"),
    [
        ([(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)], [2, 1]),
        ([(0, 1), (1, 1), (2, 1), (1, 2), (2, 2)], [1]),
        ([(0, 1), (1, 1), (2, 1), (0, 2), (2, 2)], [1]),
        ([(0, 7)], [7]),
        ([], []),
    ],
)
def test_a_step_with_a_missing_rank_is_not_listed(
    held: list[tuple[int, int]], listed: list[int]
) -> None:
    stamps = dict.fromkeys(held, 1)
    assert whole_steps(stamps, 5) == listed
    assert whole_steps(stamps, 1) == listed[:1]


@pytest.mark.parametrize(
    ("stamps", "listed"),
    [((1, 2, 3), [7]), ((3, 3, 3), [7]), ((4, 2, 3), []), ((1, 4, 3), []), ((4, 5, 6), [7])],
)
def test_a_step_with_the_metadata_of_an_earlier_save_is_not_listed(
    stamps: tuple[int, ...], listed: list[int]
) -> None:
    assert whole_steps({(rank, 7): one for rank, one in enumerate(stamps)}, 5) == listed


def test_a_save_after_a_return_to_an_earlier_step_is_kept() -> None:
    one = memory()
    for stamp, step in enumerate((10, 20, 30, 15, 16)):
        saved = shard(0, step, stamp=stamp)
        assert put(one, saved) is None
        assert one.find(saved.key) == saved
    assert steps(one) == [(0, 15), (0, 16)]


def test_a_copy_of_an_old_save_takes_the_place_of_no_newer_one() -> None:
    one = memory(100)
    for stamp, step in ((5, 15), (6, 16)):
        assert put(one, shard(0, step, size=40, stamp=stamp)) is None
    # Not by the number of its step either.
    assert isinstance(one.admit(shard(0, 99, size=40, stamp=4), 0.0), CheckpointRefusal)
    assert put(one, shard(0, 99, size=20, stamp=4)) is None
    assert steps(one) == [(0, 15), (0, 16), (0, 99)]
    # The next save makes room again, by the oldest ones.
    assert put(one, shard(0, 17, size=40, stamp=7)) is None
    assert steps(one) == [(0, 16), (0, 17)]


def test_a_job_in_use_loses_nothing_to_the_copy_of_another_ones_old_save() -> None:
    one = memory(100)
    for step in range(10):
        assert put(one, shard(0, step, stamp=10 + step), retained=10) is None
    assert isinstance(one.admit(shard(0, 1, namespace="other"), 0.0), CheckpointRefusal)
    assert len(steps(one)) == 10


def test_a_lost_member_moves_no_shard_of_others() -> None:
    members = [f"10.0.0.{number}:9200" for number in range(1, 9)]
    for rank in range(50):
        before = in_order(members, "job", rank)
        for lost in members:
            rest = in_order([one for one in members if one != lost], "job", rank)
            assert rest == [one for one in before if one != lost]
    first = {in_order(members, "job", rank)[0] for rank in range(50)}
    assert len(first) > 4


def test_after_repairs_every_shard_is_at_its_two_members() -> None:
    """Whatever two members of five are lost one after the other, and however many join."""
    members = [f"m{number}" for number in range(5)]
    shards = [shard(rank, 1) for rank in range(12)]
    placed = {
        member: [one for one in shards if member in in_order(members, "job", one.key.rank)[:COPIES]]
        for member in members
    }
    for lost, joined in combinations(members, 2):
        now = {member: list(held) for member, held in placed.items()}
        for change in ({lost}, {joined}):
            now = {member: held for member, held in now.items() if member not in change}
            repair(now)
            assert all_placed(now, shards)
        now["new"] = []
        repair(now)
        assert all_placed(now, shards)


def repair(now: dict[str, list[Shard]]) -> None:
    """Carry out what each member decides from the same contents, and then once more."""
    for _ in range(2):
        stamps = {member: {one.key: one.stamp for one in held} for member, held in now.items()}
        decided = {
            member: repairs(
                member,
                now.keys(),
                held,
                {name: keys for name, keys in stamps.items() if name != member},
            )
            for member, held in now.items()
        }
        for member, (copies, surplus) in decided.items():
            for one, to in copies:
                if one not in now[to]:
                    now[to].append(one)
            now[member] = [one for one in now[member] if one not in surplus]


def all_placed(now: dict[str, list[Shard]], shards: list[Shard]) -> bool:
    """True if each shard is at its members, and nowhere else."""
    return all(
        {member for member, held in now.items() if one in held}
        == set(in_order(now, "job", one.key.rank)[:COPIES])
        for one in shards
    )


def test_a_member_that_does_not_answer_is_sent_nothing() -> None:
    one = shard(0, 1)
    members = ("a", "b")
    assert repairs("a", members, [one], {}) == ([], [])
    assert repairs("a", members, [one], {"b": {}}) == ([(one, "b")], [])
    assert repairs("a", members, [one], {"b": {one.key: one.stamp}}) == ([], [])
