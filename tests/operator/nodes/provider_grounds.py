"""Grounds for the contract of providers: machines of each provider's kind.

A ground makes machines with Nodes and counts the requests for each action. It carries requests out
as the system behind the provider would.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_api.api_program import KEY, Running
from tests.e2e.clusters import Cluster as LocalCluster
from tests.e2e.clusters import find_kubectl
from tests.operator.nodes.provider_definitions import MACHINES as CAPI_DEFINITION
from tests.operator.nodes.provider_definitions import NODECLAIMS
from tests.operator.plain import Object, PlainRequests
from tests.watching import PATIENCE_SECONDS, until
from unbroken.kube.client import KubeClient
from unbroken.operator.nodes.providers import (
    AwsProvider,
    ClusterApiProvider,
    CommandProvider,
    KarpenterProvider,
    MachinesProvider,
    Provider,
)
from unbroken.operator.nodes.providers.base import REMEDIATE
from unbroken.spec.keys import CLUSTER_NAME, REPAIR
from unbroken.spec.nodes.kinds import MACHINE, NODE_RECORD, MachineSpec, NodeRecordSpec
from unbroken.spec.nodes.values import Action

NUMBERS = itertools.count(1)
BOOT = "boot-1"
CRDS = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CLAIMS = "apis/karpenter.sh/v1/nodeclaims"
CAPI_GROUP = "cluster.x-k8s.io"
CAPI_VERSION = f"{CAPI_GROUP}/v1beta2"
CAPI_MACHINES = f"apis/{CAPI_VERSION}/namespaces/default/machines"
INFO = (
    *("machineID", "systemUUID", "kernelVersion", "osImage", "containerRuntimeVersion"),
    *("kubeletVersion", "kubeProxyVersion", "operatingSystem", "architecture"),
)


class Ground(ABC):
    """Machines of one provider."""

    why_old_orders_pass = ""
    """Reason why the provider executes orders about an old boot; empty: it refuses them."""
    machine_runs_on = True
    """True if a machine runs until `carry_out`, whatever was requested."""

    def __init__(self, client: KubeClient) -> None:
        self.client = client
        self.plain = PlainRequests(client)

    @abstractmethod
    def provider(self, client: KubeClient | None = None) -> Provider:
        """Return a provider without memory, as another process has it."""

    @abstractmethod
    async def add(self) -> str:
        """Add a machine; return its Node's name. The Node's boot ID is `self.boot_of(name)`."""

    @abstractmethod
    async def asked(self, node: str, action: Action) -> int:
        """Return how often the action was requested for the machine."""

    @abstractmethod
    async def carry_out(self, node: str, action: Action) -> None:
        """Do what was requested: boot the node, or end all processes of its machine."""

    async def add_stranger(self) -> tuple[str, str]:
        """Add a Node without a machine; return its name, and the text that an answer must have."""
        name = fresh("stranger")
        await self.make_node(name)
        await self.make_record(name)
        return name, name

    async def boot_of(self, node: str) -> str:
        """Return the boot ID of a node."""
        found = await self.plain.get(f"api/v1/nodes/{node}")
        assert found is not None
        return str(found["status"]["nodeInfo"]["bootID"])

    async def make_node(self, name: str, **spec: Any) -> None:
        """Create a Node as its kubelet does."""
        body = {"metadata": {"name": name}, "spec": spec}
        await self.plain.call("POST", "api/v1/nodes", body=body)
        await self.boot(name, BOOT)

    async def boot(self, name: str, boot_id: str) -> None:
        """Boot the node."""
        info = {**dict.fromkeys(INFO, ""), "bootID": boot_id}
        await self.plain.merge(f"api/v1/nodes/{name}/status", {"status": {"nodeInfo": info}})

    async def drop_node(self, name: str) -> None:
        """Delete the Node, as a cloud's controller or a person does."""
        await self.plain.call("DELETE", f"api/v1/nodes/{name}")

    async def make_record(self, name: str) -> None:
        """Create the NodeRecord that the repairer writes when the node joins."""
        node = await self.plain.get(f"api/v1/nodes/{name}")
        assert node is not None
        machine = node["spec"].get("providerID", "")
        record = NodeRecordSpec(node_uid=node["metadata"]["uid"], machine=machine)
        body = NODE_RECORD.new(name, record)
        await self.client.create_if_absent(NODE_RECORD.path, body)


