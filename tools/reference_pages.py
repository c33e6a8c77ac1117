"""Pages of docs/reference/ about programs that run: metrics, endpoints, incidents, and others.

tools/reference.py writes them with its own pages.  Each function yields the lines of one page.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import starmap
from pathlib import Path
from textwrap import dedent
from textwrap import fill as filled
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from unbroken import worker
from unbroken.agent_http.server import OPEN_PATHS, AgentServer
from unbroken.cluster_api.server import HANDLERS
from unbroken.core import patience
from unbroken.core.job.recovery import incidents, ladder, symptoms
from unbroken.core.job.watch import unreached
from unbroken.nodes.gpu_metrics import FIELDS, LABELS, GpuMetrics
from unbroken.nodes.host_metrics import DEVICES_MAX, FAMILIES
from unbroken.nodes.tables import read_table
from unbroken.observe import job_metrics
from unbroken.observe.job_metrics import JobMetrics
from unbroken.observe.node_metrics import NodeMetrics
from unbroken.observe.program_metrics import (
    JobHealth,
    ProgramHealth,
    ProgramMetrics,
    QueueHealth,
    WatchHealth,
)
from unbroken.observe.resumed_metrics import ResumedMetrics
from unbroken.observe.server import HEALTH_PATH, PATH, PORT
from unbroken.spec.job import detectors, incident
from unbroken.spec.nodes.fault_table import FaultEntry, symptom_text
from unbroken.wire import agent
from unbroken.wire.proof import HELLO_PATH
from unbroken.wire.reports import PATH as REPORTS_PATH

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/unbroken"
VARIABLES = ROOT / "tools/variables.toml"
OURS = re.compile(r"UNBROKEN_[A-Z_]+")
Rows = Iterable[Iterable[str]]


def table(titles: Iterable[str], rows: Rows) -> Iterator[str]:
    """Lines of a Markdown table, and an empty line; nothing without rows."""
    found = [list(map(_cell, row)) for row in rows]
    if found:
        head = list(titles)
        yield f"| {' | '.join(head)} |"
        yield f"|{'---|' * len(head)}"
        yield from (f"| {' | '.join(row)} |" for row in found)
        yield ""


def _cell(text: str) -> str:
    parts = " ".join(text.replace("|", "\\|").split()).split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]  # outside of code
    return "`".join(parts)


def code(text: str) -> str:
    """Text as code in a line of Markdown; empty text as it is."""
    return f"`{text}`" if text else ""


def described(module: Any, owner: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, value and docstring of the constants of a module, or of a class in it."""
    body = ast.parse(inspect.getsource(module)).body
    if owner:
        (found,) = (one for one in body if isinstance(one, ast.ClassDef) and one.name == owner)
        body = found.body
    for one, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            yield ast.unparse(one.targets[0]), str(one.value.value), text


