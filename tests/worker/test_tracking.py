"""A run of a tracker: what is written into it, in which order, and what is lost with an outage.

The trackers are recorders; tests/e2e/test_trackers.py has MLflow and Weights & Biases themselves.
"""

from __future__ import annotations

import collections
import copy
import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from unbroken.errors import SpecError
from unbroken.worker.restart import restartable
from unbroken.worker.tracking.entries import Entry, Refused, RunPlan, Tracker
from unbroken.worker.tracking.history import story
from unbroken.worker.tracking.mlflow import KEY, MlflowRun
from unbroken.worker.tracking.run import ENTRIES_MAX, Run, Writer, track


class Recorder:
    """A tracker that keeps what it is given, or is away."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.refused: set[int] = set()
        """Steps that it refuses."""
        self.is_deleted = False
        """True if it refuses all that is about the run."""
        self.steps: list[int] = []
        self.metrics: list[dict[str, float]] = []
        self.tags: dict[str, str] = {}
        self.ends: list[bool] = []
        self.opened = 0

    def open(self) -> str:
        self._answer()
        self.opened += 1
        return "run-1"

    def write(self, entries: Sequence[Entry]) -> None:
        self._answer_for_run()
        if self.refused & {entry.step for entry in entries}:
            raise Refused("a name that it does not take")
        self.steps += [entry.step for entry in entries]
        self.metrics += [entry.metrics for entry in entries]

    def describe(self, tags: Mapping[str, str]) -> None:
        self._answer_for_run()
        self.tags |= tags

    def close(self, has_failed: bool) -> None:
        self._answer_for_run()
        self.ends.append(has_failed)

    def activate(self) -> None:
        raise AssertionError("no test asks for it")

    def deactivate(self, has_failed: bool) -> None:
        """Do nothing: nobody made it the run of its own functions."""

    def _answer_for_run(self) -> None:
        self._answer()
        if self.is_deleted:
            raise Refused("there is no such run")

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error


def writer(tracker: Tracker, told: Sequence[Mapping[str, Any]] = ()) -> Writer:
    """Return a writer without its thread; `told` is what the agent says, one after the other."""
    answers = iter(told)
    return Writer(tracker, lambda: next(answers, None))


def incident(number: int, **changes: object) -> dict[str, object]:
    """Return an incident as the agent tells it."""
    found = {"number": number, "attempt": number - 1, "fault": "SIGKILL", "remedy": "process"}
    return {**found, "culprit": "rank 1, node n1: SIGKILL", "seconds": 1.25, **changes}


def told(version: int, *incidents: Mapping[str, object]) -> dict[str, object]:
    """Return an agent's answer."""
    sums = {"restarts": len(incidents), "seconds_lost": 2.5, "steps_lost": 3, "goodput": 0.75}
    return {"version": version, "incidents": list(incidents), **sums}


def test_steps_are_written_in_order_and_the_first_has_the_attempt() -> None:
    tracker = Recorder()
    run = writer(tracker)
    for step in range(3):
        run.add(step, {"loss": 1 / (step + 1)})
    run.flush()
    run.add(3, {"loss": 0.1})
    run.flush()
    assert tracker.steps == [0, 1, 2, 3]
    assert [one.get("unbroken.attempt") for one in tracker.metrics] == [0.0, None, None, None]
    assert (run.id, tracker.opened) == ("run-1", 1)


def test_a_step_that_is_repeated_after_a_restart_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = Recorder()
    run = writer(tracker)
    run.add(8, {"loss": 0.8})
    run.add(9, {"loss": 0.9})
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    run.add(8, {"loss": 0.81})
    run.flush()
    assert tracker.steps == [8, 9, 8]
    assert tracker.metrics[2] == {"loss": 0.81, "unbroken.attempt": 1.0}


def test_a_tracker_that_is_away_costs_the_oldest_steps_and_the_run_says_how_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = Recorder()
    run = writer(tracker)
    tracker.error = ConnectionError("refused")
    for step in range(ENTRIES_MAX + 5):
        run.add(step, {"loss": 0.0})
        if step % 4000 == 0:
            with pytest.raises(ConnectionError):
                run.flush()
    tracker.error = None
    run.flush()
    run.flush()
    assert tracker.steps == list(range(5, ENTRIES_MAX + 5))
    assert tracker.tags == {"unbroken.steps_not_written": "5"}
    assert [one.getMessage() for one in caplog.records if "count=5" in one.getMessage()] == [
        "unbroken.worker: metrics lost: the tracker was away, slow, or refused count=5"
    ]


