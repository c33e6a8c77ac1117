"""The trace of a worker that was really killed: the collector receives the incident's times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.clusters import Cluster
from tests.e2e.jobs import INCIDENTS, Job, Object, job
from tests.otlp_collector import attributes, collecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}
REACHED = ("detectedAt", "stoppedAt", "readyAt", "startedAt", "progressAt")


def test_a_killed_worker_is_a_trace_and_without_a_collector_the_job_goes_on_too(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        variables = {**QUICK, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        cluster = make_cluster("--nodes", "2", "--cpu-per-node", "8")
        directory = tmp_path / "job"
        directory.mkdir()
        with job(cluster, directory) as one:
            one.kill(one.steps(0)[1])
            one.steps(1)
            spans = collector.until(lambda found: [s for s in found if not s.parent_span_id])
            item = one.api.get(f"{INCIDENTS}/{one.name}-1").made
            the_trace_is_the_incident(spans, item, one)
            collector.close()
            one.kill(one.steps(1)[1])
            one.steps(2)
            assert len(one.incidents(2)) == 2
            one.finish()
    cluster.unbroken("down")
    said = (cluster.directory / "up.log").read_text()
    assert said.count("traces are on") == 1
    assert said.count("traces are lost") == 1
    assert "refused" in said.partition("traces are lost")[2].partition("\n")[0]


def the_trace_is_the_incident(spans: list[Span], item: Object, one: Job) -> None:
    """Check the span of the incident, and in it those of its stages at the incident's times."""
    (whole,) = [span for span in spans if not span.parent_span_id]
    spec, uid = item["spec"], item["metadata"]["uid"]
    assert {span.trace_id for span in spans} == {bytes.fromhex(uid.replace("-", ""))}
    told = attributes(whole.attributes)
    culprit = spec["culprit"]
    assert whole.name == "incident Signal"
    assert told["unbroken.job.name"] == one.name
    assert told["unbroken.incident.rank"] == culprit["rank"] == 1
    assert told["k8s.pod.name"] == culprit["pod"]
    assert told["k8s.node.name"] == culprit["node"]
    assert told["unbroken.incident.remedy"] == spec["remedy"]
    stages = [span for span in spans if span is not whole]
    assert [span.name for span in stages] == ["detect", "stop", "ready", "start", "progress"]
    assert [span.end_time_unix_nano for span in stages] == [nanoseconds(spec[k]) for k in REACHED]
    assert whole.start_time_unix_nano == nanoseconds(culprit["at"])
    begins = [whole.start_time_unix_nano, *(span.end_time_unix_nano for span in stages)]
    for span, before in zip(stages, begins, strict=False):
        assert span.parent_span_id == whole.span_id
        # A worker may make its first step before the last agent has said that it runs its own.
        assert span.start_time_unix_nano == min(before, span.end_time_unix_nano)
        assert span.end_time_unix_nano <= whole.end_time_unix_nano
    assert whole.end_time_unix_nano == nanoseconds(spec["endedAt"])


def nanoseconds(text: str) -> int:
    """Return the nanoseconds of a time of the API, which has microseconds."""
    return (datetime.fromisoformat(text) - EPOCH) // timedelta(microseconds=1) * 1000
