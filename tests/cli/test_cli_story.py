"""Output of commands on an incident, a job's goodput, its ranks and its detectors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from unbroken.cli.job.agents import bound_lines, differing, others_line, rank_rows, watch_value
from unbroken.cli.job.detectors import changed, detector_values, promotion
from unbroken.cli.job.explain import as_value
from unbroken.cli.job.story import common, cost_text, folded, story
from unbroken.cli.job.views import (
    goodput_line,
    goodput_rows,
    goodput_value,
    incident_lines,
    largest,
    share_text,
    span,
)
from unbroken.cli.show import Paper
from unbroken.core.job.record.timeline import TWICE, Goodput
from unbroken.core.job.recovery.words import incident_line
from unbroken.errors import SpecError
from unbroken.spec.job.incident import Incident, Remedy, Restored, StackGroup, Symptom
from unbroken.spec.job.ledger import DetectorRecord, Ledger, write_ledger
from unbroken.wire.observation import Alarm, RankWatch

FROZEN = Symptom(
    95.0, "ProcessStopped", "stopped", "a-pods-1", "node-1", 3, evidence=("step 119", "step 120")
)
STUCK = (
    "__futex_wait (libc.so.6)",
    "waitRecv (libtorch_cpu.so)",
    "all_reduce (/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:2806)",
    "average (/home/you/train.py:71)",
    "step (/home/you/train.py:90)",
    "main (/home/you/train.py:140)",
)
GROUPS = (
    StackGroup("3", 1, "stopped by a signal", ("forward (/home/you/train.py:12)",), True),
    StackGroup("0-2", 3, "waits in all_reduce", STUCK),
)
HUNG = Incident(
    2,
    1,
    FROZEN,
    (FROZEN,),
    Remedy.PROCESS,
    "all pods are healthy",
    detected_at=100.0,
    progress_at=108.0,
    ended_at=108.0,
    outcome="recovered",
    confidence="certain",
    blame="rank 3 is stopped while 3 ranks wait in all_reduce",
    groups=GROUPS,
    progress_before=95.0,
    step=120,
    resumed_step=101,
    step_seconds=0.5,
)


def test_a_hang_is_told_on_one_screen() -> None:
    lines = list(story(HUNG))
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert "  culprit    rank 3 (a-pods-1 on node-1), certain\n" in text
    assert "  because    rank 3 is stopped while 3 ranks wait in all_reduce\n" in text
    assert "  evidence   | step 119\n             | step 120\n" in text
    differs = text.index("  differs    rank 3: stopped by a signal\n               | forward")
    assert differs < text.index("  others     ranks 0-2 (3): wait in all_reduce\n")
    assert re.search(
        r"timeline   \S+  last progress  -5.000 s \(step 120\)\n +\S+  detected\n", text
    )
    assert re.search(r"first step +\+8.000 s \(step 101\)\n", text)
    steps = "20 steps repeated (101 to 120, about 10.0 s of work)"
    assert f"  cost       13.000 s until training resumed, then {steps}\n" in text


def test_the_line_of_a_hang_has_the_steps_and_why_it_was_that_rank() -> None:
    assert incident_line(HUNG).endswith("restarted the processes; 13.000 s lost, 20 steps repeated")
    assert incident_lines(HUNG)[1:] == [f"  {HUNG.blame} (certain)"]


def test_the_cost_says_what_is_known() -> None:
    assert cost_text(replace(HUNG, resumed_step=None)) == "13.000 s"
    printing = replace(HUNG, step=None, resumed_step=None)
    assert cost_text(printing) == "13.000 s at most, until a line of training"
    assert cost_text(replace(HUNG, resumed_step=121)) == "13.000 s, no step lost"
    one = replace(HUNG, resumed_step=120, step_seconds=None)
    assert cost_text(one) == "13.000 s until training resumed, then 1 step repeated (120)"
    still_open = replace(HUNG, progress_at=None, ended_at=None)
    assert cost_text(still_open, now=107.0) == "still open, 12.0 s so far"
    silent = replace(HUNG, progress_at=None, progress_before=None, started_at=101.5, ended_at=161.5)
    yet = "not known yet: no step since then;"
    assert cost_text(silent) == f"{yet} 1.500 s until the workers ran"
    started = replace(silent, first_output_at=102.0)
    assert cost_text(started) == f"{yet} 2.000 s until the first output"
    rest = ", and no later sign of training (steps that the script reports are one)"
    unreported = replace(started, step=None)
    assert cost_text(unreported) == f"not known; 2.000 s until the first output{rest}"
    assert as_value(started)["seconds"] is None
    assert incident_line(started).endswith("s; 2.000 s until the first output, 20 steps repeated")
    assert cost_text(replace(silent, outcome="failed again", step=None)) == "61.500 s"
    assert (as_value(HUNG)["seconds"], as_value(HUNG)["lostSteps"]) == (13.0, 20)


MEMORY = Restored("0-1,3", 3, 119, "memory", 0.02, 1, "1f3a", "state")
REPLICA = Restored("2", 1, 119, "replica rank 0", 0.4, 2, "1f3a", "state")
RESTORED = replace(
    HUNG,
    resumed_step=None,
    restored=(MEMORY, REPLICA),
    steps_lost=1,
    replicas_agree=True,
    resumed="resumed after step 119 from memory (3 ranks) and replica rank 0 (rank 2); 1 step lost",
)


def test_where_the_ranks_went_on_is_told_with_the_slowest() -> None:
    text = "\n".join(story(RESTORED))
    assert f"  state      {RESTORED.resumed}; the replicas agree\n" in text
    assert "             restored in 0.400 s; rank 2 took longest\n" in text
    assert "then 1 step repeated (120, about 0.500 s of work)" in text
    full = "\n".join(story(RESTORED, is_full=True))
    assert "| ranks 0-1,3: state after step 119 from memory, 0.020 s, checksum 1f3a\n" in full
    assert "| rank 2: state after step 119 from replica rank 0, 0.400 s, checksum 1f3a\n" in full
    assert incident_line(RESTORED).endswith("13.000 s lost, 1 step repeated")
    value = as_value(RESTORED)
    assert (value["stepsLost"], value["lostSteps"], value["replicasAgree"]) == (1, 1, True)
    assert value["restored"][1]["source"] == "replica rank 0"


def test_samples_are_told_where_no_rank_says_what_it_restored() -> None:
    told = replace(HUNG, resumed="64 samples repeated", samples_repeated=64, samples_skipped=0)
    assert "  data       64 samples repeated\n" in "\n".join(story(told))
    value = as_value(told)
    assert (value["samplesRepeated"], value["samplesSkipped"]) == (64, 0)
    assert "samplesRepeated" not in as_value(HUNG)


def test_replicas_that_disagree_are_in_every_line_of_the_incident() -> None:
    wrong = replace(RESTORED, replicas_agree=False, resumed="resumed; the replicas disagree: x")
    assert incident_line(wrong).endswith("; REPLICAS DISAGREE")
    coloured = "\n".join(story(wrong, Paper(None, has_colours=True)))
    assert "\x1b[31mresumed; the replicas disagree: x" in coloured


@pytest.mark.parametrize("width", [20, 50, 80, 140])
def test_a_story_is_no_wider_than_the_terminal_and_loses_no_word(width: int) -> None:
    lines = list(story(HUNG, Paper(width)))
    assert max(map(len, lines)) <= max(width, 56)
    told, whole = ("".join("".join(some).split()) for some in (lines, story(HUNG)))
    assert told == whole


def test_colours_change_no_word() -> None:
    coloured = "\n".join(story(HUNG, Paper(None, has_colours=True)))
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured).split() == " ".join(story(HUNG)).split()


def test_stacks_are_folded_to_the_users_own_code() -> None:
    assert folded(STUCK, 6) == list(STUCK)
    assert folded(STUCK, 3) == [STUCK[0], "... 2 frames", *STUCK[3:]]
    native = tuple(f"{letter} (x.so)" for letter in "abcde")
    assert folded(native, 3) == [*native[:3], "... 2 frames"]
    assert folded(native[:4], 3) == list(native[:4])
    full = "\n".join(story(HUNG, is_full=True))
    assert all(frame in full for frame in STUCK)


def test_a_stack_that_is_evidence_is_shown_once() -> None:
    shown = replace(HUNG, culprit=replace(FROZEN, evidence=(*GROUPS[0].stack, "x (y.py:1)")))
    text = "\n".join(story(shown))
    assert text.count(GROUPS[0].stack[0]) == 1
    assert "  evidence" not in text
    evidence = (*shown.culprit.evidence, "last output: step 120")
    said = "\n".join(story(replace(shown, culprit=replace(FROZEN, evidence=evidence))))
    assert "  evidence   | last output: step 120\n  differs" in said


def test_nothing_is_said_twice() -> None:
    waits = "rank 3 sleeps in f (a.py:1), while ranks 0-2 wait in all_reduce"
    text = f"{waits}; no rank made progress for 20 s"
    hung = replace(HUNG, blame=waits, culprit=replace(FROZEN, text=text))
    assert "\n  what       no rank made progress for 20 s\n" in "\n".join(story(hung))
    assert incident_line(hung).startswith("incident 2: rank 3 (a-pods-1 on node-1): sleeps in f")
    assert len(incident_lines(hung)) == 1
    frozen = "\n".join(story(replace(HUNG, blame="rank 3 stopped")))
    assert "  because" not in frozen


def test_many_groups_are_counted_and_shown_when_asked() -> None:
    many = replace(HUNG, groups=(GROUPS[0], *(replace(GROUPS[1], ranks=str(n)) for n in range(9))))
    assert "and 5 groups more: --stacks" in "\n".join(story(many))
    assert "more: --stacks" not in "\n".join(story(many, is_full=True))


def test_what_incidents_have_in_common_is_said_of_three_or_more() -> None:
    others = [replace(HUNG, culprit=replace(FROZEN, rank=n, node="node-1")) for n in range(3)]
    assert common(others[:2]) == ""
    assert common(others) == "of 3 incidents: 3 on node-1, 3 ProcessStopped"


SPENT = Goodput(
    1000, 20, 912, {"NodeLost": 40, TWICE: 20, "Stalled": 5, "Signal": 3}, 60, 70, 0.912
)


def test_goodput_says_what_the_rest_was() -> None:
    assert goodput_line(SPENT) == (
        "91.2% of 16m 40s; start-up 20.0 s, NodeLost 40.0 s, repeated steps 20.0 s, "
        "Stalled 5.000 s, 1 other cause"
    )
    value = goodput_value(SPENT)
    assert largest(value) == "NodeLost 40.0 s"
    assert list(goodput_rows(value))[::3] == [
        ("productive", "15m 12s", "91.2%"),
        ("lost: repeated steps", "20.0 s", "2.0%"),
        ("suspended", "1m 00s", "not counted"),
    ]
    nothing = Goodput(5, 5, 0)
    head = "not known: no step and no line that recurs so far"
    assert goodput_line(nothing) == f"{head}; start-up 5.000 s"
    unknown = Goodput(100, 5, 93, {"Signal": 2}, share=0.93, unknown=2)
    assert goodput_line(unknown).endswith("Signal 2.000 s; 2 incidents of unknown cost")
    assert largest(goodput_value(Goodput(0, 0, 0))) == "-"


def test_only_a_job_that_lost_nothing_has_all_of_its_time() -> None:
    shares = [share_text(one) for one in (None, 0.0, 0.99999, 1.0, 0.97349)]
    assert shares == ["-", "0.0%", "99.9%", "100.0%", "97.3%"]


def test_spans_are_as_exact_as_it_matters() -> None:
    spans = [span(one) for one in (0.0314, 12.34, 59.96, 290, 7380, 273600)]
    assert spans == ["0.031 s", "12.3 s", "60.0 s", "4m 50s", "2h 03m", "3d 04h"]


def ranks(count: int, **odd: RankWatch) -> list[dict[str, Any]]:
    """Return ranks that train, with the given ones in their place."""
    usual = [
        RankWatch(n, "train", 700 + n % 2, 99.0, 0.5, 99.0 + n / count, 30.0) for n in range(count)
    ]
    by_rank = {one.rank: one for one in odd.values()}
    found = [by_rank.get(one.rank, one) for one in usual]
    return [{**watch_value(one), "pod": f"a-pods-{one.rank // 8}"} for one in found]


def test_few_ranks_are_all_shown() -> None:
    shown = list(rank_rows(ranks(2, new=RankWatch(1, "startup")), 100.0))
    assert shown == [
        [0, "a-pods-0", "train", 700, "0.500 s", "1.0 s ago", "30.0 s", "-"],
        [1, "a-pods-0", "startup", "-", "-", "-", "learning", "-"],
    ]
    assert others_line(ranks(2), 100.0) == ""


def test_of_a_thousand_ranks_those_are_shown_that_differ() -> None:
    alarm = Alarm("stopped", 80.0, 85.0, "stopped by SIGSTOP")
    found = ranks(
        1000,
        frozen=RankWatch(417, "train", 650, 80.0, 0.5, 80.0, 30.0, alarms=(alarm,)),
        late=RankWatch(3, "train", 700, 83.0, 0.5, 83.0, 30.0),
        other=RankWatch(9, "eval", 700, 99.0, 0.5, 99.0, 30.0),
    )
    shown = list(rank_rows(found, 100.0))
    assert [row[0] for row in shown] == [417, 3, 9]
    assert shown[0][-1] == "stopped: stopped by SIGSTOP"
    line = (
        "the other 997 ranks: train, step 700 to 701, last sign 0.0 s to 1.0 s ago, allowed 30.0 s"
    )
    assert others_line(found, 100.0) == line
    assert others_line(ranks(1000), 100.0).startswith("all 1000 ranks: train, step 700 to 701")


def test_fast_healthy_ranks_that_were_looked_at_apart_do_not_differ() -> None:
    # 2 ms a step: within the second between two looks, a rank makes 500.
    found = [
        RankWatch(rank, "train", 10_000 + 40 * rank, 100.0, 0.002, 100.0, 5.0) for rank in range(10)
    ]
    shown = [{**watch_value(one), "pod": "a"} for one in found]
    assert differing(shown, 100.0) == []
    shown[7] = {**shown[7], "step": 9_000}
    assert [one["rank"] for one in differing(shown, 100.0)] == [7]
    shown[7] = {**shown[7], "step": None}
    assert [one["rank"] for one in differing(shown, 100.0)] == [7]


def test_the_bound_of_each_rank_is_told() -> None:
    steps = replace(RankWatch(0), bound="steps", look_seconds=3.0, act_seconds=5.0)
    starts = replace(RankWatch(2), bound="start")
    found = [watch_value(one) for one in (steps, replace(steps, rank=1), starts, RankWatch(3))]
    steps_line, start_line = bound_lines(found)
    assert steps_line == (
        "ranks 0-1: by steps, all ranks are looked at after 3.0 s without a step, restart "
        "from 5.0 s on if two looks show who keeps the others waiting"
    )
    assert start_line.startswith("rank 2: starting or learning, alarm after 10m 00s without any")


def test_ranks_that_all_differ_are_bounded() -> None:
    odd = {f"r{n}": RankWatch(n, "eval", 700, 60.0, 0.5, 60.0, 30.0) for n in range(90)}
    found = ranks(100, **odd)
    assert len(list(rank_rows(found, 100.0))) == 24
    assert "more that differ" in others_line(found, 100.0)


def job(detectors: str = "", ledger: Ledger | None = None) -> dict[str, Any]:
    """Return a job with these annotations."""
    texts = {
        "unbroken.dev/detectors": detectors,
        "unbroken.dev/ledger": write_ledger(ledger or Ledger()),
    }
    return {"metadata": {"name": "a", "annotations": texts}}


def test_detectors_that_were_always_right_are_offered() -> None:
    records = {
        "spike": DetectorRecord(3, 0),
        "slow": DetectorRecord(9, 1),
        "nan": DetectorRecord(4),
        "silent": DetectorRecord(5),
    }
    found = detector_values(job("nan=shadow", Ledger(detectors=records)))
    by_name = {one["detector"]: one for one in found}
    assert (by_name["slow"]["right"], by_name["slow"]["wrong"]) == (9, 1)
    hint = promotion("a", found)
    assert hint.endswith(": unbroken detectors a nan=warn spike=warn")
    assert promotion("a", detector_values(job())) == ""


def test_a_change_keeps_what_was_set_before() -> None:
    assert changed("", ["nan=act"]) == "nan=act"
    assert changed("nan=warn; *=off", ["nan=act", "spike=warn"]) == "nan=act; *=off; spike=warn"
    with pytest.raises(SpecError, match="one of off, shadow, warn, act"):
        changed("", ["nan=loud"])
    assert detector_values(job("garbled"))[0]["mode"] == "act"


def test_each_stage_names_the_pod_that_it_waited_for() -> None:
    stages = replace(HUNG, stopped_at=101.0, ready_at=102.5, slowest={"ready": "a-pods-1"})
    text = "\n".join(story(stages))
    assert re.search(r"\d  ready +\+2.500 s \(a-pods-1 last\)$", text, re.MULTILINE)
    assert re.search(r"\d  stopped +\+1.000 s$", text, re.MULTILINE)
