"""OpenAPI documents: what kubectl looks up in them.

kubectl 1.33 was tried against these documents (explain in both forms, --dry-run=server,
--validate); the field numbers of the protobuf form are those of a kube-apiserver v1.20.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from unbroken.local.apiserver.http import openapi
from unbroken.local.apiserver.http.openapi import encode
from unbroken.local.apiserver.http.status import ApiError
from unbroken.local.apiserver.kinds.crds import kind_of, set_defaults
from unbroken.local.apiserver.kinds.kinds import Kind, Version
from unbroken.local.apiserver.schema.schemas import builtin

POD_NAME = "io.k8s.api.core.v1.Pod"
JOB_NAME = "io.k8s.api.batch.v1.Job"
META_NAME = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
POD = Kind("", "Pod", "pods", "pod", True, {"v1": Version("v1", builtin(POD_NAME), POD_NAME)}, "v1")
JOB = Kind(
    "batch",
    "Job",
    "jobs",
    "job",
    True,
    {"v1": Version("v1", builtin(JOB_NAME), JOB_NAME, scale={}, has_status=True)},
    "v1",
)
REVIEW = Kind(
    "",
    "Review",
    "reviews",
    "review",
    False,
    {"v1": Version("v1", builtin(POD_NAME), POD_NAME)},
    "v1",
    verbs=("create",),
)


def custom(**fields: Any) -> Kind:
    """A custom kind whose spec has `fields`."""
    spec = {"type": "object", "properties": fields}
    root = {"type": "object", "description": "A thing.", "properties": {"spec": spec}}
    crd = {
        "metadata": {"name": "things.x.example.com"},
        "spec": {
            "group": "x.example.com",
            "scope": "Cluster",
            "names": {"plural": "things", "kind": "Thing"},
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": root}}
            ],
        },
    }
    return kind_of(set_defaults(crd, "2024-01-01T00:00:00Z"))


THING = custom(a={"type": "string", "nullable": True, "enum": ["x"]})
KINDS = [POD, JOB, THING]


def v3(group: str, kinds: Any = KINDS) -> dict[str, Any]:
    """The v3 document of a group's v1."""
    found: dict[str, Any] = json.loads(openapi.v3_document(kinds, group, "v1"))
    return found


def v2(kinds: Any = KINDS) -> dict[str, Any]:
    """The v2 document."""
    found: dict[str, Any] = json.loads(openapi.v2_document(kinds))
    return found


