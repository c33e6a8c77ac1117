"""People who have signed in: what is kept of their tokens, and for how long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.apiservers import Cluster
from unbroken.cli.page import accounts
from unbroken.cli.page.account import Account
from unbroken.cli.page.accounts import ACCOUNTS_EACH, ACCOUNTS_MAX, SESSIONS_MAX, Accounts
from unbroken.cli.page.entrance import Source
from unbroken.cli.page.logs import LogQuery
from unbroken.cli.page.orders import Order
from unbroken.cli.place import ClusterPlace
from unbroken.errors import SpecError, WorldError
from unbroken.kube.client import TokenClients, connect
from unbroken.kube.errors import Unauthorized
from unbroken.operator.definitions import install


@dataclass
class Held:
    """A holder of a token, as the source of a person is."""

    account: Account
    problem: Exception | None = None

    async def read(self, path: tuple[str, ...]) -> dict[str, Any]:
        if self.problem is not None:
            raise self.problem
        return {"path": list(path)}

    async def text(self, namespace: str, job: str, number: int) -> str:
        return f"{namespace}/{job}/{number}"

    async def logs(self, namespace: str, job: str, query: LogQuery) -> dict[str, Any]:
        return {"query": str(query)}

    async def act(self, order: Order) -> str:
        return str(order)


@dataclass
class People:
    """People at a real cluster API, and what is held for them."""

    accounts: Accounts
    token: str
    held: list[weakref.ref[Held]] = field(default_factory=list)

    def alive(self) -> list[Held]:
        """Return the tokens that are still held."""
        gc.collect()
        return [one for ref in self.held if (one := ref()) is not None]


@asynccontextmanager
async def people(cluster: Cluster) -> AsyncIterator[People]:
    held: list[weakref.ref[Held]] = []

    def source_of(account: Account, person: str) -> Source:
        assert person
        made = Held(account)
        held.append(weakref.ref(made))
        return Source(made.read, made.text, made.logs, made.act)

    async with connect(cluster.kubeconfig) as own:
        await install(own)
        async with TokenClients(own.config, "test") as clients:
            found = Accounts(own, clients, ClusterPlace(), source_of)
            yield People(found, cluster.token, held)


async def test_a_token_is_held_until_its_last_session_ends(cluster: Cluster) -> None:
    async with people(cluster) as some:
        first = await some.accounts.sign_in(some.token, ())
        second = await some.accounts.sign_in(some.token, ())
        person = some.accounts.person(first)
        assert person is not None
        assert person is some.accounts.person(second)
        kept = person.source  # as the server keeps it with contents
        assert await kept.read(("jobs",)) == {"path": ["jobs"]}
        some.accounts.sign_out(first)
        assert some.accounts.person(first) is None
        assert len(some.alive()) == 1
        some.accounts.sign_out(second)
        assert some.alive() == []
        with pytest.raises(WorldError, match="the session has ended"):
            await kept.read(("jobs",))


async def test_a_token_that_kubernetes_refuses_ends_all_its_sessions(cluster: Cluster) -> None:
    async with people(cluster) as some:
        cookies = [await some.accounts.sign_in(some.token, ()) for _ in range(2)]
        person = some.accounts.person(cookies[0])
        assert person is not None
        (held,) = some.alive()
        held.problem = Unauthorized("expired")
        with pytest.raises(Unauthorized):
            await person.source.read(("jobs",))
        assert [some.accounts.person(one) for one in cookies] == [None, None]
        del held
        assert some.alive() == []


async def test_sessions_end_by_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "SESSION_SECONDS", 0.0)
    async with people(cluster) as some:
        assert some.accounts.person(await some.accounts.sign_in(some.token, ())) is None
        assert some.alive() == []


async def test_the_oldest_session_and_the_token_used_longest_ago_make_room(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (ACCOUNTS_MAX, SESSIONS_MAX) == (200, 8)
    monkeypatch.setattr(accounts, "ACCOUNTS_MAX", 2)
    async with people(cluster) as some:
        cookies = [await some.accounts.sign_in(some.token, ()) for _ in range(SESSIONS_MAX + 1)]
        known = [some.accounts.person(one) is not None for one in cookies]
        assert known == [False] + [True] * SESSIONS_MAX
        default = await some.accounts.sign_in(some.token, ("default",))
        assert some.accounts.person(cookies[-1]) is not None
        await some.accounts.sign_in(some.token, ("kube-system",))
        assert some.accounts.person(default) is None
        assert some.accounts.person(cookies[-1]) is not None
        assert len(some.alive()) == 2


async def test_whoever_signs_in_often_ends_no_session_of_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ACCOUNTS_EACH == 16
    monkeypatch.setattr(accounts, "ACCOUNTS_EACH", 2)
    async with people(cluster) as some:
        cookies = [await some.accounts.sign_in(some.token, (f"n{one}",)) for one in range(4)]
        known = [some.accounts.person(one) is not None for one in cookies]
        assert known == [False, False, True, True]
        assert len(some.alive()) == 2


@pytest.mark.parametrize("token", ["", "a b", "a\n", "\x7f", "x" * 20_000, "unknown", "é"])
async def test_what_is_no_token_begins_no_session(cluster: Cluster, token: str) -> None:
    async with people(cluster) as some:
        with pytest.raises(SpecError) as refused:
            await some.accounts.sign_in(token, ())
        assert len(token) < 3 or token not in str(refused.value)
        assert some.held == []
