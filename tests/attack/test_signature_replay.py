"""The attack: a signature for one call of the cluster API is used for another call.

A captured, signed DescribeCluster got a second `X-Amz-Target: SageMaker.DeleteCluster` before the
signed one, and was carried out as a deletion. The server verified the last header of a name and
used the first. A captured call could also be sent again for five minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.apiservers import Cluster
from tests.attack.raw_calls import Captured, captured, connection, exchange, send
from tests.cli_calls import UNBROKEN, read_until
from tests.cluster_api.api_program import KEY, Running, credentials_file, running_api
from tests.fault_proxy import Fault, FaultProxy
from tests.watching import PATIENCE_SECONDS
from unbroken.cluster_api.errors import ClusterApiError
from unbroken.cluster_api.signatures import (
    KEPT_MAX,
    KEPT_SECONDS,
    RETRY_SECONDS,
    SameSecondError,
    SignatureClaim,
    UsedSignatures,
)

pytestmark = pytest.mark.slow
GROUP = {
    "InstanceGroupName": "workers",
    "InstanceType": "ml.p5.48xlarge",
    "InstanceCount": 1,
    "ExecutionRole": "arn:aws:iam::123456789012:role/worker",
}
NUMBERS = count()


@pytest.fixture(scope="module")
def running(clusters: Callable[[str], Cluster]) -> Iterator[Running]:
    with running_api(clusters("embedded")) as found:
        yield found


@pytest.fixture
def prod(running: Running) -> Iterator[str]:
    """Create a cluster that must survive until the test ends."""
    name = f"prod-{next(NUMBERS)}"
    running.ok("CreateCluster", ClusterName=name, InstanceGroups=[GROUP])
    running.until_phase(name, "InService")
    yield name
    # The test may have deleted it.
    if is_there(running, name):
        running.gone(name)


def is_there(running: Running, name: str) -> bool:
    return running.call("DescribeCluster", ClusterName=name).body.get("ClusterStatus") in (
        "Creating",
        "InService",
    )


# --- the operation that is carried out is the one that was signed


@pytest.mark.parametrize("is_first", [True, False])
def test_a_captured_describe_is_not_taken_for_a_delete(
    running: Running, prod: str, is_first: bool
) -> None:
    seen = captured(running.endpoint, "DescribeCluster", {"ClusterName": prod})
    other = (b"X-Amz-Target", b"SageMaker.DeleteCluster")
    if is_first:
        seen.first.append(other)
    else:
        seen.headers.append(other)
    reply = send(running.endpoint, seen)
    assert (reply.status, reply.code) == (403, "InvalidSignatureException")
    assert is_there(running, prod)


@pytest.mark.parametrize(
    "name",
    [
        b"Host",
        b"X-Amz-Date",
        b"Authorization",
        b"Content-Type",
        b"X-Amz-Security-Token",
        b"X-Signed",
    ],
)
def test_no_header_that_is_signed_or_read_may_be_repeated(running: Running, name: bytes) -> None:
    more = [("x-signed", "1"), ("x-amz-security-token", "t")]
    seen = captured(running.endpoint, "ListClusters", {}, more)
    seen.first.append((name, seen.header(name.lower())))
    said = exchange(running.endpoint, seen.data)
    assert re.match(rb"HTTP/1.[01] 40[03] ", said), said


def test_a_header_that_nobody_signed_may_be_repeated(running: Running) -> None:
    seen = captured(running.endpoint, "ListClusters", {})
    seen.first += [(b"X-Forwarded-For", b"10.0.0.1"), (b"X-Forwarded-For", b"10.0.0.2")]
    assert send(running.endpoint, seen).status == 200


@pytest.mark.parametrize("name", [b"x-amz-target", b"host", b"x-amz-date"])
def test_what_says_where_when_and_what_must_be_signed(running: Running, name: bytes) -> None:
    seen = captured(running.endpoint, "ListClusters", {})
    said = seen.header(b"authorization")
    names = said.partition(b"SignedHeaders=")[2].partition(b",")[0].split(b";")
    fewer = b";".join(one for one in names if one != name)
    changed = seen.with_header(b"authorization", said.replace(b";".join(names), fewer))
    assert send(running.endpoint, changed).code == "InvalidSignatureException"


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (b"/sagemaker/", b"/s3/", "InvalidSignatureException"),
        (b"/us-west-2/", b"/../", "InvalidSignatureException"),
        (b"/us-west-2/", b"//", "InvalidSignatureException"),
        (b"/us-west-2/", b"/" + b"a" * 200 + b"/", "InvalidSignatureException"),
        (b"content-type;host", b"host;content-type", "InvalidSignatureException"),
        (b"content-type;", b"content-type;content-type;", "InvalidSignatureException"),
        (b"content-type;", b"Content-Type;", "InvalidSignatureException"),
        (b"AWS4-HMAC-SHA256", b"AWS4-ECDSA-P256-SHA256", "IncompleteSignatureException"),
        (b"Signature=", b"Signature=0", "IncompleteSignatureException"),
    ],
)
def test_the_scope_of_a_signature_is_checked(
    running: Running, old: bytes, new: bytes, code: str
) -> None:
    seen = captured(running.endpoint, "ListClusters", {})
    changed = seen.header(b"authorization").replace(old, new)
    assert send(running.endpoint, seen.with_header(b"authorization", changed)).code == code


# --- every byte that matters is verified, and odd bytes are refused


@pytest.mark.parametrize(
    "name",
    [
        b"authorization",
        b"content-type",
        b"content-encoding",
        b"host",
        b"x-amz-content-sha256",
        b"x-amz-date",
        b"x-amz-security-token",
        b"x-amz-target",
        b"user-agent",
    ],
)
@pytest.mark.parametrize("value", [b"\xff\xfe", "é".encode(), b"\xed\xa0\x80", b"a\x0bb", b""])
def test_odd_bytes_in_headers_are_refused(running: Running, name: bytes, value: bytes) -> None:
    seen = captured(running.endpoint, "ListClusters", {}).with_header(name, value)
    said = exchange(running.endpoint, seen.data)
    unsigned = name in (b"user-agent", b"x-amz-security-token") and not value
    allowed = rb"(40[03]|415) " if not (unsigned or name == b"user-agent") else rb"(200|400) "
    assert re.match(rb"HTTP/1.[01] " + allowed, said), said


@pytest.mark.parametrize(
    "target",
    [
        *(b"/?", b"/?a", b"/?a=%ff", b"/?%", b"/?a=b&a=c&&=;", b"/?\xff", b"/?" + b"a=b&" * 1000),
        *(b"/%00", b"//", b"/.", b"/%2e", b"*", b"", b"http://127.0.0.1/", b"/x", b"/\xff"),
        b"/?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=A&X-Amz-Signature=00",
    ],
)
def test_no_address_but_the_root_is_taken(running: Running, target: bytes) -> None:
    seen = captured(running.endpoint, "ListClusters", {})
    said = exchange(running.endpoint, replace(seen, line=b"POST %s HTTP/1.1" % target).data)
    assert re.match(rb"HTTP/1.[01] 4\d\d ", said), said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
        ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"),
        ("x-amz-content-sha256", "0" * 64),
        ("content-encoding", "aws-chunked"),
        ("content-encoding", "gzip"),
    ],
)
def test_payloads_that_the_signature_does_not_cover_are_refused(
    running: Running, name: str, value: str
) -> None:
    seen = captured(running.endpoint, "ListClusters", {}, [(name, value)])
    assert send(running.endpoint, seen).status in (403, 415)


def test_a_chunked_body_is_verified_as_a_whole(running: Running) -> None:
    seen = captured(running.endpoint, "ListClusters", {"MaxResults": 5})
    plain = [one for one in seen.headers if one[0] != b"content-length"]
    headers = [*plain, (b"transfer-encoding", b"chunked")]
    pieces = b"".join(b"1\r\n%c\r\n" % one for one in seen.body)
    whole = Captured(headers, pieces + b"0\r\n\r\n")
    assert send(running.endpoint, whole).status == 200
    changed = Captured(headers, pieces.replace(b"5", b"6") + b"0\r\n\r\n")
    assert send(running.endpoint, changed).code == "InvalidSignatureException"


# --- a captured call is not carried out again


def test_a_captured_deletion_does_not_delete_the_next_cluster(running: Running, prod: str) -> None:
    seen = captured(running.endpoint, "DeleteCluster", {"ClusterName": prod})
    assert send(running.endpoint, seen).status == 200
    running.until(
        lambda: running.call("DescribeCluster", ClusterName=prod),
        lambda found: found.code == "ResourceNotFound",
    )
    running.ok("CreateCluster", ClusterName=prod, InstanceGroups=[GROUP])
    reply = send(running.endpoint, seen)
    assert (reply.status, reply.code) in ((400, "ThrottlingException"), (400, "ConflictException"))
    assert is_there(running, prod)


def test_a_captured_creation_is_answered_as_aws_answers_a_second_one(running: Running) -> None:
    members = {"ClusterName": "twice", "InstanceGroups": [GROUP]}
    seen = captured(running.endpoint, "CreateCluster", members)
    assert send(running.endpoint, seen).status == 200
    assert send(running.endpoint, seen).code == "ResourceInUse"
    running.gone("twice")
    assert send(running.endpoint, seen).code == "ResourceInUse"
    assert not is_there(running, "twice")


def test_an_equal_call_that_only_reads_is_answered_again(running: Running) -> None:
    seen = captured(running.endpoint, "ListClusters", {})
    assert [send(running.endpoint, seen).status for _ in range(3)] == [200] * 3


def claim(number: int = 0, at: float = 1000.0, key: str = "AKID") -> SignatureClaim:
    return SignatureClaim(
        key, "19700101", "us-west-2", "sagemaker", ("host",), f"{number:064x}", at
    )


def test_signatures_are_remembered_as_long_as_they_are_valid() -> None:
    used = UsedSignatures(1000.0)
    used.take("UpdateCluster", claim(), 1000.0)
    with pytest.raises(ClusterApiError, match="made already"):
        used.take("UpdateCluster", claim(), 1000.0 + KEPT_SECONDS - 1)
    used.take("UpdateCluster", claim(), 1000.0 + KEPT_SECONDS)


def test_a_repeat_is_told_to_sign_again_for_a_moment_and_refused_from_then_on() -> None:
    used = UsedSignatures(1000.0)
    used.take("UpdateCluster", claim(), 1000.0)
    with pytest.raises(SameSecondError) as early:
        used.take("UpdateCluster", claim(), 1000.0 + RETRY_SECONDS)
    assert early.value.code == "ThrottlingException"
    with pytest.raises(ClusterApiError) as late:
        used.take("UpdateCluster", claim(), 1000.1 + RETRY_SECONDS)
    assert late.value.code == "ConflictException"


def test_a_call_that_failed_may_be_repeated_for_a_moment() -> None:
    used = UsedSignatures(1000.0)
    used.take("UpdateCluster", claim(), 1000.0)
    used.give_back("UpdateCluster", claim())
    used.take("UpdateCluster", claim(), 1000.0 + RETRY_SECONDS)
    used.give_back("UpdateCluster", claim())
    with pytest.raises(ClusterApiError, match="made already"):
        used.take("UpdateCluster", claim(), 1000.1 + RETRY_SECONDS)


def test_memory_is_bounded_for_each_key_and_no_signature_is_forgotten_early() -> None:
    used = UsedSignatures(1000.0)
    for number in range(KEPT_MAX):
        used.take("UpdateCluster", claim(number), 1000.0)
    with pytest.raises(ClusterApiError) as refused:
        used.take("UpdateCluster", claim(KEPT_MAX), 1000.0)
    assert refused.value.code == "ThrottlingException"
    used.take("UpdateCluster", claim(KEPT_MAX, key="AKIDOTHER"), 1000.0)
    used.take("ListClusters", claim(KEPT_MAX), 1000.0)
    with pytest.raises(ClusterApiError, match="made already"):
        used.take("UpdateCluster", claim(0), 1001.0 + RETRY_SECONDS)


def test_a_signature_older_than_the_server_changes_nothing() -> None:
    used = UsedSignatures(1000.9)
    used.take("DeleteCluster", claim(1, at=1000.0), 1001.0)
    used.take("DescribeCluster", claim(2, at=999.0), 1001.0)
    with pytest.raises(ClusterApiError, match="older than this server"):
        used.take("DeleteCluster", claim(3, at=999.0), 1001.0)


# --- honest clients notice nothing

HONEST = """
import boto3, json, sys
client = boto3.client("sagemaker", region_name="us-west-2", endpoint_url=sys.argv[1],
                      aws_access_key_id=sys.argv[2], aws_secret_access_key=sys.argv[3])
