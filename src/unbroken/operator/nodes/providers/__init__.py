"""Providers reset, reboot and replace machines: one small interface, and its implementations.

A provider is asked for an order any number of times and carries it out once, also after a restart
of who asks: it knows orders again by their identity.  It alone says when a machine is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from unbroken.errors import SpecError
from unbroken.kube.client import KubeClient
from unbroken.spec.nodes.values import NodeProvider

from .aws import AwsProvider
from .base import ClusterApiProvider, KarpenterProvider, NoProvider, Provider
from .command import CommandProvider, parse_command
from .machines import MachinesProvider

__all__ = [
    "AwsProvider",
    "ClusterApiProvider",
    "CommandProvider",
    "KarpenterProvider",
    "MachinesProvider",
    "NoProvider",
    "Provider",
    "parse_command",
    "provider_name",
    "provider_of",
]


def _command(client: KubeClient, command: Sequence[str]) -> Provider:
    if not command:
        raise SpecError("the node provider `command` needs --node-command")
    return CommandProvider(client, command)


def _aws(client: KubeClient) -> Provider:
    if find_spec("boto3") is None:
        raise SpecError("the node provider `aws` needs boto3: pip install 'unbroken[aws]'")
    return AwsProvider(client)


PROVIDERS: Mapping[NodeProvider, Callable[[KubeClient, Sequence[str]], Provider]] = {
    NodeProvider.MACHINES: lambda client, _: MachinesProvider(client),
    NodeProvider.CLUSTER_API: lambda client, _: ClusterApiProvider(client),
    NodeProvider.KARPENTER: lambda client, _: KarpenterProvider(client),
    NodeProvider.AWS: lambda client, _: _aws(client),
    NodeProvider.COMMAND: _command,
    NodeProvider.NONE: lambda client, _: NoProvider(),
}


def provider_name(text: str) -> NodeProvider:
    """Read the name of a provider.  Raises SpecError for a name that there is not."""
    try:
        return NodeProvider(text)
    except ValueError:
        known = ", ".join(PROVIDERS)
        raise SpecError(f"no node provider {text}; there are: {known}") from None


def provider_of(client: KubeClient, name: str, command: Sequence[str] = ()) -> Provider:
    """Return the provider of this name.

    `command`: the words of the provider `command`.  Raises SpecError for a name that there is not,
    and where the words are missing.
    """
    return PROVIDERS[provider_name(name)](client, command)
