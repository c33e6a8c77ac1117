"""Environment, command line, volumes, addresses and limits, from values alone."""

from __future__ import annotations

import base64
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.local.node.node_samples import container, pod
from tests.tables import cases
from unbroken.errors import SpecError, WorldError
from unbroken.local.networks import PodAddresses, node_address
from unbroken.local.node.driver import admission, pod_requests
from unbroken.local.node.pods.environment import (
    NO_IMAGE,
    ConfigProblem,
    EnvironmentSources,
    command_line,
    environment,
    expand,
    references,
)
from unbroken.local.node.pods.pod_worker import refuse_unsupported
from unbroken.local.node.pods.volumes import (
    Claims,
    Directory,
    File,
    Files,
    HostPath,
    VolumeProblem,
    content,
    hosts_text,
    mounts,
    provide,
    without_namespaces,
)
from unbroken.local.node.processes.isolation import Isolation, Mount
from unbroken.local.node.processes.limits import hierarchy, own_group, settings, weight

SECRET = {"data": {"key": base64.b64encode(b"hidden").decode(), "bad": "gA=="}}
CONFIG = {"data": {"key": "shown", "no variable!": "x"}, "binaryData": {"bin": "AAE="}}


def around(**fields: Any) -> EnvironmentSources:
    """Return the sources of a test pod's environment."""
    given = {
        "pod": pod(nodeName="n1"),
        "pod_ip": "127.64.0.9",
        "host_ip": "127.64.0.1",
        "node_name": "n1",
        "allocatable": {"cpu": "4", "memory": "8Gi"},
        "config_maps": {"cm": CONFIG, "gone": None},
        "secrets": {"s": SECRET, "gone": None},
        "base": {"PATH": "/bin"},
    }
    return EnvironmentSources(**{**given, **fields})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$(NOPE)", "$(NOPE)"),
        ("$A", "$A"),
        ("$(A", "$(A"),
        ("$", "$"),
        ("$$", "$"),
        ("$(C)", "$(A)"),
    ],
)
def test_expansion(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2", "C": "$(A)"}) == expected


@cases
def test_sources_of_variables(entry: dict[str, Any], expected: str | None) -> None:
    resources = {"requests": {"cpu": "250m"}, "limits": {"memory": "64Mi"}}
    given = container("main", env=[{"name": "X", **entry}], resources=resources)
    assert environment(given, around()).get("X") == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"configMapKeyRef": {"name": "gone", "key": "k"}}, 'configmap "gone" not found'),
        ({"secretKeyRef": {"name": "gone", "key": "k"}}, 'secret "gone" not found'),
        (
            {"configMapKeyRef": {"name": "cm", "key": "k"}},
            "couldn't find key k in ConfigMap ns/cm",
        ),
        ({"secretKeyRef": {"name": "s", "key": "bad"}}, "the value of key bad cannot be"),
        ({"fieldRef": {"fieldPath": "spec.nope"}}, "fieldPath spec.nope is not supported"),
    ],
)
def test_sources_that_are_missing_are_config_errors(source: dict[str, Any], message: str) -> None:
    given = container("main", env=[{"name": "X", "valueFrom": source}])
    with pytest.raises(ConfigProblem, match=message) as caught:
        environment(given, around())
    assert caught.value.reason == "CreateContainerConfigError"


def test_later_variables_override_and_may_refer_to_earlier_ones() -> None:
    given = container(
        "main",
        envFrom=[
            {"configMapRef": {"name": "cm"}, "prefix": "C_"},
            {"secretRef": {"name": "gone", "optional": True}},
        ],
        env=[{"name": "C_key", "value": "$(C_key)!"}, {"name": "D", "value": "$(C_key)$(E)"}],
    )
    found = environment(given, around(api_host="127.0.0.1", api_port="6443"))
    assert found["C_key"] == "shown!"
    assert found["D"] == "shown!$(E)"
    assert "C_no variable!" not in found
    assert found["HOSTNAME"] == "p"
    assert found["KUBERNETES_SERVICE_PORT"] == "6443"


