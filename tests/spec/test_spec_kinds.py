"""The kinds about nodes: stored by both API servers as they were written, read tolerantly."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from tests.apiclient import Api
from tests.apiservers import Cluster
from tests.samples import define_missing
from unbroken.spec.nodes.kinds import (
    CLUSTER,
    MACHINE,
    NODE_CHECK,
    NODE_RECORD,
    OWN_KINDS,
    BlameEntry,
    BlameKind,
    CheckKind,
    CheckResult,
    ClusterSpec,
    LifeCycle,
    MachinePhase,
    MachineSpec,
    MachineStatus,
    MachineTaint,
    NodeCheckSpec,
    NodeRecordSpec,
    Outcome,
    OwnKind,
    RepairRecord,
    RepairState,
)
from unbroken.spec.nodes.values import Action, NodeRecovery
from unbroken.spec.schema.crd import own_definition
from unbroken.spec.schema.fields import write_record

REPAIR = RepairRecord(
    Action.REBOOT, "XID 79", "daemon", RepairState.ACTING, 1000.25, fault="Xid79", tries=1
)
SPECS: list[tuple[OwnKind[Any, Any], Any]] = [
    (
        CLUSTER,
        ClusterSpec(
            "Ml-Cluster", "abc123def456", {"InstanceGroups": [{"a": 1}]}, NodeRecovery.NONE
        ),
    ),
    (
        MACHINE,
        MachineSpec(
            instance_type="ml.p5.48xlarge",
            labels={"a/b": "c"},
            taints=(MachineTaint("k", "NoSchedule"),),
            life_cycle=LifeCycle("s3://b/p", "on_create.sh"),
            boots=2,
        ),
    ),
    (NODE_CHECK, NodeCheckSpec(("node-0",), (CheckKind.STRESS, CheckKind.CONNECTIVITY))),
    (
        NODE_RECORD,
        NodeRecordSpec(
            blame=(BlameEntry(999.5, BlameKind.FAULT, "Xid79", "NVRM: Xid 79", 5.0),),
            repair=REPAIR,
            history=(REPAIR,),
            quarantined_at=1001.0,
        ),
    ),
]


@pytest.mark.parametrize(("kind", "spec"), SPECS, ids=lambda value: getattr(value, "kind", ""))
def test_what_is_stored_is_what_was_meant(
    cluster: Cluster, kind: OwnKind[Any, Any], spec: Any
) -> None:
    definition = own_definition(kind)
    with closing(Api(cluster)) as api:
        define_missing(api, definition)
        made = api.post(f"unbroken.dev/v1:{kind.plural}", kind.new("a-1", spec)).made
        assert kind.spec_of(made) == (spec, ())
        api.delete(f"unbroken.dev/v1:{kind.plural}/a-1")


def test_a_status_is_read_as_written() -> None:
    status = MachineStatus(MachinePhase.RUNNING, boots=1, index=3, started_at=5.5)
    found, problems = MACHINE.status_of({"status": write_record(status)})
    assert (found, problems) == (status, ())


def test_what_is_garbled_becomes_a_default_and_a_problem() -> None:
    found, problems = MACHINE.status_of({"status": {"phase": "Flying", "boots": 1}})
    assert found == MachineStatus(boots=1)
    assert "status.phase" in str(problems[0])
    assert MACHINE.status_of({}) == (MachineStatus(), ())
    found, problems = NODE_CHECK.spec_of({"spec": 3})
    assert len(problems) == 1
    assert found.kinds == (CheckKind.BASIC,)


def test_a_result_keeps_what_was_measured() -> None:
    result = CheckResult("n", CheckKind.STRESS, "disk", Outcome.FAIL, 1.5, measured=0.0)
    assert write_record(result)["measured"] == 0.0


def test_short_names_are_taken_once() -> None:
    assert len({kind.short for kind in OWN_KINDS}) == len(OWN_KINDS)
