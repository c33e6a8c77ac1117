"""Selection of the cluster that a command uses, from options and environment.

1. `--dir` names a local cluster, `--context` and `--kubeconfig` name any cluster.
2. Without these options, UNBROKEN_DIR names a local cluster.
3. Then KUBECONFIG counts if it is the file of a local cluster.
4. KUBECONFIG of another cluster counts only for commands that change nothing, and only while no
   local cluster runs from the default folder.  `unbroken run` always uses the local cluster.

The last rule is for laptops whose shell has the KUBECONFIG of a company's cluster.
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
    """The absolute path, with `~` expanded."""
    return directory.expanduser().absolute()


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """A cluster as the options name it; no request was sent yet."""

    kubeconfig: str | None = None
    """Path of the kubeconfig; None if the Kubernetes client looks for one."""
    context: str | None = None
    paths: state.Paths | None = None
    """Files of a local cluster; None for any other cluster."""

    def require_running(self) -> None:
        """Raise SpecError if this is a local cluster that does not run."""
        if self.paths is not None and state.running(self.paths) is None:
            raise SpecError(
                f"no cluster runs from {self.paths.directory}; start one with: unbroken up, "
                "or name another with --dir, --context or KUBECONFIG"
            )


class Use(Enum):
    """The use that a command makes of a cluster."""

    READ = "read"
    CHANGE = "change"
    """Refused for a cluster that only KUBECONFIG names, unless it is a local cluster."""
    RUN = "run"
    """Uses the local cluster, which is started if it does not run."""


def find(
    directory: Path | None,
    context: str | None,
    kubeconfig: Path | None = None,
    use: Use = Use.READ,
) -> ClusterPlace:
    """The cluster to use, with a note about a surprising choice on standard error; SpecError."""
    place, message = choose(directory, context, kubeconfig, use)
    if message:
        note(f"unbroken: {message}")
    return place


def choose(
    directory: Path | None,
    context: str | None,
    kubeconfig: Path | str | None,
    use: Use = Use.READ,
) -> tuple[ClusterPlace, str]:
    """The cluster to use, and a note for the user about the choice, or an empty string.

    Raises SpecError for options that name two clusters, and for a change that needs a cluster by
    name.
    """
    if directory is not None and (context is not None or kubeconfig is not None):
        other = "--context" if kubeconfig is None else "--kubeconfig"
        raise SpecError(f"--dir and {other} name two clusters; give one of them")
    configured = os.environ.get("KUBECONFIG", "")
    files = [Path(part).expanduser() for part in configured.split(os.pathsep) if part]
    if kubeconfig is not None or context is not None:
        file = None if kubeconfig is None else str(kubeconfig)
        return ClusterPlace(
            file, context, _own(Path(kubeconfig) if kubeconfig else next(iter(files), None))
        ), ""
    folder = os.environ.get("UNBROKEN_DIR", "")
    given = directory or (Path(folder) if folder else None)
    paths = state.Paths(resolve(given or DEFAULT))
    local = ClusterPlace(str(paths.kubeconfig), None, paths)
    if not files or (given is not None and use is not Use.RUN):
        return local, ""
    own = _own(files[0])
    if own is not None and given is None:
        return ClusterPlace(None, None, own), ""
    if use is Use.RUN or state.running(paths) is not None:
        message = f"uses the local cluster in {paths.directory} and not that of KUBECONFIG"
        return local, "" if own else f"{message}; --context or --kubeconfig names another"
    if use is Use.CHANGE:
        raise SpecError(
            f"no local cluster runs, and KUBECONFIG ({configured}) names another one: to change "
            "something there, name it with --context NAME or --kubeconfig FILE"
        )
    return ClusterPlace(None, None, None), ""


def _own(file: Path | None) -> state.Paths | None:
    """The local cluster whose kubeconfig this is; None if the file is not of a local cluster."""
    is_ours = file is not None and (file.parent / "cluster.json").is_file()
    return state.Paths(file.parent.absolute()) if file and is_ours else None