def test_arguments_alone_are_the_whole_line() -> None:
    assert command_line({"name": "main", "args": ["sh", "-c", "$(A)"]}, {"A": "1"})[2] == "1"


def test_a_command_is_needed_and_is_expanded() -> None:
    given = container("main", args=["$(A)", "$$(A)"])
    assert command_line({**given, "command": ["$(A)x"]}, {"A": "1"}) == ["1x", "1", "$(A)"]
    with pytest.raises(ConfigProblem, match=NO_IMAGE) as caught:
        command_line({"name": "main", "image": "x"}, {})
    assert caught.value.reason == "CreateContainerError"


def test_references_are_found_wherever_a_pod_names_them() -> None:
    spec = {
        "containers": [
            container(
                "a",
                envFrom=[{"configMapRef": {"name": "m1"}}, {"secretRef": {"name": "s1"}}],
                env=[{"name": "X", "valueFrom": {"secretKeyRef": {"name": "s2", "key": "k"}}}],
            )
        ],
        "initContainers": [
            container("i", env=[{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "m2"}}}])
        ],
        "volumes": [
            {"name": "v", "secret": {"secretName": "s3"}},
            {"name": "w", "projected": {"sources": [{"configMap": {"name": "m3"}}]}},
        ],
    }
    assert references(spec) == ({"m1", "m2", "m3"}, {"s1", "s2", "s3"})


# --- volumes


