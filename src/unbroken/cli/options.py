"""Options that many commands share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from .place import DEFAULT, Place, Use, find

if TYPE_CHECKING:
    from .connection import Cluster

T = TypeVar("T")


class Output(StrEnum):
    """Forms of the answer."""

    TEXT = "text"
    JSON = "json"


class ListOutput(StrEnum):
    """Forms of a list; `wide` has more columns."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"


Form = Annotated[Output, typer.Option("-o", "--output", help="text or json.")]
ListForm = Annotated[ListOutput, typer.Option("-o", "--output", help="text, wide or json.")]
Directory = Annotated[
    Path,
    typer.Option(
        "--dir",
        envvar="UNBROKEN_DIR",
        help="Folder that holds all state of the cluster, and its kubeconfig.",
        show_default=str(DEFAULT),
    ),
]
"""The local cluster that is started, stopped or looked at."""
Embedded = Annotated[
    Path | None,
    typer.Option(
        "--dir", help="Folder of a local cluster.", show_default="UNBROKEN_DIR, or ~/.unbroken"
    ),
]
Context = Annotated[
    str | None, typer.Option("--context", help="A context of the kubeconfig.", show_default=False)
]
Namespace = Annotated[
    str, typer.Option("-n", "--namespace", help="Of the job.", show_default="the context's")
]


@dataclass(frozen=True, slots=True)
class Target:
    """The cluster that a command works on."""

    directory: Embedded = None
    context: Context = None
    kubeconfig: Annotated[
        Path | None,
        typer.Option("--kubeconfig", help="Kubeconfig of another cluster.", show_default=False),
    ] = None

    def place(self, use: Use = Use.READ) -> Place:
        """The cluster that is meant; SpecError where none may be changed without being named."""
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
    target: Target

    @property
    def is_json(self) -> bool:
        """Whether the answer is for a program."""
        return self.output is Output.JSON

    def run(self, act: Callable[[Cluster], Awaitable[T]], use: Use = Use.READ) -> T:
        """Run `act` with a connection to the cluster, in the namespace."""
        return self.target.run(act, use, self.namespace)
