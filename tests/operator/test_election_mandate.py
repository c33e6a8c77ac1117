"""The right to act, which is checked at the moment when a request leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap

from tests.apiservers import Cluster
from tests.fault_proxy import FaultProxy
from unbroken.errors import WorldError
from unbroken.kube.client import api_errors, connect
from unbroken.kube.clock import boottime, monotonic
from unbroken.operator.election import Mandate, Tenure

GOOD = 12.0


@pytest.mark.parametrize(
    ("claim", "told", "until"),
    [
        ("nothing is ours at first", [], float("-inf")),
        ("a renewal counts from its sending", ["renewed 5"], 17.0),
        ("an older answer that comes late takes nothing back", ["renewed 5", "renewed 3"], 17.0),
        ("what has ended is over", ["renewed 5", "ended"], float("-inf")),
        ("an outage extends what was ours when it was noticed", ["renewed 5", "away 16"], 28.0),
        ("but not what had run out by then: others may have it", ["renewed 5", "away 17"], 17.0),
        ("and gives nothing that was not ours", ["away 5"], float("-inf")),
    ],
)
def test_a_tenure_lasts_as_long_as_it_is_certain(claim: str, told: list[str], until: float) -> None:
    tenure = Tenure(GOOD)
    for one in told:
        what, _, sent = one.partition(" ")
        match what:
            case "renewed":
                tenure.renewed(float(sent))
            case "away":
                tenure.unanswered(float(sent))
            case _:
                tenure.ended()
    assert tenure.until == until, claim
    assert not tenure.holds(until)


async def test_who_waits_for_the_mandate_goes_on_when_it_is_renewed() -> None:
    now = 100.0
    mandate = Mandate(GOOD, lambda: now)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(mandate.given())
        mandate.unanswered(now)
        mandate.renewed(now - GOOD)
        await asyncio.sleep(0)
        assert not waiting.done()
        mandate.renewed(now)
    now += GOOD
    assert not mandate.is_given(), "time alone takes it away"


def test_time_goes_on_while_the_machine_is_suspended() -> None:
    """Read both clocks from the kernel; this machine may have been suspended."""
    assert boottime() >= monotonic() - 0.001


def answers(*given: bool) -> Callable[[], bool]:
    """Return these answers in turn, and the last one repeatedly."""
    left = list(given)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize(
    "may_write",
    [(False,), (True, False)],
    ids=["before the request", "when its connection has been made"],
)
async def test_a_write_without_leave_never_reaches_the_server(
    cluster: Cluster, tmp_path: Path, may_write: tuple[bool, ...]
) -> None:
    async with FaultProxy(cluster).serve() as proxy:
        path = proxy.kubeconfig(tmp_path / "kubeconfig")
        async with connect(path) as client:
            guarded = client.guarded(answers(*may_write))
            made = ConfigMap(metadata=ObjectMeta(name="never", namespace="default"))
            with pytest.raises(WorldError, match="create it"), api_errors("create it"):
                await guarded.create(made)
            with pytest.raises(WorldError):
                await guarded.raw("DELETE", "api/v1/namespaces/default/configmaps/never")
            assert proxy.writes() == []
            assert await guarded.raw("GET", "version"), "reads need no leave"
            await client.raw(
                "POST", "api/v1/namespaces", body={"metadata": {"generateName": "mandate-"}}
            )
            assert len(proxy.writes()) == 1, "nor does who is not guarded"


async def test_writes_with_leave_are_as_before(cluster: Cluster, tmp_path: Path) -> None:
    """Write with content and without, and again on the same connection."""
    async with connect(cluster.kubeconfig) as client:
        guarded = client.guarded(lambda: True)
        path = "api/v1/namespaces/default/configmaps"
        for name in ("a", "b"):
            body = {"metadata": {"name": f"mandate-{name}"}, "data": {"text": "x" * 100_000}}
            await guarded.raw("POST", path, body=body)
        for name in ("a", "b"):
            await guarded.raw("DELETE", f"{path}/mandate-{name}")
        left = await client.raw("GET", path)
        assert b"mandate-" not in left
