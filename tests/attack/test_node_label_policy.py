"""Root on one node could label every other node for replacement.

The daemon's ClusterRole patches any Node, because RBAC cannot name the Node that a pod runs on.
The chart now brings an admission policy that lets the daemon's account change only its own Node.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.deploy.charts import CHART, EVERYTHING, of_kind, one_of, render

Object = dict[str, Any]
POLICY, BINDING = "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
NAME = "unbroken-node-daemon"
NODE_NAME = "authentication.kubernetes.io/node-name"
DAEMON = "system:serviceaccount:unbroken-system:node-daemon"


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_policy_is_on_by_default_and_denies(values: Object) -> None:
    found = render(values)
    spec = one_of(found, POLICY, NAME)["spec"]
    assert spec["failurePolicy"] == "Fail"
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert rule["resources"] == ["nodes", "nodes/*"]
    assert "UPDATE" in rule["operations"]
    binding = one_of(found, BINDING, NAME)["spec"]
    assert binding == {"policyName": NAME, "validationActions": ["Deny"]}


def test_the_policy_is_about_the_daemon_s_account_wherever_it_is() -> None:
    found = render({"nodeDaemon": {"namespace": "elsewhere"}})
    (account,) = [
        one
        for one in of_kind(found, "ServiceAccount", "node-daemon")
        if one["metadata"]["namespace"] == "elsewhere"
    ]
    (condition,) = one_of(found, POLICY, NAME)["spec"]["matchConditions"]
    place = f"{account['metadata']['namespace']}:{account['metadata']['name']}"
    assert (
        condition["expression"] == f"request.userInfo.username == 'system:serviceaccount:{place}'"
    )


@pytest.mark.parametrize(
    "values", [{"nodeDaemon": {"ownNodeOnly": False}}, {"nodeDaemon": {"enabled": False}}]
)
def test_it_goes_where_it_is_turned_off_or_there_is_no_daemon(values: Object) -> None:
    found = render(values)
    assert of_kind(found, POLICY) == of_kind(found, BINDING) == []


def test_older_clusters_do_not_get_what_they_do_not_serve() -> None:
    """Check that older clusters get no objects that they do not serve.

    Helm's library renders for one version only; an installation on 1.20 is in tests/deploy.
    """
    text = (CHART / "templates/node-daemon-policy.yaml").read_text()
    assert '"admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"' in text
    assert 'semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version' in text


CASES: list[tuple[str, str, Object | None, str, bool | None]] = [
    ("its own node", DAEMON, {NODE_NAME: ["n1"]}, "n1", True),
    ("another node", DAEMON, {NODE_NAME: ["n1"]}, "n2", False),
    ("a token that names no node", DAEMON, {"other": ["n1"]}, "n1", False),
    ("a token without extra", DAEMON, None, "n1", False),
    ("no name of a node", DAEMON, {NODE_NAME: []}, "n1", False),
    ("two names", DAEMON, {NODE_NAME: ["n1", "n2"]}, "n1", False),
    ("all nodes at once", DAEMON, {NODE_NAME: ["n1"]}, "", False),
    ("a kubelet", "system:node:n1", None, "n2", None),
    ("the operator", "system:serviceaccount:aws-hyperpod:unbroken", None, "n2", None),
    ("a namesake", "system:serviceaccount:team-a:node-daemon", {NODE_NAME: ["n1"]}, "n2", None),
]
"""Cases: name, user, `extra`, node, and the answer; None: the policy does not apply."""


@pytest.mark.slow  # Its engine is not among the tools of development.
@pytest.mark.parametrize(
    ("user", "extra", "node", "answer"), [one[1:] for one in CASES], ids=[one[0] for one in CASES]
)
def test_common_expression_language_says_what_is_meant(
    user: str, extra: Object | None, node: str, answer: bool | None
) -> None:
    engine = pytest.importorskip(
        "cel_expr_python.cel", reason="pip install cel-expr-python, Google's CEL, to evaluate it"
    )
    spec = one_of(render(), POLICY, NAME)["spec"]
    env = engine.NewEnv(variables={"request": engine.Type.DYN})
    info: Object = {"username": user, **({} if extra is None else {"extra": extra})}
    given = {"request": {"userInfo": info, "name": node, "operation": "UPDATE"}}

    def holds(expression: str) -> bool:
        return env.compile(expression).eval(data=given).value() is True

    assert holds(spec["matchConditions"][0]["expression"]) is (answer is not None)
    if answer is not None:
        assert holds(spec["validations"][0]["expression"]) is answer


def test_the_file_for_clusters_without_helm_is_the_chart_s() -> None:
    file = CHART.parents[1] / "node-daemon-policy.yaml"
    listed = [one for one in yaml.safe_load_all(file.read_text()) if one]
    found = render()
    for one in listed:
        assert one["spec"] == one_of(found, one["kind"], NAME)["spec"]
    assert [one["kind"] for one in listed] == [POLICY, BINDING]
