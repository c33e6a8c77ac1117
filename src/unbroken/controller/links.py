"""One link to the agent in each live pod of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from unbroken.agent_http.client import AgentLink
from unbroken.core.events import AgentLost, AgentReported, Event, PodPhase, PodUid, PodView
from unbroken.wire.agent import Command


@dataclass(frozen=True, slots=True)
class _Held:
    place: tuple[str, int]
    link: AgentLink
    task: asyncio.Task[None]


class AgentLinks:
    """Links by pod; a pod whose address changes gets a new one."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        token: str | None,
        tell: Callable[[Event], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._session = session
        self._token = token
        self._tell = tell
        self._tasks = tasks
        self._held: dict[PodUid, _Held] = {}

    def follow(self, pod: PodView, port: int) -> None:
        """The pod is now like this: keep, make or end its link."""
        is_live = pod.phase in (PodPhase.RUNNING, PodPhase.UNKNOWN)
        place = (pod.address, port) if pod.address and is_live else None
        held = self._held.get(pod.uid)
        if held is not None and held.place == place:
            return
        self.drop(pod.uid)
        if place is not None:
            self._held[pod.uid] = self._make(pod.uid, place)

    def drop(self, uid: PodUid) -> None:
        """The pod is gone."""
        held = self._held.pop(uid, None)
        if held is not None:
            held.task.cancel()

    def send(self, uid: PodUid, command: Command) -> bool:
        """Give an agent its command; False: there is no link, and the job says it again later."""
        held = self._held.get(uid)
        if held is not None:
            held.link.send(command)
        return held is not None

    def _make(self, uid: PodUid, place: tuple[str, int]) -> _Held:
        link = AgentLink(
            *place,
            self._token,
            lambda report: self._tell(AgentReported(uid, report)),
            lambda why: self._tell(AgentLost(uid, why)),
            self._session,
        )
        return _Held(place, link, self._tasks.create_task(link.run()))
