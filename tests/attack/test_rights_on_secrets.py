"""An attacker in the operator could read, change and list every Secret of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import yaml

from tests.apiclient import Api
from tests.deploy.charts import EVERYTHING, NAMESPACE, of_kind, render
from tests.deploy.conftest import plane as plane
from tests.deploy.planes import Plane
from tests.e2e.control import ApiPlace

OPERATOR = "unbroken-operator"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"


@pytest.mark.parametrize(
    "values", [{}, EVERYTHING, {"operator": {"namespace": "team-a"}}], ids=["", "all", "one"]
)
def test_no_role_of_the_chart_gives_more_of_secrets_than_to_make_them(values: Any) -> None:
    found = render(values)
    verbs = {
        verb
        for role in (*of_kind(found, "ClusterRole"), *of_kind(found, "Role"))
        for rule in role["rules"]
        for verb in rule["verbs"]
        if "secrets" in rule["resources"]
    }
    assert verbs == {"create"}


@pytest.mark.slow
@pytest.mark.realkube
def test_the_api_server_lets_the_operator_make_secrets_and_nothing_else(plane: Plane) -> None:
    """Check `kubectl auth can-i --list` as the operator, and its reads."""
    plane.install({"metrics": {"enabled": False}})
    config = yaml.safe_load(plane.account(OPERATOR).read_text())
    token = config["users"][0]["user"]["token"]
    with closing(Api(ApiPlace(plane.cluster.url, token, plane.cluster.ca))) as api:  # type: ignore[arg-type]
        for namespace in ("default", NAMESPACE, "kube-system"):
            assert set(secret_verbs(api, namespace)) == {"create"}
        key = f"/api/v1/namespaces/{NAMESPACE}/secrets/unbroken-operator-key"
        for path in ("/api/v1/secrets", "/api/v1/namespaces/kube-system/secrets", key):
            assert api.get(path).code == 403
        assert api.delete(key).code == 403


def secret_verbs(api: Api, namespace: str) -> Iterator[str]:
    """Yield the verbs that an account may use on Secrets of a namespace, as the server reports."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    for rule in api.post(REVIEWS, review).made["status"]["resourceRules"]:
        if {"secrets", "*"} & set(rule["resources"]) and {"", "*"} & set(rule["apiGroups"]):
            yield from rule["verbs"]
