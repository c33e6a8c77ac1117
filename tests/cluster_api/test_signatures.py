"""Signatures: those of the real client are taken, changed and old ones are not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.watching import PATIENCE_SECONDS
from unbroken.cluster_api.errors import ClusterApiError
from unbroken.cluster_api.signatures import (
    DATE_FORMAT,
    Credential,
    Message,
    read_credentials,
    sign,
    verify,
)
from unbroken.errors import SpecError

KEY = Credential("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
KEYS = {KEY.key_id: KEY}
NOW = 1_790_000_000.0
HEADERS = {
    "host": "127.0.0.1:8080",
    "content-type": "application/x-amz-json-1.1",
    "x-amz-target": "SageMaker.ListClusters",
}
PLAIN = Message("POST", "/", "", HEADERS, b"{}")

BOTOCORE = """
import json, sys
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
key, secret, token = sys.argv[1:]
request = AWSRequest("POST", "http://127.0.0.1:8080/", data=b'{"NameContains": "a"}', headers={
    "Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": "SageMaker.ListClusters"})
SigV4Auth(Credentials(key, secret, token or None), "sagemaker", "us-west-2").add_auth(request)
print(json.dumps(dict(request.headers)))
"""


def signed(now: float = NOW, key: Credential = KEY) -> Message:
    return replace(PLAIN, headers=sign(PLAIN, key, "us-west-2", now))


@pytest.mark.parametrize("token", ["", "temporary+token/="])
def test_what_botocore_signs_is_taken(aws_folder: Path, token: str) -> None:
    arguments = [str(aws_folder / "python"), "-c", BOTOCORE, KEY.key_id, KEY.secret, token]
    said = subprocess.run(
        arguments, check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    headers = {name.lower(): value for name, value in json.loads(said.stdout).items()}
    headers["host"] = "127.0.0.1:8080"
    at = datetime.strptime(headers["x-amz-date"], DATE_FORMAT).replace(tzinfo=UTC).timestamp()
    message = Message("POST", "/", "", headers, b'{"NameContains": "a"}')
    keys = {KEY.key_id: replace(KEY, token=token)}
    assert verify(message, keys, at).region == "us-west-2"
    with pytest.raises(ClusterApiError, match="does not match"):
        verify(replace(message, body=b"{}"), keys, at)


def test_what_we_sign_we_take() -> None:
    assert verify(signed(), KEYS, NOW).key_id == KEY.key_id


def with_header(name: str, value: str) -> Callable[[Message], Message]:
    return lambda message: replace(message, headers={**message.headers, name: value})


def without(name: str) -> Callable[[Message], Message]:
    return lambda message: replace(
        message, headers={key: value for key, value in message.headers.items() if key != name}
    )


def authorization(old: str, new: str) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        said = message.headers["authorization"]
        assert old in said
        return with_header("authorization", said.replace(old, new))(message)

    return change


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without("authorization"), "MissingAuthenticationTokenException"),
        (with_header("authorization", "Bearer abc"), "IncompleteSignatureException"),
        (authorization("aws4_request", "aws3_request"), "IncompleteSignatureException"),
        (authorization("AKIDEXAMPLE", "AKIDOTHER"), "UnrecognizedClientException"),
        (authorization("/sagemaker/", "/s3/"), "InvalidSignatureException"),
        (authorization("/us-west-2/", "/us-east-1/"), "InvalidSignatureException"),
        (authorization(";x-amz-target", ""), "InvalidSignatureException"),
        (authorization("host;", "host;x-absent;"), "InvalidSignatureException"),
        (with_header("x-amz-target", "SageMaker.DeleteCluster"), "InvalidSignatureException"),
        (with_header("host", "elsewhere"), "InvalidSignatureException"),
        (with_header("x-amz-date", "yesterday"), "IncompleteSignatureException"),
        (with_header("x-amz-date", "20260102T030405Z"), "InvalidSignatureException"),
        (lambda message: replace(message, body=b"{ }"), "InvalidSignatureException"),
        (lambda message: replace(message, query="a=b"), "InvalidSignatureException"),
        (with_header("x-amz-security-token", "more"), "UnrecognizedClientException"),
    ],
)
def test_what_was_changed_is_refused(change: Callable[[Message], Message], code: str) -> None:
    with pytest.raises(ClusterApiError) as refused:
        verify(change(signed()), KEYS, NOW)
    assert (refused.value.code, refused.value.status) == (code, 403)


def test_a_signature_is_good_for_five_minutes_either_way() -> None:
    for off in (-300.0, 300.0):
        verify(signed(), KEYS, NOW + off)
    for off, word in ((-301.0, "not yet current"), (301.0, "expired")):
        with pytest.raises(ClusterApiError, match=f"Signature {word}"):
            verify(signed(), KEYS, NOW + off)


def test_a_key_of_another_is_refused() -> None:
    forged = signed(key=Credential(KEY.key_id, "guessed"))
    with pytest.raises(ClusterApiError, match="does not match"):
        verify(forged, KEYS, NOW)


def test_credentials_are_read_as_the_aws_cli_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text(
        "[default]\naws_access_key_id = AKID\naws_secret_access_key = se%cret\n"
        "[other]\naws_access_key_id = OTHER\naws_secret_access_key = s\naws_session_token = t\n"
    )
    assert read_credentials(path) == {
        "AKID": Credential("AKID", "se%cret"),
        "OTHER": Credential("OTHER", "s", "t"),
    }


@pytest.mark.parametrize("text", ["", "secret without a name", "[a]\naws_access_key_id = k\n"])
def test_a_file_without_credentials_is_refused_without_showing_it(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "credentials"
    path.write_text(text)
    with pytest.raises(SpecError) as refused:
        read_credentials(path)
    assert str(path) in str(refused.value)
    assert "secret without" not in str(refused.value)
