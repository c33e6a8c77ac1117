"""Options that many commands share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from .app import option
from .place import DEFAULT, ClusterPlace, Use, find
from .show import print_value

if TYPE_CHECKING:
    from .connection import Cluster

T = TypeVar("T")


class Output(StrEnum):
    """Forms of the output of a command."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """True if the output is for programs."""
        return self is not Output.TEXT

    def print(self, value: object) -> None:
        """Print a value as JSON or YAML."""
        print_value(value, self)


class ListOutput(StrEnum):
    """Forms of a list; `wide` has more columns, `name` is one name a line."""

    TEXT = "text"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"


Form = Annotated[Output, typer.Option("-o", "--output", help="Output format: text, json or yaml.")]
ListForm = Annotated[
    ListOutput,
    typer.Option(
        "-o",
        "--output",
        help="Output format: text, wide (more columns), name (names only), json or yaml.",
    ),
]
Watching = Annotated[
    bool,
    typer.Option("-w", "--watch", help="Print each row again when it changes. Ctrl-C ends it."),
]
"""Option of commands that list objects of a cluster."""
Directory = Annotated[
    Path,
    typer.Option(
        "--dir",
        envvar="UNBROKEN_DIR",
        help="Folder with all state of the local cluster and its kubeconfig.",
        show_default=str(DEFAULT),
    ),
]
"""The local cluster that a command starts, stops or shows."""
LocalDirectory = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="Folder of the local cluster to use.",
        show_default="UNBROKEN_DIR, or ~/.unbroken",
    ),
]
Context = Annotated[
    str | None,
    typer.Option("--context", help="Context of the kubeconfig to use.", show_default=False),
]
Namespace = Annotated[
    str,
    typer.Option("-n", "--namespace", help="Namespace of the job.", show_default="the context's"),
]


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """The cluster that a command works on."""

    directory: LocalDirectory = None
    context: Context = None
    kubeconfig: Path | None = option(
        "--kubeconfig", help="Kubeconfig of the cluster to use.", show_default=False
    )

    def place(self, use: Use = Use.READ) -> ClusterPlace:
        """The cluster that the options name; SpecError if a change needs a cluster by name."""
        return find(self.directory, self.context, self.kubeconfig, use)

    def run(
        self, act: Callable[[Cluster], Awaitable[T]], use: Use = Use.READ, namespace: str = ""
    ) -> T:
        """Run `act` with a connection to the cluster."""
        from .connection import on_cluster  # slow to load

        return on_cluster(self.place(use), namespace, act)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Options of almost every command about jobs."""

    namespace: Namespace = ""
    output: Form = Output.TEXT
    target: ClusterTarget

    def run(self, act: Callable[[Cluster], Awaitable[T]], use: Use = Use.READ) -> T:
        """Run `act` with a connection to the cluster, in the namespace."""
        return self.target.run(act, use, self.namespace)
