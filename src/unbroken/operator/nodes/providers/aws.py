"""AWS: instances of EC2 Auto Scaling groups, and nodes of HyperPod clusters.

A node of HyperPod is one with the label `cluster-name`; BatchRebootClusterNodes and
BatchReplaceClusterNodes are asked for it. Any other node is an instance of EC2, named by the Node's
providerID. It is rebooted, or terminated in its Auto Scaling group without a change of the desired
capacity, so that the group starts another one.

Before an order goes to AWS it is noted in an annotation of the NodeRecord, with the instance. So a
repairer that has taken over does not give it twice, and finds the instance when its Node is gone. A
note of an order that AWS has refused is taken back. An operator that dies between the note and the
call has asked for nothing: a reboot ends at its time limit then.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from unbroken.core.nodes.repair.events import Answer, OrderStatus, RepairOrder
from unbroken.errors import PeerError, WorldError
from unbroken.kube.client import KubeClient, Object
from unbroken.spec.keys import CLUSTER_NAME, REPAIR_ORDER
from unbroken.spec.nodes.kinds import NODE_RECORD
from unbroken.spec.nodes.values import Action

from .base import annotate, machine_of, namesake, stale

PROGRAM = Path(__file__).with_name("aws_calls.py")
LIMIT_SECONDS = 60.0
"""A call that takes longer is killed (judgement): it makes three requests at most, and AWS answers
most of them within one second."""
RETRY_SECONDS = 5.0
INSTANCE = re.compile(r"i-(?:[0-9a-f]{17}|[0-9a-f]{8})")
"""AWS: pattern of ClusterNodeId; EC2 names instances alike."""
HYPERPOD_ID = re.compile(rf"aws:///[^/]+/sagemaker/cluster/hyperpod-.*?-?({INSTANCE.pattern})")
"""providerID of HyperPod's nodes (kubernetes/autoscaler#8195)."""
HYPERPOD_NAME = re.compile(rf"hyperpod-({INSTANCE.pattern})")
REGION = re.compile(r"[a-z]{2,8}(?:-[a-z]{2,12}){1,3}-[0-9]{1,2}")
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
"""The second one is boto3's; EKS sets both in pods."""
REGION_LABEL = "topology.kubernetes.io/region"


class _CallAnswer(msgspec.Struct):
    """Answer of the program, as its docstring has it."""

    text: str
    is_given: bool
    answer: str = ""
    retry_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AwsTarget:
    """The machine behind a node."""

    instance: str
    cluster: str = ""
    """HyperPod cluster; empty: it is an instance of EC2."""
    region: str = ""
    """Empty: the one that boto3's configuration names."""


