"""Pods whose agent is added by the operator."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.core.job.events import CreatePod, PodName
from unbroken.errors import SpecError
from unbroken.operator.jobs.pods import AgentToInject, JobIdentity, build_pod
from unbroken.spec.job.types import JobSpec, ReplicaSpec

ORDER = CreatePod(PodName("lm-pods-0"), "pods", 0, frozenset())
AGENT = AgentToInject("unbroken:1")
STARTED_BY = [
    *("/unbroken/agent/lib/loader", "--library-path", "/unbroken/agent/lib"),
    *("/unbroken/agent/bin/python3", "-I", "-S", "-u", "/unbroken/agent/run.py"),
]


def built(
    *containers: dict[str, Any],
    agent: AgentToInject | None = AGENT,
    asked: str | None = "injected",
    **more: Any,
) -> dict[str, Any]:
    """The specification of a pod of these containers."""
    template = {"spec": {"containers": list(containers), **more}}
    spec = JobSpec((ReplicaSpec("pods", template, 1),))
    annotations = {} if asked is None else {"unbroken.dev/agent": asked}
    job = JobIdentity("default", "lm", "uid", annotations)
    found: dict[str, Any] = build_pod(job, spec, ORDER, "secret", agent=agent)["spec"]
    return found


def main(**fields: Any) -> dict[str, Any]:
    """A container that trains."""
    return {"name": "main", "image": "mine", "command": ["torchrun", "a.py"], **fields}


def test_the_agent_is_copied_and_started_with_the_command_of_the_user() -> None:
    mounts = [{"name": "data", "mountPath": "/data"}]
    given = main(args=["--lr", "1"], volumeMounts=mounts, workingDir="/work")
    volumes, inits = [{"name": "data", "emptyDir": {}}], [{"name": "mine", "image": "x"}]
    pod = built(given, volumes=volumes, initContainers=inits)
    (container,) = pod["containers"]
    assert container["command"] == [*STARTED_BY, "torchrun", "a.py"]
    assert (container["args"], container["workingDir"]) == (["--lr", "1"], "/work")
    assert container["image"] == "mine"
    first, second = pod["initContainers"]
    assert second["name"] == "mine"
    assert (first["name"], first["image"]) == ("unbroken-agent", "unbroken:1")
    assert first["command"] == ["cp", "-rT", "/opt/unbroken-agent", "/unbroken/agent"]
    mount = {"name": "unbroken-agent", "mountPath": "/unbroken"}
    assert first["volumeMounts"] == [mount]
    assert mount in container["volumeMounts"]
    assert mounts[0] in container["volumeMounts"]
    assert {"name": "unbroken-agent", "emptyDir": {}} in pod["volumes"]
    assert volumes[0] in pod["volumes"]


def test_only_the_container_that_trains_is_changed() -> None:
    sidecar = {"name": "logs", "image": "x", "command": ["sh", "-c", "tail"]}
    pod = built(sidecar, {**main(), "name": "pytorch"})
    assert pod["containers"][0]["command"] == ["sh", "-c", "tail"]
    assert [one["name"] for one in pod["containers"][0]["volumeMounts"]] == ["unbroken-agent-key"]
    assert pod["containers"][1]["command"][-2:] == ["torchrun", "a.py"]


def test_the_init_container_asks_for_no_more_than_the_pod_and_is_the_same_user() -> None:
    resources = {
        "requests": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": 8},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": 8},
    }
    context = {"runAsUser": 7, "runAsNonRoot": True, "privileged": True}
    first = built(main(resources=resources, securityContext=context))["initContainers"][0]
    assert first["resources"] == {
        "requests": {"cpu": "4", "memory": "8Gi"},
        "limits": {"memory": "8Gi"},
    }
    assert first["securityContext"] == {
        "runAsUser": 7,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    plain = built(main())["initContainers"][0]
    assert "resources" not in plain
    assert "runAsUser" not in plain["securityContext"]


@pytest.mark.parametrize(("command", "is_added"), [
    (["torchrun", "--nproc-per-node=2", "a.py"], True),
    (["/opt/venv/bin/torchrun", "a.py"], True),
    (["python3", "-u", "-m", "torch.distributed.run", "a.py"], True),
    (["torchrun", "--rdzv-backend=unbroken", "a.py"], False),
    (["/opt/conda/bin/accelerate", "launch", "a.py"], True),
    (["accelerate-launch", "a.py"], True),
    (["python3", "-u", "-m", "accelerate.commands.launch", "a.py"], True),
    (["accelerate", "test"], False),
    (["torchrun", "--rdzv_backend", "unbroken", "a.py"], False),
    (["python", "a.py"], False),
    (["python", "-m"], False),
    (["hyperpodrun", "a.py"], False),
    (["sh", "-c", "torchrun a.py"], False),
])  # fmt: skip
def test_without_a_word_on_it_the_agent_is_added_to_a_torchrun(
    command: list[str], is_added: bool
) -> None:
    pod = built(main(command=command), asked=None)
    assert ("initContainers" in pod) is is_added
    assert (pod["containers"][0]["command"] != command) is is_added
    assert (
        built(main(command=command), asked=None, agent=None)["containers"][0]["command"] == command
    )


def test_a_backend_may_be_named_in_the_environment() -> None:
    env = [{"name": "PET_RDZV_BACKEND", "value": "unbroken"}]
    assert "initContainers" not in built(main(env=env), asked=None)


def test_the_pods_of_a_job_that_names_its_image_are_left_as_they_are() -> None:
    pod = built(main(), asked="image")
    assert pod["containers"][0]["command"] == ["torchrun", "a.py"]
    assert "initContainers" not in pod


def test_nodes_that_have_the_agent_need_no_copy() -> None:
    pod = built(main(), agent=AgentToInject(command=("python", "-m", "agent")))
    assert pod["containers"][0]["command"] == ["python", "-m", "agent", "torchrun", "a.py"]
    assert "initContainers" not in pod


def test_an_operator_without_the_image_says_what_it_needs() -> None:
    with pytest.raises(SpecError, match="--agent-image"):
        built(main(), agent=None)
