"""A run of MLflow, found again by a tag. Tried with mlflow and mlflow-skinny 3.17.

MLflow keeps every value of a metric: a step that is written again has two, and the later one is the
newer in time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unbroken.log_lines import Log

from .entries import PREFIX, Entry, Refused, RunPlan, shown

KEY = f"{PREFIX}key"
METRICS_MAX = 1000
"""Metrics in one request, by MLflow's documentation of `log_batch`."""
PARAMS_MAX = 100
TEXT_CHARACTERS = 500
"""Characters of a value that every version of MLflow takes."""
FINAL = (400, 404, 409, 413, 422)
"""HTTP status of a request that would fail again."""
log = Log(__name__, "unbroken.worker: ")


class MlflowRun:
    """One run, by the client's functions that name the run: they need no active run."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self._library = plan, plan.library
        self._client: Any = None
        self._made: Any = None
        """The run that this object has created; None: none yet."""
        self._id = ""
        self._is_active = False

    def open(self) -> str:
        """Find the oldest run with the key, or create one; write the parameters that it lacks."""
        client = self._client = self._client or self._library.MlflowClient()
        experiment = self._experiment()
        found = self._found(experiment)
        if found is None:
            self._made = client.create_run(
                experiment, run_name=self._plan.name or None, tags=self._plan.tags
            )
            # A request whose answer was lost has made a run as well: all use the oldest.
            found = self._found(experiment) or self._made
        self._id = str(found.info.run_id)
        self._ask(client.update_run, status="RUNNING")
        self._write_params(found.data.params)
        return self._id

    def _found(self, experiment: str) -> Any:
        if not self._plan.key:
            return self._made
        runs = self._client.search_runs(
            [experiment],
            filter_string=f"tags.`{KEY}` = '{self._plan.key}'",
            max_results=1,
            order_by=["attributes.start_time ASC"],
        )
        return runs[0] if runs else None

    def _experiment(self) -> str:
        if not self._plan.project:
            # The experiment of mlflow.set_experiment, or of the environment.
            return str(self._library.tracking.fluent._get_experiment_id())
        found = self._client.get_experiment_by_name(self._plan.project)
        if found is None:
            try:
                return str(self._client.create_experiment(self._plan.project))
            except self._library.MlflowException:
                # Another program may have created it.
                found = self._client.get_experiment_by_name(self._plan.project)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _write_params(self, written: Mapping[str, str]) -> None:
        made = self._library.entities.Param
        texts = {
            str(name): str(value)[:TEXT_CHARACTERS] for name, value in self._plan.params.items()
        }
        params = [made(name, text) for name, text in texts.items() if name not in written]
        for begin in range(0, len(params), PARAMS_MAX):
            part = params[begin : begin + PARAMS_MAX]
            try:
                self._log(params=part)
            except Refused:
                # One parameter must not cost the others.
                for param in part:
                    self._write_param(param)

    def _write_param(self, param: Any) -> None:
        try:
            self._log(params=[param])
        except Refused as error:
            log.warning(
                "parameter left out: MLflow refuses it", param=param.key, error=shown(error)
            )

    def write(self, entries: Sequence[Entry]) -> None:
        """Write metrics, with the time of their entry."""
        made = self._library.entities.Metric
        metrics = [
            made(name, value, int(entry.at * 1000), entry.step)
            for entry in entries
            for name, value in entry.metrics.items()
        ]
        for begin in range(0, len(metrics), METRICS_MAX):
            self._log(metrics=metrics[begin : begin + METRICS_MAX])

    def describe(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        made = self._library.entities.RunTag
        self._log(tags=[made(name, text[:TEXT_CHARACTERS]) for name, text in tags.items()])

    def close(self, has_failed: bool) -> None:
        """Set the run's status."""
        self._ask(self._client.set_terminated, status="FAILED" if has_failed else "FINISHED")

    def _log(self, **what: Any) -> None:
        self._ask(self._client.log_batch, **what, synchronous=True)

    def _ask(self, request: Callable[..., object], **values: Any) -> None:
        """Send a request about the run. Raises Refused if it would fail again."""
        try:
            request(self._id, **values)
        except self._library.MlflowException as error:
            if error.get_http_status_code() in FINAL:
                raise Refused(str(error)) from error
            raise

    def activate(self) -> None:
        """Make it MLflow's active run of this thread."""
        active = self._library.active_run()
        if active is None or active.info.run_id != self._id:
            self._library.start_run(run_id=self._id)
        self._is_active = True

    def deactivate(self, has_failed: bool) -> None:
        """End the active run, if it is ours."""
        active = self._library.active_run() if self._is_active else None
        if active is not None and active.info.run_id == self._id:
            self._library.end_run("FAILED" if has_failed else "FINISHED")
