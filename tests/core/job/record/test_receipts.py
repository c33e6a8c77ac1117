"""Sources from which ranks resumed, in an incident, from the agents' receipts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.job.drive_job import Script, running
from unbroken.core.job.events import AgentReported, RecordEvent
from unbroken.core.job.record.receipts import RESTORED_MAX, resumption
from unbroken.spec.job.incident import Restored
from unbroken.wire.agent import AgentReport, AgentState, Receipt
from unbroken.wire.observation import RankWatch


def receipt(
    rank: int, source: str = "memory", step: int = 41, checksum: str = "s", replicas: str = ""
) -> Receipt:
    """Return a receipt of the attempt after the first."""
    return Receipt(rank, 1, step, source, 0.1 * rank, checksum, 0, "state", replicas)


def all_of(*checksums: str, replicas: str = "0-2") -> list[Receipt]:
    """Return receipts of ranks that call each other replicas."""
    return [receipt(i, checksum=one, replicas=replicas) for i, one in enumerate(checksums)]


SENTENCES = [
    ([receipt(0)], None, "resumed after step 41 from memory (rank 0)"),
    ([receipt(0)], 41, "resumed after step 41 from memory (rank 0); no step lost"),
    (
        [receipt(0), receipt(1), receipt(3), receipt(2, "replica rank 0")],
        42,
        "resumed after step 41 from memory (3 ranks) and replica rank 0 (rank 2); 1 step lost",
    ),
    (
        [receipt(0), receipt(1, "disk", step=40), receipt(2, "buddy 3")],
        50,
        (
            "resumed after steps 40 to 41 from memory (rank 0), disk (rank 1) and "
            "buddy 3 (rank 2); 10 steps lost"
        ),
    ),
    (
        [receipt(i, f"buddy {i}") for i in range(5)],
        40,
        (
            "resumed after step 41 from buddy 0 (rank 0), buddy 1 (rank 1), buddy 2 (rank 2) and "
            "elsewhere (2 ranks); no step lost"
        ),
    ),
    (
        all_of("a", "b", "a"),
        None,
        (
            "resumed after step 41 from memory (3 ranks); "
            "the replicas disagree: rank 1 differs from 0,2"
        ),
    ),
    (
        all_of("a", "b", "c"),
        None,
        "resumed after step 41 from memory (3 ranks); the replicas disagree: ranks 0-2 all differ",
    ),
    ([], 41, ""),
]


@pytest.mark.parametrize(("receipts", "step", "said"), SENTENCES)
def test_all_of_it_in_a_sentence(receipts: list[Receipt], step: int | None, said: str) -> None:
    assert resumption(receipts, step).resumed == said


@pytest.mark.parametrize(
    ("receipts", "agree"),
    [
        ([], None),
        (all_of("a", "a", "a"), True),
        (all_of("a", "b", "a"), False),
        # Shards differ, and nobody calls them replicas.
        (all_of("a", "b", replicas=""), None),
        # Nothing to compare with.
        (all_of("a"), None),
        (all_of("a", ""), None),
        # Two sets of replicas with different shards.
        ([*all_of("a", "a", replicas="0-1"), receipt(2, checksum="b", replicas="2-3")], True),
        (
            [
                *all_of("a", "a", replicas="0-1"),
                receipt(2, checksum="b", replicas="2-3"),
                receipt(3, checksum="c", replicas="2-3"),
            ],
            False,
        ),
        # Another snapshot of the same ranks is another state.
        ([*all_of("a", "a"), replace(receipt(0, checksum="b", replicas="0-2"), name="ema")], True),
    ],
)
def test_replicas_are_compared_with_each_other(receipts: list[Receipt], agree: bool | None) -> None:
    assert resumption(receipts, None).replicas_agree is agree


def test_ranks_with_the_same_are_one_group_with_its_slowest() -> None:
    found = resumption([receipt(2), receipt(0), receipt(1), receipt(3, "disk")], None).restored
    assert found == (
        Restored("0-2", 3, 41, "memory", 0.2, 2, "s", "state", 0),
        Restored("3", 1, 41, "disk", 0.3, 3, "s", "state", 0),
    )


RECEIPTS = st.builds(
    Receipt,
    rank=st.integers(0, 200),
    attempt=st.just(1),
    step=st.integers(0, 3),
    source=st.sampled_from(["memory", "disk", *(f"buddy {i}" for i in range(40))]),
    seconds=st.floats(0, 9),
    checksum=st.sampled_from(["", *map(str, range(60))]),
    replicas=st.sampled_from(["", "0-9"]),
)


@given(st.lists(RECEIPTS, max_size=200, unique_by=lambda one: one.rank))
def test_many_ranks_take_few_groups_and_none_is_left_out(receipts: list[Receipt]) -> None:
    found = resumption(receipts, 3)
    assert len(found.restored) <= RESTORED_MAX
    assert sum(one.count for one in found.restored) == len(receipts)


def test_a_thousand_shards_are_one_group() -> None:
    shards = [receipt(i, checksum=str(i)) for i in range(1000)]
    (group,) = resumption(shards, None).restored
    assert (group.ranks, group.count, group.checksum) == ("0-999", 1000, "")


def told(
    script: Script, now: float, name: str, *receipts: Receipt, step: int | None = None
) -> None:
    """Report that the agent of a pod runs attempt 1 and has these receipts."""
    watch = () if step is None else (RankWatch(0, step=step),)
    report = replace(script.agents[name], receipts=receipts, watch=watch)
    script.give(AgentReported(script.views[name].uid, report), now)


def restarted() -> Script:
    """Return two pods whose workers run again after a fault at step 42."""
    script = running()
    script.run("5 runs w-0 0 told=42\n5 runs w-1 0 told=41\n6 failed w-1 0")
    script.run("7 ready w-0 0\n7 ready w-1 0\n8 runs w-0 1\n8 runs w-1 1")
    return script


def test_an_incident_has_what_all_ranks_told() -> None:
    script = restarted()
    told(script, 9.0, "w-0", receipt(0))
    assert script.incidents[1].restored == ()
    told(script, 9.1, "w-1", receipt(1, "replica rank 0"))
    incident = script.incidents[1]
    assert (incident.steps_lost, incident.outcome, len(incident.restored)) == (1, "", 2)
    told(script, 9.2, "w-0", receipt(0), step=42)
    assert script.incidents[1] == replace(
        incident, outcome="recovered", ended_at=9.2, progress_at=9.2, resumed_step=42
    )


def test_receipts_that_come_after_the_first_step_are_kept_too() -> None:
    script = restarted()
    told(script, 9.0, "w-0", receipt(0), step=42)
    assert (script.incidents[1].outcome, script.incidents[1].restored) == ("recovered", ())
    told(script, 9.1, "w-1", receipt(1), step=42)
    assert script.incidents[1].resumed.startswith("resumed after step 41 from memory (2 ranks)")
    count = len(script.effects)
    told(script, 9.2, "w-1", receipt(1), step=42)
    assert len(script.effects) == count


def test_who_has_nothing_to_tell_is_not_waited_for() -> None:
    script = restarted()
    told(script, 9.0, "w-0", receipt(0))
    assert script.job.deadline() == 11.0
    script.run("11 tick")
    assert script.incidents[1].resumed == "resumed after step 41 from memory (rank 0); 1 step lost"
    told(script, 12.0, "w-1", receipt(1))
    assert script.incidents[1].restored[0].count == 2


def test_a_fault_meanwhile_loses_no_receipt_and_gets_none_that_is_not_its_own() -> None:
    script = restarted()
    told(script, 9.0, "w-0", receipt(0), step=42)
    script.run("9.5 failed w-1 1")
    assert len(script.incidents[1].restored) == 1
    assert script.incidents[2].restored == ()


def test_receipts_of_another_attempt_are_not_taken() -> None:
    script = restarted()
    old = replace(receipt(0), attempt=0)
    told(script, 9.0, "w-0", old)
    told(script, 9.0, "w-1", old)
    script.run("20 tick")
    assert script.incidents[1].restored == ()


def test_replicas_that_disagree_are_told_loudly_and_once() -> None:
    script = restarted()
    told(script, 9.0, "w-0", receipt(0, checksum="a", replicas="0-1"))
    told(script, 9.1, "w-1", receipt(1, checksum="b", replicas="0-1"))
    told(script, 9.2, "w-1", receipt(1, checksum="c", replicas="0-1"))
    (event,) = [e for e in script.effects if isinstance(e, RecordEvent) and e.is_warning][1:]
    assert event.reason == "ReplicasDisagree"
    assert event.message == (
        "attempt 1 resumed after step 41 from memory (2 ranks); 1 step lost; "
        "the replicas disagree: ranks 0-1 all differ"
    )
    assert script.incidents[1].replicas_agree is False


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_new_operator_takes_the_receipts_that_agents_still_have(is_closed: bool) -> None:
    script = restarted()
    if is_closed:
        script.run("9 runs w-0 1 told=42")
    later = script.successor(20.0)
    for rank in (0, 1):
        name = f"w-{rank}"
        later.run(f"20 runs {name} 1 rank={rank} master=10.0.0.0 port=29001")
    later.run("20 synced")
    for rank in (0, 1):
        told(later, 21.0, f"w-{rank}", receipt(rank))
    assert later.incidents[1].restored[0].count == 2
    assert bool(later.incidents[1].outcome) is is_closed


def counted(
    script: Script, now: float, name: str, step: int, samples: float, **more: object
) -> None:
    """Report a step of a pod's only rank, with the number of samples of its data."""
    watch = RankWatch(int(name[-1]), step=step, metrics={"samples": samples})
    report = replace(script.agents[name], watch=(watch,), **more)  # type: ignore[arg-type]
    script.give(AgentReported(script.views[name].uid, report), now)


