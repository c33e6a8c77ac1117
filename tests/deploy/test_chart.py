"""Objects that the chart renders from values, and values that it refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import helm_python
import pytest
import typer
import yaml

from tests.deploy.charts import (
    CHART,
    EVERYTHING,
    NAMESPACE,
    Object,
    arguments,
    of_kind,
    one_of,
    pod_of,
    render,
)
from tests.deploy.rights import granted
from tests.tables import cases
from tests.tools import tool
from unbroken import __version__
from unbroken.cli.main import app
from unbroken.observe.server import HEALTH_PATH
from unbroken.operator.nodes.providers import PROVIDERS
from unbroken.operator.parts import PARTS, PartName
from unbroken.spec.nodes.values import NodeProvider
from unbroken.spec.schema.crd import definitions
from unbroken.wire.reports import AUDIENCE

ROOT = Path(__file__).parents[2]
SIXTY_FOUR = "0123456789abcdef" * 4


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"operator": {"namespace": "team-a"}}])
def test_it_is_without_a_fault_to_helm(values: Object) -> None:
    report = helm_python.lint(CHART, values, strict=True, kube_version="v1.33.0")
    assert report["errors"] == []
    # The recommendation of an icon.
    assert [one["path"] for one in report["messages"] if one["severity"] >= 1] == ["Chart.yaml"]


def test_definitions_are_those_of_the_source_and_outlive_the_release() -> None:
    found = of_kind(render(), "CustomResourceDefinition")
    assert {one["metadata"]["name"]: one["spec"] for one in found} == {
        one["metadata"]["name"]: one["spec"] for one in definitions()
    }
    for one in found:
        assert one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not of_kind(render({"crds": {"install": False}}), "CustomResourceDefinition")


def test_the_manifests_without_helm_are_the_same() -> None:
    made = tool("plain_manifests")
    for path, text in made.texts().items():
        assert path.read_text() == text, f"run {sys.executable} tools/{made.__name__}.py"


def test_roles_are_those_of_the_operators_parts() -> None:
    made = tool("operator_parts")
    for path, text in made.files().items():
        assert path.read_text() == text, f"run {sys.executable} tools/{made.__name__}.py"


def test_parts_name_options_and_values_that_exist() -> None:
    context = click.Context(typer.main.get_command(app))
    command = typer.main.get_command(app).get_command(context, "operator")  # type: ignore[attr-defined]
    options = {word for one in command.params for word in one.opts}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(PARTS) == set(PartName)
    for part in PARTS.values():
        assert not part.option or part.option in options
        if part.chart:
            group, key = part.chart.split(".")
            assert values[group][key] in (True, False)


@cases
def test_values_that_cannot_be_are_refused_with_their_place(values: Object, said: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert said in str(refused.value)


def test_every_value_is_described_and_has_a_default() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    described = {path: one for path, one in leaves(schema) if path != "global"}
    assert set(described) == set(defaults(values, set(described)))
    assert all(described.values())


def test_the_chart_offers_the_node_providers_that_the_operator_has() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    offered = schema["properties"]["nodes"]["properties"]["provider"]["enum"]
    assert sorted(offered) == sorted(NodeProvider) == sorted(PROVIDERS)


def leaves(schema: Object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values that are no group of others, with their descriptions."""
    for key, one in schema["properties"].items():
        inner = f"{path}.{key}".lstrip(".")
        if "description" in one:
            yield inner, one["description"]
        else:
            yield from leaves(one, inner)