def references(value: Any) -> Iterator[str]:
    """Yield every reference in a document."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def test_the_root_leads_to_every_group_and_version() -> None:
    paths = openapi.v3_root(KINDS)["paths"]
    assert list(paths) == ["api/v1", "apis/batch/v1", "apis/x.example.com/v1"]
    assert paths["api/v1"]["serverRelativeURL"].startswith("/openapi/v3/api/v1?hash=")


def test_an_address_changes_with_its_own_group_only() -> None:
    before = openapi.v3_root(KINDS)["paths"]
    after = openapi.v3_root([POD, JOB, custom(a={"type": "integer"})])["paths"]
    changed = [path for path in before if before[path] != after[path]]
    assert changed == ["apis/x.example.com/v1"]


def test_a_group_that_is_not_served_is_not_found() -> None:
    with pytest.raises(ApiError) as caught:
        openapi.v3_document(KINDS, "batch", "v2")
    assert caught.value.code == 404


@pytest.mark.parametrize("group", ["", "batch", "x.example.com"])
def test_every_reference_of_a_document_is_in_it(group: str) -> None:
    document = v3(group)
    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= names


def test_every_reference_of_the_v2_document_is_in_it() -> None:
    document = v2()
    assert set(references(document)) <= {f"#/definitions/{n}" for n in document["definitions"]}


@pytest.mark.parametrize(
    ("group", "path", "gvk"),
    [
        ("", "/api/v1/namespaces/{namespace}/pods/{name}", ("", "v1", "Pod")),
        ("x.example.com", "/apis/x.example.com/v1/things/{name}", ("x.example.com", "v1", "Thing")),
        (
            "batch",
            "/apis/batch/v1/namespaces/{namespace}/jobs/{name}/scale",
            ("autoscaling", "v1", "Scale"),
        ),
    ],
)
def test_a_patch_tells_its_kind_and_query_parameters(
    group: str, path: str, gvk: tuple[str, str, str]
) -> None:
    for document in (v3(group), v2()):
        patch = document["paths"][path]["patch"]
        identity = patch["x-kubernetes-group-version-kind"]
        assert (identity["group"], identity["version"], identity["kind"]) == gvk
        assert patch["x-kubernetes-action"] == "patch"
        names = {p["name"] for p in patch["parameters"] if p["in"] == "query"}
        assert names == {"dryRun", "fieldManager", "fieldValidation", "force"}


def test_only_built_in_kinds_take_strategic_merge_patches() -> None:
    strategic = "application/strategic-merge-patch+json"
    pods = v3("")["paths"]["/api/v1/namespaces/{namespace}/pods/{name}"]["patch"]
    things = v3("x.example.com")["paths"]["/apis/x.example.com/v1/things/{name}"]["patch"]
    assert strategic in pods["requestBody"]["content"]
    assert strategic not in things["requestBody"]["content"]
    assert "application/apply-patch+yaml" in things["requestBody"]["content"]


def test_paths_follow_scope_and_verbs() -> None:
    paths = v3("")["paths"]
    collection = "/api/v1/namespaces/{namespace}/pods"
    assert set(paths[collection]) == {"get", "post", "delete", "parameters"}
    assert set(paths["/api/v1/pods"]) == {"get", "parameters"}
    assert [p["name"] for p in paths[f"{collection}/{{name}}"]["parameters"]] == [
        "name",
        "namespace",
        "pretty",
    ]
    job = "/apis/batch/v1/namespaces/{namespace}/jobs/{name}/status"
    assert set(v3("batch")["paths"][job]) == {"get", "put", "patch", "parameters"}
    reviews = v3("", [REVIEW])
    assert list(reviews["paths"]) == ["/api/v1/reviews"]
    assert set(reviews["paths"]["/api/v1/reviews"]) == {"post", "parameters"}


def test_operations_have_names_of_their_own() -> None:
    operations = [
        operation["operationId"]
        for path in v2()["paths"].values()
        for method, operation in path.items()
        if method != "parameters"
    ]
    # A list over all namespaces shares its name with the list of one.
    assert len(operations) - len(set(operations)) == 2


def test_what_is_said_beside_a_reference_is_kept_in_v3() -> None:
    pod = v3("")["components"]["schemas"][POD_NAME]
    assert pod["properties"]["spec"]["allOf"] == [
        {"$ref": "#/components/schemas/io.k8s.api.core.v1.PodSpec"}
    ]
    assert pod["properties"]["spec"]["description"].startswith("Specification of the desired")
    assert "enum" not in pod["properties"]["kind"]
    ports = v3("")["components"]["schemas"]["io.k8s.api.core.v1.Container"]["properties"]["ports"]
    assert ports["x-kubernetes-patch-merge-key"] == "containerPort"
    assert ports["items"] == {"$ref": "#/components/schemas/io.k8s.api.core.v1.ContainerPort"}


def test_numbers_that_may_be_text_are_spelled_as_the_server_spells_them() -> None:
    quantity = "io.k8s.apimachinery.pkg.api.resource.Quantity"
    either = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
    schemas, definitions = v3("")["components"]["schemas"], v2()["definitions"]
    assert schemas[quantity]["oneOf"] == [{"type": "string"}, {"type": "number"}]
    assert schemas[either]["oneOf"] == [{"type": "integer"}, {"type": "string"}]
    assert definitions[quantity]["type"] == "string"
    assert definitions[either] == {"type": "string", "format": "int-or-string"}


def test_a_custom_kind_is_published_as_its_definition_says() -> None:
    thing = v3("x.example.com")["components"]["schemas"]["com.example.x.v1.Thing"]
    assert thing["description"] == "A thing."
    identity = {"group": "x.example.com", "kind": "Thing", "version": "v1"}
    assert thing["x-kubernetes-group-version-kind"] == [identity]
    assert thing["properties"]["spec"]["properties"]["a"] == {
        "type": "string",
        "nullable": True,
        "enum": ["x"],
    }
    assert thing["properties"]["metadata"]["allOf"] == [
        {"$ref": f"#/components/schemas/{META_NAME}"}
    ]
    listed = v3("x.example.com")["components"]["schemas"]["com.example.x.v1.ThingList"]
    assert listed["x-kubernetes-group-version-kind"] == [{**identity, "kind": "ThingList"}]
    assert listed["properties"]["items"]["items"] == {
        "$ref": "#/components/schemas/com.example.x.v1.Thing"
    }


def test_v2_leaves_out_what_it_cannot_say() -> None:
    kind = custom(
        a={"type": "string", "nullable": True},
        b={
            "type": "object",
            "properties": {"c": {"type": "string"}},
            "anyOf": [{"required": ["c"]}],
        },
        d={
            "type": "object",
            "properties": {"e": {"type": "string"}},
            "x-kubernetes-preserve-unknown-fields": True,
        },
    )
    spec = v2([kind])["definitions"]["com.example.x.v1.Thing"]["properties"]["spec"]
    assert spec["properties"] == {
        "a": {},
        "b": {"type": "object", "properties": {"c": {"type": "string"}}},
        "d": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    }


def test_field_names_that_are_schema_keywords_are_kept() -> None:
    kind = custom(items={"type": "array", "items": {"type": "string"}}, default={"type": "object"})
    for document in (
        v3("x.example.com", [kind])["components"]["schemas"],
        v2([kind])["definitions"],
    ):
        spec = document["com.example.x.v1.Thing"]["properties"]["spec"]["properties"]
        assert spec == {
            "items": {"type": "array", "items": {"type": "string"}},
            "default": {"type": "object"},
        }


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("application/com.github.proto-openapi.spec.v2@v1.0+protobuf", True),
        ("application/com.github.proto-openapi.spec.v2.v1.0+protobuf, application/json", True),
        ("application/json", False),
        ("", False),
    ],
)
def test_old_clients_ask_for_protobuf(accept: str, wanted: bool) -> None:
    assert openapi.wants_protobuf(accept) is wanted


def fields(message: bytes) -> list[tuple[int, Any]]:
    """(number, value) of a protobuf message's fields."""
    position, found = 0, []

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        tag = varint()
        if tag & 7 == 0:
            found.append((tag >> 3, varint()))
            continue
        size = 8 if tag & 7 == 1 else varint()
        found.append((tag >> 3, message[position : position + size]))
        position += size
    return found