def count_until_fault() -> Script:
    """Return two ranks that count 8 samples a step, of which one is lost after step 42."""
    script = running()
    script.run("5 runs w-0 0\n5 runs w-1 0")
    for at, step in ((6, 10), (7, 42)):
        for rank in (0, 1):
            counted(script, at, f"w-{rank}", step - rank, (step - rank + 1) * 8)
    script.run("8 failed w-1 0\n9 ready w-0 0\n9 ready w-1 0\n10 runs w-0 1\n10 runs w-1 1")
    return script


def test_samples_are_told_when_all_ranks_have() -> None:
    script = count_until_fault()
    counted(script, 12, "w-0", 42, 43 * 8, receipts=(receipt(0),))
    assert script.incidents[1].outcome == "recovered"
    assert script.incidents[1].samples_repeated is None
    counted(script, 12.1, "w-1", 43, 46 * 8, receipts=(receipt(1),))
    incident = script.incidents[1]
    assert (incident.samples_repeated, incident.samples_skipped) == (8, 16)
    said = "1 step lost; 8 samples repeated and 16 samples skipped"
    assert incident.resumed == f"resumed after step 41 from memory (2 ranks); {said}"
    count = len(script.effects)
    counted(script, 13, "w-0", 50, 51 * 8)
    assert len(script.effects) == count


