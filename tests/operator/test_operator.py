"""The operator against both API servers: what it makes of jobs, without nodes or agents."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.job_keys import MASTER, key_in, secret_of
from tests.operator.conftest import conditions, job
from unbroken.core.keys import job_key, job_secret_name

Object = dict[str, Any]
JOBS, PODS = "hyperpodpytorchjobs", "pods"
RULES = "spec.runPolicy.logMonitoringConfiguration"


def pods(found: Object) -> dict[str, str]:
    """Name -> uid."""
    return {one["metadata"]["name"]: one["metadata"]["uid"] for one in found["items"]}


async def secret(here: Any) -> tuple[str, Object]:
    """The Secret that the job's pods mount, by its path."""
    names = {secret_of(pod) for pod in (await here.get(PODS))["items"]}
    (name,) = names
    return f"secrets/{name}", await here.until(f"secrets/{name}", bool)


async def test_a_job_gets_its_pods_and_its_key(place: Any) -> None:
    async with place() as here, here.operator():
        made = await here.post(JOBS, job())
        found = await here.until(PODS, lambda listed: len(listed["items"]) == 2)
        assert sorted(pods(found)) == ["lm-pods-0", "lm-pods-1"]
        status = await here.until(f"{JOBS}/lm", conditions)
        assert list(conditions(status)) == ["Created"]
        assert status["status"]["restartCount"] == 0
        uid = made["metadata"]["uid"]
        path, kept = await secret(here)
        assert path == f"secrets/{job_secret_name(MASTER, 'lm', uid)}"
        assert kept["metadata"]["ownerReferences"][0]["uid"] == uid
        assert key_in(kept) == job_key(MASTER, uid)
        events = await here.until("events", lambda listed: listed["items"])
        assert events["items"][0]["involvedObject"]["name"] == "lm"


async def test_a_restarted_operator_doubles_nothing_and_derives_the_same_key(place: Any) -> None:
    async with place() as here:
        async with here.operator():
            await here.post(JOBS, job())
            before = await here.until(PODS, lambda listed: len(listed["items"]) == 2)
            kept = await secret(here)
        await here.delete(f"{PODS}/lm-pods-1", gracePeriodSeconds=0)
        async with here.operator():
            after = await here.until(PODS, lambda listed: len(listed["items"]) == 2)
            assert pods(after)["lm-pods-0"] == pods(before)["lm-pods-0"]
            assert pods(after)["lm-pods-1"] != pods(before)["lm-pods-1"]
            assert await secret(here) == kept


async def test_a_secret_that_somebody_removes_comes_back_for_new_pods(place: Any) -> None:
    async with place() as here:
        async with here.operator():
            await here.post(JOBS, job())
            await here.until(PODS, lambda listed: len(listed["items"]) == 2)
            path, kept = await secret(here)
        await here.delete(path)
        await here.delete(f"{PODS}/lm-pods-1", gracePeriodSeconds=0)
        async with here.operator():
            again = await here.until(path, bool)
            assert again["data"] == kept["data"]


async def test_pods_with_the_key_of_another_operator_are_replaced_once(place: Any) -> None:
    """An operator of an older version made them, or one with another master key."""
    async with place() as here:
        async with here.operator(bytes(32)):
            await here.post(JOBS, job())
            before = await here.until(PODS, lambda listed: len(listed["items"]) == 2)
        async with here.operator():

            def is_new(listed: Object) -> bool:
                return len(listed["items"]) == 2 and not set(pods(listed).values()) & old

            old = set(pods(before).values())
            after = await here.until(PODS, is_new)
            assert key_in((await secret(here))[1]) != key_in(
                await here.get(f"secrets/{secret_of(before['items'][0])}")
            )

            def has_said(listed: Object) -> bool:
                reasons = [one["reason"] for one in listed["items"]]
                return reasons.count("AgentKeyUnknown") == 2

            await here.until("events", has_said)
        async with here.operator():
            assert pods(await here.get(PODS)) == pods(after)