def defaults(values: Object, known: set[str], path: str = "") -> Iterator[str]:
    """Yield the paths of the values in `known`, and of those that should be in it."""
    for key, one in values.items():
        inner = f"{path}.{key}".lstrip(".")
        if inner in known or not isinstance(one, dict):
            yield inner
        else:
            yield from defaults(one, known, inner)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"operator": {"namespace": "team-a"}, "metrics": {"enabled": False}},
        {"nodes": {"enabled": False}, "pytorchjobs": {"enabled": False}, "ray": {"enabled": False}},
        {
            "nodes": {"provider": "command", "command": "fix {node} {action}", "dryRun": True},
            "checks": {
                "image": "checks:1",
                "linkBandwidth": {"ml.p5.48xlarge": 30},
                "nodeBandwidth": {"ml.p5.48xlarge": 200},
                "logsClaim": "check-logs",
            },
            "operator": {"extraArgs": ["--repair-dry-run"]},
        },
        EVERYTHING,
    ],
)
def test_programs_know_the_arguments_that_they_are_given(values: Object) -> None:
    found = render(values)
    for deployment in of_kind(found, "Deployment"):
        words = arguments(found, deployment["metadata"]["name"])
        context = click.Context(typer.main.get_command(app))
        command = typer.main.get_command(app).get_command(context, words[0])  # type: ignore[attr-defined]
        assert command is not None
        command.make_context(words[0], words[1:])


def test_the_log_of_checks_goes_to_the_claim_that_is_named() -> None:
    found = render({"checks": {"logsClaim": "check-logs"}})
    pod = pod_of(one_of(found, "Deployment", "unbroken-operator"))
    [container] = pod["containers"]
    [folder] = [one for one in container["args"] if one.startswith("--check-logs=")]
    [mount] = [one for one in container["volumeMounts"] if one["name"] == "check-logs"]
    assert folder == f"--check-logs={mount['mountPath']}"
    [volume] = [one for one in pod["volumes"] if one["name"] == "check-logs"]
    assert volume["persistentVolumeClaim"] == {"claimName": "check-logs"}
    assert "check-logs" not in str(render({}))


def test_a_kubelet_asks_the_operator_where_it_answers() -> None:
    [container] = pod_of(one_of(render({}), "Deployment", "unbroken-operator"))["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": HEALTH_PATH, "port": "metrics"}
    assert f"--metrics-port={ports['metrics']}" in container["args"]
    silent = render({"metrics": {"enabled": False}})
    [container] = pod_of(one_of(silent, "Deployment", "unbroken-operator"))["containers"]
    assert "livenessProbe" not in container


@pytest.mark.parametrize(
    ("tls", "secret", "made", "scheme"),
    [
        ({}, "unbroken-cluster-api-tls", 1, "HTTPS"),
        ({"secretName": "mine"}, "mine", 0, "HTTPS"),
        ({"enabled": False}, None, 0, "HTTP"),
    ],
)
def test_the_cluster_api_has_tls(tls: Object, secret: str | None, made: int, scheme: str) -> None:
    found = render({"clusterApi": {**EVERYTHING["clusterApi"], "tls": tls}})
    assert len(of_kind(found, "Secret", "unbroken-cluster-api-tls")) == made
    pod = pod_of(one_of(found, "Deployment", "unbroken-cluster-api"))
    named = {one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    assert named.get("tls") == secret
    assert any("--tls-key" in one for one in pod["containers"][0]["args"]) is bool(secret)
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == scheme
    (port,) = one_of(found, "Service", "unbroken-cluster-api")["spec"]["ports"]
    assert port["name"] == scheme.lower()


@pytest.mark.parametrize("provider", ["none", "machines"])
def test_the_cluster_api_knows_who_makes_machines(provider: str) -> None:
    found = render({**EVERYTHING, "nodes": {"provider": provider}})
    for name in ("unbroken-operator", "unbroken-cluster-api"):
        [container] = pod_of(one_of(found, "Deployment", name))["containers"]
        assert f"--node-provider={provider}" in container["args"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Deployment", "unbroken-operator"),
        ("Deployment", "unbroken-cluster-api"),
        ("Deployment", "unbroken-page"),
        ("DaemonSet", "checkpoint-memory"),
    ],
)
def test_pods_meet_the_restricted_standard(kind: str, name: str) -> None:
    """Check the pods against Kubernetes' Pod Security Standard `restricted`."""
    pod = pod_of(one_of(render(EVERYTHING), kind, name))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    allowed = {"configMap", "emptyDir", "secret", "projected", "downwardAPI"}
    assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True


