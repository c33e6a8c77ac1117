"""The table of rungs: one for each remedy, in the order of the remedies, each to be reached."""

from __future__ import annotations

from unbroken.core.job.recovery.ladder import RUNGS, Pods, choose, rung_of
from unbroken.spec.job.incident import Remedy


def test_each_remedy_has_its_rung_in_the_order_of_the_remedies() -> None:
    assert [rung.remedy for rung in RUNGS] == list(Remedy)


def test_higher_rungs_keep_no_more_than_lower_ones() -> None:
    kept = [rung.keeps_processes for rung in RUNGS]
    assert kept == sorted(kept, reverse=True)


def test_a_lost_pod_leads_to_a_rung_that_replaces_it() -> None:
    for rung in RUNGS:
        remedy, _ = choose(rung.remedy, "restart 1", ["lm-1"])
        led_to = rung_of(remedy)
        is_replaced = led_to.replaces is not Pods.NONE
        assert is_replaced or not led_to.starts_again or rung.remedy is Remedy.IN_PROCESS
