"""Bodies of any bytes, which become a value or a 4xx."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.local.apiserver.http.bodies import DEPTH_MAX, decode, decode_object, repeated_fields
from unbroken.local.apiserver.http.status import ApiError

JSON, YAML = "application/json", "application/yaml"


@pytest.mark.parametrize(
    ("body", "media", "expected"),
    [
        (b'{"a": [1, 2.5, null, true, "x"]}', JSON, {"a": [1, 2.5, None, True, "x"]}),
        (b'{"a": 1}', "application/json; charset=utf-8", {"a": 1}),
        (b'{"a": 1}', "", {"a": 1}),
        (b'{"a": 1}', "application/merge-patch+json", {"a": 1}),
        (b"a: 1\nb: [x, y]\n", YAML, {"a": 1, "b": ["x", "y"]}),
        (b"day: 2026-11-21\n", YAML, {"day": "2026-11-21"}),
        (b"a: &x {b: 1}\nc: *x\n", YAML, {"a": {"b": 1}, "c": {"b": 1}}),
        (b"[1]", "application/apply-patch+yaml", [1]),
    ],
)
def test_json_and_yaml_are_understood(body: bytes, media: str, expected: object) -> None:
    assert decode(body, media) == expected


LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("body", "media", "code"),
    [
        (b"{", JSON, 400),
        (b"", JSON, 400),
        (b'{"a": 1} x', JSON, 400),
        (b"\xff\xfe{}", JSON, 400),
        (b'{"a": "\xff"}', JSON, 400),
        (b'{"a": 1e999}', JSON, 400),
        (b'{"a": 123456789012345678901234567890}', JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (b"[" * 900 + b"]" * 900, JSON, 400),
        (b"a: [", YAML, 400),
        (b"a: .nan", YAML, 400),
        (b"1: x", YAML, 400),
        (b"a: !!binary aGk=", YAML, 400),
        (b"a: !!python/object/apply:os.system [id]", YAML, 400),
        (LAUGHS.encode(), YAML, 400),
        (b"a: &a [*a]", YAML, 400),
        (b"{}", "application/vnd.kubernetes.protobuf", 400),
        (b"{}", "text/plain", 415),
    ],
)
def test_bad_bodies_are_refused(body: bytes, media: str, code: int) -> None:
    with pytest.raises(ApiError) as caught:
        decode(body, media)
    assert caught.value.code == code


def test_nesting_is_taken_up_to_the_limit() -> None:
    def nested(depth: int) -> bytes:
        return b"[" * depth + b"]" * depth

    decode(nested(DEPTH_MAX - 1), JSON)
    with pytest.raises(ApiError):
        decode(nested(DEPTH_MAX + 1), JSON)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": 1, "b": {"a": 2}}', []),
        (b'{"a": 1, "a": 2}', ["a"]),
        (b'{"m": {"n": 1, "n": 1, "n": 2}, "l": [{}, {"x": 1, "x": 2}]}', ["l[1].x", "m.n"]),
    ],
)
def test_fields_that_come_twice_are_named(body: bytes, expected: list[str]) -> None:
    assert repeated_fields(body) == expected


@given(st.binary(max_size=200), st.sampled_from([JSON, YAML]))
def test_no_bytes_break_it(body: bytes, media: str) -> None:
    try:
        value = decode_object(body, media)
    except ApiError as error:
        assert 400 <= error.code < 500
        return
    json.dumps(value)