def test_pods_that_need_a_token_ask_for_it_and_only_the_daemon_is_privileged() -> None:
    found = render(EVERYTHING)
    accounts = of_kind(found, "ServiceAccount")
    assert [one["automountServiceAccountToken"] for one in accounts] == [False] * 4
    levels = {
        one["metadata"]["name"]: one["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for one in of_kind(found, "Namespace")
    }
    assert levels == {"unbroken-system": "privileged", "unbroken-checks": "privileged"}
    daemon = one_of(found, "DaemonSet", "node-daemon")
    assert daemon["metadata"]["namespace"] == "unbroken-system"


def test_no_rule_has_a_wildcard_and_none_can_widen_itself() -> None:
    for role in (*of_kind(render(EVERYTHING), "ClusterRole"), *of_kind(render(EVERYTHING), "Role")):
        for rule in role["rules"]:
            words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert "*" not in words, role["metadata"]["name"]
            assert not words & {"escalate", "bind", "impersonate", "rbac.authorization.k8s.io"}


def test_hyp_finds_the_operators_pods() -> None:
    """Check namespace and label of HyperPod's documents, and the key that `hyp` 3.12 uses."""
    deployment = one_of(render(), "Deployment", "unbroken-operator")
    assert deployment["metadata"]["namespace"] == "aws-hyperpod"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels["hp-training-control-plane"] == "hp-training-operator-controller-manager"


def test_selectors_find_what_they_are_about() -> None:
    found = render(EVERYTHING)
    workloads = [*of_kind(found, "Deployment"), *of_kind(found, "DaemonSet")]
    pods = [one["spec"]["template"]["metadata"]["labels"].items() for one in workloads]
    for one in workloads:
        wanted = one["spec"]["selector"]["matchLabels"].items()
        assert wanted <= one["spec"]["template"]["metadata"]["labels"].items()
        assert sum(wanted <= labels for labels in pods) == 1
    budget = one_of(found, "PodDisruptionBudget", "unbroken-operator")
    services = [one["spec"]["selector"] for one in of_kind(found, "Service")]
    assert len(services) == 6
    for wanted in (budget["spec"]["selector"]["matchLabels"], *services):
        assert sum(wanted.items() <= labels for labels in pods) == 1


def test_what_is_off_leaves_no_right_and_no_option() -> None:
    resuming = {name: part for name, part in PARTS.items() if part.resumes}
    off = {"enabled": False}
    values = [str(part.chart).partition(".")[0] for part in resuming.values()]
    found = render({"nodes": off, **dict.fromkeys(values, off)})
    (role,) = of_kind(found, "ClusterRole", "unbroken-operator")
    kinds = {resource for rule in role["rules"] for resource in rule["resources"]}
    resumed = {kind.plural for part in resuming.values() for kind in part.resumes}
    assert len(resumed) >= 5
    assert not kinds & {"machines", "nodechecks", "clusters", *resumed}
    assert "customresourcedefinitions" not in kinds
    given = arguments(found)
    without = {f"--without={name}" for name in ("nodes", *resuming)}
    assert without <= set(given)
    assert not [one for one in given if one.startswith(("--node-", "--repair-", "--check-"))]


def test_queues_are_left_alone_unless_kueue_is_named() -> None:
    found, queued = render({}), render({"kueue": {"enabled": True}})
    assert "--without=queues" in arguments(found)
    assert "--without=queues" not in arguments(queued)
    for rendered, is_asked in ((found, False), (queued, True)):
        (role,) = of_kind(rendered, "ClusterRole", "unbroken-operator")
        groups = {group for rule in role["rules"] for group in rule["apiGroups"]}
        assert ("kueue.x-k8s.io" in groups) is is_asked


def test_train_jobs_are_run_only_where_the_runtime_is_asked_for() -> None:
    for is_asked in (False, True):
        found = render({"trainer": {"runtime": is_asked, "resultImage": "shell:1"}})
        assert ("--without=trainer" in arguments(found)) is not is_asked
        (role,) = of_kind(found, "ClusterRole", "unbroken-operator")
        rights = {
            (one, verb)
            for rule in role["rules"]
            for one in rule["resources"]
            for verb in rule["verbs"]
        }
        assert {("pods", "patch"), ("hyperpodpytorchjobs", "create")} <= rights or not is_asked
        assert (("pods", "patch") in rights) is is_asked
        runtimes = of_kind(found, "ClusterTrainingRuntime", "unbroken-torch")
        assert len(runtimes) == is_asked
    result = runtimes[0]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = result["template"]["spec"]
    assert pod["containers"][0]["image"] == "shell:1"
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_traces_are_asked_for_by_opentelemetrys_variables() -> None:
    def environment(values: Object) -> list[Object]:
        [container] = pod_of(one_of(render(values), "Deployment", "unbroken-operator"))[
            "containers"
        ]
        found: list[Object] = container.get("env", [])
        return found

    endpoint = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}
    service = {"name": "OTEL_SERVICE_NAME", "value": "unbroken-operator"}
    more = {"name": "OTEL_BSP_SCHEDULE_DELAY", "value": "1000"}
    # A Secret that is not there costs the traces, not the operator.
    key = {"secretKeyRef": {"name": "collector-key", "key": "headers", "optional": True}}
    headers = {"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": key}
    assert environment({}) == []
    assert environment({"operator": {"extraEnv": [more]}}) == [more]
    traced: Object = {"traces": {"endpoint": endpoint["value"]}}
    assert environment(traced | {"operator": {"extraEnv": [more]}}) == [endpoint, service, more]
    assert environment(EVERYTHING) == [endpoint, service, headers]


