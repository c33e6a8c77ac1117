"""The provider `aws`: what goes wrong on the way to AWS, with boto3 against moto's server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.apiservers import Cluster
from tests.e2e.clusters import processes
from tests.operator.nodes.provider_grounds import BOOT, Ec2, Ec2Ground, running_ec2
from unbroken.agent.workers.lineage import children
from unbroken.core.nodes.repair.events import Answer, RepairOrder
from unbroken.errors import SpecError, WorldError
from unbroken.kube.client import connect
from unbroken.operator import definitions
from unbroken.operator.nodes.providers import AwsProvider, provider_of
from unbroken.operator.nodes.providers.aws import PROGRAM, AwsTarget, noted, target_of
from unbroken.spec.keys import CLUSTER_NAME, REPAIR_ORDER
from unbroken.spec.nodes.kinds import NODE_RECORD
from unbroken.spec.nodes.values import Action

HANG_SECONDS = 3.0
SHORT, LONG = "i-0abc1234", "i-0ab12cd34ef567890"
TERMINATE = "TerminateInstanceInAutoScalingGroup"


@pytest.fixture(scope="module")
def ec2(aws_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ec2]:
    """moto's server, for the tests of this file."""
    with running_ec2(aws_python, tmp_path_factory.mktemp("ec2")) as found:
        yield found


@pytest.fixture
def opened(clusters: Callable[[str], Cluster], ec2: Ec2) -> Any:
    """Opens the ground of EC2."""

    @asynccontextmanager
    async def ground() -> AsyncIterator[Ec2Ground]:
        async with connect(clusters("embedded").kubeconfig) as client:
            await definitions.install(client)
            yield Ec2Ground(client, ec2)

    return ground


def order(node: str, action: Action) -> RepairOrder:
    """An order."""
    return RepairOrder(node, action, BOOT, f"{node}-{action.value}")


async def note_of(ground: Ec2Ground, node: str) -> str:
    """The note of the order in the NodeRecord; empty: there is none."""
    found = await ground.plain.get(f"{NODE_RECORD.path}/{node}")
    assert found is not None
    return str((found["metadata"].get("annotations") or {}).get(REPAIR_ORDER, ""))


@pytest.mark.slow
async def test_order_that_aws_is_too_busy_for_is_given_again(opened: Any, ec2: Ec2) -> None:
    async with opened() as ground:
        node = await ground.add()
        with (
            ec2.refusing("RebootInstances", "503", "RequestLimitExceeded"),
            pytest.raises(WorldError, match="RequestLimitExceeded") as raised,
        ):
            await ground.provider().order(order(node, Action.REBOOT))
        assert raised.value.retry_after_seconds == 10.0
        assert await note_of(ground, node) == ""
        for _ in range(2):
            answer = await ground.provider().order(order(node, Action.REBOOT))
            assert answer.answer is Answer.WORKING
        # The one that was refused, and the one that was not.
        assert await ground.asked(node, Action.REBOOT) == 2


