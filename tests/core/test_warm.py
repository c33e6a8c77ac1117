"""When templates are started, workers parked, and starts warm."""

from __future__ import annotations

import pytest

from unbroken.core.warm import (
    FAILURES_MAX,
    FIRST,
    QUIET_SECONDS,
    AskFresh,
    Began,
    Checked,
    Effect,
    EndTemplate,
    Event,
    Imported,
    LookAtImports,
    Park,
    Parked,
    ParkedEnded,
    StartTemplate,
    StepTold,
    StopBegan,
    TemplateFailed,
    TemplateReady,
    Tick,
    Warm,
)


def fed(machine: Warm, *events: Event, at: float = 0.0) -> list[Effect]:
    """What the events lead to."""
    return [effect for event in events for effect in machine.step(event, at)]


def parked(nproc: int = 2) -> Warm:
    """An attempt trains, and as many as it has workers are parked."""
    machine = Warm(nproc)
    fed(machine, Began(), StepTold(), TemplateReady(), *[Parked()] * nproc)
    return machine


def test_the_template_is_started_once_a_step_is_told() -> None:
    machine = Warm(2)
    assert machine.refusal(0.0) == FIRST
    assert fed(machine, Began()) == []
    assert fed(machine, StepTold()) == [StartTemplate()]
    assert fed(machine, StepTold()) == []
    assert machine.deadline() is None
    assert machine.refusal(0.0) == "the template is not ready yet"
    assert fed(machine, TemplateReady()) == [Park(2)]
    assert machine.refusal(0.0) == "nobody is parked yet"
    fed(machine, Parked())
    assert machine.refusal(0.0) == "the template does not answer"


def test_without_steps_it_is_started_when_imports_are_quiet() -> None:
    machine = Warm(1)
    fed(machine, Began(), at=100.0)
    assert machine.deadline() == 100.0 + QUIET_SECONDS
    assert fed(machine, Tick(), at=101.0) == []
    assert fed(machine, Tick(), at=110.0) == [LookAtImports()]
    assert fed(machine, Imported(107.0), at=110.0) == []
    assert machine.deadline() == 117.0
    assert fed(machine, Tick(), Imported(107.0), at=117.0) == [LookAtImports(), StartTemplate()]
    assert machine.deadline() is None


def test_a_start_is_warm_only_with_a_new_answer_that_no_file_has_changed() -> None:
    machine = parked()
    assert fed(machine, StopBegan(), at=50.0) == [AskFresh()]
    assert machine.is_unsure(50.0)
    assert fed(machine, StopBegan(), at=50.1) == [], "an answer is awaited"
    fed(machine, Checked(), at=50.2)
    assert machine.refusal(50.3) == ""
    assert machine.refusal(51.5) == "the template does not answer", "long ago"
    assert machine.ask(51.5) == [AskFresh()]
    fed(machine, Checked(), at=51.5)
    assert machine.refusal(51.5) == ""


def test_those_used_are_replaced_once_the_new_attempt_trains() -> None:
    machine = parked()
    fed(machine, StopBegan(), Checked(), at=50.0)
    assert fed(machine, Began(warm=2), at=50.0) == []
    assert machine.refusal(50.0) == "nobody is parked yet"
    assert fed(machine, StepTold(), at=51.0) == [Park(2)]
    assert fed(machine, StepTold(), at=52.0) == []


def test_a_template_that_is_ready_only_in_the_next_attempt_waits_until_that_trains() -> None:
    machine = Warm(2)
    fed(machine, Began(), StepTold(), StopBegan(), Began())
    assert fed(machine, TemplateReady()) == []
    assert fed(machine, StepTold()) == [Park(2)]


def test_a_changed_file_means_a_cold_start_and_a_new_template() -> None:
    machine = parked()
    fed(machine, StopBegan())
    assert fed(machine, Checked("/lib/a.py")) == [EndTemplate()]
    assert machine.refusal(0.0) == "/lib/a.py has changed"
    assert fed(machine, Began(), StepTold()) == [StartTemplate()]


def test_a_parked_worker_that_ended_is_replaced_by_the_next_attempt() -> None:
    machine = parked()
    assert fed(machine, ParkedEnded()) == []
    assert fed(machine, Began(warm=1), StepTold()) == [Park(2)]


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_template_that_failed_is_given_up_after_a_few(is_ready: bool) -> None:
    machine = Warm(1)
    for _ in range(FAILURES_MAX):
        assert fed(machine, Began(), StepTold()) == [StartTemplate()]
        events = [TemplateReady()] if is_ready else []
        fed(machine, *events)
        assert fed(machine, TemplateFailed("unsafe: 2 threads")) == [EndTemplate()]
        assert fed(machine, TemplateFailed("it ended")) == [], "told already"
        assert machine.refusal(0.0) == "unsafe: 2 threads"
    assert fed(machine, Began(), StepTold()) == []
    assert machine.deadline() is None


def test_time_alone_changes_nothing_while_nothing_is_waited_for() -> None:
    machine = parked()
    assert machine.deadline() is None
    assert fed(machine, StopBegan(), Tick(), Imported(None), at=99.0) == [AskFresh()]
