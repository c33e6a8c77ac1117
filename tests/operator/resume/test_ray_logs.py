"""Logs of Ray's jobs that are read by log rules: what counts as hung, and what does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests import loopback
from tests.virtual_time import in_virtual_time
from tests.watching import running
from unbroken.agent_http.sessions import plain_session
from unbroken.core.logs import patterns
from unbroken.core.logs.rule_config import CompiledRule, compile_rule
from unbroken.core.ray_resume import Head
from unbroken.operator.resume.ray_dashboard import LOG_MESSAGE_BYTES_MAX, Budgets, DashboardAddress
from unbroken.operator.resume.ray_logs import (
    LATE_SECONDS,
    LINE_BYTES_MAX,
    PATTERNS_MEMORY_BYTES,
    RayLogJudge,
    RayLogs,
)
from unbroken.spec.job.types import LogRule
from unbroken.spec.log_monitoring import read_log_monitoring
from unbroken.spec.problems import Report

STEPS = {
    "name": "Steps",
    "logPattern": r".*step=(\d+)",
    "expectedStartCutOffInSeconds": 600,
    "expectedRecurringFrequencyInSeconds": 60,
}
LOSS = {
    "name": "Loss",
    "logPattern": r".*loss=(\S+)",
    "metricThreshold": 8,
    "operator": "gt",
    "metricEvaluationDataPoints": 2,
}
MEMORY = {"name": "Memory", "logPattern": ".*out of memory", "faultOnMatch": True}
STOPPED = {**STEPS, "stopPattern": ".*training is done"}
HEAD = Head("ray-head", "h0")
BUDGET = Budgets(0.0).of("team", "ray", 0.0)


def rules(*given: dict[str, Any]) -> tuple[LogRule, ...]:
    """Rules as a user writes them."""
    found = read_log_monitoring(json.dumps(given))
    assert found.problems == ()
    return found.rules


def judge(*given: dict[str, Any]) -> RayLogJudge:
    """A judge whose log can be read from second 0 on."""
    report = Report()
    made = [compile_rule(rule, "", report) for rule in rules(*given)]
    compiled: tuple[CompiledRule, ...] = tuple(rule for rule in made if rule is not None)
    found = RayLogJudge(compiled)
    found.resumed(0.0)
    return found


def test_a_silent_job_is_hung_after_the_time_of_its_rule_and_the_delay_of_ray() -> None:
    one = judge(STEPS)
    one.read("step=1\n", 10.0)
    one.read("saving the \x1b[1mcheckpoint\x1b[0m\n", 20.0)
    assert one.deadline() == pytest.approx(70.0 + LATE_SECONDS)
    assert one.broken(69.9 + LATE_SECONDS) == ""
    expected = "is hung: no match of log rule Steps for 60 s; last line: saving the checkpoint"
    assert one.broken(70.0 + LATE_SECONDS) == expected
    one.read("step=2\n", 80.0)
    assert one.broken(80.5) == ""


def test_a_job_that_never_begins_to_step_is_hung_after_its_start() -> None:
    one = judge(STEPS)
    assert one.broken(599.0 + LATE_SECONDS) == ""
    expected = "is hung: no match of log rule Steps for 600 s since its start; no line at all"
    assert one.broken(600.0 + LATE_SECONDS) == expected


def test_a_rule_without_a_start_waits_for_its_first_match() -> None:
    one = judge({**STEPS, "expectedStartCutOffInSeconds": None})
    assert one.deadline() is None
    assert one.broken(10_000.0) == ""


def test_time_in_which_the_log_cannot_be_read_does_not_count() -> None:
    one = judge(STEPS)
    one.read("step=1\n", 10.0)
    one.paused(30.0)
    assert one.broken(500.0) == ""
    one.resumed(500.0)
    assert one.broken(539.0 + LATE_SECONDS) == ""
    assert one.broken(540.0 + LATE_SECONDS) != ""


def test_a_job_after_its_last_step_is_not_hung() -> None:
    one = judge(STOPPED)
    one.read("step=1\ntraining is done\n", 10.0)
    assert one.broken(10_000.0) == ""


def test_bad_values_and_lines_that_are_faults_break_a_rule() -> None:
    one = judge(LOSS, MEMORY)
    one.read("loss=9\nloss=nan\n", 1.0)
    slow = "breaks log rule Loss: last 2 values gt 8 or no number; newest: nan"
    assert one.broken(2.0) == slow
    one.read("loss=1\n", 3.0)
    assert one.broken(4.0) == ""
    one.read("CUDA out of memory on cuda:3\n", 5.0)
    assert one.broken(6.0) == "breaks log rule Memory: logged: CUDA out of memory on cuda:3"


@pytest.mark.parametrize(
    "line",
    [
        "token=hf_0123456789abcdefgh",
        "x" * 3 * LINE_BYTES_MAX,
        "\x1b]0;title\x07\u202e\x00",
        "\ud800",
    ],
)
def test_the_last_line_is_bounded_and_has_no_secrets(line: str) -> None:
    one = judge(STEPS)
    one.read(f"step=1\n{line}\n", 0.0)
    found = one.broken(1000.0)
    assert found.startswith("is hung")
    assert len(found) < 300
    assert found.isprintable()
    assert "hf_01" not in found


class Logs:
    """The dashboard of a head with one job, whose whole log is sent at each connection."""

    def __init__(self) -> None:
        self.messages = ["step=1\n"]
        self.is_cut = False
        """The connection ends after the messages."""
        self.connections = 0
        self.has_second, self.has_fourth = asyncio.Event(), asyncio.Event()

    async def tail(self, request: web.Request) -> web.WebSocketResponse:
        """GET /api/jobs/ID/logs/tail."""
        self.connections += 1
        if self.connections == 2:
            self.has_second.set()
        if self.connections == 4:
            self.has_fourth.set()
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for message in self.messages:
            await socket.send_str(message)
        if not self.is_cut:
            await socket.receive()
        return socket

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve at a free port of this machine; its address."""
        app = web.Application()
        app.add_routes([web.get("/api/jobs/one/logs/tail", self.tail)])
        async with loopback.serving(app) as port:
            yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def reading(changed: asyncio.Queue[str]) -> AsyncIterator[RayLogs[str]]:
    """The program that reads logs; `changed` gets the subjects that changed."""
    async with plain_session() as session:
        clock = asyncio.get_running_loop().time
        found: RayLogs[str] = RayLogs(session, changed.put_nowait, clock)
        async with running(found.run()):
            yield found