def test_what_could_not_be_written_is_written_before_what_came_later() -> None:
    tracker = Recorder()
    run = writer(tracker)
    run.add(0, {"loss": 0.0})
    run.flush()
    tracker.error = TimeoutError()
    run.add(1, {"loss": 0.0})
    with pytest.raises(TimeoutError):
        run.flush()
    run.add(2, {"loss": 0.0})
    tracker.error = None
    run.flush()
    assert tracker.steps == [0, 1, 2]
    assert tracker.tags == {}


def test_a_step_that_the_tracker_refuses_costs_no_other() -> None:
    tracker = Recorder()
    tracker.refused = {1}
    run = writer(tracker)
    for step in range(3):
        run.add(step, {"loss": 0.0})
    run.flush()
    assert tracker.steps == [0, 2]
    assert tracker.tags == {"unbroken.steps_not_written": "1"}


def test_values_that_are_no_numbers_are_left_out_and_the_others_are_kept() -> None:
    tracker = Recorder()
    run = writer(tracker)
    run.add(0, {"loss": 1, "name": "a"})  # type: ignore[dict-item]
    run.add("no step", {"loss": 2})  # type: ignore[arg-type]
    run.flush()
    assert tracker.metrics == [{"loss": 1.0, "unbroken.attempt": 0.0}]


def test_incidents_become_tags_and_goodput_a_metric_once_for_each_version() -> None:
    tracker = Recorder()
    first, second = told(7, incident(1)), told(9, incident(1, steps_lost=2), incident(2))
    run = writer(tracker, [told(0), first, first, second])
    run.add(41, {"loss": 0.5})
    for _ in range(4):
        run.flush(is_last=True)
    assert tracker.tags["unbroken.incident.1"] == (
        "attempt 0: rank 1, node n1: SIGKILL; remedy process; 1.2 s lost; 2 steps repeated"
    )
    assert tracker.tags["unbroken.restarts"] == "2"
    assert tracker.tags["unbroken.last_fault"] == "SIGKILL"
    written = [one for one in tracker.metrics if "unbroken.goodput" in one]
    assert [one["unbroken.restarts"] for one in written] == [1.0, 2.0]
    assert written[1]["unbroken.goodput"] == 0.75
    assert tracker.steps == [41, 41, 41]


def test_the_end_waits_for_the_incident_that_led_to_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JOB_RESTART_COUNT", "2")
    tracker = Recorder()
    run = writer(tracker, [told(0), told(7, incident(1)), told(9, incident(1), incident(2))])
    run.add(41, {"loss": 0.5})
    run.flush(is_last=True)
    assert tracker.tags["unbroken.restarts"] == "2"


@pytest.mark.parametrize("answer", [{}, {"version": 0}, {"version": "1", "incidents": {}}, told(3)])
def test_an_agent_without_incidents_changes_nothing(answer: Mapping[str, object]) -> None:
    assert story(answer) is None


def test_an_incident_whose_cost_is_not_known_says_nothing_of_it() -> None:
    found = story(told(1, incident(1, seconds=None)))
    assert found is not None
    assert found.tags["unbroken.incident.1"].endswith("SIGKILL; remedy process")


def test_the_end_is_written_after_all_steps() -> None:
    tracker = Recorder()
    run = writer(tracker)
    run.add(0, {"loss": 0.0})
    run.flush(is_last=True)
    assert (tracker.steps, tracker.ends) == ([0], [False])


def test_a_run_that_was_deleted_costs_its_metrics_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = Recorder()
    run = writer(tracker, [told(7, incident(1)), told(9, incident(1), incident(2))])
    run.flush()
    tracker.is_deleted = True
    for step in range(3):
        run.add(step, {"loss": 0.0})
        run.flush()
    (record,) = caplog.records
    assert record.getMessage().endswith('"the tracker refuses them: there is no such run"')
    run.flush(is_last=True)
    assert caplog.records[-1].getMessage().endswith("slow, or refused count=3")
    assert run._is_over.is_set()


class MlflowError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status

    def get_http_status_code(self) -> int:
        return self.status


