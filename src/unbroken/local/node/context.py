"""State that all pods of one node share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from unbroken.local.node.pods.events import Note, Object
from unbroken.local.node.processes.limits import Limits
from unbroken.local.node.processes.process import Launcher

from .addresses import PodAddresses
from .api import NodeApi

PASSED_ON = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
)  # fmt: skip
"""Variables of the host that stand in for those of an image."""
STAND_INS = Path(__file__).parent / "bin"
"""Commands that pods find before others of their names: `hyperpodrun`, which starts the pod's own
or `unbrokenrun`."""


@dataclass(slots=True)
class NodeContext:
    """Shared by the workers of one node; made by the driver."""

    name: str
    address: str
    directory: Path
    allocatable: Mapping[str, str]
    api: NodeApi
    launcher: Launcher
    limits: Limits
    addresses: PodAddresses
    session: aiohttp.ClientSession
    clock: Callable[[], float]
    """Seconds since the epoch that never go back."""
    record: Callable[[Object, Note], None]
    """Publish an event about a pod."""
    api_host: str = ""
    api_port: str = ""
    gpus: dict[int, str] = field(default_factory=dict)
    """UID of the pod that has each GPU."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Python environments by the name of the image that each replaces."""


def base_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that every container starts from; our own commands are on its PATH."""
    result = {name: environ[name] for name in PASSED_ON if name in environ}
    result["PATH"] = with_own_commands(result.get("PATH", os.defpath))
    return result


def with_image(
    variables: Mapping[str, str], image: str, environments: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables with the Python environment that replaces an image, if one does.

    An environment is given for a name with its tag, or for all tags of a name.
    """
    name = image.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    untagged = head if colon and "/" not in tag else name
    for known in (image, name, untagged):
        if directory := environments.get(known):
            path = os.pathsep.join([f"{directory}/bin", variables.get("PATH", os.defpath)])
            return {**variables, "PATH": path, "VIRTUAL_ENV": directory}
    return dict(variables)


def with_own_commands(path: str) -> str:
    """Return a PATH with our stand-ins first and our own commands last."""
    places = [place for place in path.split(os.pathsep) if place != str(STAND_INS)]
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([str(STAND_INS), *places, *([own] if own not in places else [])])
