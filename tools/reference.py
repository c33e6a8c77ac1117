"""Write the pages of docs/reference/ from the source; with `--check`, compare them instead.

Pages about programs that run (metrics, endpoints, incidents, ...) are in reference_pages.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import typer
from reference_json import json_forms, schemas
from reference_pages import code, pages, table

from unbroken.agent.options import OPTIONS as LAUNCHER_OPTIONS
from unbroken.cli import main
from unbroken.cli.app import (
    CONTEXT,
    choices,
    default_of,
    help_parts,
    is_argument,
    placeholder,
    wrapped,
)
from unbroken.spec import keys
from unbroken.spec.job.types import JobOptions
from unbroken.spec.schema.crd import job_definition

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
HEAD = "<!-- Written by tools/reference.py from {source}; do not edit. -->\n\n"
EXIT = re.compile(r"(?:With --once: exit status|Exit status)\b.*", re.DOTALL)
FAILED = (
    "The command failed; a line `error: ...` on standard error says why. Or a test found a fault: "
    "see the table below."
)
COMMON_CODES = (
    ("0", "The command did what it was asked to do."),
    ("1", FAILED),
    ("2", "The command line is wrong: an unknown command or option, or a bad value."),
    ("3", "The command came to no result, or to one of its own: see the table below."),
    ("130", "Ctrl-C ended the command."),
)


def files() -> Mapping[Path, str]:
    """Return the pages by path."""
    found = {
        "cli.md": ("src/unbroken/cli", cli()),
        "exit-codes.md": ("src/unbroken/cli", exit_codes()),
        "launcher.md": ("src/unbroken/agent/options.py", launcher()),
        "annotations.md": ("src/unbroken/spec/keys.py", annotations()),
        "job.md": ("src/unbroken/spec", job()),
        "json.md": ("src/unbroken/cli", json_forms(_with_output())),
        **pages(),
    }
    made = {FOLDER / "schemas" / name: text for name, text in schemas().items()}
    return made | {
        FOLDER / name: HEAD.format(source=source) + "\n".join(lines).rstrip() + "\n"
        for name, (source, lines) in found.items()
    }


# --- Commands


def commands(found: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a command and every command below it, with the words that call it."""
    yield path, found
    for name in getattr(found, "commands", {}):
        yield from commands(found.commands[name], (*path, name))


def program() -> Any:
    """Return the `unbroken` command."""
    return typer.main.get_command(main.app)


def _with_output() -> Iterator[str]:
    """Yield the commands that have the option `-o`."""
    for path, command in commands(program(), ()):
        if any("-o" in one.opts for one in command.params):
            yield " ".join(path)


def cli() -> Iterator[str]:
    """Yield every command with its arguments and options."""
    yield from (
        "# Commands",
        "",
        "`unbroken COMMAND --help` prints the same texts. `hyperpod` is a short form of",
        "`unbroken hyperpod`. See also the [exit codes](exit-codes.md), and",
        "[unbrokenrun](launcher.md), the launcher of a job's pods.",
        "",
    )
    found = program()
    yield from _described(("unbroken",), found)
    for group, names in main.GROUPS.items():
        yield from (f"## {group}", "")
        for name in names:
            for path, command in commands(found.commands[name], ("unbroken", name)):
                yield from (f"### {' '.join(path)}", "")
                yield from _described(path, command)


def _described(path: tuple[str, ...], command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=" ".join(path), **CONTEXT)
    yield from ("```", " ".join([*path, *command.collect_usage_pieces(context)]), "```", "")
    paragraphs, examples = help_parts(command)
    for paragraph in paragraphs:
        yield from (wrapped(paragraph, 100), "")
    if examples:
        yield from ("```sh", *examples, "```", "")
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    rows = [(_names(one), _value(one), one.help or "", _default(one)) for one in shown]
    yield from table(("argument or option", "value", "meaning", "default"), rows)
    below = getattr(command, "commands", None)
    if below and path != ("unbroken",):
        yield from ("Commands: " + ", ".join(code(name) for name in below) + ".", "")


def _names(param: Any) -> str:
    if is_argument(param):
        return code(placeholder(param))
    return ", ".join(map(code, (*param.opts, *param.secondary_opts)))


def _value(param: Any) -> str:
    if is_argument(param) or not placeholder(param):
        return ""
    return ", ".join(map(code, choices(param))) or code(placeholder(param))


def _default(param: Any) -> str:
    found = "required" if param.required else default_of(param)
    names = [param.envvar] if isinstance(param.envvar, str) else param.envvar or []
    return "; ".join(filter(None, [*(f"`{name}` in the environment" for name in names), found]))


def exit_codes() -> Iterator[str]:
    """Yield exit codes that all commands share, and those of single commands."""
    yield from (
        "# Exit codes",
        "",
        "These numbers are stable: scripts may rely on them.",
        "",
        *table(("code", "meaning"), COMMON_CODES),
        "`unbroken run` ends with the exit code of its job: 0 if the job completed, otherwise the",
        "code of the worker that failed it.",
        "",
        "## Commands with codes of their own",
        "",
        *table(("command", "codes"), _own_codes()),
    )


def _own_codes() -> Iterator[tuple[str, str]]:
    for path, command in commands(program(), ("unbroken",)):
        if not hasattr(command, "commands"):
            texts = (command.help or "").split("\n\n")
            found = [match[0] for text in texts if (match := re.search(EXIT, text))]
            found += [
                f"{code(p.opts[0])}: {match[0]}"
                for p in command.params
                if (match := re.search(r"exit status .*", p.help or ""))
            ]
            if found:
                yield code(" ".join(path)), " ".join(dict.fromkeys(found))


