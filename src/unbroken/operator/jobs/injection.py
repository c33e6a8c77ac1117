"""Injection of the agent into a pod whose image does not have it. Pure.

An init container copies the agent and its own Python from the agent's image to a volume
(`deploy/relocatable.py` makes them). The container that trains starts the agent from there, with
its own command as the agent's arguments (`agent.injected`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.errors import SpecError
from unbroken.spec import keys
from unbroken.spec.job.launch import training_container

Object = dict[str, Any]

SOURCE = "/opt/unbroken-agent"
"""Folder of the agent in its image (deploy/Containerfile)."""
VOLUME = INIT_CONTAINER = "unbroken-agent"
MOUNT = "/unbroken"
"""Mount path of the volume, in both containers. Any user may write there."""
FOLDER = f"{MOUNT}/agent"
COMMAND = (
    *(f"{FOLDER}/lib/loader", "--library-path", f"{FOLDER}/lib"),
    *(f"{FOLDER}/bin/python3", "-I", "-S", "-u", f"{FOLDER}/run.py"),
)
"""Command that starts the agent without any program or library of the image."""
SHARED_RESOURCES = ("cpu", "memory")
USER_FIELDS = ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile", "seLinuxOptions")
"""Fields of a security context that the init container has from the container that trains."""


@dataclass(frozen=True, slots=True)
class AgentToInject:
    """The agent that this operator adds to pods."""

    image: str = ""
    """Image that has the agent in `SOURCE`; empty: the nodes have it, and nothing is copied."""
    command: tuple[str, ...] = COMMAND
    """Words before the user's command."""


def inject(pod: Object, agent: AgentToInject | None) -> None:
    """Add the agent to a pod's specification. Raises SpecError if there is none to add."""
    if agent is None:
        raise SpecError(
            f"{keys.AGENT}: injected needs an operator that knows the agent's image: start it with "
            "--agent-image (the chart does)"
        )
    name = training_container(pod)
    (container,) = (item for item in pod["containers"] if item["name"] == name)
    container["command"] = [*agent.command, *(container.get("command") or ())]
    if not agent.image:
        return
    mount = {"name": VOLUME, "mountPath": MOUNT}
    container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]
    pod["volumes"] = [*(pod.get("volumes") or ()), {"name": VOLUME, "emptyDir": {}}]
    first = _init_container(container, agent.image, mount)
    pod["initContainers"] = [first, *(pod.get("initContainers") or ())]


def _init_container(container: Mapping[str, Any], image: str, mount: Object) -> Object:
    """Return the container that copies.

    It requests no more than the container that trains, so that the pod's place, quality of service
    and quota do not change.
    """
    context = container.get("securityContext") or {}
    asked = container.get("resources") or {}
    result: Object = {
        "name": INIT_CONTAINER,
        "image": image,
        # -T: after a reboot of the node the folder may already exist.
        "command": ["cp", "-rT", SOURCE, FOLDER],
        "volumeMounts": [mount],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            **{key: context[key] for key in USER_FIELDS if key in context},
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    resources = {
        kind: {name: asked[kind][name] for name in SHARED_RESOURCES if name in asked[kind]}
        for kind in ("requests", "limits")
        if asked.get(kind)
    }
    if resources:
        result["resources"] = resources
    return result