@pytest.mark.parametrize(
    ("volume", "expected"),
    [
        ({"emptyDir": {}}, Directory()),
        ({"emptyDir": {"medium": "Memory"}}, Directory(is_in_memory=True)),
        ({"hostPath": {"path": "/x", "type": "File"}}, HostPath("/x", "File")),
        (
            {"configMap": {"name": "cm", "items": [{"key": "key", "path": "a/b", "mode": 0o400}]}},
            Files({"a/b": File(b"shown", 0o400)}),
        ),
        ({"configMap": {"name": "gone", "optional": True}}, Files({})),
        (
            {"secret": {"secretName": "s", "defaultMode": 0o440, "items": [
                {"key": "key", "path": "k"}]}},
            Files({"k": File(b"hidden", 0o440)}),
        ),
        (
            {"downwardAPI": {"items": [
                {"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]}},
            Files({"n": File(b"p", 0o644)}),
        ),
        (
            {"projected": {"sources": [
                {"serviceAccountToken": {"path": "token"}},
                {"secret": {"name": "s", "items": [{"key": "key", "path": "k"}]}}]}},
            Files({"k": File(b"hidden", 0o644)}),
        ),
        ({"persistentVolumeClaim": {"claimName": "c"}}, HostPath("/data", "DirectoryOrCreate")),
    ],
)  # fmt: skip
def test_what_volumes_hold(volume: dict[str, Any], expected: object) -> None:
    claims = Claims(
        claims={"c": {"spec": {"volumeName": "pv"}}},
        volumes={"pv": {"spec": {"hostPath": {"path": "/data"}}}},
    )
    assert content({"name": "v", **volume}, around(), claims) == expected


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        ({"configMap": {"name": "gone"}}, 'configmap "gone" not found'),
        ({"secret": {"secretName": "gone"}}, 'secret "gone" not found'),
        (
            {"configMap": {"name": "cm", "items": [{"key": "k", "path": "p"}]}},
            "references non-existent config key: k",
        ),
        ({"persistentVolumeClaim": {"claimName": "gone"}}, 'claim "gone" not found'),
        ({"persistentVolumeClaim": {"claimName": "new"}}, "is not bound"),
        ({"nfs": {"server": "s", "path": "/"}}, "no volumes of kind nfs"),
    ],
)
def test_volumes_that_cannot_be_provided_say_why(volume: dict[str, Any], message: str) -> None:
    with pytest.raises(VolumeProblem, match=message):
        content({"name": "v", **volume}, around(), Claims(claims={"new": {"spec": {}}}))


def test_nothing_waits_for_the_volume_that_every_pod_is_given() -> None:
    sources = [{"configMap": {"name": "gone"}}, {"serviceAccountToken": {"path": "token"}}]
    volume = {"name": "kube-api-access-x", "projected": {"sources": sources}}
    assert content(volume, around(), Claims()) == Files({})


def test_files_of_a_volume_have_their_modes_and_stay_inside(tmp_path: Path) -> None:
    made = provide("v", Files({"a/b": File(b"x", 0o400)}), tmp_path, "u1")
    assert (made / "a/b").read_bytes() == b"x"
    assert (made / "a/b").stat().st_mode & 0o777 == 0o400
    with pytest.raises(ConfigProblem, match="leaves its volume"):
        provide("v", Files({"../b": File(b"x", 0o400)}), tmp_path, "u1")


@pytest.mark.parametrize(
    ("type", "exists", "is_fine"),
    [
        ("", False, True),
        ("Directory", False, False),
        ("DirectoryOrCreate", False, True),
        ("Directory", True, True),
        ("File", True, False),
        ("FileOrCreate", False, True),
        ("Socket", True, False),
    ],
)
def test_types_of_host_paths(tmp_path: Path, type: str, exists: bool, is_fine: bool) -> None:
    path = tmp_path / "x"
    if exists:
        path.mkdir()
    if is_fine:
        assert provide("v", HostPath(str(path), type), tmp_path, "u1") == path
        assert path.exists()
    else:
        with pytest.raises(VolumeProblem, match="type check failed"):
            provide("v", HostPath(str(path), type), tmp_path, "u1")


def test_mounts_of_a_container(tmp_path: Path) -> None:
    given = pod(volumes=[{"name": "v", "emptyDir": {}}, {"name": "c", "configMap": {}}])
    main = container(
        "main",
        volumeMounts=[
            {"name": "v", "mountPath": "/data/", "subPathExpr": "$(NAME)/x"},
            {"name": "c", "mountPath": "/etc/c"},
        ],
    )
    paths = {"v": tmp_path / "v", "c": tmp_path / "c"}
    found = mounts(main, given, paths, {"NAME": "n"})
    assert found == [
        Mount(str(tmp_path / "v/n/x"), "/data"),
        Mount(str(tmp_path / "c"), "/etc/c", read_only=True),
    ]
    assert (tmp_path / "v/n/x").is_dir()


def test_a_sub_path_cannot_leave_its_volume_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v/link").symlink_to("/etc")
    main = container("main", volumeMounts=[{"name": "v", "mountPath": "/d", "subPath": "link"}])
    with pytest.raises(ConfigProblem, match="leaves its volume"):
        mounts(main, pod(volumes=[{"name": "v"}]), {"v": tmp_path / "v"}, {})


def test_without_namespaces_only_volumes_at_their_own_place_will_do() -> None:
    without_namespaces([Mount("/etc", "/etc")], Isolation.NONE, {})
    without_namespaces([Mount("/etc", "/data")], Isolation.USER, {})
    with pytest.raises(ConfigProblem, match="nothing can be mounted at /data"):
        without_namespaces([Mount("/etc", "/data")], Isolation.NONE, {})


def test_without_namespaces_the_agents_token_is_named_where_it_is() -> None:
    variables = {"UNBROKEN_AGENT_KEY_FILE": "/var/run/unbroken/token"}
    token = Mount("/node/pods/u/volumes/t", "/var/run/unbroken", read_only=True)
    without_namespaces([token], Isolation.USER, variables)
    assert variables["UNBROKEN_AGENT_KEY_FILE"] == "/var/run/unbroken/token"
    without_namespaces([token], Isolation.NONE, variables)
    assert variables["UNBROKEN_AGENT_KEY_FILE"] == "/node/pods/u/volumes/t/token"


def test_grpc_probes_are_refused_and_not_forgotten() -> None:
    with pytest.raises(ConfigProblem, match="livenessProbe: this node runs no grpc probes"):
        refuse_unsupported(container("main", livenessProbe={"grpc": {"port": 1}}))


def test_the_hosts_file_names_the_pod_and_its_aliases() -> None:
    given = pod(subdomain="sub", hostAliases=[{"ip": "1.2.3.4", "hostnames": ["a", "b"]}])
    lines = hosts_text(given, "127.64.0.2").splitlines()
    assert "127.64.0.2\tp.sub.ns.svc.cluster.local\tp" in lines
    assert "1.2.3.4\ta\tb" in lines


# --- addresses, limits, what fits


def test_addresses_are_kept_taken_once_and_used_again_last() -> None:
    pool = PodAddresses(3)
    pool.keep(["127.64.3.2"])
    first, second = pool.take(), pool.take()
    assert (first, second) == ("127.64.3.3", "127.64.3.4")
    pool.free(first)
    assert pool.take() == "127.64.3.5"


def test_every_address_of_the_node_can_be_had_and_no_more() -> None:
    pool = PodAddresses(0)
    taken = {pool.take() for _ in range(253)}
    assert len(taken) == 253
    assert node_address(0) not in taken
    with pytest.raises(WorldError):
        pool.take()
    pool.free("127.64.0.9")
    assert pool.take() == "127.64.0.9"


def test_a_node_number_beyond_the_addresses_is_refused() -> None:
    with pytest.raises(SpecError):
        node_address(200 * 256)


@cases
def test_limits_as_cgroup_files(resources: dict[str, Any], expected: dict[str, str]) -> None:
    assert settings(resources) == expected
    assert weight(Decimal(100_000)) == 10_000


def test_the_version_two_hierarchy_is_found_among_others() -> None:
    mountinfo = (
        "25 30 0:23 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "26 30 0:24 / /sys/fs/cgroup/unified rw shared:3 - cgroup2 cgroup2 rw\n"
    )
    assert hierarchy(mountinfo) == "/sys/fs/cgroup/unified"
    assert hierarchy("") is None
    assert own_group("4:memory:/a\n0::/user.slice/b\n") == "/user.slice/b"


def test_requests_of_a_pod_count_sidecars_and_the_largest_init_container() -> None:
    def asking(name: str, cpu: str, **fields: Any) -> dict[str, Any]:
        return container(name, resources={"requests": {"cpu": cpu}}, **fields)

    given = pod(
        asking("a", "1"),
        container("b", resources={"limits": {"cpu": "2"}}),
        initContainers=[asking("s", "500m", restartPolicy="Always"), asking("i", "6")],
        overhead={"cpu": "250m"},
    )
    assert pod_requests(given)["cpu"] == Decimal("6.75")


@pytest.mark.parametrize(
    ("asked", "used", "message"),
    [
        ({"cpu": "2"}, {"cpu": "2"}, None),
        ({"cpu": "3"}, {"cpu": "2"}, "cpu, requested: 3000, used: 2000, capacity: 4000"),
        ({"nvidia.com/gpu": "1"}, {}, "nvidia.com/gpu, requested: 1, used: 0, capacity: 0"),
        ({"nvidia.com/gpu": "0"}, {}, None),
    ],
)
def test_what_does_not_fit_is_rejected(
    asked: dict[str, str], used: dict[str, str], message: str | None
) -> None:
    def of(requests: dict[str, str]) -> dict[str, Any]:
        return pod(container("main", resources={"requests": requests}))

    found = admission(of(asked), [of(used)], {"cpu": "4", "pods": "110"})
    if message is None:
        assert found is None
    else:
        assert found is not None
        assert found.message.endswith(message)
        assert found.reason == f"OutOf{next(iter(asked))}"


def test_no_more_pods_than_the_node_takes() -> None:
    found = admission(pod(), [pod(), pod()], {"pods": "2"})
    assert found is not None
    assert found.reason == "OutOfpods"