def fresh(prefix: str) -> str:
    """Return a name of a node that no other test has."""
    return f"{prefix}-{next(NUMBERS)}-{os.getpid()}"


async def define(client: KubeClient, definition: Object) -> None:
    """Install the definition of another project's kind."""
    await client.create_if_absent(CRDS, definition)
    spec = definition["spec"]
    path = f"apis/{spec['group']}/{spec['versions'][-1]['name']}/{spec['names']['plural']}"
    await until(lambda: client.get_or_none(path, Object), lambda listed: listed is not None)


class ObjectGround(Ground):
    """Objects of another project's kind, with a finalizer until the machine is off."""

    def __init__(self, client: KubeClient) -> None:
        super().__init__(client)
        self._remediated: Counter[str] = Counter()

    @abstractmethod
    def path(self, node: str) -> str:
        """Return the path of the object behind a node."""

    async def asked(self, node: str, action: Action) -> int:
        """Count requests as `Ground.asked`; repeated deletions count as one."""
        found = await self.plain.get(self.path(node))
        return int(found is None or "deletionTimestamp" in found["metadata"])

    async def carry_out(self, node: str, action: Action) -> None:
        """Carry out a request as `Ground.carry_out`."""
        await self.plain.merge(self.path(node), {"metadata": {"finalizers": None}})


class KarpenterGround(ObjectGround):
    """NodeClaims of Karpenter."""

    def provider(self, client: KubeClient | None = None) -> Provider:
        """Return a provider as `Ground.provider`."""
        return KarpenterProvider(client or self.client)

    def path(self, node: str) -> str:
        """Return the path as `ObjectGround.path`."""
        return f"{CLAIMS}/claim-{node}"

    async def add(self) -> str:
        """Add a machine as `Ground.add`."""
        await define(self.client, NODECLAIMS)
        name = fresh("karpenter")
        await self.make_node(name)
        body = {
            "apiVersion": "karpenter.sh/v1",
            "kind": "NodeClaim",
            "metadata": {"name": f"claim-{name}", "finalizers": ["karpenter.sh/termination"]},
            "spec": {
                "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "c"},
                "requirements": [{"key": "kubernetes.io/arch", "operator": "Exists"}],
            },
        }
        await self.plain.call("POST", CLAIMS, body=body)
        status = {"nodeName": name, "providerID": f"aws:///us-west-2a/{name}"}
        await self.plain.merge(f"{self.path(name)}/status", {"status": status})
        return name


class ClusterApiGround(ObjectGround):
    """Machines of a MachineSet of Cluster API."""

    def provider(self, client: KubeClient | None = None) -> Provider:
        """Return a provider as `Ground.provider`."""
        return ClusterApiProvider(client or self.client)

    def path(self, node: str) -> str:
        """Return the path as `ObjectGround.path`."""
        return f"{CAPI_MACHINES}/machine-{node}"

    async def add(self, *, is_owned: bool = True) -> str:
        """Add a machine as `Ground.add`. `is_owned`: a MachineSet replaces it after a deletion."""
        await define(self.client, CAPI_DEFINITION)
        name = fresh("capi")
        await self.make_node(name)
        owner = {
            "apiVersion": CAPI_VERSION,
            "kind": "MachineSet",
            "name": "workers-abc",
            "uid": "11111111-2222-3333-4444-555555555555",
            "controller": True,
            "blockOwnerDeletion": True,
        }
        config = {"apiGroup": "bootstrap.cluster.x-k8s.io", "kind": "KubeadmConfig", "name": "b"}
        machine = {"apiGroup": f"infrastructure.{CAPI_GROUP}", "kind": "AWSMachine", "name": "m"}
        body = {
            "apiVersion": CAPI_VERSION,
            "kind": "Machine",
            "metadata": {
                "name": f"machine-{name}",
                "finalizers": [f"machine.{CAPI_GROUP}"],
                "ownerReferences": [owner] if is_owned else [],
                "labels": {f"{CAPI_GROUP}/cluster-name": "c"},
            },
            "spec": {
                "clusterName": "c",
                "bootstrap": {"configRef": config},
                "infrastructureRef": machine,
            },
        }
        await self.plain.call("POST", CAPI_MACHINES, body=body)
        status = {"nodeRef": {"name": name}, "phase": "Running"}
        await self.plain.merge(f"{self.path(name)}/status", {"status": status})
        return name

    async def asked(self, node: str, action: Action) -> int:
        """Count requests as `Ground.asked`, by the annotation that requests a remediation."""
        if action is Action.REPLACE:
            return await super().asked(node, action)
        found = await self.plain.get(self.path(node))
        assert found is not None
        if REMEDIATE in found["metadata"].get("annotations", {}):
            self._remediated[node] += 1
            await self.plain.merge(
                self.path(node), {"metadata": {"annotations": {REMEDIATE: None}}}
            )
        return self._remediated[node]

    async def carry_out(self, node: str, action: Action) -> None:
        """Carry out a request as `Ground.carry_out`."""
        if action is Action.REPLACE:
            await super().carry_out(node, action)
        else:
            await self.boot(node, f"after-{await self.boot_of(node)}")