def launcher() -> Iterator[str]:
    """Yield the options of unbrokenrun."""
    yield from (
        "# unbrokenrun",
        "",
        "`unbrokenrun [OPTIONS] SCRIPT [ARGS...]` is the command of a job's pods. It starts the",
        "agent, which starts the workers. It takes the options of torchrun and of HyperPod's",
        "`hyperpodrun`, a name that it also has.",
        "",
    )
    used = [one for one in LAUNCHER_OPTIONS if not one.ignored and not one.refused]
    ignored = [(_spelled(one), one.ignored) for one in LAUNCHER_OPTIONS if one.ignored]
    refused = [(_spelled(one), one.refused) for one in LAUNCHER_OPTIONS if one.refused]
    yield from ("## Options", "")
    yield from table(("option", "meaning"), ((_spelled(one), one.help) for one in used))
    yield from (
        "## Options without effect",
        "",
        "They are accepted, so that commands run unchanged.",
        "",
    )
    yield from table(("option", "why it has no effect"), ignored)
    yield from ("## Options that are refused", "")
    yield from table(("option", "why"), refused)


def _spelled(option: Any) -> str:
    return ", ".join(map(code, option.spellings))


# --- Annotations and labels


def annotations() -> Iterator[str]:
    """Yield every label, annotation, taint and condition type, by the section of keys.py."""
    yield from (
        "# Annotations and labels",
        "",
        "## Annotations of a job that you may write",
        "",
        "They go into `metadata.annotations` of a HyperPodPyTorchJob. A job with an annotation",
        "`unbroken.dev/...` that is not in this table is refused.",
        "",
    )
    sections = _sections()
    options = get_type_hints(JobOptions)
    rows = []
    for (value,), text in sections.pop(next(iter(sections))):
        option = value.removeprefix(keys.OWN_PREFIX).replace("-", "_")
        kind, default = options[option], getattr(JobOptions(), option)
        is_choice = isinstance(kind, type) and issubclass(kind, Enum)
        values = ", ".join(code(one.value) for one in kind) if is_choice else "see the meaning"
        shown = (
            code(default.value)
            if is_choice
            else f"{default:g}"
            if default and kind is float
            else ""
        )
        rows.append((code(value), values, shown, text))
    yield from table(("annotation", "values", "default", "meaning"), rows)
    yield from ("The modes of detectors are in [detectors](../detectors.md).", "")
    for title, found in sections.items():
        rows = [(", ".join(map(code, values)), text) for values, text in found]
        if rows:
            yield from (f"## {title}", "", *table(("name", "meaning"), rows))


def _sections() -> dict[str, list[tuple[list[str], str]]]:
    """Return the names in keys.py with their docstrings, by the comment above them."""
    source = Path(keys.__file__).read_text()
    heads = [
        (number, match[1])
        for number, line in enumerate(source.splitlines(), 1)
        if (match := re.match(r"# --- (.+)", line))
    ]
    sections: dict[str, list[tuple[list[str], str]]] = {title: [] for _, title in heads}
    body = ast.parse(source).body
    for one, after in pairwise(body):
        if not isinstance(one, ast.Assign) or not isinstance(after, ast.Expr):
            continue
        title = next((title for line, title in reversed(heads) if line < one.lineno), None)
        if title is None or not isinstance(after.value, ast.Constant):
            continue
        text = " ".join(str(after.value.value).split())
        names = [found.id for found in ast.walk(one.targets[0]) if isinstance(found, ast.Name)]
        values = {getattr(keys, name): name for name in names if not name.endswith("_PREFIX")}
        if all(isinstance(value, str) for value in values) and values:
            sections[title].append((list(values), text))
    return sections


# --- Fields of a job


def job() -> Iterator[str]:
    """Yield the fields of `spec` of a HyperPodPyTorchJob."""
    schema = job_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    yield from (
        "# Fields of a job",
        "",
        "The fields of `spec` of a `HyperPodPyTorchJob` (`sagemaker.amazonaws.com/v1`). On a",
        "cluster, `kubectl explain hpj.spec` prints the same texts. How many restarts a job gets",
        "if no limit is set: [restart budget](../guide/restart-budget.md). What a job is refused",
        "for: [validation](../guide/validation.md).",
        "",
        *table(("field", "type", "default", "meaning"), _fields(schema["properties"]["spec"], "")),
    )


def _fields(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str, str]]:
    for name, one in schema.get("properties", {}).items():
        default = "required" if name in schema.get("required", ()) else code(_plain(one, "default"))
        yield code(path + name), _type(one), default, one.get("description", "")
        if name == "template":
            continue  # a pod template as Kubernetes documents it
        is_list = one.get("type") == "array"
        below = one.get("items", {}) if is_list else one
        yield from _fields(below, f"{path}{name}{'[]' if is_list else ''}.")


def _plain(schema: Mapping[str, Any], key: str) -> str:
    value = schema.get(key)
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(map(code, schema["enum"]))
    limits = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "at least"), ("maximum", "at most"))
        if key in schema
    ]
    kind = schema.get("type", "integer or string")
    return ", ".join([{"array": "list"}.get(kind, kind), *limits])


def run() -> int:
    """Write the pages, or compare them; return the exit code."""
    written = files()
    if "--check" not in sys.argv[1:]:
        (FOLDER / "schemas").mkdir(parents=True, exist_ok=True)
        for path, text in written.items():
            path.write_text(text)
        return 0
    old = [path for path, text in written.items() if not path.exists() or path.read_text() != text]
    for path in old:
        print(f"{path.relative_to(ROOT)} is not what `make reference` writes", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(run())