@pytest.mark.slow
async def test_aws_that_cannot_be_reached_is_asked_again(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as ground:
        node = await ground.add()
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
            with pytest.raises(WorldError, match="Could not connect") as raised:
                await ground.provider().order(order(node, Action.REBOOT))
        assert raised.value.retry_after_seconds == 10.0
        assert await note_of(ground, node) == ""
        assert (await ground.provider().order(order(node, Action.REBOOT))).answer is Answer.WORKING


@pytest.mark.slow
async def test_refusal_of_aws_is_told_in_its_words(opened: Any, ec2: Ec2) -> None:
    async with opened() as ground:
        node = await ground.add()
        with ec2.refusing(TERMINATE, "403", "AccessDenied"):
            answer = await ground.provider().order(order(node, Action.REPLACE))
        assert answer.answer is Answer.FAILED
        assert "AccessDenied" in answer.text
        assert await note_of(ground, node) == ""


@pytest.mark.slow
async def test_reboot_whose_answer_was_lost_is_not_asked_for_again(opened: Any, ec2: Ec2) -> None:
    async with opened() as ground:
        node = await ground.add()
        with ec2.refusing("RebootInstances", "hang"):
            provider = AwsProvider(ground.client, str(ec2.python), HANG_SECONDS)
            with pytest.raises(WorldError, match="has not answered"):
                await provider.order(order(node, Action.REBOOT))
        # Tests of other processes make calls of their own meanwhile.
        assert not {*processes(str(PROGRAM))} & {*children()}, "the call lives on"
        assert (await ground.provider().order(order(node, Action.REBOOT))).answer is Answer.WORKING
        assert await ground.asked(node, Action.REBOOT) <= 1


@pytest.mark.slow
async def test_only_members_of_a_group_are_terminated_and_it_keeps_its_size(
    opened: Any, ec2: Ec2
) -> None:
    async with opened() as ground:
        alone = await ground.add_instance(ec2.alone)
        answer = await ground.provider().order(order(alone, Action.REPLACE))
        assert answer.answer is Answer.UNSUPPORTED
        assert f"{ec2.alone} is in no Auto Scaling group" in answer.text
        assert await ground.asked(alone, Action.REPLACE) == 0
        before = ec2.call("autoscaling", "describe_auto_scaling_groups")["AutoScalingGroups"][0]
        node = await ground.add()
        await ground.provider().order(order(node, Action.REPLACE))
        after = ec2.call("autoscaling", "describe_auto_scaling_groups")["AutoScalingGroups"][0]
        assert after["DesiredCapacity"] == before["DesiredCapacity"] == len(after["Instances"])
        # A terminated instance cannot be rebooted: the answer is that it is gone.
        gone = await ground.provider().order(order(node, Action.REBOOT))
        assert gone.answer is Answer.GONE


@pytest.mark.slow
async def test_instance_that_two_nodes_claim_to_be_is_not_touched(opened: Any, ec2: Ec2) -> None:
    async with opened() as ground:
        instance = ec2.members.pop()
        node, liar = await ground.add_instance(instance), await ground.add_instance(instance)
        answer = await ground.provider().order(order(liar, Action.REPLACE))
        assert answer.answer is Answer.UNSUPPORTED
        assert node in answer.text
        assert liar in answer.text
        assert await ground.asked(node, Action.REPLACE) == 0


@pytest.mark.slow
async def test_instance_that_cannot_be_rebooted_says_its_state(opened: Any, ec2: Ec2) -> None:
    async with opened() as ground:
        instance = ec2.members.pop()
        node = await ground.add_instance(instance)
        ec2.call("ec2", "stop_instances", InstanceIds=[instance])
        answer = await ground.provider().order(order(node, Action.REBOOT))
        assert (answer.answer, answer.text) == (Answer.FAILED, f"instance {instance} is stopped")
        unknown = await ground.add_instance(LONG)
        answer = await ground.provider().order(order(unknown, Action.REPLACE))
        assert answer.answer is Answer.UNSUPPORTED, "another region or account is no proof"
        assert f"EC2 knows no instance {LONG} in us-west-2" in answer.text


@pytest.mark.slow
async def test_python_without_boto3_says_what_to_install(opened: Any) -> None:
    async with opened() as ground:
        node = await ground.add()
        answer = await AwsProvider(ground.client, sys.executable).order(order(node, Action.REBOOT))
        assert answer.answer is Answer.FAILED
        assert "pip install 'unbroken[aws]'" in answer.text
        with pytest.raises(SpecError, match="unbroken\\[aws\\]"):
            provider_of(ground.client, "aws")


@pytest.mark.parametrize(
    ("name", "provider_id", "cluster", "instance"),
    [
        ("ip-10-0-0-1.ec2.internal", f"aws:///us-west-2a/{LONG}", "", LONG),
        ("old", f"aws:///us-west-2a/{SHORT}", "", SHORT),
        ("outpost", f"aws:///us-west-2-lax-1a/{LONG}", "", LONG),
        ("h", f"aws:///usw2-az2/sagemaker/cluster/hyperpod-8un4sg4b7m3e-{LONG}", "c", LONG),
        (f"hyperpod-{LONG}", "", "c", LONG),
        # No instance of AWS, or none that may be meant.
        (f"hyperpod-{LONG}", "", "", ""),
        ("gce", f"gce://project/zone/{LONG}", "", ""),
        ("fargate", "aws:///us-west-2a/1a2b3c/fargate-ip-10-0-0-1", "", ""),
        ("longer", f"aws:///us-west-2a/{LONG}0", "", ""),
        ("odd", f"aws:///us-west-2a/{LONG} --all", "", ""),
        ("plain", f"aws:///us-west-2a/{LONG}", "c", ""),
        ("nothing", "", "", ""),
    ],
)
def test_instance_is_read_from_what_nodes_of_aws_say(
    name: str, provider_id: str, cluster: str, instance: str
) -> None:
    labels = {CLUSTER_NAME: cluster} if cluster else {}
    node = {"metadata": {"name": name, "labels": labels}, "spec": {"providerID": provider_id}}
    found = target_of(node)
    assert (found.instance if found else "") == instance
    assert found is None or found.cluster == cluster


def test_region_is_the_operators_own_or_else_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"topology.kubernetes.io/region": "eu-central-1"}
    node = {
        "metadata": {"name": "a", "labels": labels},
        "spec": {"providerID": f"aws:///z/{LONG}"},
    }
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    assert target_of(node) == AwsTarget(LONG, "", "eu-central-1")
    labels["topology.kubernetes.io/region"] = "eu.example.com/x"
    assert target_of(node) == AwsTarget(LONG, "", "")
    monkeypatch.setenv("AWS_REGION", "us-gov-west-1")
    assert target_of(node) == AwsTarget(LONG, "", "us-gov-west-1")


def test_note_of_another_order_is_none() -> None:
    def record(note: str) -> dict[str, Any]:
        return {"metadata": {"annotations": {REPAIR_ORDER: note}}}

    assert noted(record(f"o-1 {LONG} us-west-2 c"), "o-1") == AwsTarget(LONG, "c", "us-west-2")
    assert noted(record(f"o-1 {LONG}  "), "o-1") == AwsTarget(LONG)
    for other in ("", "o-1", f"o-2 {LONG} us-west-2 c", f"o-1 {LONG} a b c"):
        assert noted(record(other), "o-1") is None