def _required(rows: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    found = list(rows)
    bare = [name for name, _, text in found if not text]
    if bare:
        raise SystemExit(f"no docstring, which the reference needs: {', '.join(bare)}")
    return found


# --- Environment variables


def environment() -> Iterator[str]:
    """Yield every environment variable that users and workers see."""
    sections = tomllib.loads(VARIABLES.read_text())["section"]
    _compare({name for one in sections for name in one["variables"]})
    yield from ("# Environment variables", "")
    yield from (
        "Options of a command line have priority over variables. `PET_OPTION` stands for the",
        "option `--option` of `unbroken run` and `unbrokenrun`, as in torchrun:",
        "`PET_NPROC_PER_NODE=2` is `--nproc-per-node 2`.",
        "",
    )
    for one in sections:
        yield from (f"## {one['title']}", "", one["text"], "")
        rows = ((code(name), text) for name, text in one["variables"].items())
        yield from table(("variable", "meaning"), rows)


def _compare(known: set[str]) -> None:
    """SystemExit if the table and the source name different variables."""
    words = {
        word
        for path in SOURCE.rglob("*.py")
        for word in re.findall(r"\b[A-Z][A-Z0-9_]+\b", path.read_text())
    }
    missing = {word for word in words if OURS.fullmatch(word)} - known
    stale = {name for name in known if name not in words and not name.startswith("OTEL_")}
    if missing or stale:
        raise SystemExit(
            f"{VARIABLES.relative_to(ROOT)}: missing: {sorted(missing)}; not in the source: "
            f"{sorted(stale)}"
        )


# --- Incidents


def incident_classes() -> Iterator[str]:
    """Classes of faults, and remedies."""
    yield from (
        "# Incidents: classes and remedies",
        "",
        "`unbroken explain JOB` shows the class of an incident behind its number. Metrics have",
        "it as the label `fault`. [Read an incident](../guide/incidents.md) explains the rest.",
        "",
        "## Faults of a worker",
        "",
        "The agent names them, from the exit status, the output and the kernel.",
        "",
    )
    kinds = _required(described(agent, "FaultKind"))
    yield from table(("class", "meaning"), ((code(value), text) for _, value, text in kinds))
    mine = [one for one in _required_of(symptoms) if one[1] not in _DETECTED]
    mine += [one for one in _required_of(unreached) if one[0] == "NOT_REACHABLE"]
    yield from ("## Faults of a pod, an agent or a node", "")
    rows = [
        (code(value), "yes" if value in symptoms.POD_LOSSES else "", text)
        for _, value, text in mine
    ]
    yield from table(("class", "the pod is lost", "meaning"), rows)
    yield from (
        "## Faults that detectors find",
        "",
        "The mode says what a detector may do: only `act` opens an incident.",
        "[Detectors](../detectors.md) explains the modes.",
        "",
    )
    modes = {
        symptoms.BY_DETECTOR[one]: (one.value, mode) for one, mode in detectors.DEFAULTS.items()
    }
    rows_found = [
        (code(value), code(modes[value][0]), code(modes[value][1].value), text)
        for _, value, text in _required_of(symptoms)
        if value in modes
    ]
    yield from table(("class", "detector", "mode by default", "meaning"), rows_found)
    yield from (
        "## Restarts that are nobody's fault",
        "",
        "They are not counted against the [restart budget](../guide/restart-budget.md).",
        "",
    )
    planned = [one for one in _required_of(incident) if one[0] == "PLANNED_MOVE"]
    free = [one for one in _required_of(incidents) if one[1] in incidents.UNCHARGED]
    yield from table(("class", "meaning"), ((code(v), text) for _, v, text in (*free, *planned)))
    yield from _remedies()


_DETECTED = set(symptoms.BY_DETECTOR.values())


def _required_of(module: Any) -> list[tuple[str, str, str]]:
    """The constants of a module that are classes of faults."""
    found = described(module)
    return _required(
        one for one in found if not one[0].startswith("_") and re.fullmatch(r"[A-Z]\w+", one[1])
    )


def _remedies() -> Iterator[str]:
    yield from (
        "## Remedies",
        "",
        "The rungs of the recovery ladder, lowest first. A fault enters at the lowest rung that",
        "can help: with a lost pod at `pod`, otherwise at `process` or `in-process`. The [restart",
        "budget](../guide/restart-budget.md) may demand a higher one.",
        "",
    )
    texts = {value: text for _, value, text in _required(described(incident, "Remedy"))}
    rows = (
        (
            code(rung.remedy.value),
            texts[rung.remedy.value],
            rung.replaces.value,
            "yes" if rung.keeps_processes else "no",
        )
        for rung in ladder.RUNGS
    )
    yield from table(("remedy", "meaning", "pods replaced", "other processes may stay"), rows)


# --- Silence


def silence() -> Iterator[str]:
    """Yield every limit of silence, from the rows that agents and operator use."""
    yield from (
        "# Limits of silence",
        "",
        "How long a rank, and a job, may show nothing. [Detectors](../detectors.md) explains signs",
        "of life, alarms and looks.",
        "",
        "## Silence after which all ranks are looked at",
        "",
        "A rank that is silent for so long is *late*. Nothing is stopped for that alone: what the",
        "looks show decides, and not before the silence of the last column. All limits of a row",
        "must be over.",
        "",
    )
    titles = ("the rank shows", "known after", "late after", "the restart, not before")
    yield from table(titles, _lateness())
    text = f"""*Gap* is the longest gap between two signs so far. Signs other than steps must have
        come for {patience.REGULAR_TIMES:g} times as long. Multiples of the gap are doubled after
        {patience.FEW_GAPS} gaps or {patience.FEW_VISITS} visits of a phase, and near those of the
        table after many. Least silences are doubled after {_span(patience.CAUTION_SECONDS)} of
        history, longer before, and near those of the table after ten times as much. Each alarm that
        was wrong adds a half to both, at most {patience.MISTAKES_MAX} times. Once a rank has ended,
        the limits of the others are {_limit(patience.ENDING, "as long")}: they may be saving the
        last checkpoint."""
    yield from ("## Silence of a rank that is an alarm", "", _paragraph(text), "")
    rules = [(one.silence, one) for one in patience.BY_SIGN.values()]
    others = (patience.EARLY, patience.RESTARTED, patience.START, patience.NEW_PHASE)
    rows = [*starmap(_alarm, rules), *map(_alarm, others)]
    yield from table(("the rank", "known after", "idle", "spinning", "working"), rows)
    text = f"""If several rows apply, each of them must be satisfied. A look counts if counters show
        {patience.WATCH_SECONDS:g} s before it. If the silence is an alarm, two looks are enough
        that name a rank which does not compute."""
    yield from (
        "## Silence after which the job is stopped, by what looks show",
        "",
        _paragraph(text),
        "",
    )
    titles = ("looks show", "silence, at least", "looks in a row", "seconds between them")
    yield from table(titles, map(_allowance, patience.ALLOWANCES))
    again, slow = patience.REPEAT_FACTOR, patience.SLOW.seconds
    text = f"""The usual silence is the longest limit of the ranks' alarms. Its multiple counts up
        to {_span(patience.USUAL_SECONDS_MAX)}, or up to the usual silence if that is longer. If the
        silence comes again after a restart, after the same step, its limit is {again:g} times as
        long, and at least {_span(again * slow)}. The next restarts multiply it again, up to
        {again**patience.REPEATS_MAX:g} times."""
    yield _paragraph(text)


def _allowance(one: patience.Allowance) -> tuple[str, str, str, str]:
    least = _limit(patience.Limit(one.seconds, one.times), "the usual silence")
    pause = f"{one.pause_seconds:g}" if one.pause_seconds else "as long as the silence so far"
    return one.situation, least, str(one.looks), pause


def _lateness() -> Iterator[tuple[str, str, str, str]]:
    steps, lines = patience.LATE_STEPS, patience.LATE_LINES
    gap, longest = "the longest gap", _span(patience.LATE_PAUSE_SECONDS_MAX)
    late = (
        f"{_limit(steps.look, 'the usual step')}; {steps.act.times:g} times {gap} up to {longest}"
    )
    known = f"{patience.WARM_UP_CALLS + patience.LATE_STEPS_MIN} steps, in {steps.known.gaps} looks"
    yield steps.sign, known, late, _limit(steps.act, gap)
    history = f"{lines.known.gaps} gaps, {_span(lines.known.seconds)}"
    known = f"{history}, and {patience.REGULAR_TIMES:g} times {gap}"
    yield lines.sign, known, _limit(lines.look, gap), _limit(lines.act, gap)
    spin = _span(patience.LATE_SPIN_SECONDS)
    history = _history(patience.BY_SIGN[patience.SignSource.WORK].learned)
    yield "neither", history, f"the limit of its alarm; {spin} of spinning", "the same"
    visits = f"{patience.FEW_VISITS} visits, or {_history(patience.STEADY)} in the first"
    yield "a reported phase", visits, "the limit of its alarm", "the same"


def _alarm(
    limits: patience.SilenceLimits, sign: patience.SignLimits | None = None
) -> tuple[str, str, str, str, str]:
    learned = "" if sign is None else _history(sign.learned)
    later = "" if sign is None or sign.firm == sign.learned else f", after {_history(sign.firm)}"
    own, idle = ("the start-up" if limits is patience.RESTARTED else "the gap"), "the idle limit"
    spinning, working = _limit(limits.spinning, idle), _limit(limits.working, idle)
    return (
        limits.situation,
        learned,
        _limit(limits.idle, own),
        spinning + ("" if spinning == NEVER else later),
        working + ("" if working == NEVER else later),
    )


def _paragraph(text: str) -> str:
    return filled(" ".join(text.split()), 100)


NEVER = "never"


def _limit(limit: patience.Limit, usual: str) -> str:
    if limit.seconds == patience.NEVER:
        return NEVER
    times = f"{limit.times:g} times {usual}" if limit.times else ""
    least = _span(limit.seconds) if limit.seconds or not times else ""
    return f"{times}, at least {least}" if times and least else times or least


def _history(history: patience.History) -> str:
    return f"{history.gaps} signs in {_span(history.seconds)}"


def _span(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 600 else f"{seconds:g} s"


# --- Metrics


def metrics() -> Iterator[str]:
    """Yield every metric family, with type, labels and meaning."""
    jobs, resumed, nodes, own, gpus = (CollectorRegistry() for _ in range(5))
    JobMetrics(jobs, 0.0, lambda: 0.0)
    ResumedMetrics(resumed, 0.0)
    NodeMetrics(nodes, 0.0)
    ProgramMetrics(own, _health)
    GpuMetrics(gpus)
    dcgm = (
        (code(name), ", ".join(map(code, LABELS)), "untyped", text) for name, text in FIELDS.items()
    )
    yield from (
        "# Metrics",
        "",
        f"The operator serves these at `{PATH}` of port {PORT}, the local cluster at an address",
        "that `unbroken status` shows. The node daemon serves those of its node, at the same path",
        "and port of its own pod. The agent, the cluster API and the server of the checkpoint",
        "memory serve no metrics.",
        "[The guide](../guide/metrics.md) has the scrape configuration and useful alerts.",
        "Histograms have the series `_bucket`, `_sum` and `_count`. The Prometheus client library",
        "adds `process_*` and `python_info`, and to some counters and histograms the time of their",
        "creation (`_created`).",
        "",
    )
    for title, text, found in (
        ("Jobs, by the documented names", DOCUMENTED, _families(jobs, is_ours=False)),
        ("Jobs", "", _families(jobs, is_ours=True)),
        ("Jobs of other kinds with auto-resume", "", _families(resumed)),
        ("Nodes", "", _families(nodes)),
        ("The operator itself", "", _families(own)),
        ("Node daemon: faults", "", _families(gpus, is_ours=True)),
        ("Node daemon: GPUs, by the DCGM exporter's names", DCGM, dcgm),
        ("Node daemon: the system, by node-exporter's names", NODE_EXPORTER, _system()),
    ):
        yield from (f"## {title}", "", *([text, ""] if text else []))
        yield from table(("name", "labels", "type", "meaning"), found)


DOCUMENTED = (
    "For dashboards made for HyperPod's training operator. `namespace` is added; `cluster_id` and\n"
    "`cluster_name` are for the scraper to add (`relabel_configs`), as in HyperPod. The public\n"
    "documentation does not give the unit of the two latencies: here it is seconds. Their buckets\n"
    "have the plain name, because the dashboards ask for it."
)


DCGM = (
    "From NVML. A field that the GPU or its driver does not offer is missing. `DCGM_FI_PROF_*`\n"
    "needs DCGM itself. The type is untyped: DCGM's counters do not end in `_total`."
)
NODE_EXPORTER = (
    "From /proc and /sys. Counters of EFA devices have the names of AWS's EFA exporter. Devices\n"
    f"of pods are left out, and of each type of device at most {DEVICES_MAX} are shown."
)


def _system() -> Rows:
    """Name, labels, type and meaning of the node's system."""
    yield (
        "`node_memory_FIELD_bytes`",
        "",
        "gauge",
        "Field of /proc/meminfo, such as `MemAvailable`.",
    )
    yield "`node_memory_FIELD`", "", "gauge", "The same without a unit, such as `HugePages_Free`."
    for name, family in FAMILIES.items():
        kind = "untyped" if family.kind == "unknown" else family.kind
        yield code(name), ", ".join(map(code, family.labels)), kind, family.text


def _health() -> ProgramHealth:
    """A state in which every family has a sample."""
    watch = WatchHealth("pods", True, 0, 0, 0, {}, 0.0)
    queue, job = QueueHealth("nodes", 0, 0, 0), JobHealth(("default", "lm"), 0, 0, 0)
    return ProgramHealth(True, (watch,), (queue,), (job,))


def _families(
    registry: CollectorRegistry, *, is_ours: bool | None = None
) -> list[tuple[str, str, str, str]]:
    """Name, labels, type and meaning of each family; `is_ours`: only those named `unbroken_`."""
    found: dict[str, tuple[str, str, str, str]] = {}
    for collector in list(registry._collector_to_names):
        families = [collector] if isinstance(collector, MetricWrapperBase) else collector.collect()
        for one in families:
            name, labels, kind, text = _family(one)
            if is_ours is None or name.startswith("unbroken_") == is_ours:
                found[name] = (code(name), ", ".join(map(code, labels)), kind, text)
    return list(found.values())


def _family(one: Any) -> tuple[str, tuple[str, ...], str, str]:
    if isinstance(one, MetricWrapperBase):
        name = one._name if one._type != "counter" else f"{one._name}_total"
        return name, tuple(one._labelnames), one._type, one._documentation
    assert isinstance(one, Metric)
    labels = getattr(one, "_labelnames", None)
    if labels is None:  # buckets under the plain name
        return one.name, (*job_metrics.HYPERPOD_JOB, "le"), "cumulative buckets", one.documentation
    name = f"{one.name}_total" if one.type == "counter" else one.name
    return name, tuple(labels), one.type, one.documentation


# --- Faults of nodes


def node_faults() -> Iterator[str]:
    """The table of faults that the node daemon detects."""
    entries = read_table(None).table.entries
    yield from (
        "# Faults of nodes",
        "",
        f"The table of the node daemon has {len(entries)} entries. `unbroken faults explain NAME`",
        "prints one of them, and [the guide](../guide/node-faults.md) says what each action does",
        "and how to change the table. The action in brackets is taken if the fault comes again",
        "after a reset or reboot, or as often as the entry says.",
        "",
    )
    classes = list(dict.fromkeys(one.kind for one in entries.values()))
    for kind in classes:
        yield from (f"## Class {kind.value}", "")
        rows = [
            (code(name), one.title, _symptom(one), _action(one), one.source)
            for name, one in entries.items()
            if one.kind is kind
        ]
        yield from table(("name", "fault", "symptom", "action", "source of the action"), rows)


def _symptom(entry: FaultEntry) -> str:
    """The symptom; a pattern is code."""
    text = symptom_text(entry)
    return code(text.replace("`", "'")) if entry.kernel else text


def _action(entry: FaultEntry) -> str:
    often = entry.repeats
    more = ""
    if often is not None:
        more = (
            f" ({often.action.value} if {often.times} times in {often.within_seconds / 3600:g} h)"
        )
    return f"{entry.action.value}{more}"


# --- The worker library


def worker_library() -> Iterator[str]:
    """The public names of `unbroken.worker`, with signatures and docstrings."""
    yield from (
        "# unbroken.worker",
        "",
        "The library for training scripts: `from unbroken import worker`.",
        "[The guide](../worker-library.md) shows how to use it.",
        "",
        *_documentation(worker, ""),
    )
    for name in worker.__all__:
        one = getattr(worker, name)
        yield from (f"## worker.{name}", "", "```python", _signature(name, one), "```", "")
        yield from _documentation(one, name)
        if inspect.isclass(one) and not issubclass(one, BaseException):
            yield from _members(one, f"worker.{name}")
        made = {"checkpoints": "Checkpoints"}.get(name)
        if made:
            cls = getattr(importlib.import_module(one.__module__), made)
            yield from ("### The object that it returns", "", *_documentation(cls, made))
            yield from _members(cls, made)


def _signature(name: str, one: Any) -> str:
    if inspect.isclass(one) and issubclass(one, BaseException):
        return f"class {name}({one.__bases__[0].__name__})"
    found = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(one)))
    if inspect.isclass(one):
        return f"class {name}" + (found.removesuffix(" -> None") if name in _CONSTRUCTED else "")
    return f"{name}{found}"


