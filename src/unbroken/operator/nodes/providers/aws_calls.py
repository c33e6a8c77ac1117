"""Calls of AWS for one repair order, in a process of its own: one JSON question in, one answer out.

boto3 blocks, in name look-ups and in searches for credentials too; a process can be killed.  It is
run by path, and needs nothing but the standard library and boto3.  The question (standard input):

    {"action": "reboot", "is_first": true, "has_booted": false,
     "instance": "i-0abc", "cluster": "", "region": ""}

`is_first`: the order is given now; else it was given before, and only its state is asked for.
`has_booted`: the node has booted since.  `cluster`: the HyperPod cluster of the instance; empty: it
is one of EC2.  `region` empty: the one of boto3's configuration.  The answer (standard output):

    {"answer": "working" | "done" | "gone" | "failed" | "unsupported", "text": "...",
     "is_given": true}
    {"retry_seconds": 5.0, "text": "...", "is_given": false}

`is_given` false: AWS has certainly not taken the order; the same order may be given again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

WORKING, DONE, GONE = "working", "done", "gone"
FAILED, UNSUPPORTED = "failed", "unsupported"
TEXT_MAX = 300
CONNECT_SECONDS, READ_SECONDS = 5.0, 20.0
"""Limits of one request.  There is one attempt: the operator asks again."""
RETRY_SECONDS = 10.0
BUSY = frozenset(
    {
        "InternalError",
        "InternalFailure",
        "InternalServerError",
        "RequestLimitExceeded",
        "ResourceContention",
        "ScalingActivityInProgress",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "Unavailable",
    }
)
"""Error codes of a request that was not carried out, and may be if it is sent again (AWS:
"Common errors" of EC2, EC2 Auto Scaling and SageMaker)."""
MISSING = frozenset({"ResourceNotFound", "ResourceNotFoundException"})
INSTANCE_MISSING = "InvalidInstanceID.NotFound"

Answer = dict[str, Any]
Question = Mapping[str, Any]


def answer(answer: str, text: str, *, is_given: bool = True) -> Answer:
    """Return an answer about the order."""
    return {"answer": answer, "text": text[:TEXT_MAX], "is_given": is_given}


class Ec2:
    """Instances of EC2 Auto Scaling groups."""

    def __init__(self, client_of: Callable[[str], Any]) -> None:
        self._ec2 = client_of("ec2")
        self._groups = client_of("autoscaling")

    def order(self, asked: Question) -> Answer:
        """Carry the order out, or say how it stands."""
        instance, is_first = asked["instance"], asked["is_first"]
        try:
            result = self._ec2.describe_instances(InstanceIds=[instance])
        except Exception as error:
            if code_of(error) != INSTANCE_MISSING:
                raise
            return self._missing(instance, is_first)
        states = [
            item["State"]["Name"]
            for reservation in result["Reservations"]
            for item in reservation["Instances"]
        ]
        if not states:
            return self._missing(instance, is_first)
        if states[0] == "terminated":
            return answer(GONE, f"instance {instance} is terminated")
        if asked["action"] == "reboot":
            return self._reboot(instance, states[0], is_first)
        return self._replace(instance, states[0])

    def _missing(self, instance: str, is_first: bool) -> Answer:
        if is_first:
            # Perhaps the region or the account is another: that is no proof of anything.
            text = f"EC2 knows no instance {instance} in {self._ec2.meta.region_name}"
            return answer(UNSUPPORTED, text, is_given=False)
        # EC2 shows terminated instances for an hour at most.
        return answer(GONE, f"instance {instance} is gone")

    def _reboot(self, instance: str, state: str, is_first: bool) -> Answer:
        if state != "running":
            return answer(FAILED, f"instance {instance} is {state}", is_given=not is_first)
        if is_first:
            self._ec2.reboot_instances(InstanceIds=[instance])
        return answer(WORKING, f"reboot of instance {instance} requested")

    def _replace(self, instance: str, state: str) -> Answer:
        if state == "shutting-down":
            return answer(WORKING, f"instance {instance} is shutting down")
        result = self._groups.describe_auto_scaling_instances(InstanceIds=[instance])
        if not result["AutoScalingInstances"]:
            text = f"instance {instance} is in no Auto Scaling group; nothing would take its place"
            return answer(UNSUPPORTED, text, is_given=False)
        member = result["AutoScalingInstances"][0]
        if not member["LifecycleState"].startswith("Terminat"):
            # Asked for again, it is still one termination.
            self._groups.terminate_instance_in_auto_scaling_group(
                InstanceId=instance, ShouldDecrementDesiredCapacity=False
            )
        group = member["AutoScalingGroupName"]
        return answer(WORKING, f"Auto Scaling group {group} replaces instance {instance}")


class HyperPod:
    """Nodes of HyperPod clusters."""

    def __init__(self, client_of: Callable[[str], Any]) -> None:
        self._sagemaker = client_of("sagemaker")

    def order(self, asked: Question) -> Answer:
        """Carry the order out, or say how it stands."""
        if asked["is_first"]:
            return self._give(asked)
        try:
            result = self._sagemaker.describe_cluster_node(
                ClusterName=asked["cluster"], NodeId=asked["instance"]
            )
        except Exception as error:
            if code_of(error) not in MISSING:
                raise
            text = f"HyperPod cluster {asked['cluster']} has no node {asked['instance']} any more"
            return answer(GONE, text)
        status = result["NodeDetails"]["InstanceStatus"]
        text = f"node {asked['instance']} is {status['Status']}"
        if status.get("Message"):
            text = f"{text}: {status['Message']}"
        if status["Status"] == "Running" and asked["has_booted"]:
            return answer(DONE, text)
        return answer(FAILED if status["Status"] == "Failure" else WORKING, text)

    def _give(self, asked: Question) -> Answer:
        node = asked["instance"]
        call = (
            self._sagemaker.batch_reboot_cluster_nodes
            if asked["action"] == "reboot"
            else self._sagemaker.batch_replace_cluster_nodes
        )
        said = call(ClusterName=asked["cluster"], NodeIds=[node])
        failures = [item for item in said.get("Failed") or () if item["NodeId"] == node]
        if not failures:
            return answer(WORKING, f"HyperPod {asked['action']}s node {node}")
        code, text = failures[0]["ErrorCode"], failures[0].get("Message") or ""
        if code == "InstanceIdInUse":
            text = f"another operation on node {node} is in progress: {text}"
            return answer(WORKING, text, is_given=False)
        kind = UNSUPPORTED if code == "InstanceIdNotFound" else FAILED
        return answer(kind, f"node {node}: {code}: {text}", is_given=False)


def code_of(error: Exception) -> str:
    """Return the error code of AWS's answer; empty: the error is no answer of AWS."""
    response = getattr(error, "response", None)
    return str(response["Error"]["Code"]) if isinstance(response, dict) else ""