class LocalGround(Ground):
    """Machines of a running local cluster, whose pool carries out the requests."""

    why_old_orders_pass = "a reboot is a count of the Machine, a replacement names it"
    machine_runs_on = False

    def provider(self, client: KubeClient | None = None) -> Provider:
        """Return a provider as `Ground.provider`."""
        return MachinesProvider(client or self.client)

    async def add(self) -> str:
        """Add a machine as `Ground.add`."""
        name = fresh("machine")
        await self.plain.call("POST", MACHINE.path, body=MACHINE.new(name, MachineSpec()))
        await self._until(
            lambda found: (found or {}).get("status", {}).get("phase") == "Running", name
        )
        return name

    async def asked(self, node: str, action: Action) -> int:
        """Count requests as `Ground.asked`."""
        found = await self.plain.get(f"{MACHINE.path}/{node}")
        if action is Action.REPLACE:
            return int(found is None or "deletionTimestamp" in found["metadata"])
        assert found is not None
        return int(found["spec"].get("boots") or 0)

    async def carry_out(self, node: str, action: Action) -> None:
        """Wait as `Ground.carry_out`, until the pool has carried out the request by itself."""
        if action is Action.REPLACE:
            await self._until(lambda found: found is None, node)
        else:
            await self._until(
                lambda found: found["status"].get("boots") == found["spec"]["boots"], node
            )

    async def drop_node(self, name: str) -> None:
        """Delete the Node as `Ground.drop_node`, unless the pool has done that."""
        await self.client.delete_if_present(f"api/v1/nodes/{name}")

    async def _until(self, holds: Callable[[Any], bool], node: str) -> None:
        await until(lambda: self.plain.get(f"{MACHINE.path}/{node}"), holds)


SCRIPT = """
# Does what is ordered once, and answers as docs/guide/node-repair.md asks of it.
set -eu
cd "$FOLDER"
[ -e "machine-$NODE" ] || { echo "no machine is behind $NODE" >&2; exit 1; }
mkdir "order-$ORDER_ID" 2> /dev/null && echo "$ACTION" >> "asked-$NODE"
[ -e "done-$NODE" ] && exit 0
exit 75
"""


class CommandGround(Ground):
    """Machines of a user's script."""

    why_old_orders_pass = "the command is told BOOT_ID, and decides"

    def __init__(self, client: KubeClient, folder: Path) -> None:
        super().__init__(client)
        self._folder = folder
        (folder / "repair.sh").write_text(SCRIPT)

    def provider(self, client: KubeClient | None = None) -> Provider:
        """Return a provider as `Ground.provider`."""
        words = ("env", f"FOLDER={self._folder}", "sh", str(self._folder / "repair.sh"))
        return CommandProvider(client or self.client, words)

    async def add(self) -> str:
        """Add a machine as `Ground.add`."""
        name = fresh("command")
        await self.make_node(name)
        (self._folder / f"machine-{name}").touch()
        return name

    async def asked(self, node: str, action: Action) -> int:
        """Count requests as `Ground.asked`."""
        log = self._folder / f"asked-{node}"
        return log.read_text().split().count(action.value) if log.exists() else 0

    async def carry_out(self, node: str, action: Action) -> None:
        """Carry out a request as `Ground.carry_out`."""
        (self._folder / f"done-{node}").touch()
        if action is Action.REBOOT:
            await self.boot(node, f"after-{await self.boot_of(node)}")


