"""Warm starts: when templates start, when workers are parked, and when a start is warm."""

from __future__ import annotations

import pytest

from unbroken.core.agent.warm import (
    FAILURES_MAX,
    FIRST,
    IMPORT_SECONDS_MAX,
    LESSON_QUIET_SECONDS,
    LOOK_SECONDS,
    PARK_SECONDS,
    QUIET_SECONDS,
    RETRY_SECONDS,
    AskFresh,
    Began,
    Checked,
    EndTemplate,
    Imported,
    LookAtImports,
    Named,
    Park,
    Parked,
    ParkedEnded,
    PauseTemplate,
    ResumeTemplate,
    StartTemplate,
    StepReported,
    StopBegan,
    Teach,
    TemplateFailed,
    TemplateReady,
    Warm,
    WarmEffect,
    WarmEvent,
    left_out_lines,
)
from unbroken.core.tick import Tick


def fed(machine: Warm, *events: WarmEvent, at: float = 0.0) -> list[WarmEffect]:
    """Return the effects of the events."""
    return [effect for event in events for effect in machine.step(event, at)]


def parked(nproc: int = 2) -> Warm:
    """Return an attempt that trains, with as many parked workers as it has running ones."""
    machine = Warm(nproc)
    fed(machine, Began(), StepReported(), TemplateReady(), *[Parked()] * nproc)
    return machine


def test_the_template_is_started_once_a_step_is_told() -> None:
    machine = Warm(2)
    assert machine.refusal(0.0) == FIRST
    assert fed(machine, Began()) == []
    assert fed(machine, StepReported()) == [StartTemplate()]
    assert fed(machine, StepReported()) == []
    assert machine.refusal(0.0) == "the template is not ready yet"
    assert fed(machine, TemplateReady()) == [Park(2)]
    assert machine.refusal(0.0) == "nobody is parked yet"
    fed(machine, Parked())
    assert machine.refusal(0.0) == "the template does not answer"


def test_it_prepares_from_known_imports_until_enough_workers_are_parked() -> None:
    machine = Warm(2)
    assert not machine.is_preparing
    fed(machine, Named())
    assert machine.is_preparing
    fed(machine, TemplateReady(), Parked())
    assert machine.is_preparing
    fed(machine, Parked())
    assert not machine.is_preparing


@pytest.mark.parametrize("ready", [(), (TemplateReady(), Parked())])
def test_it_prepares_no_longer_once_the_template_has_failed(ready: tuple[WarmEvent, ...]) -> None:
    machine = Warm(2)
    fed(machine, Named(), *ready, TemplateFailed("unsafe: it has started threads"))
    assert not machine.is_preparing


def test_what_is_left_out_is_told_in_a_line_for_each_reason() -> None:
    assert left_out_lines({}) == ()
    rank = "RANK is read while it is imported"
    assert left_out_lines({"a": rank, "b": "has started threads: c", "d": rank, "e": rank}) == (
        f"a and 2 more: {rank}",
        "b: has started threads: c",
    )
    lines = left_out_lines({f"m{number}": f"reason {number // 2}" for number in range(20)})
    assert lines == (*(f"m{2 * n} and 1 more: reason {n}" for n in range(4)), "12 more modules")


def test_parked_workers_import_more_only_while_an_attempt_trains() -> None:
    machine = Warm(1)
    fed(machine, Named(), TemplateReady(), Parked())
    assert not machine.may_import_more, "nobody knows the ranks"
    fed(machine, Began(warm=1), Parked())
    assert not machine.may_import_more, "its first steps have the processors"
    fed(machine, StepReported())
    assert machine.may_import_more
    fed(machine, StopBegan())
    assert not machine.may_import_more


def test_without_steps_it_is_started_when_imports_are_quiet() -> None:
    machine = Warm(1)
    fed(machine, Began(), at=100.0)
    assert fed(machine, Tick(), at=101.0) == []
    assert machine.deadline() == 100.0 + QUIET_SECONDS
    assert fed(machine, Tick(), at=110.0) == [LookAtImports()]
    assert fed(machine, Imported(107.0), at=110.0) == []
    assert machine.deadline() == 117.0
    assert fed(machine, Tick(), Imported(107.0), at=117.0) == [LookAtImports(), StartTemplate()]