def test_the_address_of_notifications_is_in_a_secret() -> None:
    assert not [one for one in arguments(render({})) if one.startswith("--notify")]
    assert [one for one in arguments(render(EVERYTHING)) if one.startswith("--notify")] == [
        "--notify-file=/etc/unbroken-notify/url",
        "--notify-form=slack",
        "--notify-page=https://page",
    ]
    pod = pod_of(one_of(render(EVERYTHING), "Deployment", "unbroken-operator"))
    (volume,) = [one for one in pod["volumes"] if one["name"] == "notify"]
    # A Secret that is not there costs the notifications, not the operator.
    assert volume["secret"] == {"secretName": "webhook", "optional": True, "defaultMode": 0o440}
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["notify"] == "/etc/unbroken-notify"
    with pytest.raises(helm_python.HelmError, match=r"notifications\.pageURL has no effect"):
        render({"notifications": {"pageURL": "https://page"}})


def test_an_operator_of_one_namespace_has_rights_to_jobs_there_only() -> None:
    found = render({"operator": {"namespace": "team-a"}})
    (role,) = of_kind(found, "ClusterRole", "unbroken-operator")
    kinds = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert kinds == {"nodes", "customresourcedefinitions"}
    assert not [one for one in arguments(found) if one.startswith("--webhook")]
    assert one_of(found, "Role", "unbroken-operator")["metadata"]["namespace"] == "team-a"
    assert one_of(found, "Role", "unbroken-operator-lease")["metadata"]["namespace"] == "team-a"


def test_the_authority_of_the_api_server_is_mounted_where_it_is_named() -> None:
    assert "webhook-client-ca" not in str(render())
    found = render({"webhook": {"clientCAConfigMap": "front-proxy"}})
    assert "--webhook-client-ca=/etc/unbroken-webhook/ca.crt" in arguments(found)
    pod = pod_of(one_of(found, "Deployment", "unbroken-operator"))
    assert {"name": "webhook-client-ca", "configMap": {"name": "front-proxy"}} in pod["volumes"]
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["webhook-client-ca"] == "/etc/unbroken-webhook"