group = json.loads(sys.argv[4])
for _ in range(20):
    client.list_clusters()
made = client.create_cluster(ClusterName="honest", InstanceGroups=[group])
codes = []
for _ in range(2):
    try:
        client.create_cluster(ClusterName="honest", InstanceGroups=[group])
    except client.exceptions.ResourceInUse:
        codes.append("ResourceInUse")
found = client.describe_cluster(ClusterName="honest")
client.delete_cluster(ClusterName="honest")
print(json.dumps([made["ResponseMetadata"]["RetryAttempts"], codes, found["ClusterName"]]))
"""


def honest(python: Path, endpoint: str, script: str = HONEST) -> object:
    """Return the output of boto3.

    HONEST prints the retries of the first creation, the others' errors, and the cluster.
    """
    done = subprocess.run(
        [str(python), "-c", script, endpoint, KEY.key_id, KEY.secret, json.dumps(GROUP)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PATH": os.environ["PATH"], "AWS_EC2_METADATA_DISABLED": "true"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def boto3_python() -> Path:
    named = os.environ.get("UNBROKEN_AWS")
    folder = Path(named) if named else Path(sys.prefix) / "aws/bin"
    if not (folder / "python").exists():
        pytest.skip(f"no boto3 in {folder} (tools/setup.sh installs it)")
    return folder / "python"


def test_equal_calls_of_boto3_within_a_second(running: Running, boto3_python: Path) -> None:
    assert honest(boto3_python, running.endpoint) == [0, ["ResourceInUse"] * 2, "honest"]


EQUAL_CHANGES = """
import boto3, json, sys
client = boto3.client("sagemaker", region_name="us-west-2", endpoint_url=sys.argv[1],
                      aws_access_key_id=sys.argv[2], aws_secret_access_key=sys.argv[3])
