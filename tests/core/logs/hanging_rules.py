"""The rules that hang, computed from all nodes at once: what the job's machine must find bit by
bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from unbroken.spec.job.types import RuleScope
from unbroken.wire.agent import RuleState, RuleView


def hanging_rules(nodes: Sequence[Sequence[RuleView]]) -> tuple[str, ...]:
    """Return rules kept by the job as a whole (`some`) that hang on all nodes, from every node's
    views.

    All nodes that had a match must have lost it. If no node ever had one, all must be past the
    start cut-off. A node without any match does not outweigh a node with one.
    """
    by_rule: dict[tuple[str, int], list[RuleView]] = {}
    for views in nodes:
        seen: Counter[str] = Counter()
        for view in views:
            if view.ranks == RuleScope.JOB.value:
                by_rule.setdefault((view.name, seen[view.name]), []).append(view)
                seen[view.name] += 1
    return tuple(
        name
        for (name, _), views in by_rule.items()
        if len(views) == len(nodes)
        and all(v.state is RuleState.HANGING for v in [v for v in views if v.matches] or views)
    )
