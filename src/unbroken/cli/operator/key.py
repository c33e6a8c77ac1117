"""The master key of `unbroken operator`: a file of its own, or of a mounted Secret."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.cli.app import option
from unbroken.cli.place import find
from unbroken.cli.programs import ProgramTarget
from unbroken.errors import SpecError
from unbroken.local import state

if TYPE_CHECKING:
    from unbroken.kube.client import KubeClient
    from unbroken.operator.key import KeySecret


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """The file of the key, and the Secret that the kubelet mounts there, if any."""

    file: Path
    secret: KeySecret | None

    async def read(self, client: KubeClient) -> bytes:
        """Read the key; create it if it does not exist.  Raises SpecError."""
        from unbroken.operator.key import kept_key, mounted_key

        if self.secret is None:
            return kept_key(self.file)
        return await mounted_key(client, self.file, self.secret)


@dataclass(frozen=True, slots=True)
class KeyFlags:
    """The operator's master key."""

    key_file: Path | None = option(
        "--key-file",
        help="File with the operator's master key: 64 hexadecimal digits, mode 0600. All "
        "operators of a cluster need the same key. A missing file is created, unless "
        "--key-secret is given.",
        show_default="operator.key in the local cluster's folder, for other clusters "
        "in ~/.local/state/unbroken",
    )
    key_secret: str | None = option(
        "--key-secret",
        metavar="NAMESPACE/NAME",
        help="Secret that the kubelet mounts as --key-file (entry `key`). The operator "
        "creates a missing Secret, and never reads it.",
    )

    def place(self, target: ProgramTarget) -> KeyPlace:
        """The place of the key; SpecError if the options are incomplete."""
        from unbroken.operator.key import KeySecret

        if self.key_secret is None:
            return KeyPlace(self.key_file or _usual(target.kubeconfig, target.directory), None)
        namespace, slash, name = self.key_secret.partition("/")
        if not (namespace and slash and name) or "/" in name:
            raise SpecError(f"--key-secret {self.key_secret}: must be NAMESPACE/NAME")
        if self.key_file is None:
            raise SpecError("--key-secret needs --key-file: the file where the Secret is mounted")
        return KeyPlace(self.key_file, KeySecret(namespace, name))


def _usual(kubeconfig: Path | None, directory: Path | None) -> Path:
    if kubeconfig is None and directory is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        raise SpecError(
            "no key: in a pod, mount a Secret and name it with --key-file and --key-secret "
            "(as the chart does); a key in the container would be lost with it"
        )
    if kubeconfig is not None:
        beside = state.Paths(kubeconfig.absolute().parent)
        paths = beside if beside.options.is_file() else None
    else:
        paths = find(directory, None).paths
    if paths is not None:
        return paths.operator_key
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "unbroken" / "operator.key"
