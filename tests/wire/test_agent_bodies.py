"""The documented request and status bodies, compared with pydantic's errors where it has some."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import PeerError
from unbroken.wire.agent import AgentReport, AgentState, StartCommand, StopCommand
from unbroken.wire.agent_bodies import (
    Status,
    Unprocessable,
    parse_json,
    report_of_status,
    start_body,
    start_command,
    status_body,
    stop_body,
    stop_command,
)

GOOD = {"rank": 0, "nnodes": 2, "faultCount": 3, "master_addr": "10.0.0.1", "master_port": "29401"}


class StartRequest(pydantic.BaseModel):
    """The documented start request, as FastAPI would check it."""

    rank: int
    nnodes: int
    faultCount: int
    master_addr: str
    spare: bool | None = False
    log_monitoring_configuration: list[dict[str, Any]] | None = None
    ipVersion: str | None = None


class StopRequest(pydantic.BaseModel):
    restart_mode: str | None = "ipr"
    is_graceful: bool | None = None
    timeout: int | None = None


def problems(value: object) -> list[dict[str, Any]]:
    with pytest.raises(Unprocessable) as caught:
        start_command(value)
    return caught.value.problems


def expected(model: type[pydantic.BaseModel], value: object) -> list[dict[str, Any]]:
    try:
        model.model_validate(value)
    except pydantic.ValidationError as error:
        found = json.loads(error.json(include_url=False, include_context=False))
        return [{**one, "loc": ["body", *one["loc"]]} for one in found]
    return []


def test_a_start_is_read() -> None:
    more = {
        "ipVersion": "v1",
        "rankIps": [{"rank": 0, "ip": "10.0.0.1"}, {"rank": 7, "ip": "10.0.0.9"}],
        "spare": "yes",
        "log_monitoring_configuration": [{"name": "r", "logPattern": "x"}],
        "progress": {"ck": {"progressCount": 5}},
        "unknown": 1,
    }
    assert start_command(GOOD | more) == StartCommand(
        attempt=3,
        rank=0,
        nnodes=2,
        master_addr="10.0.0.1",
        master_port=29401,
        log_rules=({"name": "r", "logPattern": "x"},),
        spare=True,
        ip_version="v1",
        rank_ips=((0, "10.0.0.1"),),
        progress={"ck": {"progressCount": 5}},
    )


@pytest.mark.parametrize("port", [29401, "29401", " 29401 ", 29401.0])
def test_numbers_may_be_texts(port: object) -> None:
    assert start_command(GOOD | {"master_port": port}).master_port == 29401


def test_an_empty_port_is_none() -> None:
    assert start_command(GOOD | {"master_port": ""}).master_port == 0


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "x"},
        {"rank": 1.5},
        {"rank": "1.5"},
        {"rank": None},
        {"rank": []},
        {"nnodes": "²"},
        {"master_addr": 5},
        {"master_addr": None},
        {"spare": "maybe"},
        {"spare": 2},
        {"spare": []},
        {"ipVersion": 3},
        {"log_monitoring_configuration": {}},
        {"rank": "x", "nnodes": None, "faultCount": {}},
    ],
)
def test_problems_are_told_as_fastapi_tells_them(change: dict[str, object]) -> None:
    assert problems(GOOD | change) == expected(StartRequest, GOOD | change)


@pytest.mark.parametrize("value", [{}, {"rank": 0}, {"nnodes": 1, "master_addr": "a"}])
def test_missing_fields_are_told_all_at_once(value: dict[str, object]) -> None:
    found = problems(value)
    names = [problem["loc"][-1] for problem in found]
    assert names == [name for name in GOOD if name not in value]
    assert {problem["type"] for problem in found} == {"missing"}
    assert all(problem["input"] == value for problem in found)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"master_addr": ""}, "master_addr"),
        ({"master_port": 70000}, "master_port"),
        ({"rank": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"rankIps": [{"ip": "10.0.0.1"}]}, "rankIps"),
        ({"rankIps": [{"rank": "0", "ip": "10.0.0.1"}]}, "rankIps"),
        ({"rankIps": [{"rank": 10**6, "ip": "10.0.0.1"}]}, "rankIps"),
    ],
)
def test_nonsense_is_refused_where_the_stock_agent_stumbles(
    change: dict[str, object], place: str
) -> None:
    (problem,) = problems(GOOD | change)
    assert (problem["type"], problem["loc"]) == ("value_error", ["body", place])
    assert problem["ctx"] == {"error": {}}


def test_a_spare_may_have_a_rank_beyond_the_nodes() -> None:
    assert start_command(GOOD | {"rank": 2, "spare": True}).rank == 2


@pytest.mark.parametrize(
    ("body", "kind", "loc"),
    [(b"{", "json_invalid", ["body", 1]), (b"nope", "json_invalid", ["body", 0])],
)
def test_what_is_not_json_is_told(body: bytes, kind: str, loc: list[object]) -> None:
    with pytest.raises(Unprocessable) as caught:
        parse_json(body)
    (problem,) = caught.value.problems
    assert (problem["type"], problem["loc"], problem["input"]) == (kind, loc, {})
    assert problem["ctx"]["error"]


@pytest.mark.parametrize(
    ("value", "command"),
    [
        (None, StopCommand(restart_mode="ipr")),
        ({}, StopCommand(restart_mode="ipr")),
        ({"timeout": 0}, StopCommand(restart_mode="ipr")),
        ({"timeout": "4", "is_graceful": 1, "restart_mode": "bogus"},
         StopCommand(None, "bogus", True, 4.0)),
        ({"attempt": 3, "timeout": 0.5}, StopCommand(3, "ipr", False, 0.5)),
    ],
)  # fmt: skip
def test_stops_are_read(value: object, command: StopCommand) -> None:
    assert stop_command(value) == command


@pytest.mark.parametrize("value", [{"is_graceful": "maybe"}, {"timeout": "x"}, {"restart_mode": 1}])
def test_wrong_stops_are_told_as_fastapi_tells_them(value: dict[str, object]) -> None:
    with pytest.raises(Unprocessable) as caught:
        stop_command(value)
    assert caught.value.problems == expected(StopRequest, value)


def test_a_stock_agent_is_sent_whole_seconds() -> None:
    body = stop_body(StopCommand(2, is_graceful=True, timeout_seconds=0.2))
    assert body == {
        "restart_mode": "process_level_restart",
        "attempt": 2,
        "is_graceful": True,
        "timeout": 1,
    }
    StopRequest.model_validate(body)
    StartRequest.model_validate(start_body(start_command(GOOD)))


def test_the_status_has_the_documented_keys_in_their_order() -> None:
    report = AgentReport(
        "a",
        AgentState.FAULTED,
        rank=0,
        reason="WorkerCrash",
        message="text",
        progress={"ck": {"progressCount": 1}},
        agent_version="1",
    )
    entered = {AgentState.INIT: 0.5, AgentState.FAULTED: 1.0}
    body = status_body(report, Status(entered, "v1", spare=False))
    assert list(body.items()) == [
        ("status", "faulted"),
        (
            "transitions",
            {
                "INIT": "1970-01-01T00:00:00.500000+00:00",
                "FAULTED": "1970-01-01T00:00:01.000000+00:00",
            },
        ),
        ("reason", "WorkerCrash"),
        ("message", "text"),
        ("restartMode", "process_level_restart"),
        ("ipversion", "v1"),
        ("progress", {"ck": {"progressCount": 1}}),
        ("agent_version", "1"),
        ("assigned_rank", "0"),
        ("spare", "False"),
    ]


def test_a_stock_agents_status_is_a_report() -> None:
    body = {
        "status": "faulted",
        "transitions": {"INIT": "2026-01-01T00:00:00.000000+00:00"},
        "reason": "WorkerCrash",
        "message": "local rank 0",
        "restartMode": "process_level_restart",
        "agent_version": "1.1.3",
        "assigned_rank": "3",
        "spare": "True",
    }
    report = report_of_status(body)
    assert (report.state, report.rank, report.reason) == (AgentState.FAULTED, 3, "WorkerCrash")
    assert (report.newest_attempt, report.attempt, report.offered_port) == (None, None, None)
    again = report_of_status(body | {"transitions": {"INIT": "2026-01-01T00:00:01.000000+00:00"}})
    assert again.agent_id != report.agent_id


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*GOOD, "status", "spare", "timeout"]), inner)
        ),
        max_leaves=8,
    )
)
def test_no_body_is_too_strange(value: object) -> None:
    for read in (start_command, stop_command, report_of_status):
        try:
            read(value)
        except PeerError as error:
            assert str(error)
