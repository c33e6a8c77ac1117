"""Lines that recur in training: told from those of a start, over attempts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.agent.recurring_lines import (
    KINDS_MAX,
    LINES_READ_MAX,
    RecurringLines,
    kind_of,
)

Timed = tuple[float, str]


class Agent:
    """The attempts of one worker; times count from the start of each attempt."""

    def __init__(self) -> None:
        self.lines = RecurringLines()
        self.attempt = -1

    def run(self, *written: Timed) -> list[tuple[float, float]]:
        """Run an attempt that writes these lines; return (when it was known, since when it
        trains)."""
        self.attempt += 1
        base = 1000.0 * self.attempt
        self.lines.begin(self.attempt, base)
        found = []
        for at, line in written:
            since = self.lines.take(self.attempt, 0, [line.encode()], base + at)
            if since is not None:
                found.append((at, since - base))
        return found


def losses(start: float, count: int, every: float = 1.0) -> list[Timed]:
    return [(start + n * every, f"step {n} loss {3 / (n + 1):.4g}") for n in range(count)]


def bar(start: float, count: int, name: str = "Loading weights", every: float = 1.0) -> list[Timed]:
    return [
        (start + n * every, f"{name}: {n:3}%|{'█' * n}{' ' * (9 - n)}| {n}/9 [00:0{n}<00:09]")
        for n in range(count)
    ]


HELLO = (0.5, "starting rank 0 on node-1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("step 1 loss 3.25", "step 1200 loss 2.5e-05"),
        ("loss: nan", "loss: 0.25"),
        ("{'loss': 3.2, 'epoch': 0.1}", "{'loss': inf, 'epoch': 12}"),
        ("  5%|▌         | 25/500 [00:05<01:40,  4.90it/s]",
         " 99%|█████████▉| 495/500 [10:05<00:01, 1.20s/it]"),
        ("Epoch 1 ━━━━╸      3/9 1.5MB", "Epoch 2 ━━━━━━━━━━╸ 8/9 10.5kB"),
        ("0.25", "12"),
        ("2026-11-29 08:00:01,123 INFO损失 3.2", "2026-11-30 18:10:01,023 INFO损失 0.1"),
        ("\x1b[32mloss\x1b[0m 1", "\x1b[32mloss\x1b[0m 22"),
    ],
)  # fmt: skip
def test_numbers_units_and_bars_do_not_change_the_kind_of_a_line(one: str, other: str) -> None:
    assert kind_of(one.encode()) == kind_of(other.encode()) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("step 1 loss 3.25", "eval_loss 3.25"),
        ("Loading weights:  5%|▌ | 1/9", "Map:  5%|▌ | 1/9"),
        ("loss 3", "3"),
    ],
)
def test_other_words_make_another_kind(one: str, other: str) -> None:
    assert kind_of(one.encode()) != kind_of(other.encode())


@pytest.mark.parametrize("line", ["", "-----", "══════", " | "])
def test_a_line_without_letters_and_digits_is_of_no_kind(line: str) -> None:
    assert kind_of(line.encode()) is None


@pytest.mark.parametrize(
    ("drawn", "step"),
    [
        ("  0%|          | 0/500 [00:00<?, ?it/s]", "  0%|▏  | 1/500 [00:01<08:20,  1.00s/it]"),
        ("Epoch 0:   0%|     | 0/9 [00:00<?, ?it/s]", "Epoch 0:  11%|█    | 1/9 [00:00<00:03]"),
        ("0it [00:00, ?it/s]", "1it [00:01,  1.00s/it]"),
        ("Epoch 0/2 ━━━━ 0/9 0:00:00 • -:--:--", "Epoch 0/2 ╸━━━ 1/9 0:00:01 • 0:00:08"),
    ],
)
def test_a_progress_bar_that_is_only_drawn_shows_no_training(drawn: str, step: str) -> None:
    assert kind_of(drawn.encode()) is None
    agent = Agent()
    agent.run((5, drawn), *((6.0 + n, step) for n in range(20)))
    assert agent.run((2, drawn), (4, step)) == [(4, 4)]


def test_training_resumes_with_the_kind_that_recurred_and_not_with_a_line_of_the_start() -> None:
    agent = Agent()
    agent.run(HELLO, *losses(10, 5))
    assert agent.run(HELLO, (5, "dataset ready"), *losses(9.5, 3)) == [(9.5, 9.5)]


def test_a_line_that_is_printed_once_at_each_start_never_recurs() -> None:
    agent = Agent()
    assert [agent.run(HELLO, (9, "epoch done")) for _ in range(6)] == [[]] * 6


def test_a_first_attempt_trains_since_the_first_line_of_a_kind_that_outlasts_the_start() -> None:
    assert Agent().run(HELLO, *bar(6, 5), *losses(12, 20)) == [(24, 12)]


def test_a_bar_of_the_start_up_is_no_training() -> None:
    agent = Agent()
    agent.run(HELLO, *bar(6, 4), *losses(12, 6))
    assert agent.run(HELLO, *bar(2, 4), *losses(8, 3)) == [(8, 8)]


def test_an_attempt_that_broke_in_its_start_up_teaches_nothing() -> None:
    agent = Agent()
    agent.run(HELLO, *losses(10, 5))
    assert agent.run(HELLO, *bar(1, 9)) == []
    assert agent.run(HELLO, *bar(1, 9), *losses(12, 1)) == [(12, 12)]


def test_what_was_taken_for_training_is_forgotten_once_training_outlasts_it() -> None:
    agent = Agent()
    assert agent.run(*bar(1, 9)) == [(3, 1)]
    agent.run(*bar(1, 9), *losses(12, 20))
    assert agent.run(*bar(1, 9), *losses(12, 2)) == [(12, 12)]


def test_a_later_stage_of_the_script_is_learned() -> None:
    agent = Agent()
    agent.run(*losses(10, 5))
    agent.run(*losses(10, 5), *bar(20, 9, "Distilling"))
    assert agent.run(*bar(7, 1, "Distilling")) == [(7, 7)]


def test_an_evaluation_before_the_fault_does_not_hide_the_training() -> None:
    agent = Agent()
    agent.run(*losses(10, 60), *bar(71, 9, "Evaluating"))
    assert agent.run(*losses(9, 1)) == [(9, 9)]


def test_a_traceback_that_repeats_itself_does_not_hide_the_training() -> None:
    agent = Agent()
    agent.run(*losses(10, 5), *[(14.5, '  File "model.py", line 7, in forward')] * 900)
    assert agent.run(*losses(9, 1)) == [(9, 9)]


def test_lines_of_a_worker_that_has_ended_do_not_count_for_the_next_attempt() -> None:
    lines = RecurringLines()
    lines.begin(0, 0)
    for at in (1, 2, 3):
        lines.take(0, 0, [b"loss 1"], at)
    lines.begin(1, 10)
    assert lines.take(0, 0, [b"loss 1"], 10.1) is None
    assert lines.take(1, 0, [b"loss 1"], 19) == 19


def test_workers_are_told_apart() -> None:
    lines = RecurringLines()
    lines.begin(0, 0)
    for local_rank in range(8):
        assert lines.take(0, local_rank, [b"loss 1"], 1.0) is None


def test_kinds_of_hostile_output_do_not_displace_the_training() -> None:
    agent = Agent()
    noise = [(1.0, f"{'x' * n} {'y' * 3000}") for n in range(3, 200)] * 2
    agent.run(*losses(10, 3), *noise, *losses(20, 3))
    worker = agent.lines._workers[0]
    assert len(worker._kinds) == KINDS_MAX
    assert sum(map(len, worker._kinds)) <= KINDS_MAX * 200
    assert agent.run(*losses(9, 1)) == [(9, 9)]


def test_of_a_flood_only_the_last_lines_are_read() -> None:
    lines = RecurringLines()
    lines.begin(0, 0)
    lines.take(0, 0, [f"{chr(97 + n) * 3}".encode() for n in range(26)], 1.0)
    assert len(lines._workers[0]._kinds) == LINES_READ_MAX


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from(["loss 1", "hello", "map 2", "7"]))))
def test_training_never_begins_before_a_line_was_written(written: list[Timed]) -> None:
    agent = Agent()
    for _ in range(3):
        ordered = sorted(written)
        for known, since in agent.run(*ordered):
            assert since <= known
            assert since in [at for at, _ in ordered]