client.create_cluster(ClusterName="equal", InstanceGroups=[json.loads(sys.argv[4])])
arn = client.describe_cluster(ClusterName="equal")["ClusterArn"]
for _ in range(4):
    client.add_tags(ResourceArn=arn, Tags=[{"Key": "a", "Value": "b"}])
client.delete_cluster(ClusterName="equal")
print(json.dumps("all carried out"))
"""


def test_equal_changes_of_boto3_within_a_second(running: Running, boto3_python: Path) -> None:
    """Check that equal calls of boto3, which have equal signatures, are all carried out."""
    assert honest(boto3_python, running.endpoint, EQUAL_CHANGES) == "all carried out"


def test_a_retry_of_boto3_is_carried_out(
    clusters: Callable[[str], Cluster], boto3_python: Path, tmp_path: Path
) -> None:
    """Check a retry of boto3 with an equal signature within the second.

    The Kubernetes API is not available at first.
    """
    running = FaultProxy(clusters("embedded"))
    with running.beside() as proxy:
        proxy.faults.append(
            Fault(lambda call: call.method == "POST" and "clusters" in call.path, 1, status=503)
        )
        process = subprocess.Popen(
            [
                *(*UNBROKEN, "cluster-api", "--port", "18432"),
                *("--kubeconfig", str(proxy.kubeconfig(tmp_path / "proxied"))),
                *("--credentials", str(credentials_file(tmp_path))),
                *("--node-provider", "machines"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            [line] = read_until(process, lambda line: "cluster API serves address=" in line)
            met = honest(boto3_python, line.partition("cluster API serves address=")[2])
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_SECONDS)
    assert isinstance(met, list)
    assert met[0] in (1, 2)
    assert met[1:] == [["ResourceInUse"] * 2, "honest"]


# --- attackers cannot keep others out


def test_connections_that_say_nothing_keep_nobody_out(running: Running) -> None:
    silent = [connection(running.endpoint) for _ in range(400)]
    try:
        for link in silent[::2]:
            link.sendall(b"POST / HTTP/1.1\r\nhost: a\r\n")
        assert running.call("ListClusters").status == 200
        silent[0].setblocking(False)
        assert silent[0].recv(1) == b"", "the oldest was closed for a newer one"
    finally:
        for link in silent:
            link.close()


def test_slow_requests_are_ended(running: Running) -> None:
    seen = captured(running.endpoint, "ListClusters", {"MaxResults": 5})
    with connection(running.endpoint) as head, connection(running.endpoint) as body:
        head.sendall(seen.data[:100])
        body.sendall(seen.data[:-5])
        assert body.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert head.recv(65536) == b""


def test_a_stranger_is_refused_before_the_body_is_read(running: Running) -> None:
    seen = captured(running.endpoint, "ListClusters", {}).with_header(b"content-length", b"1000000")
    changed = seen.header(b"authorization").replace(KEY.key_id.encode(), b"AKIDNOBODY")
    with connection(running.endpoint) as link:
        link.sendall(seen.with_header(b"authorization", changed).data)
        assert b"UnrecognizedClientException" in link.recv(65536)
