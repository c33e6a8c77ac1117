"""Log rules that the job keeps as a whole, as its machine decides about them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.core.job.drive_job import Script, spec
from tests.core.logs.hanging_rules import hanging_rules
from unbroken.core.job.events import (
    AgentReported,
    AskAgent,
    EvidenceReceived,
    JobSeen,
    PodUid,
    StartWorkers,
)
from unbroken.core.job.watch.hangs import Tally, shared
from unbroken.core.tick import Tick
from unbroken.spec.job.types import JobOptions, LogRule, RuleScope, RuleWatch, RunPolicy
from unbroken.spec.schema.fields import write_record
from unbroken.wire.agent import AgentReport, AgentState, RuleState, RuleView
from unbroken.wire.observation import CollectCommand, Evidence

RULE = LogRule("loss", "loss=", expected_recurring_frequency_in_seconds=60)
WAITING = RuleView("loss", RuleState.WAITING, "some")
SILENT = replace(WAITING, state=RuleState.HANGING)
HEALTHY = replace(WAITING, state=RuleState.HEALTHY, matches=3, last_match_at=5.0, last_rank=0)
LOST = replace(HEALTHY, state=RuleState.HANGING, last_line="loss=3")

VIEWS = st.builds(
    RuleView,
    name=st.sampled_from(["loss", "lr"]),
    state=st.sampled_from(RuleState),
    ranks=st.sampled_from(["some", "some", "node", "0,8"]),
    matches=st.integers(0, 1),
)


class Logs(Script):
    """A job of two nodes with a rule, all of it running."""

    def __init__(self, policy: RunPolicy | None = None) -> None:
        super().__init__(spec(2, policy=policy or RunPolicy(log_monitoring_configuration=(RULE,))))
        self.up()

    def hear(self, pod: str, at: float, *views: RuleView, attempt: int = 0) -> str:
        """A report with the rules; the job's true condition afterwards."""
        report = self.report(f"runs {pod} {attempt}")
        said = AgentReported(self._uid(pod), replace(report, log_rules=views))
        for effect in self.give(said, at):
            if isinstance(effect, AskAgent) and isinstance(effect.request, CollectCommand):
                asked = effect.request
                seen = Evidence(asked.request, asked.attempt, report.agent_id, at)
                self.give(EvidenceReceived(effect.pod, seen), at)
        return f"{self.condition.type} {self.condition.reason}"


def test_a_rule_hangs_once_every_node_that_heard_it_has_lost_it() -> None:
    logs = Logs()
    logs.hear("w-1", 65, SILENT)
    assert logs.hear("w-0", 65, HEALTHY) == "Running Running"
    assert logs.hear("w-0", 70, LOST) == "Faulted LogHang_loss"
    culprit = logs.incidents[1].culprit
    assert (culprit.fault, culprit.rank, culprit.pod) == ("LogRule", 0, "j-w-0")
    assert culprit.evidence == ("loss=3",)
    assert logs.status.restart_count == 1


def test_a_rule_that_nobody_ever_heard_hangs_when_all_are_past_the_cut_off() -> None:
    logs = Logs()
    assert logs.hear("w-1", 65, SILENT) == "Running Running"
    assert logs.hear("w-0", 66, WAITING) == "Running Running"
    assert logs.hear("w-0", 67, SILENT) == "Faulted LogHang_loss"
    culprit = logs.incidents[1].culprit
    assert (culprit.rank, culprit.pod) == (None, ""), "nobody can be blamed"


def test_a_node_that_hears_it_again_keeps_the_job_going() -> None:
    logs = Logs()
    logs.hear("w-1", 65, LOST)
    logs.hear("w-1", 66, HEALTHY)
    assert logs.hear("w-0", 70, LOST) == "Running Running"


def test_views_of_an_earlier_attempt_decide_nothing() -> None:
    logs = Logs()
    logs.hear("w-1", 65, LOST)
    logs.run("""
        70 failed w-0 0
        71 ready w-0 0
        71 ready w-1 0
    """)
    logs.run_ordered(72)
    assert logs.hear("w-0", 75, LOST, attempt=1) == "Running Running"
    assert logs.hear("w-1", 75, LOST, attempt=1) == "Faulted LogHang_loss"


def test_agents_are_told_who_must_log() -> None:
    rules = tuple(replace(RULE, name=name) for name in ("a", "b"))
    script = Script(spec(1, policy=RunPolicy(log_monitoring_configuration=rules)))
    script.run("0 job")
    ranks = {"b": RuleWatch(RuleScope.RANK, frozenset({0, 8}))}
    script.give(JobSeen(script.spec, JobOptions(log_rule_ranks=ranks)), 0)
    script.run("0 synced\n0 pod w-0 node=n0\n1 ready w-0")
    (order,) = [e for e in script.effects if isinstance(e, StartWorkers)]
    assert [rule["ranks"] for rule in order.command.log_rules] == ["some", "0,8"]


@given(st.lists(st.lists(VIEWS, max_size=4).map(tuple), min_size=1, max_size=4))
def test_the_counts_say_what_all_views_together_say(nodes: list[tuple[RuleView, ...]]) -> None:
    tallies: dict[tuple[str, int], Tally] = {}
    for views in nodes:
        for key, view in shared(views):
            tallies.setdefault(key, Tally()).add(view, 1)
    found = sorted(key[0] for key, tally in tallies.items() if tally.hangs(len(nodes)))
    assert found == sorted(hanging_rules(nodes))


def test_a_stock_agent_is_told_what_the_crd_has() -> None:
    script = Script(spec(1, policy=RunPolicy(log_monitoring_configuration=(RULE,))))
    script.run("0 job\n0 synced\n0 pod w-0 node=n0")
    script.give(AgentReported(PodUid("w-0.0"), AgentReport("stock", AgentState.READY)), 1)
    (order,) = [e for e in script.effects if isinstance(e, StartWorkers)]
    assert order.command.log_rules == (write_record(RULE, is_minimal=True),)


def test_a_new_operator_decides_by_what_it_hears() -> None:
    logs = Logs()
    logs.run("5 pod w-0 phase=Running\n5 pod w-1 phase=Running")
    logs.hear("w-0", 65, LOST)
    new = logs.successor(80)
    new.run("80 synced")
    for at in (80, 81):
        for pod in ("w-0", "w-1"):
            report = replace(logs.agents[pod], rank=int(pod[-1]), log_rules=(LOST,))
            new.give(AgentReported(PodUid(f"{pod}.0"), report), at)
    new.give(Tick(), 86)
    assert new.condition.reason == "LogHang_loss"
    assert new.incidents[1].attempt == 0