def reply(asked: Question) -> Answer:
    """Answer the question."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            HTTPClientError,
        )
        from botocore.exceptions import (
            ConnectionError as NoConnection,
        )
    except ImportError:
        text = "the operator's Python has no boto3: pip install 'unbroken[aws]'"
        return answer(FAILED, text, is_given=False)
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"total_max_attempts": 1},
        user_agent_extra="unbroken",
    )

    def client_of(service: str) -> Any:
        return session.client(service, config=config)

    try:
        session = boto3.Session(region_name=asked["region"] or None)
        service = HyperPod(client_of) if asked["cluster"] else Ec2(client_of)
        return service.order(asked)
    except ClientError as error:
        text = str(error)[:TEXT_MAX]
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code_of(error) in BUSY or status >= 500:
            return {"retry_seconds": RETRY_SECONDS, "text": text, "is_given": False}
        return answer(FAILED, text, is_given=not asked["is_first"])
    except NoConnection as error:
        # Each question asks for a change in its last request at most, and that was not sent.
        return {"retry_seconds": RETRY_SECONDS, "text": str(error)[:TEXT_MAX], "is_given": False}
    except HTTPClientError as error:
        # The request may have arrived: nobody knows whether the order was taken.
        text = str(error)[:TEXT_MAX]
        return {"retry_seconds": RETRY_SECONDS, "text": text, "is_given": True}
    except BotoCoreError as error:
        # No credentials, no region, parameters that boto3 refuses: nothing was sent.
        return answer(FAILED, str(error), is_given=not asked["is_first"])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(reply(json.load(sys.stdin))))