_CONSTRUCTED = ("Snapshot",)
"""Classes of which a script makes objects; functions return those of the others."""


def _documentation(one: Any, name: str) -> list[str]:
    text = inspect.getdoc(one)
    if not text or text.startswith(f"{name}("):
        return []
    lines: list[str] = []
    is_code = False
    for part in re.split(r"\n\s*\n", text):
        was_code, is_code = is_code, part.startswith("    ")
        if was_code and is_code:
            lines.insert(-2, f"\n{dedent(part)}")
        elif is_code:
            lines += ["```python", dedent(part), "```", ""]
        else:
            lines += [part.replace(".  ", ". "), ""]
    return lines


def _members(cls: type, owner: str) -> Iterator[str]:
    fields = getattr(cls, "__dataclass_fields__", {})
    if fields:
        texts = dict(_field_texts(cls))
        rows = (
            (code(name), code(str(one.type)), texts.get(name, "")) for name, one in fields.items()
        )
        yield from table(("attribute", "type", "meaning"), rows)
        return
    for name, one in vars(cls).items():
        is_shown = inspect.isfunction(one) or isinstance(one, property)
        if name.startswith("_") or name in _INTERNAL.get(cls.__name__, ()) or not is_shown:
            continue
        text = (inspect.getdoc(one) or "").replace(".  ", ". ")
        shown = name if isinstance(one, property) else _signature(name, one)
        shown = re.sub(r"\(self(, )?", "(", shown)
        yield from (f"#### {owner}.{name}", "", "```python", shown, "```", "", text, "")


