"""The order of an agent's links: which of them may command."""

from __future__ import annotations

from unbroken.core.agent.link_order import LinkOrder


def test_only_the_newest_open_link_may_command() -> None:
    order = LinkOrder()
    old = order.ask()
    order.open(old)
    assert order.may_command(old)
    new = order.ask()
    assert order.may_command(old), "whoever asks may not have the key"
    order.open(new)
    assert (order.may_command(old), order.may_command(new)) == (False, True)


def test_a_link_that_proves_late_stays_older() -> None:
    order = LinkOrder()
    old, new = order.ask(), order.ask()
    order.open(new)
    order.open(old)
    assert (order.may_command(old), order.may_command(new)) == (False, True)