MAKE_GROUP = """
import boto3, json, sys
groups, ec2 = boto3.client("autoscaling"), boto3.client("ec2")
image = ec2.describe_images()["Images"][0]["ImageId"]
groups.create_launch_configuration(
    LaunchConfigurationName="lc", ImageId=image, InstanceType="m5.large")
groups.create_auto_scaling_group(
    AutoScalingGroupName="workers", LaunchConfigurationName="lc", MinSize=0, MaxSize=50,
    DesiredCapacity=int(sys.argv[1]), AvailabilityZones=["us-west-2a"])
alone = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1)["Instances"]
members = groups.describe_auto_scaling_instances()["AutoScalingInstances"]
print(json.dumps([[one["InstanceId"] for one in found] for found in (members, alone)]))
"""
ASK = """
import boto3, json, sys
client = boto3.client(sys.argv[1])
print(json.dumps(getattr(client, sys.argv[2])(**json.loads(sys.argv[3])), default=str))
"""
INSTANCES = 16


class Ec2:
    """moto's server, an Auto Scaling group in it, and an instance outside of any group."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self.folder = folder
        made = json.loads(self._run(MAKE_GROUP, str(INSTANCES)))
        self.members: list[str] = made[0]
        self.alone: str = made[1][0]

    def call(self, service: str, method: str, **given: Any) -> Any:
        """Make one call of boto3."""
        return json.loads(self._run(ASK, service, method, json.dumps(given)))

    def _run(self, program: str, *arguments: str) -> str:
        words = [self.python, "-c", program, *arguments]
        return subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
        ).stdout

    def actions(self, instance: str) -> list[str]:
        """Return the actions that named the instance, in order."""
        lines = (self.folder / "actions").read_text().splitlines()
        return [line.split()[0] for line in lines if line.endswith(f" {instance}")]

    @contextmanager
    def refusing(self, action: str, status: str, code: str = "") -> Iterator[None]:
        """Refuse an action during the block; with status `hang`, never answer it."""
        path = self.folder / "refuse"
        path.write_text(f"{action}\n{status}\n{code}")
        try:
            yield
        finally:
            path.unlink()


@contextmanager
def running_ec2(python: Path, folder: Path) -> Iterator[Ec2]:
    """Run moto's server until the block ends; boto3 in child processes finds it by variables."""
    words = [python, str(Path(__file__).with_name("ec2_program.py")), str(folder)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            assert port, (folder / "log").read_text()
            for name, value in aws_environment(f"http://127.0.0.1:{port}").items():
                patch.setenv(name, value)
            yield Ec2(python, folder)
        finally:
            server.kill()


def aws_environment(endpoint: str) -> dict[str, str]:
    """Return variables that lead boto3 to an address of this machine, and to no other."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY.key_id,
        "AWS_SECRET_ACCESS_KEY": KEY.secret,
        "AWS_DEFAULT_REGION": "us-west-2",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


class Ec2Ground(Ground):
    """Instances of an Auto Scaling group; moto terminates them at once."""

    machine_runs_on = False

    def __init__(self, client: KubeClient, ec2: Ec2) -> None:
        super().__init__(client)
        self.ec2 = ec2
        self._instances: dict[str, str] = {}

    def provider(self, client: KubeClient | None = None) -> Provider:
        """Return a provider as `Ground.provider`."""
        return AwsProvider(client or self.client, str(self.ec2.python))

    async def add(self) -> str:
        """Add a machine as `Ground.add`."""
        return await self.add_instance(self.ec2.members.pop())

    async def add_instance(self, instance: str) -> str:
        """Create the Node of this instance."""
        name = fresh("ip-10-0-0")
        await self.make_node(name, providerID=f"aws:///us-west-2a/{instance}")
        await self.make_record(name)
        self._instances[name] = instance
        return name

    async def asked(self, node: str, action: Action) -> int:
        """Count requests as `Ground.asked`."""
        is_reboot = action is Action.REBOOT
        wanted = "RebootInstances" if is_reboot else "TerminateInstanceInAutoScalingGroup"
        return self.ec2.actions(self._instances[node]).count(wanted)

    async def carry_out(self, node: str, action: Action) -> None:
        """Carry out a request as `Ground.carry_out`."""
        if action is Action.REBOOT:
            await self.boot(node, f"after-{await self.boot_of(node)}")


class HyperPodGround(Ground):
    """Nodes of a HyperPod cluster; unbroken's own cluster API stands for SageMaker."""

    def __init__(self, client: KubeClient, python: Path, running: Running) -> None:
        super().__init__(client)
        self._python = python
        self._running = running
        self._free: list[str] = []
        self._asked: Counter[tuple[str, str]] = Counter()

    def provider(self, client: KubeClient | None = None) -> Provider:
        """Return a provider as `Ground.provider`."""
        return AwsProvider(client or self.client, str(self._python))

    async def add(self) -> str:
        """Add a machine as `Ground.add`."""
        if not self._free:
            self._free = await asyncio.to_thread(self._make_cluster)
        name = self._free.pop()
        await self.boot(name, BOOT)
        await self.make_record(name)
        return name

    async def add_stranger(self) -> tuple[str, str]:
        """Add a Node as `Ground.add_stranger`: its label names a cluster that does not exist."""
        name = await self.add()
        labels = {CLUSTER_NAME: "elsewhere"}
        await self.plain.merge(f"api/v1/nodes/{name}", {"metadata": {"labels": labels}})
        return name, "elsewhere"

    def _make_cluster(self) -> list[str]:
        name = fresh("hp")
        group = {
            "InstanceGroupName": "workers",
            "InstanceType": "ml.c5.large",
            "InstanceCount": 4,
            "ExecutionRole": "arn:aws:iam::111122223333:role/hyperpod-role",
            "LifeCycleConfig": {"SourceS3Uri": "s3://sagemaker-b", "OnCreate": "on_create.sh"},
        }
        eks = {"Eks": {"ClusterArn": "arn:aws:eks:us-west-2:111122223333:cluster/hyperpod-eks"}}
        self._running.ok(
            "CreateCluster", ClusterName=name, InstanceGroups=[group], Orchestrator=eks
        )
        self._running.until_phase(name, "InService")
        nodes = self._running.ok("ListClusterNodes", ClusterName=name)["ClusterNodeSummaries"]
        return [f"hyperpod-{one['InstanceId']}" for one in nodes]

    async def asked(self, node: str, action: Action) -> int:
        """Count requests as `Ground.asked`; the service begins to carry them out."""
        found = await self.plain.get(f"api/v1/nodes/{node}")
        ordered = ((found or {}).get("metadata", {}).get("annotations") or {}).get(REPAIR, "")
        if ordered:
            self._asked[node, ordered] += 1
            await self.plain.merge(
                f"api/v1/nodes/{node}", {"metadata": {"annotations": {REPAIR: None}}}
            )
        return self._asked[node, action.value]

    async def carry_out(self, node: str, action: Action) -> None:
        """Carry out a request as `Ground.carry_out`."""
        if action is Action.REBOOT:
            await self.boot(node, f"after-{await self.boot_of(node)}")
            return
        path = f"{MACHINE.path}/{node}"
        await self.client.delete_if_present(path)
        await self.client.merge_if_present(path, {"metadata": {"finalizers": None}})

    async def drop_node(self, name: str) -> None:
        """Delete the Node as `Ground.drop_node`. While its Machine exists, the Node comes back."""


@contextmanager
def local_cluster(folder: Path) -> Iterator[LocalCluster]:
    """Run a local cluster without an operator."""
    made = LocalCluster(folder / "state", find_kubectl())
    made.unbroken("up", "--detach", "--nodes", "1", "--no-operator")
    try:
        yield made
    finally:
        made.take_away()
