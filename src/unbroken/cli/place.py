"""Which cluster a command speaks to: the options, and what they mean.

`--dir` names an embedded cluster, `--context` any other; without them it is that of KUBECONFIG,
and without that the embedded cluster of the default folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from unbroken.embedded import state
from unbroken.errors import SpecError

DEFAULT = Path("~/.unbroken")

_DIRECTORY = typer.Option(
    "--dir",
    envvar="UNBROKEN_DIR",
    help="Folder that holds all state of the cluster, and its kubeconfig.",
    show_default=str(DEFAULT),
)
Directory = Annotated[Path, _DIRECTORY]


class Output(StrEnum):
    """Forms of the answer."""

    TEXT = "text"
    JSON = "json"


# Options of every command that is about jobs.
Embedded = Annotated[
    Path | None,
    typer.Option(
        "--dir", envvar="UNBROKEN_DIR", help="Folder of an embedded cluster.", show_default=False
    ),
]
Context = Annotated[
    str | None, typer.Option("--context", help="A context of the kubeconfig.", show_default=False)
]
Namespace = Annotated[
    str, typer.Option("-n", "--namespace", help="Of the job.", show_default="the context's")
]
Form = Annotated[Output, typer.Option("-o", "--output", help="text or json.")]


def resolve(directory: Path) -> Path:
    """An absolute path, `~` expanded."""
    return directory.expanduser().absolute()


@dataclass(frozen=True, slots=True)
class Place:
    """A cluster as the options name it; nothing has been asked of it yet."""

    kubeconfig: str | None = None
    """None: what the Kubernetes client finds by itself."""
    context: str | None = None
    paths: state.Paths | None = None
    """Of an embedded cluster; None: some other cluster."""

    def require_running(self) -> None:
        """SpecError where it is an embedded cluster that does not run."""
        if self.paths is not None and state.running(self.paths) is None:
            raise SpecError(
                f"no cluster runs from {self.paths.directory}; start one with: unbroken up, "
                "or name another with --dir, --context or KUBECONFIG"
            )


def find(directory: Path | None, context: str | None) -> Place:
    """The cluster that is meant."""
    if directory is not None and context is not None:
        raise SpecError("--dir and --context name two clusters; give one of them")
    configured = os.environ.get("KUBECONFIG", "")
    if directory is None and (context or configured):
        first = Path(configured.split(os.pathsep)[0]) if configured else None
        # A folder of ours, whoever named its kubeconfig.
        is_ours = first is not None and (first.parent / "cluster.json").is_file()
        paths = state.Paths(first.parent.absolute()) if first and is_ours else None
        return Place(None, context, paths)
    paths = state.Paths(resolve(directory or DEFAULT))
    return Place(str(paths.kubeconfig), None, paths)


def cluster_of(
    kubeconfig: Path | None, context: str | None, directory: Path | None
) -> tuple[Path | str | None, str | None]:
    """Kubeconfig and context for a program that may run in a pod of the cluster it is about.

    Without a file the Kubernetes client finds its own, in a pod that of its service account.
    """
    if kubeconfig is not None:
        return kubeconfig, context
    if directory is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        return None, context
    place = find(directory, context)
    return place.kubeconfig, place.context