def test_a_start_is_warm_only_with_a_new_answer_that_no_file_has_changed() -> None:
    machine = parked()
    assert fed(machine, StopBegan(), at=50.0) == [AskFresh()]
    assert machine.is_unsure(2, 50.0)
    assert fed(machine, StopBegan(), at=50.1) == [], "an answer is awaited"
    fed(machine, Checked(), at=50.2)
    assert machine.refusal(50.3) == ""
    assert machine.refusal(51.5) == "the template does not answer", "long ago"
    assert machine.ask(2, 51.5) == [AskFresh()]
    fed(machine, Checked(), at=51.5)
    assert machine.refusal(51.5) == ""


def test_those_used_are_replaced_once_the_new_attempt_trains() -> None:
    machine = parked()
    fed(machine, StopBegan(), Checked(), at=50.0)
    assert fed(machine, Began(warm=2), at=50.0) == []
    assert machine.refusal(50.0) == "nobody is parked yet"
    assert machine.deadline() == 50.0 + PARK_SECONDS
    assert fed(machine, Tick(), at=50.0 + PARK_SECONDS) == [Park(2)]
    assert fed(machine, StepReported(), Imported(49.0), at=61.0) == [LookAtImports()]


def test_a_start_that_finds_too_few_parked_has_them_parked() -> None:
    machine = parked()
    fed(machine, StopBegan(), Checked(), at=50.0)
    assert not machine.is_unsure(2, 50.0)
    fed(machine, Began(warm=2), StopBegan(), at=50.1)
    assert machine.ask(2, 50.1) == [Park(2)]
    assert machine.ask(2, 50.1) == [], "asked already"
    fed(machine, Parked(), at=50.1)
    assert machine.is_unsure(2, 50.1)
    fed(machine, Parked(), at=50.1)
    assert not machine.is_unsure(2, 50.1)
    assert machine.refusal(50.1) == ""


def test_what_others_have_told_is_imported_before_the_first_start_and_again_with_news() -> None:
    machine = Warm(2)
    assert fed(machine, Named()) == [StartTemplate()]
    assert fed(machine, Named()) == [], "it is said again"
    assert fed(machine, TemplateReady()) == [Park(2)]
    assert fed(machine, Named(), Parked()) == [], "not while one is being parked"
    assert fed(machine, Parked(), Named(is_news=False)) == []
    assert fed(machine, Named()) == [Teach()]
    assert machine.refusal(0.0) == "the template is not ready yet"
    assert fed(machine, TemplateReady()) == [Park(2)]
    assert fed(machine, TemplateFailed("killed"), Named(is_news=False)) == [
        EndTemplate(),
        StartTemplate(),
    ]


def test_while_workers_train_what_others_tell_waits_for_the_next_lesson() -> None:
    assert fed(parked(), Named()) == []
    assert fed(Warm(2), Began(), Named()) == []


@pytest.mark.parametrize("has_spare", [True, False])
def test_what_the_job_names_is_imported_before_the_first_start(has_spare: bool) -> None:
    machine = Warm(2, has_spare)
    assert fed(machine, Named()) == [StartTemplate()]
    assert fed(machine, Began()) == ([] if has_spare else [PauseTemplate()])
    assert fed(machine, StepReported()) == ([] if has_spare else [ResumeTemplate()])
    assert fed(machine, TemplateReady()) == [Park(2)]


def test_a_template_that_imports_is_interrupted_by_a_restart_that_needs_the_processors() -> None:
    for has_spare in (True, False):
        machine = Warm(2, has_spare)
        assert fed(machine, Began(), StepReported(), StopBegan()) == [StartTemplate()]
        assert fed(machine, Began()) == ([] if has_spare else [PauseTemplate()])
        assert fed(machine, StepReported()) == ([] if has_spare else [ResumeTemplate()])
        assert fed(machine, TemplateReady()) == [Park(2)]


def test_starts_that_come_to_no_step_interrupt_the_template_only_once() -> None:
    machine = Warm(2, has_spare=False)
    assert fed(machine, Named(), Began(), StopBegan()) == [
        StartTemplate(),
        PauseTemplate(),
        ResumeTemplate(),
    ]
    assert fed(machine, Began(), StepReported()) == []


def test_what_is_imported_later_is_taught_once_it_is_quiet() -> None:
    machine = parked()
    assert fed(machine, Tick(), at=LOOK_SECONDS) == [LookAtImports()]
    assert fed(machine, Imported(LOOK_SECONDS - 1, is_news=True), at=LOOK_SECONDS) == []
    quiet = LOOK_SECONDS - 1 + LESSON_QUIET_SECONDS
    assert machine.deadline() == quiet
    assert fed(machine, Tick(), Imported(LOOK_SECONDS - 1, is_news=True), at=quiet) == [
        LookAtImports(),
        Teach(),
    ]
    assert machine.refusal(quiet) == "the template is not ready yet"
    assert fed(machine, TemplateReady(), at=quiet) == [Park(2)]