def test_samples_are_told_without_any_receipt() -> None:
    script = count_until_fault()
    counted(script, 12, "w-0", 32, 33 * 8)
    counted(script, 12, "w-1", 40, 41 * 8)
    incident = script.incidents[1]
    assert (incident.resumed_step, incident.steps_lost) == (32, None)
    assert incident.resumed == "176 samples repeated"


def test_samples_of_a_job_that_fails_again_at_once_are_not_made_up() -> None:
    script = count_until_fault()
    told(script, 10.5, "w-0", step=42)
    script.run("11 failed w-1 1\n12 ready w-0 1\n12 ready w-1 1\n13 runs w-0 2\n13 runs w-1 2")
    for rank in (0, 1):
        counted(script, 14, f"w-{rank}", 42, 43 * 8)
    assert [script.incidents[n].samples_repeated for n in (1, 2)] == [None, None]


def count_of_one(steps: bool) -> Script:
    """Return two ranks of which only the first counts samples. `steps`: the other reports steps."""
    script = running()
    script.run("5 runs w-0 0\n5 runs w-1 0")
    for attempt, at in enumerate((6, 12)):
        for rank in (1, 0) if steps else (0,):
            metrics = {} if rank else {"samples": 43 * 8}
            watch = (RankWatch(rank, step=42, metrics=metrics),)
            report = replace(script.agents[f"w-{rank}"], watch=watch)
            if not attempt and not rank:
                counted(script, at, "w-0", 10, 11 * 8)
            script.give(AgentReported(script.views[f"w-{rank}"].uid, report), at)
        if not attempt:
            script.run("8 failed w-1 0\n9 ready w-0 0\n9 ready w-1 0")
            script.run("10 runs w-0 1\n10 runs w-1 1")
    return script


def test_samples_are_told_where_only_one_rank_counts_them() -> None:
    assert count_of_one(steps=True).incidents[1].samples_repeated == 8


def test_samples_are_not_told_of_some_ranks_while_others_may_yet_count_theirs() -> None:
    script = count_of_one(steps=False)
    assert script.incidents[1].samples_repeated is None
    assert script.incidents[1].resumed == ""


def test_samples_are_taken_back_where_a_rank_turns_up_that_was_not_known_before() -> None:
    script = count_of_one(steps=True)
    counted(script, 13, "w-1", 42, 43 * 8)
    assert script.incidents[1].samples_repeated is None
    assert script.incidents[1].resumed == ""


def test_samples_are_counted_again_once_it_is_known_how_many_steps_are_made_again() -> None:
    script = running()
    script.run("5 runs w-0 0\n5 runs w-1 0")
    for rank in (0, 1):
        counted(script, 6, f"w-{rank}", 10, 11 * 8)
        counted(script, 7, f"w-{rank}", 42, 43 * 8)
    script.run("8 failed w-1 0\n9 ready w-0 0\n9 ready w-1 0")
    begun = []
    for rank in (0, 1):
        name = f"w-{rank}"
        watch = (RankWatch(rank, step=40, metrics={"samples": 41 * 8}),)
        report = AgentReport(
            f"{name}.a", AgentState.RUNNING, 1, 1, rank, "10.0.0.0", 29001, nproc=1,
            watch=watch, receipts=(receipt(rank),),
        )  # fmt: skip
        begun.append(AgentReported(script.views[name].uid, report))
    script.effects += script.job.steps(begun, 10)
    script.run("10 tick")
    assert script.incidents[1].samples_repeated == 16, "as the receipts tell"
    script.give(begun[0], 11)
    assert script.incidents[1].resumed_step == 40
    assert script.incidents[1].samples_repeated == 48