def one(message: bytes, *numbers: int) -> Any:
    """The first value at a path of field numbers."""
    value: Any = message
    for number in numbers:
        value = next(item for key, item in fields(value) if key == number)
    return value


def test_the_protobuf_form_has_the_fields_of_the_json_form() -> None:
    message = openapi.v2_protobuf(KINDS)
    assert one(message, 1) == b"2.0"
    assert one(message, 2, 1) == b"Kubernetes"
    named = {one(pair, 1).decode(): one(pair, 2) for n, pair in fields(one(message, 8)) if n == 2}
    assert list(named) == list(v2()["paths"])
    patch = one(named["/api/v1/namespaces/{namespace}/pods/{name}"], 8)
    assert one(patch, 5) == b"patchCoreV1NamespacedPod"
    parameters = [value for number, value in fields(patch) if number == 8]
    assert one(parameters[0], 1, 1, 2) == b"body"
    assert one(parameters[1], 1, 2, 3, 4) == b"dryRun"
    assert one(patch, 9, 1, 2, 1, 2, 1, 1) == f"#/definitions/{POD_NAME}".encode()
    defined = {one(pair, 1).decode(): one(pair, 2) for _, pair in fields(one(message, 9))}
    assert list(defined) == list(v2()["definitions"])
    properties = [one(pair, 1) for _, pair in fields(one(defined[POD_NAME], 25))]
    assert properties == [b"apiVersion", b"kind", b"metadata", b"spec", b"status"]
    extension = one(defined[POD_NAME], 31)
    assert one(extension, 1) == b"x-kubernetes-group-version-kind"
    assert json.loads(one(extension, 2, 2)) == [{"group": "", "kind": "Pod", "version": "v1"}]


def test_numbers_and_maps_in_protobuf() -> None:
    schema = {"type": "object", "minimum": 1.5, "maxLength": 300, "default": {"a": 1},
              "additionalProperties": {"type": "string"}}  # fmt: skip
    message = one(encode({"definitions": {"x": schema}}), 9, 1, 2)
    assert one(message, 9) == b"\0\0\0\0\0\0\xf8?"
    assert one(message, 11) == 300
    assert json.loads(one(message, 5, 2)) == {"a": 1}
    assert one(message, 21, 1, 22, 1) == b"string"
