"""Names and metadata that `recorded/refusals` does not compare with the real server."""

from __future__ import annotations

import pytest

from tests.tables import cases
from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.kinds.builtin import BUILTINS
from unbroken.local.apiserver.kinds.kinds import Kind
from unbroken.local.apiserver.validation import names

KINDS = {kind.resource: kind for kind in BUILTINS}
RBAC = "rbac.authorization.k8s.io"
CUSTOM = Kind("x.dev", "Thing", "things", "thing", True, {}, "v1", is_custom=True)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (
            names.dns_label,
            ["a", "0", "a-b", "a" * 63],
            ["", "A", "a.b", "-a", "a-", "a" * 64, "a\n"],
        ),
        (names.dns_subdomain, ["a", "a.b-c.0", "a" * 253], ["", ".a", "a..b", "a_b", "a" * 254]),
        (names.dns_1035_label, ["a", "a-0"], ["0a", "a.b", "A", "a" * 64]),
        (names.path_segment, ["a:b", "A_B", "system:x", "..."], [".", "..", "a/b", "a%b"]),
        (
            names.qualified_name,
            ["a", "A_b.c", "x.dev/a", "x/" + "a" * 63],
            ["", "/a", "x/", "X/a", "a/b/c", "-a", "a b", "x/" + "a" * 64],
        ),
        (names.label_value, ["", "a", "A_b.c", "a" * 63], ["-", "a b", "a/b", "a" * 64, "a-"]),
        (names.config_key, ["a", ".a", "A_b-c.d", "..."[:1] + "x"], ["", "a b", ".", "..", "..a"]),
        (names.environment_name, ["A", "_a", "a.b-c"], ["", "1a", "a=b", "..", "..a"]),
        (names.port_name, ["http", "a1", "1a"], ["", "A", "1", "-a", "a-", "a--b", "a" * 16]),
    ],
)
def test_a_rule_takes_what_it_should_and_nothing_else(
    rule: names.NameRule, good: list[str], bad: list[str]
) -> None:
    assert {text: rule(text) for text in good if rule(text)} == {}
    assert [text for text in bad if not rule(text)] == []


@pytest.mark.parametrize(
    ("resource", "name", "is_good"),
    [
        ("namespaces", "a.b", False),
        ("pods", "a.b", True),
        ("pods", "a:b", False),
        ("services", "0a", False),
        ("configmaps", "0a", True),
        (f"roles.{RBAC}", "system:A_b", True),
        (f"clusterrolebindings.{RBAC}", "a/b", False),
        ("jobs.batch", "a" * 63, True),
    ],
)
def test_each_kind_has_its_rule(resource: str, name: str, is_good: bool) -> None:
    kind = KINDS[resource]
    meta = {"name": name, **({"namespace": "n"} if kind.namespaced else {})}
    assert (not names.validate_metadata(meta, kind)) is is_good


@cases
def test_the_field_that_is_wrong_is_told(meta: Object, field: str) -> None:
    assert [cause.field for cause in names.validate_metadata(meta, CUSTOM)] == [field]


def test_what_is_just_right_is_taken() -> None:
    meta = {
        "name": "a",
        "namespace": "n",
        "generateName": "a-",
        "annotations": {"K/a": "x" * (2**18 - 3)},
        "finalizers": ["plain"],
        "labels": {"x.dev/A": ""},
    }
    assert names.validate_metadata(meta, CUSTOM) == []


def test_finalizers_of_built_in_kinds_need_a_prefix() -> None:
    meta = {"name": "a", "namespace": "n", "finalizers": ["kubernetes", "x.dev/a", "plain"]}
    causes = names.validate_metadata(meta, KINDS["pods"])
    assert [(cause.field, cause.message.split(": ", 1)[1]) for cause in causes] == [
        (
            "metadata.finalizers[2]",
            '"plain": name is neither a standard finalizer name nor is it fully qualified',
        )
    ]