def test_what_an_attempt_has_imported_is_taught_in_the_next() -> None:
    machine = parked()
    fed(machine, StopBegan(), Checked(), Began(warm=2), at=50.0)
    assert fed(machine, StepReported(), at=51.0) == [LookAtImports()]
    assert fed(machine, Imported(20.0, is_news=True), at=51.0) == [Teach()]


def test_nobody_is_taught_while_one_is_about_to_be_parked() -> None:
    machine = parked()
    fed(machine, Tick(), at=1.0)
    fed(machine, ParkedEnded())
    assert fed(machine, Tick(), Imported(0.0), at=LOOK_SECONDS) == [LookAtImports(), Park(1)]
    due = 2 * LOOK_SECONDS
    assert fed(machine, Tick(), Imported(0.0, is_news=True), at=due) == [LookAtImports()]
    assert machine.deadline() == due + PARK_SECONDS


def test_a_template_that_fails_while_training_goes_on_is_replaced_after_a_while() -> None:
    machine = parked()
    assert fed(machine, TemplateFailed("killed"), at=20.0) == [EndTemplate()]
    assert fed(machine, Tick(), at=20.0 + RETRY_SECONDS)[0] == StartTemplate()


def test_a_changed_file_means_a_cold_start_and_a_new_template() -> None:
    machine = parked()
    fed(machine, StopBegan())
    assert fed(machine, Checked("/lib/a.py")) == [EndTemplate()]
    assert machine.refusal(0.0) == "/lib/a.py has changed"
    assert fed(machine, Began(), StepReported()) == [StartTemplate()]


def test_a_parked_worker_that_ended_is_replaced_by_the_next_attempt() -> None:
    machine = parked()
    assert fed(machine, ParkedEnded()) == []
    assert fed(machine, Began(warm=1), Tick(), at=PARK_SECONDS) == []
    assert fed(machine, Tick(), at=2 * PARK_SECONDS) == [Park(2)]


def test_no_deadline_stays_in_the_past() -> None:
    machine = parked()
    fed(machine, Began(warm=2), at=LOOK_SECONDS - 1)
    for second in range(int(LOOK_SECONDS), 1000):
        for _ in range(3):
            fed(machine, Tick(), Imported(None), at=float(second))
        due = machine.deadline()
        assert due is None or due > second


def test_a_template_that_hangs_is_ended_and_replaced() -> None:
    machine = Warm(1)
    assert fed(machine, Began(), StepReported(), at=1.0) == [StartTemplate()]
    assert machine.deadline() == 1.0 + PARK_SECONDS
    late = 1.0 + IMPORT_SECONDS_MAX
    assert EndTemplate() not in fed(machine, Tick(), Imported(None), at=late - 0.1)
    assert EndTemplate() in fed(machine, Tick(), at=late)
    assert machine.refusal(late) == "the template has imported for 600 s"
    assert StartTemplate() in fed(machine, Tick(), at=late + RETRY_SECONDS)


@pytest.mark.parametrize("has_spare", [True, False])
def test_a_template_that_failed_is_replaced_beside_a_start_if_there_is_room(
    has_spare: bool,
) -> None:
    machine = Warm(1, has_spare)
    fed(machine, Began(), StepReported(), TemplateReady(), Parked(), TemplateFailed("killed"))
    fed(machine, StopBegan(), Began(), at=50.0)
    expected = [StartTemplate()] if has_spare else []
    assert fed(machine, Tick(), at=50.0 + PARK_SECONDS) == expected


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_template_that_failed_is_given_up_after_a_few(is_ready: bool) -> None:
    machine = Warm(1)
    for _ in range(FAILURES_MAX):
        assert fed(machine, Began(), StepReported()) == [StartTemplate()]
        events = [TemplateReady()] if is_ready else []
        fed(machine, *events)
        assert fed(machine, TemplateFailed("unsafe: 2 threads")) == [EndTemplate()]
        assert fed(machine, TemplateFailed("it ended")) == [], "told already"
        assert machine.refusal(0.0) == "unsafe: 2 threads"
    assert fed(machine, Began(), StepReported()) == []
    assert fed(machine, Tick(), at=RETRY_SECONDS) == []


def test_time_alone_changes_nothing_while_nothing_trains() -> None:
    machine = parked()
    fed(machine, StopBegan())
    assert machine.deadline() is None
    assert fed(machine, Tick(), Imported(None, is_news=True), at=99.0) == []
