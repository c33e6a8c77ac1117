"""The page of a dashboard: the panels of `observe/dashboards` with the data of a Prometheus.

The browser names a dashboard and a span of the tables; it cannot send a query.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from unbroken.core.page.panels import (
    DEFAULT_SPAN,
    SPANS,
    PanelSeries,
    TimeSpan,
    filled_query,
    newest_value,
    placed_values,
    sample_value,
    series_name,
    shown_series,
)
from unbroken.errors import PeerError, SpecError, WorldError
from unbroken.observe.dashboards import DASHBOARDS, Dashboard, Panel, PanelKind

from .prometheus import PrometheusApi, prometheus_session

QUERIES_AT_ONCE = 4
"""Queries of a page that Prometheus works on at the same time."""
PAGE_SECONDS = 10.0
"""Seconds that all queries of a page may take together: other pages wait for their turn."""
KEPT_SECONDS = 10.0
"""Seconds until a dashboard is asked for again, however many people look at it."""


class Dashboards:
    """The dashboards of one Prometheus, with their newest contents."""

    def __init__(self, address: str) -> None:
        """`address` empty: no Prometheus is configured."""
        self._address = address
        self._kept: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}
        """Time and contents by dashboard and span of the tables."""

    async def page(self, name: str, span_name: str, now: float) -> dict[str, Any]:
        """Return a dashboard as `dashboard_page` does, with contents of the last KEPT_SECONDS."""
        at, value = self._kept.get((name, span_name), (float("-inf"), {}))
        if not at <= now < at + KEPT_SECONDS:
            value = await dashboard_page(self._address, name, span_name, now)
            self._kept[name, span_name] = now, value
        return value


async def dashboard_page(address: str, name: str, span_name: str, now: float) -> dict[str, Any]:
    """Return a dashboard with its data of the span that ends now.

    `address`: of Prometheus; empty: none is configured.  `name`, `span_name` empty: the first
    dashboard, and the usual span.  Raises SpecError, and WorldError if Prometheus does not answer.
    """
    name, span_name = name or next(iter(DASHBOARDS)), span_name or DEFAULT_SPAN
    board, span = DASHBOARDS.get(name), SPANS.get(span_name)
    if board is None or span is None:
        raise SpecError("there is no such dashboard")
    if not address:
        raise SpecError(
            "dashboards need a Prometheus that scrapes this cluster: give its address with "
            "`unbroken up --prometheus http://127.0.0.1:9090`, or on a Kubernetes cluster with "
            "`unbroken ui --prometheus`"
        )
    times = span.times(now)
    async with prometheus_session() as session:
        reader = _Reader(PrometheusApi(address, session), span, times, now)
        panels = await asyncio.gather(*(reader.panel(one, board.variables) for one in board.panels))
    away = next((found for found in panels if isinstance(found, WorldError)), None)
    if away is not None:
        raise away
    return {
        "address": address,
        "name": name,
        "title": board.title,
        "span": span_name,
        "spans": [*SPANS],
        "boards": [board_value(key, one) for key, one in DASHBOARDS.items()],
        "times": times,
        "panels": panels,
    }


def board_value(name: str, board: Dashboard) -> dict[str, Any]:
    """Return a dashboard as the list of all has it."""
    return {"name": name, "title": board.title}


class _Reader:
    """Reads the panels of one page."""

    def __init__(
        self, api: PrometheusApi, span: TimeSpan, times: Sequence[int], now: float
    ) -> None:
        self._api = api
        self._span = span
        self._times = times
        self._now = now
        self._free = asyncio.Semaphore(QUERIES_AT_ONCE)
        self._until = asyncio.get_running_loop().time() + PAGE_SECONDS

    async def panel(self, panel: Panel, variables: Iterable[str]) -> dict[str, Any] | WorldError:
        """Return a panel with its data or its problem; the error if Prometheus is not reached."""
        query = filled_query(panel.expr, variables, self._span)
        try:
            async with asyncio.timeout_at(self._until), self._free:
                found = await self._series(panel, query)
        except TimeoutError:
            return panel_value(panel, [], 0, f"no answer within {PAGE_SECONDS:g} s")
        except PeerError as error:
            return panel_value(panel, [], 0, str(error))
        except WorldError as error:
            return error
        return panel_value(panel, *shown_series(found), "")

    async def _series(self, panel: Panel, query: str) -> list[PanelSeries]:
        if panel.kind is not PanelKind.TIME_SERIES:
            given = {"query": query, "time": f"{self._now:.3f}"}
            newest = await self._api.ask("query", given)
            return [
                PanelSeries(series_name(panel.legend, one.metric), sample_value(one.value[1]))
                for one in newest
                if one.value is not None
            ]
        first, last = self._times[0], self._times[-1]
        given = {"query": query, "start": f"{first}", "end": f"{last}"}
        lines = await self._api.ask("query_range", {**given, "step": f"{self._span.step_seconds}"})
        values = [placed_values(self._times, one.values) for one in lines]
        return [
            PanelSeries(series_name(panel.legend, one.metric), newest_value(line), line)
            for one, line in zip(lines, values, strict=True)
        ]


def panel_value(
    panel: Panel, series: Sequence[PanelSeries], hidden: int, problem: str
) -> dict[str, Any]:
    """Return a panel as the page shows it."""
    return {
        "title": panel.title,
        "kind": panel.kind.value,
        "unit": panel.unit.value,
        "width": panel.width,
        "problem": problem,
        "series": [series_value(one) for one in series],
        "hidden": hidden,
    }


def series_value(series: PanelSeries) -> dict[str, Any]:
    """Return a series as the page shows it."""
    return {"name": series.name, "newest": series.newest, "values": series.values}