class AwsProvider:
    """Asks EC2 Auto Scaling and SageMaker, each time in a process of its own."""

    name = "aws"
    supports = frozenset({Action.REBOOT, Action.REPLACE})

    def __init__(
        self,
        client: KubeClient,
        python: str = sys.executable,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._client = client
        self._python = python
        """A Python that has boto3."""
        self._limit_seconds = limit_seconds

    async def status(self, order: RepairOrder) -> OrderStatus:
        """As `Provider.status`."""
        return await self.order(order)

    async def order(self, order: RepairOrder) -> OrderStatus:
        """As `Provider.order`."""
        path = f"{NODE_RECORD.path}/{quote(order.node)}"
        record = await self._client.get_or_none(path, Object)
        if record is None:
            raise WorldError(f"NodeRecord {order.node} is not written yet", RETRY_SECONDS)
        node = await self._client.get_or_none(f"api/v1/nodes/{quote(order.node)}", Object)
        target = noted(record, order.id)
        over = stale(order, None if node is None else _boot_id(node))
        if over is not None and (target is None or order.action is Action.REBOOT):
            return over
        if target is not None:
            has_booted = over is not None
            return _status(await self._call(order, target, is_first=False, has_booted=has_booted))
        if node is None:
            text = f"node {order.node} is gone; which instance it was is not known"
            return OrderStatus(Answer.UNSUPPORTED, text)
        machine = await machine_of(self._client, order.node, node)
        if isinstance(machine, OrderStatus):
            return machine
        target = target_of(node)
        if target is None:
            text = f"neither providerID nor name of node {order.node} names an instance of AWS"
            return OrderStatus(Answer.UNSUPPORTED, text)
        if other := await namesake(self._client, order.node, target.instance, _instance):
            text = f"nodes {order.node} and {other} both say that they are {target.instance}"
            return OrderStatus(Answer.UNSUPPORTED, text)
        return await self._give(order, target, path, record)

    async def _give(
        self, order: RepairOrder, target: AwsTarget, path: str, record: Object
    ) -> OrderStatus:
        note = f"{order.id} {target.instance} {target.region} {target.cluster}"
        await annotate(self._client, path, record, {REPAIR_ORDER: note})
        said = await self._call(order, target, is_first=True)
        if not said.is_given:
            await self._client.merge_if_present(
                path, {"metadata": {"annotations": {REPAIR_ORDER: None}}}
            )
        return _status(said)

    async def _call(
        self, order: RepairOrder, target: AwsTarget, *, is_first: bool, has_booted: bool = False
    ) -> _CallAnswer:
        """Run the program once; WorldError where asking again may help."""
        question = {
            "action": order.action.value,
            "is_first": is_first,
            "has_booted": has_booted,
            "instance": target.instance,
            "cluster": target.cluster,
            "region": target.region,
        }
        self._client.require_leave()
        process = await asyncio.create_subprocess_exec(
            # Not in its folder: its modules have names that others may import.
            *(self._python, "-P", str(PROGRAM)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(self._limit_seconds):
                out, err = await process.communicate(msgspec.json.encode(question))
        except TimeoutError as error:
            text = f"AWS has not answered about {target.instance} in {self._limit_seconds:.0f} s"
            raise WorldError(text, RETRY_SECONDS) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            return msgspec.json.decode(out, type=_CallAnswer)
        except msgspec.MsgspecError as error:
            last = err.decode(errors="replace").strip().rpartition("\n")[2][:300]
            text = f"{PROGRAM.name} ended with exit code {process.returncode}: {last}"
            raise PeerError(text) from error


def _status(said: _CallAnswer) -> OrderStatus:
    if not said.answer:
        raise WorldError(f"AWS: {said.text}", said.retry_seconds)
    return OrderStatus(Answer(said.answer), said.text)


def _instance(node: Object) -> str | None:
    target = target_of(node)
    return None if target is None else target.instance


def _boot_id(node: Object) -> str:
    return str(((node.get("status") or {}).get("nodeInfo") or {}).get("bootID") or "")


def noted(record: Object, order_id: str) -> AwsTarget | None:
    """The machine of an order that was given before; None: it was not."""
    note = (record["metadata"].get("annotations") or {}).get(REPAIR_ORDER, "")
    words: list[Any] = note.split(" ")
    if len(words) != len(("order", "instance", "region", "cluster")) or words[0] != order_id:
        return None
    return AwsTarget(instance=words[1], region=words[2], cluster=words[3])


def target_of(node: Object) -> AwsTarget | None:
    """The machine that a node says it is; None: it names none."""
    metadata, spec = node["metadata"], node.get("spec") or {}
    labels = metadata.get("labels") or {}
    provider_id = str(spec.get("providerID") or "")
    region = next(filter(None, map(os.environ.get, REGION_VARIABLES)), "")
    if not region and REGION.fullmatch(labels.get(REGION_LABEL) or ""):
        region = labels[REGION_LABEL]
    if cluster := labels.get(CLUSTER_NAME):
        named = HYPERPOD_ID.fullmatch(provider_id) or HYPERPOD_NAME.fullmatch(metadata["name"])
        return AwsTarget(named[1], cluster, region) if named else None
    scheme, _, place = provider_id.partition("://")
    instance = place.rpartition("/")[2]
    if scheme != "aws" or not INSTANCE.fullmatch(instance):
        return None
    return AwsTarget(instance, "", region)
