"""Panels of dashboards: queries, times, names and the choice of series."""

from __future__ import annotations

import re

import pytest

from unbroken.core.page.panels import (
    NAME_MAX,
    SERIES_MAX,
    SPANS,
    PanelSeries,
    filled_query,
    placed_values,
    series_name,
    shown_series,
)
from unbroken.observe.dashboards import DASHBOARDS


def test_a_query_selects_all_values_of_the_variables() -> None:
    query = 'increase(x{job=~"$job",jobName=~"$job"}[$__range]) + rate(y[$__rate_interval])'
    assert filled_query(query, ("job",), SPANS["1h"]) == (
        'increase(x{job=~".*",jobName=~".*"}[3600s]) + rate(y[60s])'
    )
    assert "[5055s]" in filled_query(query, ("job",), SPANS["7d"]), "longer than a step"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_variable_is_left_in_the_queries_of_a_dashboard(name: str) -> None:
    board = DASHBOARDS[name]
    for panel in board.panels:
        assert "$" not in filled_query(panel.expr, board.variables, SPANS["1h"]), panel.title
        labels = re.findall(r"{{(\w+)}}", panel.legend)
        assert panel.legend.count("{{") == len(labels), panel.title


@pytest.mark.parametrize("name", SPANS)
def test_a_span_has_about_a_hundred_points_in_whole_steps(name: str) -> None:
    span = SPANS[name]
    times = span.times(1_800_000_001.9)
    assert 90 <= len(times) <= 121
    assert times[-1] - times[0] == span.seconds
    assert all(time % span.step_seconds == 0 for time in times)
    assert 0 <= 1_800_000_001.9 - times[-1] < span.step_seconds


@pytest.mark.parametrize(
    ("legend", "labels", "name"),
    [
        ("{{state}}", {"state": "Running"}, "Running"),
        ("{{namespace}}/{{job}}", {"namespace": "a", "job": "b", "x": "y"}, "a/b"),
        ("nodes", {}, "nodes"),
        ("{{state}}", {"job": "b", "a": "c"}, "a=c, job=b"),
        ("{{state}}", {}, ""),
        ("{{state}}", {"state": "{{job}}", "job": "b"}, "{{job}}"),
        ("{{state}}", {"state": "a\u202eb\nc\x00"}, "a\ufffdb\ufffdc\ufffd"),
        ("{{state}}", {"state": "<img src=x>"}, "<img src=x>"),
        ("{{state}}", {"state": "x" * 5000}, "x" * (NAME_MAX - 1) + "…"),
    ],
)
def test_a_series_is_named_by_its_labels(legend: str, labels: dict[str, str], name: str) -> None:
    assert series_name(legend, labels) == name


def test_values_stand_at_their_times_and_others_are_gaps() -> None:
    samples = [(10.0, "1.5"), (20.0, "NaN"), (30.0, "+Inf"), (40.0, "-2e3"), (55.0, "9")]
    samples += [(50.0, "1" * 5000)]
    assert placed_values([0, 10, 20, 30, 40, 50], samples) == (None, 1.5, None, None, -2000.0, None)


def test_of_too_many_series_the_greatest_are_shown() -> None:
    found = [
        PanelSeries(f"n{number}", float(number), (None, float(number))) for number in range(50)
    ]
    found.append(PanelSeries("none", None))
    found.append(PanelSeries("earlier", 0.0, (99.0, 0.0)))
    shown, hidden = shown_series(found)
    assert len(shown) == SERIES_MAX
    assert hidden == 31
    assert {one.name for one in shown} == {f"n{number}" for number in range(31, 50)} | {"earlier"}


def test_series_are_in_the_order_of_the_numbers_in_their_names() -> None:
    names = ["up to +Inf s", "up to 10.0 s", "up to 2.5 s", "up to 0.25 s", "gpu 10", "gpu 9"]
    shown, _ = shown_series(PanelSeries(name, 1.0) for name in names)
    assert [one.name for one in shown] == [
        *("gpu 9", "gpu 10"),
        *("up to 0.25 s", "up to 2.5 s", "up to 10.0 s", "up to +Inf s"),
    ]