async def test_a_variable_left_in_a_quantity_fails_the_job_with_the_fields_name(place: Any) -> None:
    bad = job()
    main = bad["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    main["resources"] = {"limits": {"nvidia.com/gpu": "${GPUS}"}}
    field = "spec.replicaSpecs[0].template.spec.containers[0].resources.limits"
    async with place() as here, here.operator():
        await here.post(JOBS, bad)
        found = await here.until(f"{JOBS}/lm", lambda seen: "Failed" in conditions(seen))
        failed = conditions(found)["Failed"]
        assert failed["reason"] == "InvalidSpec"
        assert f'{field}["nvidia.com/gpu"]: Invalid value: "${{GPUS}}"' in failed["message"]
        assert "${GPUS} was left unsubstituted" in failed["message"]
        assert (await here.get(PODS))["items"] == []


async def test_a_job_that_cannot_be_understood_fails_with_every_problem(
    place: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rule = {"name": "r", "logPattern": "("}
    bad = job(runPolicy={"logMonitoringConfiguration": [rule]})
    bad["metadata"]["annotations"] = {"unbroken.dev/oops": "1"}
    async with place() as here, here.operator():
        await here.post(JOBS, bad)
        found = await here.until(f"{JOBS}/lm", lambda seen: "Failed" in conditions(seen))
        failed = conditions(found)["Failed"]
        assert failed["reason"] == "InvalidSpec"
        assert "spec.runPolicy.logMonitoringConfiguration[0].logPattern" in failed["message"]
        assert "unbroken.dev/oops" in failed["message"]
        assert (await here.get(PODS))["items"] == []
        good = {"runPolicy": {"logMonitoringConfiguration": None}}
        annotations = {"annotations": {"unbroken.dev/oops": None}}
        await here.merge(f"{JOBS}/lm", {"spec": good, "metadata": annotations})
        await here.until(PODS, lambda listed: len(listed["items"]) == 2)
        found = await here.until(f"{JOBS}/lm", lambda seen: "Failed" not in conditions(seen))


async def test_a_strangers_pod_of_the_name_is_waited_for(place: Any) -> None:
    stranger = {"metadata": {"name": "lm-pods-0"}, "spec": {"containers": [{"name": "c"}]}}
    stranger["spec"]["containers"] = [{"name": "c", "image": "any"}]
    async with place() as here, here.operator():
        made = await here.post(PODS, stranger)
        await here.post(JOBS, job())
        await here.until(f"{PODS}/lm-pods-1", lambda pod: pod)
        mine = await here.get(f"{PODS}/lm-pods-0")
        assert mine["metadata"]["uid"] == made["metadata"]["uid"]
        await here.delete(f"{PODS}/lm-pods-0", gracePeriodSeconds=0)
        await here.until(f"{PODS}/lm-pods-0", lambda pod: pod["metadata"]["labels"]["HPJob"])


@pytest.mark.parametrize("is_away", [False, True], ids=["operator runs", "operator is away"])
async def test_a_job_created_again_waits_for_the_names_of_pods_that_still_end(
    place: Any, is_away: bool
) -> None:
    held, free = {"metadata": {"finalizers": ["test/ends"]}}, {"metadata": {"finalizers": None}}
    names = ("lm-pods-0", "lm-pods-1")
    async with place() as here, AsyncExitStack() as first:
        await first.enter_async_context(here.operator())
        await here.post(JOBS, job())
        before = pods(await here.until(PODS, lambda listed: len(listed["items"]) == 2))
        old = await secret(here)
        for name in names:
            await here.merge(f"{PODS}/{name}", held)
        if is_away:
            await first.aclose()
        await here.delete(f"{JOBS}/lm")
        for name in names:
            await here.delete(f"{PODS}/{name}")
        again = await here.post(JOBS, job())
        if is_away:
            await first.enter_async_context(here.operator())
        await here.until(f"{JOBS}/lm", conditions)
        await here.merge(f"{PODS}/lm-pods-1", free)
        uid = again["metadata"]["uid"]
        await here.until(f"{PODS}/lm-pods-1", lambda pod: owner(pod) == uid)
        kept = await here.get(f"{PODS}/lm-pods-0")
        assert kept["metadata"]["uid"] == before["lm-pods-0"]
        assert list(conditions(await here.get(f"{JOBS}/lm"))) == ["Created"]
        await here.merge(f"{PODS}/lm-pods-0", free)
        await here.until(f"{PODS}/lm-pods-0", lambda pod: owner(pod) == uid)
        assert not before.items() & pods(await here.get(PODS)).items()
        assert await secret(here) != old


def owner(pod: Object) -> str:
    """Uid of the job of a pod."""
    return str(pod["metadata"]["ownerReferences"][0]["uid"])


async def test_a_bad_change_is_told_and_not_taken(place: Any) -> None:
    async with place() as here, here.operator():
        await here.post(JOBS, job())
        before = await here.until(PODS, lambda listed: len(listed["items"]) == 2)
        rules = [{"name": "r", "logPattern": "("}]
        bad = {"runPolicy": {"logMonitoringConfiguration": rules}}
        await here.merge(f"{JOBS}/lm", {"spec": bad})
        events = await here.until(
            "events",
            lambda listed: [e for e in listed["items"] if e["reason"] == "InvalidSpec"],
        )
        said = next(e for e in events["items"] if e["reason"] == "InvalidSpec")
        assert said["type"] == "Warning"
        assert "logMonitoringConfiguration[0].logPattern" in said["message"]
        assert pods(await here.get(PODS)) == pods(before)
        found = await here.get(f"{JOBS}/lm")
        assert "Failed" not in conditions(found)


async def test_a_warning_is_recorded_once_and_that_of_a_change_when_it_is_made(place: Any) -> None:
    def rules(*names: str) -> Object:
        return {"logMonitoringConfiguration": [{"name": n, "logPattern": "x"} for n in names]}

    def told(listed: Object) -> list[tuple[int, str]]:
        found = [one for one in listed["items"] if one["reason"] == "SpecWarning"]
        return [(one["count"], one["message"]) for one in found]

    async with place() as here:
        async with here.operator():
            await here.post(JOBS, job(runPolicy=rules("a")))
            await here.until(f"{JOBS}/lm", conditions)
            before = told(await here.until("events", told))
        async with here.operator():
            # The second operator has seen the job when it makes a pod of it.
            await here.delete(f"{PODS}/lm-pods-1", gracePeriodSeconds=0)
            await here.until(f"{PODS}/lm-pods-1", lambda pod: pod)
            await here.merge(f"{JOBS}/lm", {"spec": {"runPolicy": rules("a", "b")}})
            after = told(await here.until("events", lambda seen: len(told(seen)) > 1))
        assert before[0][1].startswith(f"{RULES}[0]: finds nothing: ")
        assert after == [*before, (1, before[0][1].replace("[0]", "[1]"))]