FAST = {**STEPS, "expectedRecurringFrequencyInSeconds": 1}


@in_virtual_time
async def test_the_log_of_a_job_is_read_until_nobody_wants_it() -> None:
    logs, changed = Logs(), asyncio.Queue[str]()
    async with logs.serving() as url, reading(changed) as found:
        assert found.want("a", HEAD, DashboardAddress(url), ["one"], rules(FAST), BUDGET) == {}
        assert await changed.get() == "a"
        broken = found.want("a", HEAD, DashboardAddress(url), ["one"], rules(FAST), BUDGET)
        expected = "is hung: no match of log rule Steps for 1 s; last line: step=1"
        assert broken == {"one": expected}
        assert found.want("a", HEAD, DashboardAddress(url), [], rules(FAST), BUDGET) == {}
        # Another head, or another rule, is another story.
        assert (
            found.want(
                "a", Head("ray-head", "h1"), DashboardAddress(url), ["one"], rules(FAST), BUDGET
            )
            == {}
        )
        assert await changed.get() == "a"
        assert logs.connections == 2
        found.forget("a")
        assert found.want("a", HEAD, DashboardAddress(url), [], rules(FAST), BUDGET) == {}


@in_virtual_time
async def test_a_log_that_broke_off_is_read_on_and_not_read_twice() -> None:
    logs, changed = Logs(), asyncio.Queue[str]()
    bad = {**LOSS, "metricEvaluationDataPoints": 4}
    logs.messages, logs.is_cut = ["loss=9\nlos", "s=9\nloss=9\n"], True
    async with logs.serving() as url, reading(changed) as found:
        assert found.want("a", HEAD, DashboardAddress(url), ["one"], rules(bad, FAST), BUDGET) == {}
        await logs.has_second.wait()
        # Read twice, there would be six bad values, and the fourth would break the rule.
        logs.messages.append("step=1\n")
        logs.is_cut = False
        assert await changed.get() == "a"
        broken = found.want("a", HEAD, DashboardAddress(url), ["one"], rules(bad, FAST), BUDGET)
        assert "is hung: no match of log rule Steps" in broken["one"]


@pytest.mark.parametrize("message", ["x" * (LOG_MESSAGE_BYTES_MAX + 1), ""])
@in_virtual_time
async def test_a_log_that_cannot_be_read_says_nothing_of_its_job(message: str) -> None:
    logs, changed = Logs(), asyncio.Queue[str]()
    logs.messages, logs.is_cut = ["step=1\n", message], True
    other = Logs()
    async with logs.serving() as url, other.serving() as well, reading(changed) as found:
        found.want("a", HEAD, DashboardAddress(url), ["one"], rules(FAST), BUDGET)
        found.want("b", HEAD, DashboardAddress(well), ["one"], rules(FAST), BUDGET)
        assert await changed.get() == "b"
        assert found.want("a", HEAD, DashboardAddress(url), ["one"], rules(FAST), BUDGET) == {}


@in_virtual_time
async def test_a_log_that_is_refused_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    logs, changed = Logs(), asyncio.Queue[str]()
    logs.messages = ["x" * (LOG_MESSAGE_BYTES_MAX + 1)]
    async with logs.serving() as url, reading(changed) as found:
        found.want("a", HEAD, DashboardAddress(url), ["one"], rules(FAST), BUDGET)
        await logs.has_fourth.wait()
    (line,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert line.startswith("log of a job not read")
    assert "exceeds limit" in line or "too big" in line


async def test_the_patterns_of_all_logs_of_a_cluster_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty logs with the slowest patterns took 1.2 s of the operator's loop, and their memory."""
    made = list[int]()
    real = patterns.re2.Set

    class Counted:
        """RE2's sets of patterns, counted."""

        @staticmethod
        def MatchSet(options: Any) -> Any:
            """Return a new set."""
            made.append(options.max_mem)
            return real.MatchSet(options)

    monkeypatch.setattr(patterns.re2, "Set", Counted)
    async with reading(asyncio.Queue[str]()) as found:
        ids = [str(number) for number in range(20)]
        found.want(
            "a", HEAD, DashboardAddress("http://127.0.0.1:1"), ids, rules(FAST, LOSS), BUDGET
        )
    assert made == [PATTERNS_MEMORY_BYTES]
