"""Selectors.  Texts of errors were taken from kube-apiserver v1.20.2."""

from __future__ import annotations

import pytest

from tests.tables import cases
from unbroken.local.apiserver.http.status import ApiError, Object
from unbroken.local.apiserver.validation.selectors import (
    field_value,
    parse_fields,
    parse_labels,
    selector_of,
)

LABELS = {"app": "web", "tier": "front", "rank": "7", "empty": ""}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("app", True),
        ("none", False),
        ("!none", True),
        ("!app", False),
        ("app=web", True),
        ("app==web", True),
        ("app=", False),
        ("empty=", True),
        ("app!=web", False),
        ("none!=web", True),
        ("none!=", True),
        ("app in (web, api)", True),
        ("app in(api)", False),
        ("app in (api,)", False),
        ("empty in (api,)", True),
        ("empty in (,)", True),
        ("empty in ()", True),
        ("app notin (web)", False),
        ("none notin (web)", True),
        ("rank>6", True),
        ("rank > 7", False),
        ("rank<8", True),
        ("app>1", False),
        ("none<1", False),
        ("  app = web , tier = front ", True),
        ("app=web,tier=back", False),
        ("in", False),
        ("in in (in)", False),
        ("notin=x", False),
    ],
)
def test_a_label_selector_matches_as_in_kubernetes(text: str, matches: bool) -> None:
    assert parse_labels(text).matches(LABELS) is matches


@cases
def test_a_bad_label_selector_is_told_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_labels(text)
    assert (caught.value.code, caught.value.reason) == (400, "BadRequest")
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("source", "matches"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"app": "web"}}, True),
        ({"matchLabels": {"app": "api"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "none", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "none", "operator": "DoesNotExist"}]}, True),
    ],
)
def test_a_selector_object_matches(source: Object | None, matches: bool) -> None:
    assert selector_of(source).matches(LABELS) is matches


@pytest.mark.parametrize(
    "term",
    [
        {"key": "a", "operator": "Equals"},
        {"key": "a", "operator": "In"},
        {"key": "a", "operator": "Exists", "values": ["b"]},
        {"key": "", "operator": "Exists"},
    ],
)
def test_a_bad_selector_object_is_refused(term: Object) -> None:
    with pytest.raises(ApiError):
        selector_of({"matchExpressions": [term]})


ALLOWED = ("metadata.name", "metadata.namespace")


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("metadata.name=a", True),
        ("metadata.name==a", True),
        ("metadata.name!=a", False),
        ("metadata.name=", False),
        ("metadata.name=a,", True),
        (",", True),
        ("metadata.name=a,metadata.namespace=c", False),
        ("metadata.name=a,metadata.namespace=b\\,\\=\\\\c", True),
    ],
)
def test_a_field_selector_matches(text: str, matches: bool) -> None:
    values = {"metadata.name": "a", "metadata.namespace": "b,=\\c"}
    assert parse_fields(text, ALLOWED).matches(values) is matches


@cases
def test_a_bad_field_selector_is_told_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_fields(text, ALLOWED)
    assert (caught.value.code, caught.value.message) == (400, message)


def test_a_kind_with_fields_of_its_own_says_which_is_not_supported() -> None:
    with pytest.raises(ApiError, match=r"^field label not supported: spec\.x$"):
        parse_fields("spec.x=a", (*ALLOWED, "spec.nodeName"))


@pytest.mark.parametrize(
    ("content", "path", "text"),
    [
        ({"spec": {"nodeName": "n1"}}, "spec.nodeName", "n1"),
        ({"spec": {}}, "spec.nodeName", ""),
        ({"spec": {"unschedulable": True}}, "spec.unschedulable", "true"),
        ({"spec": {}}, "spec.unschedulable", "false"),
        ({"status": {"successful": 3}}, "status.successful", "3"),
        ({"source": {"component": "kubelet"}}, "source", "kubelet"),
        ({"involvedObject": {"kind": "Pod"}}, "regarding.kind", "Pod"),
        ({"reportingComponent": "x"}, "reportingController", "x"),
        ({"source": {}, "reportingComponent": "x"}, "source", "x"),
    ],
)
def test_a_field_is_compared_as_text(content: Object, path: str, text: str) -> None:
    assert field_value(content, path) == text
