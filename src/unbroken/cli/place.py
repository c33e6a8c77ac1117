"""The cluster that a command speaks to: the options, and what they mean.

`--dir` names a local cluster, `--context` and `--kubeconfig` any other.  Without them, UNBROKEN_DIR
and then KUBECONFIG do, where KUBECONFIG names a local cluster.  Where it names another one, it
gives way to the local cluster of the default folder while that runs, and always for `unbroken run`:
a person at a laptop often has the KUBECONFIG of a company's cluster in the shell.  Commands that
change something never follow such a KUBECONFIG.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from unbroken.errors import SpecError
from unbroken.local import state

from .show import note

DEFAULT = Path("~/.unbroken")


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


class Use(Enum):
    """What a command does to a cluster."""

    READ = "read"
    CHANGE = "change"
    """Never on a cluster that only KUBECONFIG names, unless it is a local one."""
    RUN = "run"
    """On the local cluster, which is started if need be."""


def find(
    directory: Path | None,
    context: str | None,
    kubeconfig: Path | None = None,
    use: Use = Use.READ,
) -> Place:
    """The cluster that is meant; SpecError where none may be changed without being named."""
    place, said = choose(directory, context, kubeconfig, use)
    if said:
        note(f"unbroken: {said}")
    return place


def choose(
    directory: Path | None,
    context: str | None,
    kubeconfig: Path | str | None,
    use: Use = Use.READ,
) -> tuple[Place, str]:
    """The cluster that is meant, and what a person must be told of the choice; empty: nothing."""
    if directory is not None and (context is not None or kubeconfig is not None):
        other = "--context" if kubeconfig is None else "--kubeconfig"
        raise SpecError(f"--dir and {other} name two clusters; give one of them")
    configured = os.environ.get("KUBECONFIG", "")
    files = [Path(part).expanduser() for part in configured.split(os.pathsep) if part]
    if kubeconfig is not None or context is not None:
        file = None if kubeconfig is None else str(kubeconfig)
        return Place(
            file, context, _own(Path(kubeconfig) if kubeconfig else next(iter(files), None))
        ), ""
    folder = os.environ.get("UNBROKEN_DIR", "")
    given = directory or (Path(folder) if folder else None)
    paths = state.Paths(resolve(given or DEFAULT))
    local = Place(str(paths.kubeconfig), None, paths)
    if not files or (given is not None and use is not Use.RUN):
        return local, ""
    own = _own(files[0])
    if own is not None and given is None:
        return Place(None, None, own), ""
    if use is Use.RUN or state.running(paths) is not None:
        said = f"uses the local cluster in {paths.directory} and not that of KUBECONFIG"
        return local, "" if own else f"{said}; --context or --kubeconfig names another"
    if use is Use.CHANGE:
        raise SpecError(
            f"no local cluster runs, and KUBECONFIG ({configured}) names another one: to change "
            "something there, name it with --context NAME or --kubeconfig FILE"
        )
    return Place(None, None, None), ""


def _own(file: Path | None) -> state.Paths | None:
    """The local cluster of which this is the kubeconfig; None: it is no local cluster's."""
    is_ours = file is not None and (file.parent / "cluster.json").is_file()
    return state.Paths(file.parent.absolute()) if file and is_ours else None
