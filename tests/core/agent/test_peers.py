"""Agents vouch for each other; none learns that all run an attempt after one has stopped."""

from __future__ import annotations

import random

import pytest

from unbroken.core.agent.peers import Vouching
from unbroken.wire import agent
from unbroken.wire.agent import PeerAnswer, PeerQuestion, parent_of

ATTEMPT = 3


class Network:
    """Agents that ask their parents; messages take time, and some are lost."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.clocks = [self.random.uniform(-1e6, 1e6) for _ in range(count)]
        self.agents = [Vouching(f"agent-{r}", ATTEMPT, r, count) for r in range(count)]
        self.stopped_at: list[float | None] = [None] * count
        self.cut: set[int] = set()
        self._mail: list[tuple[float, int, int, float, PeerQuestion | PeerAnswer]] = []

    def clock(self, rank: int) -> float:
        return self.now + self.clocks[rank]

    def vouches(self, rank: int) -> bool:
        return self.stopped_at[rank] is None

    def step(self) -> None:
        """Let a moment pass."""
        self.now += self.random.uniform(0.0, 0.05)
        rank = self.random.randrange(len(self.agents))
        parent = parent_of(rank)
        if parent is not None:
            now = self.clock(rank)
            agent, vouches = self.agents[rank], self.vouches(rank)
            question = agent.question(vouches=vouches, is_urgent=False, now=now)
            self._send(rank, parent, now, question)
        for letter in [one for one in self._mail if one[0] <= self.now]:
            self._mail.remove(letter)
            self._arrive(*letter[1:])

    def _send(self, of: int, to: int, asked_at: float, what: PeerQuestion | PeerAnswer) -> None:
        if self.random.random() < 0.9 and (of in self.cut) == (to in self.cut):
            late = self.random.choice([0.01, 0.1, 3.0]) * self.random.random()
            self._mail.append((self.now + late, of, to, asked_at, what))

    def _arrive(self, of: int, to: int, asked_at: float, what: PeerQuestion | PeerAnswer) -> None:
        if (of in self.cut) != (to in self.cut):
            return
        if isinstance(what, PeerAnswer):
            self.agents[to].answered(what, asked_at)
            return
        assert self.agents[to].asked(what, self.clock(to))
        answer = self.agents[to].answer_child(what, vouches=self.vouches(to), now=self.clock(to))
        self._send(to, of, asked_at, answer)

    def all_at(self, rank: int) -> float:
        """Return when all ran the attempt, as this agent knows it, on the clock of the world."""
        vouches, now = self.vouches(rank), self.clock(rank)
        return self.agents[rank].all_at(vouches=vouches, now=now) - self.clocks[rank]


@pytest.fixture(autouse=True)
def _small_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "FANOUT", 2)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_vouched_for_after_one_has_stopped(seed: int) -> None:
    network = Network(seed, 7)
    for _ in range(2000):
        network.step()
    assert min(map(network.all_at, range(7))) > network.now - 20, "all are heard of"
    victim = network.random.randrange(7)
    network.stopped_at[victim] = stopped = network.now
    for _ in range(500):
        network.step()
        known = [network.all_at(rank) for rank in range(7) if network.vouches(rank)]
        assert max(known) <= stopped + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_a_group_that_is_cut_off_is_not_vouched_for_although_its_first_agent_is_in_it(
    seed: int,
) -> None:
    network = Network(seed, 7)
    for _ in range(2000):
        network.step()
    network.cut = {0, 1, 3}
    cut_at = network.now
    for _ in range(500):
        network.step()
        assert max(network.all_at(rank) for rank in range(7)) <= cut_at + 1e-6


def test_a_question_of_another_attempt_or_of_a_stranger_is_not_answered() -> None:
    root = Vouching("agent-0", ATTEMPT, 0, 3)
    assert not root.asked(PeerQuestion(ATTEMPT - 1, 1), 1.0)
    assert not root.asked(PeerQuestion(ATTEMPT, 5), 1.0)
    assert root.asked(PeerQuestion(ATTEMPT, 1), 1.0)
    answer = root.answer_child(PeerQuestion(ATTEMPT, 1), vouches=True, now=1.0)
    assert answer == PeerAnswer("agent-0", 1.0, None)


def test_a_token_of_an_earlier_process_of_the_parent_counts_for_nothing() -> None:
    root = Vouching("agent-new", ATTEMPT, 0, 2)
    old = PeerQuestion(ATTEMPT, 1, "agent-old", token=100.0, age=0.0)
    answer = root.answer_child(old, vouches=True, now=100.0)
    assert answer.age is None


def test_an_urgent_question_is_passed_on_to_the_parent_for_as_long_as_it_counts() -> None:
    agent = Vouching("agent-1", ATTEMPT, 1, 7)
    assert agent.asked(PeerQuestion(ATTEMPT, 3, is_urgent=False), 10.0)
    assert not agent.question(vouches=True, is_urgent=False, now=10.0).is_urgent
    assert agent.asked(PeerQuestion(ATTEMPT, 4, is_urgent=True), 11.0)
    assert agent.question(vouches=True, is_urgent=False, now=12.9).is_urgent
    assert not agent.question(vouches=True, is_urgent=False, now=13.1).is_urgent
    assert agent.question(vouches=True, is_urgent=True, now=13.1).is_urgent
