"""Secrets do not reach what is kept and shown, and training output stays as it is."""

from __future__ import annotations

import string

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.job.record.redaction import (
    PATTERNS,
    REMOVED,
    clean,
    clean_incident,
    clean_lines,
)
from unbroken.spec.job.incident import Incident, Remedy, StackGroup, Symptom

SECRET = "aB3" + "x9Kq" * 8
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"token hf_{SECRET} is invalid", "token [removed] is invalid"),
        (f"remote: ghp_{SECRET}", "remote: [removed]"),
        (f"sk-ant-{SECRET}", "[removed]"),
        ("AKIAIOSFODNN7EXAMPLE", "[removed]"),
        (f"Authorization: Bearer {SECRET}", "Authorization: Bearer [removed]"),
        (f"got {JWT}!", "got [removed]!"),
        ("wandb: API key: " + "0a" * 20, "wandb: API key: [removed]"),
        ("https://bob:hunter2@host/x", "https://[removed]@host/x"),
        ("git clone https://oauth2@host/x", "git clone https://[removed]@host/x"),
        ("MY_TOKEN=abcdef", "MY_TOKEN=[removed]"),
        ("password: hunter2, retrying", "password: [removed], retrying"),
        ("{'aws_secret_access_key': 'a b c', 'x': 1}",
         "{'aws_secret_access_key': [removed], 'x': 1}"),
        ('{"api_key": "abc"}', '{"api_key": [removed]}'),
        (f"--hub-token={SECRET} --lr=1", "--hub-token=[removed] --lr=1"),
        (f"?access_token={SECRET}&x=1", "?access_token=[removed]&x=1"),
    ],
)  # fmt: skip
def test_secrets_are_removed(text: str, left: str) -> None:
    assert clean(text) == left
    assert clean(left) == left


@pytest.mark.parametrize(
    "text",
    [
        "step 4 loss=2.31 tokens: 4096 tokens/s=3.2e4 num_token=81920",
        "Special tokens: bos_token=<s>, eos_token: '</s>', pad_token=[PAD], unk_token: None",
        "tokenizer=LlamaTokenizer max_token = 128000000",
        "commit 3f786850e387550fdab836ed7e6dc881de23001b",
        "RuntimeError: CUDA error: device-side assert triggered",
        '  File "/opt/app/train.py", line 12, in key',
        "KeyError: 'labels'",
        "tcp://10.0.0.1:29500 and s3://bucket/key/part-0",
        "rank 3: key=value monkey: banana",
        "the password is wrong",
    ],
)
def test_training_output_stays(text: str) -> None:
    assert clean(text) == text


KEY = [
    "-----BEGIN RSA PRIVATE KEY-----",
    *["MIIEow" + "A" * 58] * 3,
    "-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_private_key_is_removed_wherever_it_is_cut(start: int, stop: int) -> None:
    if start and stop < len(KEY):
        return  # without either end it is only text
    found = clean_lines(["before", *KEY[start:stop], "after it"])
    assert found[0] == "before"
    assert found[-1] == "after it"
    assert set(found[1:-1]) == {REMOVED}


def test_a_private_key_in_one_text_is_removed() -> None:
    assert "MIIE" not in clean("x\n" + "\n".join(KEY) + "\ny")
    assert clean(f"a {KEY[0]}{KEY[1]}{KEY[4]} b") == f"a {REMOVED} b"


def test_patterns_are_in_the_language_of_re2() -> None:
    for pattern in PATTERNS:
        re2.compile(pattern)


ALNUM = string.ascii_letters + string.digits
secrets = st.one_of(
    st.text(ALNUM, min_size=20, max_size=60).map(lambda s: f"hf_{s}"),
    st.text(ALNUM, min_size=36, max_size=36).map(lambda s: f"ghp_{s}"),
    st.text(ALNUM, min_size=20, max_size=60).map(lambda s: f"sk-{s}"),
    st.text(string.ascii_uppercase + string.digits, min_size=16, max_size=16).map("AKIA".__add__),
)
around = st.text(st.characters(codec="utf-8", exclude_categories=["L", "N", "Pc"]), max_size=30)


@given(around, secrets, around)
def test_a_secret_is_gone_whatever_is_around_it(before: str, secret: str, after: str) -> None:
    assert secret not in clean(f"{before}{secret}{after}")


@given(st.text(max_size=2000))
def test_any_text_is_taken(text: str) -> None:
    once = clean(text)
    assert len(once.split("\n")) == len(text.split("\n"))


def test_long_lines_cost_their_length() -> None:
    for text in (
        "token" * 60_000,
        "key=" * 60_000,
        "://" * 80_000,
        "a" * 300_000 + " token=",
        "eyJ" * 90_000,
    ):
        clean(text)


def test_no_part_of_an_incident_keeps_a_secret() -> None:
    told = f"MY_TOKEN={SECRET}"
    sign = Symptom(1, "ExitCode", told, evidence=(told,))
    group = StackGroup("0", 1, told, (told,))
    incident = Incident(1, 0, sign, (sign,), Remedy.PROCESS, told, 1, blame=told, groups=(group,))
    assert SECRET not in repr(clean_incident(incident))
