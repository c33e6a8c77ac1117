"""Write the rules of the chart's roles, and the guide's table, from the parts of the operator."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from unbroken.operator.parts import PARTS, WITHOUT, ChartRole, OperatorPart, PartName, Right

ROOT = Path(__file__).parents[1]
FILE = ROOT / "deploy/helm/unbroken/templates/_parts.tpl"
HEAD = """\
{{/* Written by tools/operator_parts.py from src/unbroken/operator/parts.py; do not edit. */}}
"""
END = "{{- end }}"

GUIDE = ROOT / "docs/guide/security.md"
TABLE_HEAD = """\
| part of the operator | what it does | `unbroken operator` | the chart | needs |
|---|---|---|---|---|
"""


def files() -> dict[Path, str]:
    """The files as they should be."""
    guide = GUIDE.read_text()
    before, head, after = guide.partition(TABLE_HEAD)
    _, gap, after = after.partition("\n\n")
    return {FILE: templates(), GUIDE: before + head + "\n".join(_rows()) + gap + after}


def _rows() -> Iterator[str]:
    for name, part in PARTS.items():
        words = f"{WITHOUT} {name.value}" if part.option == WITHOUT else part.option
        option = f"{'on' if part.is_on else 'off'} without `{words}`" if words else "always on"
        chart = {None: "always off", "": "always on"}.get(part.chart, f"`{part.chart}`")
        yield f"| `{name.value}` | {part.help} | {option} | {chart} | {part.needs} |"


def templates() -> str:
    """The chart's file."""
    lines = [HEAD]
    for name, part in PARTS.items():
        if part.chart:
            lines += _condition(name, part)
    lines += ['{{- define "unbroken.without" -}}', *_left_out(), END, ""]
    for role in ChartRole:
        lines += [f'{{{{- define "{role.value}" -}}}}', *_rules(role), END, ""]
    return "\n".join(lines)


def template(name: PartName) -> str:
    """The template that renders `true` where the chart's values turn the part on, else nothing."""
    return f"unbroken.{name.value}"


def _condition(name: PartName, part: OperatorPart) -> Iterator[str]:
    value = f".Values.{part.chart}"
    if part.is_clusterwide:
        value = f"and {value} (not .Values.operator.namespace)"
    yield f"{{{{/* {part.help} `true` or empty. */}}}}"
    yield f'{{{{- define "{template(name)}" -}}}}'
    yield f"{{{{- if {value} }}}}true{{{{ end }}}}"
    yield from (END, "")


def _left_out() -> Iterator[str]:
    """Arguments of the operator for the parts that the chart's values turn off."""
    for name, part in PARTS.items():
        if part.option == WITHOUT and part.chart is None:
            yield f"- {WITHOUT}={name.value}"
        elif part.option == WITHOUT:
            yield f'{{{{- if not (include "{template(name)}" .) }}}}'
            yield f"- {WITHOUT}={name.value}"
            yield END


def _rules(role: ChartRole) -> Iterator[str]:
    for name, part in PARTS.items():
        rights = [one for one in part.rights if one.role is role]
        if not rights or part.chart is None:
            continue
        if part.chart:
            yield f'{{{{- if include "{template(name)}" . }}}}'
        yield f"# {part.help}"
        for provider, rules in groupby(rights, key=lambda one: one.provider):
            if provider is None:
                yield from (line for one in rules for line in _rule(one))
                continue
            yield f'{{{{- if eq .Values.nodes.provider "{provider.value}" }}}}'
            yield from (line for one in rules for line in _rule(one))
            yield END
        if part.chart:
            yield END


def _rule(right: Right) -> Iterator[str]:
    group = right.group or '""'
    yield f"- apiGroups: [{group}]"
    yield f"  resources: [{right.resource}]"
    if right.name:
        yield f"  resourceNames: [{right.name}]"
    yield f"  verbs: [{', '.join(right.verbs.split())}]"


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