def test_an_image_is_named_by_tag_or_digest() -> None:
    def image(values: Object) -> str:
        (container,) = pod_of(one_of(render(values), "Deployment", "unbroken-operator"))[
            "containers"
        ]
        named: str = container["image"]
        return named

    assert image({}) == "unbroken:0.1.0"
    assert image({"image": {"repository": "r.example:5000/unbroken", "tag": "2"}}) == (
        "r.example:5000/unbroken:2"
    )
    digest = f"sha256:{SIXTY_FOUR}"
    assert image({"image": {"tag": "2", "digest": digest}}) == f"unbroken@{digest}"


def test_a_packed_chart_holds_all_that_it_reads(tmp_path: Path) -> None:
    archive = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as chart:
        rendered = chart.render(EVERYTHING, name="unbroken", namespace=NAMESPACE)
    assert rendered["unbroken/templates/crds.yaml"].count("kind: CustomResourceDefinition") == 6


def test_chart_images_and_package_have_one_version() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == __version__
    for guide in ("docs/guide/install.md", "deploy/Containerfile"):
        named = set(re.findall(r"unbroken(?:-training)?:([0-9][\w.]*)", (ROOT / guide).read_text()))
        assert named == {__version__}, guide


def test_pages_tell_one_way_to_keep_values_over_an_upgrade() -> None:
    told = [
        line
        for page in (ROOT / "docs").rglob("*.md")
        for line in page.read_text().splitlines()
        if "helm upgrade unbroken" in line
    ]
    assert len(told) >= 3
    assert all(" --reset-then-reuse-values" in line for line in told)


def test_the_notes_point_at_a_page_with_a_first_job() -> None:
    with helm_python.Chart.load(CHART) as chart:
        notes = chart.render({}, name="unbroken", namespace=NAMESPACE)[
            "unbroken/templates/NOTES.txt"
        ]
    assert "docs/guide/install.md#first-job" in notes
    assert "\n## First job\n" in (ROOT / "docs/guide/install.md").read_text()


def test_the_page_and_the_operator_name_each_other() -> None:
    values = {"page": {"enabled": True, "hosts": ["a.example.com", "b.example.com"]}}
    found = render(values, name="team", namespace="team-ns")
    words = arguments(found, "team-unbroken-page")
    assert [one for one in words if one.startswith("--name=")] == [
        "--name=a.example.com",
        "--name=b.example.com",
    ]
    assert "--operator=team-unbroken-reports.team-ns.svc:8091" in words
    operator = arguments(found, "team-unbroken-operator")
    assert "--reports-reader=team-ns/team-unbroken-page" in operator
    assert "--reports-port=8091" in operator
    (token,) = (
        source["serviceAccountToken"]
        for volume in pod_of(one_of(found, "Deployment", "team-unbroken-page"))["volumes"]
        for source in volume.get("projected", {}).get("sources", ())
    )
    assert (token["audience"], f"--operator-token=/var/run/secrets/unbroken/{token['path']}") == (
        AUDIENCE,
        words[-1],
    )
    reports = one_of(found, "Service", "team-unbroken-reports")["spec"]
    assert reports["clusterIP"] == "None"
    policy = one_of(found, "NetworkPolicy", "team-unbroken-operator")["spec"]
    (rule,) = (one for one in policy["ingress"] if one["ports"][0]["port"] == 8091)
    (label,) = (one["podSelector"]["matchLabels"] for one in rule["from"])
    page = one_of(found, "Deployment", "team-unbroken-page")["spec"]["template"]["metadata"]
    assert label.items() <= page["labels"].items()


def test_without_the_page_there_is_nothing_of_it() -> None:
    found = render({**EVERYTHING, "page": {"enabled": False}})
    assert not [one for one in found if one["metadata"]["name"].endswith(("-page", "-reports"))]
    assert not [one for one in arguments(found) if one.startswith("--reports")]


def test_the_page_may_read_no_objects_but_jobs() -> None:
    found = render({"page": {"enabled": True}})
    assert granted(found, "unbroken-page") == {
        ("tokenreviews.authentication.k8s.io", "create"),
        ("hyperpodpytorchjobs.sagemaker.amazonaws.com", "list"),
    }
