"""Bad input: each gets a 4xx Status, and nothing is stored."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.apiclient import Answer, Api, Object
from tests.samples import STRICT, config_map, pod, warned
from tests.tables import cases
from tests.watching import PATIENCE_SECONDS

MEBIBYTE = 1 << 20


def refused(answer: Answer, *codes: int) -> None:
    """The answer must be a Status of one of `codes`, or of any 4xx if none is given."""
    code, _ = answer.failure
    assert code in codes if codes else 400 <= code < 500, answer


def stored(here: Api) -> list[Object]:
    """Config maps there are now."""
    items: list[Object] = here.get("configmaps").made["items"]
    return items


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}}",
        b"[]",
        b"null",
        b'"text"',
        b"12",
        b'{"metadata": {"name": "a"}',
        b'{"metadata": {"name": "a"}} trailing',
        b"{'metadata': {}}",
        b'{"metadata": {"name": NaN}}',
        b"\x00\x01\x02",
        b"\xff\xfe{}",
    ],
    ids=lambda body: repr(body)[:24],
)
def test_malformed_json_is_400(here: Api, body: bytes) -> None:
    answer = here.send("POST", "configmaps", body)
    refused(answer, 400, 422)
    assert stored(here) == []


@pytest.mark.parametrize(
    "body", [b"a: b: c", b"- a\n- b", b"\tx: y", b"a: &x [*x]", b"just text", b"{"]
)
def test_malformed_yaml_is_400(here: Api, body: bytes) -> None:
    refused(here.send("POST", "configmaps", body, "application/yaml"), 400, 422)
    assert stored(here) == []


def test_yaml_that_multiplies_itself_is_refused(here: Api) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 9):
        item = f"*a{level - 1}"
        lines.append(f"a{level}: &a{level} [{', '.join([item] * 9)}]")
    body = "\n".join(["apiVersion: v1", "kind: ConfigMap", "metadata: {name: a}", *lines])
    answer = here.send("POST", "configmaps", body, "application/yaml")
    refused(answer)
    assert stored(here) == []


@cases
def test_wrong_type_is_400(here: Api, body: Object) -> None:
    refused(here.post("configmaps", body), 400)
    assert stored(here) == []


POD_TYPES: list[tuple[str, Any]] = [
    ("containers", {}),
    ("containers", ["x"]),
    ("terminationGracePeriodSeconds", "soon"),
    ("nodeSelector", {"a": 1}),
    ("hostNetwork", "true"),
    ("volumes", "x"),
]


@pytest.mark.parametrize(("field", "value"), POD_TYPES)
def test_wrong_type_in_a_pod_is_400(here: Api, field: str, value: Any) -> None:
    refused(here.post("pods", pod("a", **{field: value})), 400)
    assert here.get("pods").made["items"] == []


def test_quantity_that_is_none_is_refused(here: Api) -> None:
    resources = {"limits": {"cpu": "much"}}
    body = pod("a", containers=[{"name": "main", "image": "x", "resources": resources}])
    refused(here.post("pods", body), 400)


def test_body_of_ten_megabytes_is_413(here: Api) -> None:
    body = config_map("a", x="x" * 10 * MEBIBYTE)
    answer = here.post("configmaps", body)
    assert answer.failure == (413, "RequestEntityTooLarge")
    assert stored(here) == []


def test_config_map_over_a_mebibyte_is_refused(here: Api) -> None:
    refused(here.post("configmaps", config_map("a", x="x" * (MEBIBYTE + 1))), 422, 413)
    assert stored(here) == []


def test_config_map_of_just_under_a_mebibyte_is_taken(here: Api) -> None:
    body = config_map("a", x="x" * (MEBIBYTE - 1))
    assert here.post("configmaps", body).code == 201


def test_annotations_over_256_kib_are_refused(here: Api) -> None:
    body = config_map("a")
    body["metadata"]["annotations"] = {"x": "x" * (257 * 1024)}
    answer = here.post("configmaps", body)
    refused(answer, 422)
    assert "metadata.annotations" in {field for _, field in answer.causes}


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_nesting_is_refused(here: Api, opening: bytes) -> None:
    depth = 100_000
    closing = b"]" if opening == b"[" else b"}"
    deep = opening * depth + b"1" + closing * depth
    body = b'{"metadata": {"name": "a"}, "data": ' + deep + b"}"
    refused(here.send("POST", "configmaps", body), 400)
    assert stored(here) == []


def test_deep_nesting_in_a_patch_is_refused(here: Api) -> None:
    made = here.post("configmaps", config_map("a")).made
    body = b'{"data":' * 100_000 + b"1" + b"}" * 100_000
    answer = here.send("PATCH", "configmaps/a", body, "application/merge-patch+json")
    if answer.code == 500:
        assert here.cluster.is_real  # v1.20 blames itself, v1.36 no longer
        assert here.minor < 36
    else:
        refused(answer, 400, 413, 422)
    assert here.get("configmaps/a").made == made


def test_long_label_is_refused(here: Api) -> None:
    body = config_map("a")
    body["metadata"]["labels"] = {"x": "y" * 100_000}
    refused(here.post("configmaps", body), 422)
    body["metadata"]["labels"] = {"x" * 100_000: "y"}
    refused(here.post("configmaps", body), 422)
    assert stored(here) == []


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2f..%2fsecrets", "a%00b", "%ff%fe", "a%2fb", "A", "%20"]
)
def test_odd_name_in_a_path_finds_nothing(here: Api, name: str) -> None:
    here.post("configmaps", config_map("a")).done()
    for method in ("GET", "DELETE"):
        answer = here.send(method, f"/api/v1/namespaces/{here.namespace}/configmaps/{name}")
        assert 300 <= answer.code < 500, answer
    assert [item["metadata"]["name"] for item in stored(here)] == ["a"]


@pytest.mark.parametrize("namespace", ["..", "%2e%2e%2f", "UPPER", "a%00b", "x" * 300])
def test_odd_namespace_in_a_path_takes_nothing(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    answer = api.send("POST", path, config_map("a"))
    ours = api.cluster.is_real and answer.code == 500 and "invalid resource name" in answer.message
    assert 300 <= answer.code < 500 or ours, answer


@pytest.mark.parametrize("character", ["\x00", "\x01", "\n", "\u202e"])
def test_odd_character_in_a_name_is_refused(here: Api, character: str) -> None:
    refused(here.post("configmaps", config_map(f"a{character}b")), 422, 400)
    assert stored(here) == []


def test_odd_characters_in_data_are_kept(here: Api) -> None:
    text = '\x00\x01\x7f\u2028\U0001f600 ä \\ " </script>'
    here.post("configmaps", config_map("a", x=text)).done()
    assert here.get("configmaps/a").made["data"] == {"x": text}


@cases
def test_bad_query_is_refused(here: Api, query: Object) -> None:
    answer = here.get("configmaps", **query)
    if here.cluster.is_real and answer.code == 500:
        assert "strconv" in answer.message  # v1.20 blames itself for a bad number
        return
    refused(answer, 400, 410, 422)


def test_negative_limit_is_no_limit(here: Api) -> None:
    for name in "ab":
        here.post("configmaps", config_map(name)).done()
    answer = here.get("configmaps", limit=-1)
    if answer.code == 200:
        assert len(answer.object["items"]) == 2
    else:
        refused(answer, 400, 422)


def raw(
    api: Api, method: str, path: str, headers: dict[str, str], body: bytes | None = None
) -> http.client.HTTPResponse:
    """A request without what `Api` adds; the response has been read."""
    place = urlsplit(api.cluster.url)
    assert place.hostname is not None
    if place.scheme == "https":
        context = ssl.create_default_context(cadata=api.cluster.ca)
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            place.hostname, place.port, timeout=PATIENCE_SECONDS, context=context
        )
    else:
        connection = http.client.HTTPConnection(
            place.hostname, place.port, timeout=PATIENCE_SECONDS
        )
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    response.content = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


CREDENTIALS = [
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer "},
    {"Authorization": "Basic YWRtaW46YWRtaW4="},
]


@pytest.mark.parametrize("headers", CREDENTIALS, ids=["wrong", "empty", "basic"])
def test_wrong_credentials_are_401_or_nobody(api: Api, headers: dict[str, str]) -> None:
    response = raw(api, "GET", "/api/v1/namespaces/default/secrets", headers)
    status = json.loads(response.content)  # type: ignore[attr-defined]
    assert status["kind"] == "Status"
    # The real server lets a request without a token in as anonymous, who may do nothing.
    allowed = {401} if headers["Authorization"] == "Bearer wrong" else {401, 403}
    assert response.status in allowed
    assert status["reason"] in {"Unauthorized", "Forbidden"}


def test_no_credentials_read_nothing(api: Api) -> None:
    for method, path in (("GET", "/api/v1/pods"), ("DELETE", "/api/v1/nodes"), ("GET", "/apis")):
        response = raw(api, method, path, {})
        assert response.status in {401, 403}


def test_wrong_credentials_write_nothing(here: Api) -> None:
    path = f"/api/v1/namespaces/{here.namespace}/configmaps"
    headers = {"Authorization": "Bearer wrong", "Content-Type": "application/json"}
    assert raw(here, "POST", path, headers, json.dumps(config_map("a")).encode()).status == 401
    assert stored(here) == []


@pytest.mark.parametrize("path", ["/api/v1/pods", "/version"])
def test_head_and_options_do_no_harm(api: Api, path: str) -> None:
    for method in ("HEAD", "OPTIONS"):
        response = raw(api, method, path, api.cluster.headers)
        assert response.status < 500, method
    assert api.get(path).code == 200


@pytest.mark.parametrize("method", ["TRACE", "PROPFIND", "FOO"])
def test_unknown_method_is_405(api: Api, method: str) -> None:
    assert raw(api, method, "/api/v1/pods", api.cluster.headers).status in {400, 403, 405, 501}
    assert api.get("/version").code == 200


def test_body_on_a_get_is_ignored(here: Api) -> None:
    answer = here.send("GET", "configmaps", b"not json")
    assert answer.made["items"] == []


def test_unknown_query_parameters_are_ignored(here: Api) -> None:
    assert here.get("configmaps", pretty="true", unknown="x").made["items"] == []


def test_server_goes_on_after_all_of_this(here: Api) -> None:
    here.post("configmaps", config_map("a", x="1")).done()
    assert here.get("configmaps/a").made["data"] == {"x": "1"}


@pytest.mark.since(25, "field validation by the server")
@pytest.mark.parametrize(("mode", "code", "warning"), STRICT)
def test_unknown_field_of_a_built_in_kind(
    here: Api, mode: str, code: int, warning: str | None
) -> None:
    body = {"metadata": {"name": "a"}, "spec": {"ports": [{"port": 80}], "more": 2}}
    answer = here.post("services", body, fieldValidation=mode)
    assert answer.code == code
    if code == 400:
        assert answer.message.startswith('Service in version "v1" cannot be handled as a Service')
        assert 'unknown field "spec.more"' in answer.message
    assert warned(answer) == ([warning] if warning else [])


@pytest.mark.since(25, "field validation by the server")
def test_duplicate_field_is_told(here: Api) -> None:
    text = '{"metadata": {"name": "a", "name": "a"}}'
    answer = here.send("POST", "configmaps", text, query={"fieldValidation": "Strict"})
    assert answer.failure == (400, "BadRequest")
    assert 'duplicate field "metadata.name"' in answer.message


@pytest.mark.since(25, "field validation by the server")
def test_unknown_validation_is_refused(here: Api) -> None:
    answer = here.post("configmaps", config_map("a"), fieldValidation="Maybe")
    assert answer.failure == (422, "Invalid")
