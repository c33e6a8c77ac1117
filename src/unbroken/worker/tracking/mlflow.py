"""A run of MLflow, found again by a tag. Tried with mlflow and mlflow-skinny 3.17.

MLflow keeps every value of a metric: a step that is written again has two, and the later one is the
newer in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from .entries import PREFIX, Entry, Refused

KEY = f"{PREFIX}key"
METRICS_MAX = 1000
"""Metrics in one request, by MLflow's documentation of `log_batch`."""
PARAMS_MAX = 100
TEXT_CHARACTERS = 500
"""Characters of a value that every version of MLflow takes."""
FINAL = (400, 404, 409, 413, 422)
"""HTTP status of a request that would fail again."""


class MlflowRun:
    """One run, by the client's functions that name the run: they need no active run."""

    def __init__(
        self,
        library: ModuleType,
        key: str,
        project: str,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> None:
        self._library, self._key, self._project = library, key, project
        self._name, self._params, self._tags = name, dict(params), dict(tags)
        self._client: Any = None
        self._id = ""
        self._is_active = False

    def open(self) -> str:
        """Find the oldest run with the key, or create one."""
        client = self._client = self._client or self._library.MlflowClient()
        experiment = self._experiment()
        found = self._found(experiment)
        if found is None:
            made = client.create_run(experiment, run_name=self._name or None, tags=self._tags)
            # A request whose answer was lost has made a run as well: all use the oldest.
            found = self._found(experiment) or made.info.run_id
            self._write_params(found)
        client.update_run(found, status="RUNNING")
        self._id = found
        return found

    def _found(self, experiment: str) -> str | None:
        if not self._key:
            return None
        runs = self._client.search_runs(
            [experiment],
            filter_string=f"tags.`{KEY}` = '{self._key}'",
            max_results=1,
            order_by=["attributes.start_time ASC"],
        )
        return runs[0].info.run_id if runs else None

    def _experiment(self) -> str:
        if not self._project:
            # The experiment of mlflow.set_experiment, or of the environment.
            return str(self._library.tracking.fluent._get_experiment_id())
        found = self._client.get_experiment_by_name(self._project)
        if found is None:
            try:
                return str(self._client.create_experiment(self._project))
            except self._library.MlflowException:
                # Another program may have created it.
                found = self._client.get_experiment_by_name(self._project)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _write_params(self, run: str) -> None:
        made = self._library.entities.Param
        params = [made(str(k), str(v)[:TEXT_CHARACTERS]) for k, v in self._params.items()]
        for begin in range(0, len(params), PARAMS_MAX):
            self._client.log_batch(run, params=params[begin : begin + PARAMS_MAX])

    def write(self, entries: Sequence[Entry]) -> None:
        """Write metrics, with the time of their entry."""
        made = self._library.entities.Metric
        metrics = [
            made(name, value, int(entry.at * 1000), entry.step)
            for entry in entries
            for name, value in entry.metrics.items()
        ]
        try:
            for begin in range(0, len(metrics), METRICS_MAX):
                part = metrics[begin : begin + METRICS_MAX]
                self._client.log_batch(self._id, metrics=part, synchronous=True)
        except self._library.MlflowException as error:
            if error.get_http_status_code() in FINAL:
                raise Refused(str(error)) from error
            raise

    def describe(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        made = self._library.entities.RunTag
        texts = [made(name, text[:TEXT_CHARACTERS]) for name, text in tags.items()]
        self._client.log_batch(self._id, tags=texts)

    def close(self, has_failed: bool) -> None:
        """Set the run's status."""
        self._client.set_terminated(self._id, "FAILED" if has_failed else "FINISHED")

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
