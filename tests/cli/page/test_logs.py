"""Lines of logs for the page: which are read, in which order, and how much of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from unbroken.cli.connection import Cluster
from unbroken.cli.page import logs
from unbroken.cli.page.account import NamespaceScope, PermittedCluster, Rights
from unbroken.cli.page.logs import (
    BYTES_MAX,
    CHARACTERS_MAX,
    LINE_BYTES_MAX,
    LINES_MAX,
    PODS_MAX,
    LogLine,
    LogQuery,
    _Window,
    line_value,
    log_page,
    newest,
    read_query,
    stamped,
)
from unbroken.cli.place import ClusterPlace
from unbroken.errors import SpecError
from unbroken.kube.client import connect
from unbroken.spec.times import time_seconds, time_text

NOW = 1_800_000_000.0
HOUR = 3600.0


@dataclass
class Api:
    """The part of a Kubernetes API that logs need, with the log of each pod."""

    logs: dict[str, list[tuple[float, bytes]]] = field(default_factory=dict)
    """Lines with their times, by pod; a pod without a log refuses it."""
    sent: int = 0
    """Bytes of logs that were sent."""
    silent: tuple[str, ...] = ()
    """Pods of a kubelet that begins an answer and sends no more."""
    asked: Counter[str] = field(default_factory=Counter)
    """Number of requests for the log of each pod."""
    refuses_pods: bool = False

    async def job(self, request: web.Request) -> web.Response:
        created = time_text(NOW - 30 * 24 * HOUR)
        metadata = {"name": "train", "namespace": "default", "creationTimestamp": created}
        return web.json_response({"metadata": metadata, "spec": {"nprocPerNode": "1"}})

    async def pods(self, request: web.Request) -> web.Response:
        if self.refuses_pods:
            return web.json_response({"kind": "Status", "code": 403}, status=403)
        spec = {"containers": [{"name": "main", "image": "a"}]}
        items = [{"metadata": {"name": one, "uid": one}, "spec": spec} for one in self.logs]
        return web.json_response({"items": items})

    async def log(self, request: web.Request) -> web.StreamResponse:
        pod = request.match_info["pod"]
        lines = self.logs[pod]
        self.asked[pod] += 1
        if not lines:
            status = {
                "kind": "Status",
                "code": 403,
                "reason": "Forbidden",
                "message": "no pods/log",
            }
            return web.json_response(status, status=403)
        since = time_seconds(request.query["sinceTime"])
        answer = web.StreamResponse()
        await answer.prepare(request)
        if pod in self.silent:
            await asyncio.Event().wait()
        for at, text in lines:
            if at >= since:
                line = time_text(at, has_microseconds=True).encode() + b" " + text + b"\n"
                self.sent += len(line)
                await answer.write(line)
        return answer


@asynccontextmanager
async def served(folder: Path, api: Api) -> AsyncIterator[Cluster]:
    app = web.Application()
    group = "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs/train"
    app.router.add_get(group, api.job)
    app.router.add_get("/api/v1/namespaces/default/pods", api.pods)
    app.router.add_get("/api/v1/namespaces/default/pods/{pod}/log", api.log)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    file = folder / "kubeconfig"
    server = {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    context = {"cluster": "a", "user": "a"}
    content = {
        "clusters": [{"name": "a", "cluster": server}],
        "contexts": [{"name": "a", "context": context}],
        "users": [{"name": "a", "user": {}}],
        "current-context": "a",
    }
    file.write_text(yaml.safe_dump(content))
    try:
        async with connect(file) as client:
            yield Cluster(ClusterPlace(str(file)), client, "default")
    finally:
        await runner.cleanup()


async def page(folder: Path, api: Api, **query: Any) -> dict[str, Any]:
    async with served(folder, api) as cluster:
        return await log_page(cluster, "train", LogQuery(**query), NOW)


def texts(found: dict[str, Any]) -> list[str]:
    return [one["text"] for one in found["lines"]]


async def test_lines_of_all_pods_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    api = Api({
        "a": [(NOW - 9, b"[default0]:one"), (NOW - 7, b"[default0]:three")],
        "b": [(NOW - 8, b"[default0]:two"), (NOW - 6, b"agent")],
    })  # fmt: skip
    found = await page(tmp_path, api)
    assert texts(found) == ["one", "two", "three", "agent"]
    assert [one["pod"] for one in found["lines"]] == ["a", "b", "a", "b"]
    assert (found["older"], found["notes"]) == (None, [])
    assert texts(await page(tmp_path, api, pod="b")) == ["two", "agent"]


async def test_pages_of_older_lines_have_each_line_once(tmp_path: Path) -> None:
    count = 3 * LINES_MAX + 7
    # Ten lines are written at once each time.
    lines = [(NOW - HOUR + index // 10, f"{index}".encode()) for index in range(count)]
    api, shown, before = Api({"a": lines}), list[str](), None
    while True:
        found = await page(tmp_path, api, before=before)
        shown[:0] = texts(found)
        assert len(found["lines"]) <= LINES_MAX
        before = found["older"]
        if before is None:
            break
    assert shown == [f"{index}" for index in range(count)]


async def test_the_newest_lines_of_a_long_log_are_read_without_the_rest(tmp_path: Path) -> None:
    old = [(NOW - 20 * 24 * HOUR + index, b"x" * 1000) for index in range(5000)]
    new = [(NOW - 30 + index / 100, b"new") for index in range(2 * LINES_MAX)]
    api = Api({"a": old + new})
    assert set(texts(await page(tmp_path, api))) == {"new"}
    assert api.sent < 100_000


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"find": "LOSS"}, ["loss nan", "Loss 4"]),
        ({"find": "loss nan|Loss", "is_pattern": True}, ["loss nan", "Loss 4"]),
        ({"find": "^x.*z$", "is_pattern": True}, ["xyz"]),
        ({"find": "loss|x"}, []),
        ({"since": NOW - 2 * HOUR}, ["Loss 4", "xyz"]),
        ({"before": NOW - 2 * HOUR}, ["loss nan"]),
        ({"find": "loss", "since": NOW - 2 * HOUR, "before": NOW - 2}, ["Loss 4"]),
    ],
)
async def test_a_search_finds_old_lines(
    tmp_path: Path, query: dict[str, Any], expected: list[str]
) -> None:
    day = 24 * HOUR
    api = Api({"a": [(NOW - 9 * day, b"loss nan"), (NOW - 5, b"Loss 4"), (NOW - 1, b"xyz")]})
    found = await page(tmp_path, api, **query)
    assert texts(found) == expected
    assert found["older"] is None


async def test_a_pattern_that_re2_refuses_is_explained(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"the pattern cannot be used: .*look-ahead"):
        await page(tmp_path, Api({"a": [(NOW, b"x")]}), find="a(?=b)", is_pattern=True)


async def test_a_log_that_is_too_long_is_read_in_part_and_said_so(tmp_path: Path) -> None:
    line = b"y" * 60_000
    count = BYTES_MAX // len(line) + 500
    lines = [(NOW - 50 + index * 40 / count, line) for index in range(count)]
    api = Api({"a": [(NOW - 60 * 60, b"wanted"), *lines]})
    found = await page(tmp_path, api, find="wanted")
    assert found["lines"] == []
    assert "16 MiB at most are searched at once" in found["notes"][0]
    while not found["lines"]:
        assert found["older"] is not None
        found = await page(tmp_path, api, find="wanted", before=found["older"])
    assert texts(found) == ["wanted"]


async def test_hostile_lines_are_bounded_and_without_control_characters(tmp_path: Path) -> None:
    hostile = b"\x1b[31mred\x1b]0;title\x07\r\x9b \xff\xfe\x00 \xe2\x80\xae<b>"
    long = b"a" * (LINE_BYTES_MAX * 40)
    found = await page(
        tmp_path, Api({"a": [(NOW - 3, hostile), (NOW - 2, long), (NOW - 1, b"after")]})
    )
    first, second, third = found["lines"]
    assert first["text"] == (
        "\\x1b[31mred\\x1b]0;title\\x07\\x0d\N{REPLACEMENT CHARACTER} "
        "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\\x00 \\u202e<b>"
    )
    assert second["text"] == "a" * CHARACTERS_MAX
    assert 0 < second["cut"] < LINE_BYTES_MAX
    assert third["text"] == "after"


async def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    assert "no pods now" in (await page(tmp_path, Api()))["notes"][0]
    refused = await page(tmp_path, Api({f"p{index}": [] for index in range(9)}))
    assert len(refused["notes"]) == 6
    assert "no pods/log" in refused["notes"][0]
    assert refused["notes"][-1] == "4 other logs could not be read."
    many = Api({f"p{index:03}": [(NOW - 1, b"x")] for index in range(PODS_MAX + 5)})
    found = await page(tmp_path, many)
    assert len(found["lines"]) == PODS_MAX
    assert "first 64 of 69 pods" in found["notes"][0]
    nobody = await page(tmp_path, many, rank=3)
    assert nobody["lines"] == [], "a pod whose ranks are not known is of no rank"


async def test_a_log_that_never_comes_keeps_nobody_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert logs.IDLE_SECONDS == 10.0
    monkeypatch.setattr(logs, "IDLE_SECONDS", 5.0)
    lines = {one: [(NOW - 20 * 24 * HOUR, b"old"), (NOW - 1, one.encode())] for one in ("a", "b")}
    api = Api(lines, silent=("b",))
    found = await page(tmp_path, api)
    assert texts(found) == ["old", "a"]
    assert [one.partition(":")[0] for one in found["notes"]] == ["b"]
    assert api.asked["a"] > api.asked["b"] == 1


async def test_pods_that_may_not_be_listed_are_not_said_to_be_gone(tmp_path: Path) -> None:
    async with served(tmp_path, Api({"a": []}, refuses_pods=True)) as cluster:
        permitted = PermittedCluster(
            cluster.place, cluster.client, "default", NamespaceScope(), Rights()
        )
        found = await log_page(permitted, "train", LogQuery(), NOW)
    (note,) = found["notes"]
    assert "Your account may not list these" in note
    assert "pods" in note


def test_more_lines_of_one_moment_than_are_shown_end_no_paging() -> None:
    lines = [LogLine(5.0, 0, "a", str(index)) for index in range(LINES_MAX + 1)]
    shown, older = newest(_Window(0.0, None, lines), 0.0)
    assert (len(shown), older) == (LINES_MAX, 5.0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("2027-01-15T08:00:00.123456789Z text", (1_800_000_000.123456, "text")),
        ("2027-01-15T10:00:00.5+02:00 ", (1_800_000_000.5, "")),
        (
            "1970-01-01T00:00:00.000000000Z unbroken: lines dropped here",
            (7.0, "unbroken: lines dropped here"),
        ),
        ("no time", (7.0, "no time")),
        ("", (7.0, "")),
        ("9" * 5000, (7.0, "9" * 5000)),
    ],
)
def test_the_time_of_a_line_is_read(line: str, expected: tuple[float, str]) -> None:
    at, text = stamped(line, 7.0)
    assert (round(at, 6), text) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"rank": "-1"},
        {"rank": "x"},
        {"rank": "9" * 5000},
        {"since": "now"},
        {"before": "1e9"},
        {"before": "nan"},
        {"before": "9" * 30},
        {"before": "1.x"},
        {"find": "x" * 201},
        {"follow": "1"},
    ],
)
def test_parameters_that_make_no_sense_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(SpecError):
        read_query(given)


def test_parameters_are_read() -> None:
    given = {"rank": "3", "pod": "a", "find": "x", "pattern": "1", "since": "5", "before": "6.25"}
    assert read_query(given) == LogQuery(3, "a", "x", True, 5.0, 6.25)
    assert read_query({}) == LogQuery()


def test_a_line_is_shown_whole_if_it_is_short() -> None:
    assert line_value(LogLine(1.0, 2, "a", "x\ty"))["text"] == "x\ty"
