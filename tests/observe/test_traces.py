"""Traces arrive at a real collector; one that is away, or holds still, costs nothing but them."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.otlp_collector import Collector, attributes, collecting
from tests.watching import PATIENCE_SECONDS
from unbroken.core.job.record.spans import IncidentName, Trace, trace_of
from unbroken.observe import traces
from unbroken.observe.traces import CLOSING, sending
from unbroken.spec.job.incident import Incident, Remedy, Symptom

KILLED = Symptom(1e9 + 0.1, "Signal", "killed", pod="lm-pods-1", node="n1", rank=3, exit_code=137)
ENDED = Incident(
    *(1, 0, KILLED, (KILLED,), Remedy.PROCESS, "first fault"),
    detected_at=1e9 + 0.2,
    stopped_at=1e9 + 0.300001,
    ended_at=1e9 + 5,
    outcome="recovered",
)
NAMED = IncidentName("3f2b8c1e-5a77-4c0d-9e21-0d4f6b7a8c99", "lm-1", "team", "lm")
TRACE = trace_of(ENDED, NAMED)
FAST = {
    "OTEL_BSP_SCHEDULE_DELAY": "50",  # milliseconds
    "OTEL_EXPORTER_OTLP_TIMEOUT": "2",
    "OTEL_EXPORTER_OTLP_HEADERS": "x-scope=team%20a",
}


@pytest.fixture
def collector() -> Iterator[Collector]:
    """One that answers; nothing is under way to it after the test."""
    with collecting() as made:
        yield made
        made.answer()
        for thread in threading.enumerate():
            if thread.name == CLOSING:
                thread.join(PATIENCE_SECONDS)
                assert not thread.is_alive()


def send(monkeypatch: pytest.MonkeyPatch, url: str, *given: Trace, **variables: str) -> None:
    """Send traces as a program does that ends then."""
    environment = {**FAST, "OTEL_EXPORTER_OTLP_ENDPOINT": url, **variables}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    async def program() -> None:
        async with sending(environment) as one:
            assert one is not None
            for trace in given:
                one(trace)

    asyncio.run(program())


def closed_port() -> str:
    """The address of a server that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_trace_arrives_as_it_was_before_the_program_ends(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = trace_of(replace(ENDED, outcome="RetriesExhausted"), replace(NAMED, uid="other"))
    send(monkeypatch, collector.url, TRACE, failed)
    mine = [one for one in collector.spans if one.trace_id == TRACE.id.to_bytes(16)]
    assert {(one.name, one.start_time_unix_nano, one.end_time_unix_nano) for one in mine} == {
        ("incident Signal", 1_000_000_000_100_000_000, 1_000_000_005_000_000_000),
        ("detect", 1_000_000_000_100_000_000, 1_000_000_000_200_000_000),
        ("stop", 1_000_000_000_200_000_000, 1_000_000_000_300_001_000),
    }
    (whole,) = [one for one in mine if not one.parent_span_id]
    assert whole.span_id == TRACE.whole.id.to_bytes(8)
    assert {one.parent_span_id for one in mine if one != whole} == {whole.span_id}
    assert attributes(whole.attributes) == TRACE.whole.attributes
    states = {one.trace_id: one.status for one in collector.spans if not one.parent_span_id}
    assert states[whole.trace_id].code == Status.STATUS_CODE_UNSET
    (other,) = states.keys() - {whole.trace_id}
    assert states[other].code == Status.STATUS_CODE_ERROR
    assert states[other].message == "RetriesExhausted"
    assert collector.headers[0]["x-scope"] == "team a"
    assert collector.resource()["service.name"] == "unbroken-operator"


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_SERVICE_NAME": "mine"}, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}],
)
def test_the_service_has_the_name_that_the_variables_give(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    send(monkeypatch, collector.url, TRACE, **variables)
    assert collector.resource()["service.name"] == "mine"


def test_that_a_collector_refuses_is_told_once(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 403
    each = {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1"}
    send(monkeypatch, collector.url, *[TRACE] * 3, **each)
    assert len(collector.requests) == 9
    (said,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert said.levelno == logging.WARNING
    assert "traces are lost" in said.message
    assert "Forbidden" in said.message


def test_that_no_collector_is_there_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send(monkeypatch, closed_port(), *[TRACE] * 3)
    (said,) = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert "traces are lost" in said
    assert "refused" in said


def test_spans_beyond_the_queue_are_dropped_and_that_is_told_once(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = {"OTEL_BSP_MAX_QUEUE_SIZE": "4", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4"}
    collector.hold()
    send(monkeypatch, collector.url, *[TRACE] * 20, OTEL_EXPORTER_OTLP_TIMEOUT="0.5", **small)
    (said,) = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert "Queue full" in said


async def test_that_spans_arrive_again_is_told(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {**FAST, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    collector.status = 403
    caplog.set_level(logging.INFO)

    async def program() -> None:
        async with sending(environment) as one:
            assert one is not None
            one(TRACE)
            await asyncio.to_thread(collector.until, bool)
            collector.status = 200
            one(TRACE)

    await program()
    words = [one.message.partition(" error=")[0] for one in caplog.records]
    assert words == ["traces are on", "traces are lost", "traces are sent again"]


def test_a_collector_that_holds_still_holds_nobody_up(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither to send nor to close waits for an answer, which would come after the test."""
    collector.hold()
    monkeypatch.setattr(traces, "FLUSH_SECONDS", 0.2)
    send(monkeypatch, collector.url, *[TRACE] * 3, OTEL_EXPORTER_OTLP_TIMEOUT="1000")
    assert "the collector took more than 0.2 s" in caplog.text


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, ""),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            'traces are off error="OTEL_EXPORTER_OTLP_PROTOCOL is grpc, not http/protobuf"',
        ),
    ],
)
async def test_they_are_off_unless_they_are_asked_for_and_can_be_had(
    caplog: pytest.LogCaptureFixture, variables: dict[str, str], said: str
) -> None:
    async def program() -> bool:
        async with sending(variables) as one:
            return one is not None

    assert not await program()
    assert [one.message for one in caplog.records] == [said] * bool(said)


async def test_a_package_that_is_missing_is_named_once_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "unbroken.observe.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    async def program() -> bool:
        async with sending({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x/v1/traces"}) as one:
            return one is not None

    assert not await program()
    (said,) = [one.message for one in caplog.records]
    assert said.startswith("traces are off")
    assert "pip install unbroken[otel]" in said


async def test_variables_that_make_no_sense_stop_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")

    async def program() -> bool:
        async with sending({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}) as one:
            return one is not None

    assert not await program()
    assert "max_queue_size must be a positive integer" in caplog.text