class Mlflow:
    """The part of MLflow's library that is called, with a server that keeps its rules: tags find
    the runs, a parameter keeps its value, and a request has an effect as a whole or none."""

    MlflowException = MlflowError
    entities = types.SimpleNamespace(
        Param=collections.namedtuple("Param", "key value"),
        RunTag=collections.namedtuple("RunTag", "key value"),
    )

    def __init__(self) -> None:
        self.runs: list[types.SimpleNamespace] = []
        self.errors: list[int] = []
        """Status of the next requests that log parameters or tags."""

    def MlflowClient(self) -> Mlflow:
        return self

    def get_experiment_by_name(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(experiment_id=name)

    def create_run(
        self, experiment: str, *, run_name: str | None, tags: dict[str, str]
    ) -> types.SimpleNamespace:
        info = types.SimpleNamespace(run_id=f"run-{len(self.runs)}", status="RUNNING")
        data = types.SimpleNamespace(params={}, tags=dict(tags))
        self.runs.append(types.SimpleNamespace(info=info, data=data, experiment=experiment))
        return copy.deepcopy(self.runs[-1])

    def search_runs(
        self, experiments: list[str], *, filter_string: str, **_: object
    ) -> list[types.SimpleNamespace]:
        found = [
            run
            for run in self.runs
            for name, value in run.data.tags.items()
            if filter_string == f"tags.`{name}` = '{value}'" and run.experiment in experiments
        ]
        return copy.deepcopy(found[:1])

    def update_run(self, run_id: str, status: str) -> None:
        self._run(run_id).info.status = status

    def set_terminated(self, run_id: str, status: str) -> None:
        self._run(run_id).info.status = status

    def log_batch(self, run_id: str, *, synchronous: bool, **parts: list[Any]) -> None:
        data = self._run(run_id).data
        assert synchronous
        if self.errors:
            raise MlflowError(self.errors.pop(0))
        for kind, entries in parts.items():
            old = getattr(data, kind)
            new = {one.key: one.value for one in entries}
            if kind == "params" and ("" in new or {**new, **old} != {**old, **new}):
                raise MlflowError(400)
            old.update(new)

    def _run(self, run_id: str) -> types.SimpleNamespace:
        found = [run for run in self.runs if run.info.run_id == run_id]
        if not found:
            raise MlflowError(404)
        return found[0]


def mlflow_run(library: Mlflow, key: str, **params: object) -> MlflowRun:
    tags = {KEY: key} if key else {}
    return MlflowRun(RunPlan(library, key, "llama", "", params, tags))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["uid", ""])
def test_parameters_are_written_by_the_next_try_into_the_same_run(key: str) -> None:
    library = Mlflow()
    library.errors = [500, 503]
    run = writer(mlflow_run(library, key, lr=0.1, layers=2))
    for _ in range(2):
        with pytest.raises(MlflowError):
            run.flush()
    run.flush()
    (made,) = library.runs
    assert made.data.params == {"lr": "0.1", "layers": "2"}
    assert run.id == made.info.run_id


def test_the_next_attempt_writes_the_parameters_that_are_missing_and_changes_none() -> None:
    library = Mlflow()
    first = mlflow_run(library, "uid", lr=0.1)
    first.open()
    assert mlflow_run(library, "uid", lr=0.2, nodes=4).open() == first.open()
    (made,) = library.runs
    assert made.data.params == {"lr": "0.1", "nodes": "4"}


def test_a_parameter_that_is_refused_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    library = Mlflow()
    run = writer(mlflow_run(library, "", **{"lr": 0.1, "": 1, "layers": 2}))
    run.flush()
    assert library.runs[0].data.params == {"lr": "0.1", "layers": "2"}
    assert "parameter left out: MLflow refuses it" in caplog.text


def test_a_run_that_was_deleted_in_mlflow_is_no_error_that_repeats() -> None:
    library = Mlflow()
    run = mlflow_run(library, "uid")
    run.open()
    library.runs.clear()
    with pytest.raises(Refused):
        run.describe({"a": "b"})
    with pytest.raises(Refused):
        run.close(has_failed=False)


def test_another_module_is_refused() -> None:
    with pytest.raises(SpecError, match="takes the module mlflow or wandb"):
        track(sys)


def test_another_rank_than_0_has_no_run_and_asks_nothing_of_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    with track(types.ModuleType("mlflow"), name="another rank") as run:
        run.log(0, loss=0.5)
        assert run.id is None
        assert run.activate(0.0) is False


def test_the_library_is_imported_by_the_script_alone() -> None:
    code = "import sys, unbroken.worker.tracking.run; print({'mlflow', 'wandb'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_parked_worker_has_a_run_once_it_is_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()

    def make() -> Recorder | None:
        return recorder if os.environ.get("RANK") == "0" else None

    monkeypatch.setenv("RANK", "-1")
    monkeypatch.setenv("JOB_RESTART_COUNT", "0")
    run = Run(make)
    run.log(1, loss=1.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    run.log(2, loss=0.5)
    run.finish()
    assert (recorder.steps, recorder.ends) == ([2], [False])
    run.log(3, loss=0.1)
    assert recorder.steps == [2]


def test_the_loss_of_a_peer_does_not_end_the_run_of_a_restartable_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder()
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    run = Run(lambda: recorder)
    monkeypatch.setattr(restartable, "_run", object())
    with pytest.raises(RuntimeError), run:
        raise lost
    assert recorder.ends == []
    monkeypatch.setattr(restartable, "_run", None)
    with pytest.raises(RuntimeError), run:
        raise lost
    assert recorder.ends == [True]
