"""Answers to an AdmissionReview, and the certificate of the webhook."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from tests.operator.conftest import job
from unbroken.errors import PeerError, SpecError
from unbroken.operator.webhook.certificates import DAY, Authority
from unbroken.operator.webhook.registration import WebhookOptions, configuration, service_of
from unbroken.operator.webhook.review import answered, asked, judged

Object = dict[str, Any]
QUEUE = "kueue.x-k8s.io/queue-name"
NAMES = ["127.0.0.1"]


def changed(job: Object, path: str, value: Any) -> Object:
    """Return the job with another value at a path."""
    made = copy.deepcopy(job)
    *parents, last = path.split("/")
    place = made
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    place[last] = value
    return made


def stands(job: Object, type: str) -> Object:
    """Return the job with a condition."""
    condition = {"type": type, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return changed(job, "status/conditions", [condition])


def review(new: Object, old: Object | None = None) -> Object:
    """Return the response to a review."""
    request: Object = {"uid": "u1", "namespace": "ns", "object": new, "oldObject": old}
    question = asked(json.dumps({"request": request}).encode())
    verdict, _ = judged(question)
    response: Object = answered(question, verdict)["response"]
    assert response["uid"] == "u1"
    return response


BAD = changed(job(), "spec/nprocPerNode", "all")


def test_every_problem_is_named_with_its_path() -> None:
    worse = changed(BAD, "metadata/annotations", {"unbroken.dev/oops": "1"})
    response = review(worse)
    assert response["allowed"] is False
    status = response["status"]
    assert (status["code"], status["reason"]) == (422, "Invalid")
    fields = [one["field"] for one in status["details"]["causes"]]
    assert fields == ["spec.nprocPerNode", "metadata.annotations[unbroken.dev/oops]"]
    assert all(field in status["message"] for field in fields)


def test_a_good_job_is_allowed_with_warnings() -> None:
    response = review(changed(job(), "spec/nprocPerNode", 4))
    assert response["allowed"] is True
    assert response["warnings"][0].startswith("spec.nprocPerNode: sagemaker-hyperpod 3.12")


def test_a_job_that_was_bad_before_can_be_changed_elsewhere_and_can_go() -> None:
    assert review(changed(BAD, "metadata/labels", {"a": "b"}), BAD)["allowed"]
    assert not review(changed(BAD, "spec/nprocPerNode", "x"), BAD)["allowed"]
    leaving = changed(BAD, "metadata/deletionTimestamp", "2026-01-01T00:00:00Z")
    assert review(leaving, job())["allowed"]


@pytest.mark.parametrize(
    ("state", "is_allowed"),
    [("Running", False), ("Created", False), ("Suspended", True), ("Failed", True)],
)
def test_the_queue_of_a_running_job_stays(state: str, is_allowed: bool) -> None:
    old = stands(changed(job(), "metadata/labels", {QUEUE: "a"}), state)
    response = review(changed(old, "metadata/labels", {QUEUE: "b"}), old)
    assert response["allowed"] is is_allowed
    if not is_allowed:
        (cause,) = response["status"]["details"]["causes"]
        assert cause["field"] == f"metadata.labels[{QUEUE}]"


def test_what_takes_effect_later_or_never_is_warned_of() -> None:
    running = stands(job(), "Running")
    more = changed(running, "spec/replicaSpecs/0/replicas", 3)
    assert "next full start" in review(more, running)["warnings"][0]
    queued = changed(running, "metadata/labels", {QUEUE: "a"})
    assert (
        "waits in its queue anew"
        in review(changed(queued, "spec/replicaSpecs/0/replicas", 3), queued)["warnings"][0]
    )
    ended = stands(job(), "Completed")
    late = review(changed(ended, "spec/replicaSpecs/0/replicas", 3), ended)
    assert "has ended" in late["warnings"][0]
    assert "warnings" not in review(changed(running, "metadata/labels", {"a": "b"}), running)


@pytest.mark.parametrize(
    "body", [None, [], {}, {"request": {"uid": 1}}, {"request": {"uid": "u", "object": "x"}}]
)
def test_what_is_no_review_is_told_so(body: object) -> None:
    with pytest.raises(PeerError):
        asked(json.dumps(body).encode())


# --- certificates

NOW = 1_800_000_000.0
MASTER = bytes(range(32))


def test_every_operator_derives_the_same_authority_from_the_key() -> None:
    one, other = Authority.of(MASTER), Authority.of(MASTER)
    assert one.certificate == other.certificate
    assert Authority.of(bytes(32)).certificate != one.certificate
    authority = x509.load_pem_x509_certificate(one.certificate)
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_any_operators_certificate_is_believed_by_who_trusts_the_authority() -> None:
    leaves = [Authority.of(MASTER).issue(["webhook.ns.svc"], NOW) for _ in range(2)]
    assert leaves[0].key != leaves[1].key
    authority = x509.load_pem_x509_certificate(Authority.of(MASTER).certificate)
    store = Store([authority])
    moment = datetime.fromtimestamp(NOW + DAY, UTC)
    verifier = (
        PolicyBuilder()
        .store(store)
        .time(moment)
        .build_server_verifier(x509.DNSName("webhook.ns.svc"))
    )
    for leaf in leaves:
        verifier.verify(x509.load_pem_x509_certificate(leaf.certificate), [])
    stranger = Authority.of(bytes(32)).issue(["webhook.ns.svc"], NOW)
    with pytest.raises(VerificationError):
        verifier.verify(x509.load_pem_x509_certificate(stranger.certificate), [])


def test_a_certificate_is_short_lived_and_renewed_long_before_its_end() -> None:
    leaf = Authority.of(MASTER).issue(NAMES, NOW)
    found = x509.load_pem_x509_certificate(leaf.certificate)
    assert found.not_valid_after_utc.timestamp() == NOW + 7 * DAY
    assert leaf.renewal == NOW + 3 * DAY
    assert found.not_valid_before_utc.timestamp() < NOW, "clocks differ"


def test_the_webhook_is_reached_by_its_service_or_on_loopback() -> None:
    local = configuration(WebhookOptions(), 1234, b"pem")["webhooks"][0]["clientConfig"]
    assert local["url"] == "https://127.0.0.1:1234/validate"
    options = WebhookOptions(9443, service_of("ns/hook"))
    (webhook,) = configuration(options, 9443, b"pem")["webhooks"]
    service = {"namespace": "ns", "name": "hook", "path": "/validate", "port": 443}
    assert webhook["clientConfig"]["service"] == service
    assert (options.host, options.names()) == ("0.0.0.0", ["hook.ns.svc"])
    for text in ("hook", "ns/", "/hook", "a/b/c"):
        with pytest.raises(SpecError, match="NAMESPACE/NAME"):
            service_of(text)
