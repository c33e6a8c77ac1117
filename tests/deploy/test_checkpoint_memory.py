"""The chart's checkpoint memory: its name, its memory, and the pods that reach it."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from pathlib import Path

import msgspec
import pytest

from tests.deploy.charts import Object, of_kind, one_of, pod_of, render
from tests.e2e.clusters import UNBROKEN
from tests.watching import wait_until
from unbroken.cli.nodes.checkpoint_memory import memory_bytes
from unbroken.core.checkpoint_memory import PORT, SERVICE
from unbroken.kube.quantity import parse_quantity
from unbroken.nodes.checkpoint_peers import CONTENTS_PATH, Contents
from unbroken.spec.job_kinds import BATCH_JOB, JOB_KINDS

NAME = "checkpoint-memory"
MIB = 1 << 20


def memory(**values: object) -> list[Object]:
    """Return every object of the chart with the checkpoint memory."""
    return render({"checkpointMemory": {"enabled": True, **values}})


def container(found: list[Object]) -> Object:
    """Return the server's container."""
    (one,) = pod_of(one_of(found, "DaemonSet", NAME))["containers"]
    return dict(one)


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert NAME not in str(render())


def test_awss_client_finds_it_by_the_name_that_it_asks_by_default() -> None:
    service = one_of(memory(), "Service", SERVICE.partition(".")[0])
    assert SERVICE.split(".")[1:3] == [service["metadata"]["namespace"], "svc"]
    assert service["spec"]["clusterIP"] == "None"
    (port,) = service["spec"]["ports"]
    assert port["port"] == PORT
    (named,) = container(memory())["ports"]
    assert (named["name"], named["containerPort"]) == (port["targetPort"], PORT)
    elsewhere = render({"checkpointMemory": {"enabled": True}}, namespace="unbroken")
    for kind in ("Service", "DaemonSet", "NetworkPolicy"):
        places = [one["metadata"] for one in of_kind(elsewhere, kind)]
        assert [one["namespace"] for one in places if NAME in str(one)] == ["aws-hyperpod"]


@pytest.mark.parametrize("size", [1, 16, 409, 65536])
def test_the_container_may_use_what_its_checkpoints_take(size: int) -> None:
    """Files take whole pages, so the volume is larger than their bytes, and the limit than it."""
    found = memory(memoryGiB=size)
    (text,) = (one for one in container(found)["args"] if one.startswith("--memory="))
    capacity = memory_bytes(text.partition("=")[2])
    assert capacity == size << 30
    volumes = pod_of(one_of(found, "DaemonSet", NAME))["volumes"]
    (volume,) = (one["emptyDir"] for one in volumes if one["emptyDir"].get("medium") == "Memory")
    resources = container(found)["resources"]
    limit = parse_quantity(resources["limits"]["memory"])
    assert parse_quantity(resources["requests"]["memory"]) == limit
    assert capacity + 256 * MIB <= parse_quantity(volume["sizeLimit"]) <= limit - 512 * MIB


def test_only_pods_of_jobs_and_the_servers_reach_it() -> None:
    found = memory()
    (policy,) = (one for one in of_kind(found, "NetworkPolicy") if NAME in one["metadata"]["name"])
    (rule,) = policy["spec"]["ingress"]
    assert [one["port"] for one in rule["ports"]] == [PORT]
    own, *jobs = rule["from"]
    labels = one_of(found, "DaemonSet", NAME)["spec"]["template"]["metadata"]["labels"]
    assert own["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["podSelector"] == own["podSelector"]
    keys = dict.fromkeys(kind.pod_label for kind in JOB_KINDS if kind is not BATCH_JOB)
    expressions = [one["podSelector"]["matchExpressions"] for one in jobs]
    assert expressions == [[{"key": one, "operator": "Exists"}] for one in keys]
    off = render({"checkpointMemory": {"enabled": True}, "networkPolicy": {"enabled": False}})
    assert not of_kind(off, "NetworkPolicy")


def test_a_faulty_node_keeps_its_checkpoints() -> None:
    pod = pod_of(one_of(memory(), "DaemonSet", NAME))
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["automountServiceAccountToken"] is False
    chosen = pod_of(one_of(memory(nodeSelector={"gpu": "yes"}, tolerations=[]), "DaemonSet", NAME))
    assert (chosen["nodeSelector"], "tolerations" in chosen) == ({"gpu": "yes"}, False)


@pytest.mark.slow
def test_the_command_of_the_pod_serves_what_its_probe_asks(tmp_path: Path) -> None:
    one = container(memory())
    # An address of its own, which no local cluster has.
    address = f"127.63.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    assert one["command"][0] == "unbroken"
    mounts = [mount["mountPath"] for mount in one["volumeMounts"]]
    (folder,) = (word for word in one["args"] if word.startswith("--folder="))
    assert folder.partition("=")[2] in mounts
    words = [f"--folder={tmp_path}/memory" if word == folder else word for word in one["args"]]
    (variable,) = one["env"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*UNBROKEN, *one["command"][1:], *words],
            env={**os.environ, variable["name"]: address},
            stdout=output,
            stderr=output,
        )
    try:

        def answer(path: str) -> bytes:
            assert server.poll() is None
            try:
                with urllib.request.urlopen(f"http://{address}:{PORT}{path}", timeout=30) as got:
                    return bytes(got.read())
            except OSError:
                return b""

        probe = one["readinessProbe"]["httpGet"]
        wait_until(lambda: answer(probe["path"]), logs=log)
        contents = msgspec.json.decode(answer(CONTENTS_PATH), type=Contents)
        assert contents.capacity_bytes == 16 << 30
    finally:
        server.terminate()
        assert server.wait(60) == 0, log.read_text()
