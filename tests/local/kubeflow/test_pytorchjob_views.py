"""Objects of a PyTorchJob as the built-in controller reads them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from lightkube.resources.core_v1 import Pod, Service

from unbroken.local.kubeflow.controller import job_picture, replaced_annotation
from unbroken.local.kubeflow.decisions import JobPod, Replaced
from unbroken.spec.keys import REPLACED_PODS
from unbroken.spec.kubeflow.pytorchjob import Replica

Object = dict[str, Any]


def job(**annotations: str) -> Object:
    """Return a job without pods."""
    metadata = {"name": "lm", "namespace": "default", "uid": "u", "annotations": annotations}
    return {"metadata": metadata, "spec": {"pytorchReplicaSpecs": {}}}


def pod(name: str, labels: Object, **status: Any) -> Pod:
    """Return a pod with these labels, without the domain, and this status."""
    keys = {f"training.kubeflow.org/{key}": value for key, value in labels.items()}
    metadata = {"name": name, "uid": f"{name}-uid", "labels": keys}
    return msgspec.convert({"metadata": metadata, "status": status}, Pod)


def test_pods_are_told_by_their_labels() -> None:
    ended = {"name": "pytorch", "state": {"terminated": {"exitCode": 137}}, "restartCount": 2}
    common = {"image": "any", "imageID": "", "ready": False}
    sidecar = {"name": "log", "state": {"running": {}}, "restartCount": 1, **common}
    statuses = [{**ended, **common}, sidecar]
    first = pod(
        *("lm-worker-3", {"replica-type": "worker", "replica-index": "3"}),
        phase="Failed",
        containerStatuses=statuses,
    )
    odd = pod("odd", {"replica-type": "driver", "replica-index": "0"})
    service = msgspec.convert({"metadata": {"name": "lm-worker-3"}}, Service)
    found = job_picture(job(), [first, odd], [service])
    wanted = JobPod(
        *("lm-worker-3", "lm-worker-3-uid", Replica.WORKER, 3, "Failed"),
        restarts=3,
        exit_code=137,
    )
    assert found.pods == (wanted,)
    assert found.services == {"lm-worker-3"}


@pytest.mark.parametrize("replaced", [Replaced(), Replaced(3, frozenset({"a", "b"}))])
def test_what_was_replaced_is_read_as_it_was_written(replaced: Replaced) -> None:
    assert job_picture(job(**replaced_annotation(replaced)), (), ()).replaced == replaced


@pytest.mark.parametrize("text", ["", "many a b", "-1"])
def test_a_garbled_count_is_none(text: str) -> None:
    assert job_picture(job(**{REPLACED_PODS: text}), (), ()).replaced.count == 0
