"""The operator took another user's Secret `JOB-agent` for the key of the job of that name.

It gave it to the job's pods, sent it to their agents in clear, and undid its owner's rotation.
"""

from __future__ import annotations

from typing import Any

from tests.job_keys import secret_of
from tests.operator.conftest import job
from tests.operator.conftest import place as place

JOBS, PODS = "hyperpodpytorchjobs", "pods"


async def test_a_strangers_secret_is_neither_used_nor_touched(place: Any) -> None:
    stranger = {"metadata": {"name": "gitlab-agent"}, "stringData": {"token": "glagent-SECRET"}}
    async with place() as here:
        await here.post("secrets", stranger)
        async with here.operator():
            await here.post(JOBS, job("gitlab"))
            found = await here.until(PODS, lambda listed: len(listed["items"]) == 2)
            for pod in found["items"]:
                assert secret_of(pod) != "gitlab-agent"
                assert "gitlab-agent" not in {
                    one.get("secret", {}).get("secretName") for one in pod["spec"]["volumes"]
                }
            rotated = await here.merge("secrets/gitlab-agent", {"stringData": {"token": "new"}})
            # New pods made the operator check the Secret.
            await here.delete(f"{PODS}/gitlab-pods-1", gracePeriodSeconds=0)
            await here.until(f"{PODS}/gitlab-pods-1", bool)
        assert await here.get("secrets/gitlab-agent") == rotated


async def test_a_job_that_is_made_anew_has_another_secret_and_another_key(place: Any) -> None:
    async with place() as here, here.operator():
        names = set()
        for _ in range(2):
            await here.post(JOBS, job("lm"))
            found = await here.until(PODS, lambda listed: len(listed["items"]) == 2)
            names |= {secret_of(pod) for pod in found["items"]}
            await here.delete(f"{JOBS}/lm")
            await here.absent(f"{JOBS}/lm")
            for pod in found["items"]:
                name = pod["metadata"]["name"]
                if await here.get(f"{PODS}/{name}"):
                    await here.call("DELETE", f"{PODS}/{name}", body={"gracePeriodSeconds": 0})
            await here.until(PODS, lambda listed: not listed["items"])
        assert len(names) == 2