_INTERNAL = {
    "Snapshot": (
        "channel", "find", "everyone", "other", "copies", "fetch", "used", "rebind", "complain",
    ),
    "Checkpoints": ("restore_newer",),
}  # fmt: skip
"""Methods that other parts of the package call, not scripts."""


def _field_texts(cls: type) -> Iterator[tuple[str, str]]:
    (found,) = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body
    assert isinstance(found, ast.ClassDef)
    for one, after in zip(found.body, [*found.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign) and isinstance(after, ast.Expr):
            value = after.value
            if isinstance(value, ast.Constant):
                yield ast.unparse(one.target), " ".join(str(value.value).split())


# --- HTTP endpoints


def endpoints() -> Iterator[str]:
    """Yield every path that the programs serve."""
    server = AgentServer(cast(Any, SimpleNamespace(snapshots=None)), None)
    routes = server._application(has_link=True).router.routes()
    rows = []
    for one in routes:
        if one.method != "HEAD" and one.resource is not None:
            path = re.sub(r"\{(\w+)(:[^}]*\}?)?\}", r"{\1}", one.resource.canonical)
            text = (inspect.getdoc(one.handler) or "").partition("\n\n")[0]
            if not text:
                raise SystemExit(f"{one.method} {path}: its handler has no docstring")
            rows.append((one.method, code(path), "no" if path in OPEN_PATHS else "yes", text))
    rows.append(("GET", code(HELLO_PATH), "no", "Exchange nonces before the first request."))
    yield from (
        "# HTTP endpoints",
        "",
        "## Agent",
        "",
        f"Port {agent.PORT} of each pod (`AGENT_PORT`). The first five paths are those of",
        "HyperPod's agent 1.1.3. A request must prove that its sender has the job's key, unless",
        "the job has the annotation `unbroken.dev/agent-auth: none`",
        "([authentication](../design/agent-authentication.md)).",
        "",
        *table(("method", "path", "proof", "meaning"), rows),
        "## Operator",
        "",
        "Options: `--metrics-host`, `--metrics-port`, `--webhook-port`, `--reports-host`,",
        "`--reports-port`, `--reports-reader`.",
        "",
    )
    yield from table(
        ("method", "path", "port", "meaning"),
        (
            ("GET", code(PATH), str(PORT), "[Metrics](metrics.md) in the format of Prometheus."),
            ("GET", code(HEALTH_PATH), str(PORT), "200 while the program answers."),
            (
                "POST",
                "a path with a secret",
                "`--webhook-port`",
                "[Admission reviews](../guide/validation.md) of the Kubernetes API server, by TLS.",
            ),
            (
                "GET",
                code(f"{REPORTS_PATH}/{{namespace}}/{{job}}"),
                "`--reports-port`",
                "The newest reports of a job's agents, a line each, for `--reports-reader` alone.",
            ),
        ),
    )
    yield from (
        "## Node daemon",
        "",
        "Options: `--metrics-host`, `--metrics-port` (off by default; the chart sets 8081).",
        "",
    )
    yield from table(
        ("method", "path", "meaning"),
        (
            ("GET", code(PATH), "[Metrics](metrics.md) of the node and its GPUs."),
            ("GET", code(HEALTH_PATH), "200 while the program answers."),
        ),
    )
    yield from (
        "## Cluster API",
        "",
        "`POST /` with the operation in the header `X-Amz-Target: SageMaker.OPERATION`, JSON 1.1,",
        "signed with Signature Version 4; `GET /healthz` needs no signature.",
        "[The guide](../guide/cluster-api.md) shows the requests. Operations:",
        "",
        *(f"- `{name}`" for name in sorted(HANDLERS)),
        "",
    )


def pages() -> Mapping[str, tuple[str, Iterable[str]]]:
    """Source and lines of each page, by file name."""
    return {
        "environment.md": ("tools/variables.toml", environment()),
        "incidents.md": (
            "src/unbroken/wire/agent.py and src/unbroken/core/job",
            incident_classes(),
        ),
        "metrics.md": ("src/unbroken/observe", metrics()),
        "silence.md": ("src/unbroken/core/patience.py", silence()),
        "node-faults.md": ("src/unbroken/nodes/data/faults.toml", node_faults()),
        "worker.md": ("src/unbroken/worker", worker_library()),
        "endpoints.md": ("src/unbroken/agent_http", endpoints()),
    }
