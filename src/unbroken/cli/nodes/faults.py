"""`unbroken faults`: the table of faults, and the faults of an XID or a kernel log line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unbroken.cli.app import App
from unbroken.cli.listing import Listing, show_list
from unbroken.cli.options import Form, ListForm, ListOutput, Output
from unbroken.cli.show import note
from unbroken.errors import SpecError
from unbroken.foreign_numbers import INT32_MAX, whole_number

if TYPE_CHECKING:
    from unbroken.core.nodes.signals import Sign, SignTable
    from unbroken.spec.nodes.fault_table import FaultEntry

Object = dict[str, Any]
app = App(
    no_args_is_help=True,
    help="Show the faults that the node daemon detects, and the action for each."
    "\n\nExample: `unbroken faults explain 79`",
)
Table = Annotated[
    Path | None,
    typer.Option(
        "--table", metavar="FILE", help="File with changes to the table.", show_default=False
    ),
]


@app.command("list")
def list_faults(table: Table = None, output: ListForm = ListOutput.TEXT) -> None:
    """List the table of faults; -o wide adds the source of each entry.

    Example: `unbroken faults list`
    """
    from unbroken.spec.nodes.fault_table import symptom_text

    sign_table = _read(table)
    entries, is_wide = sign_table.table.entries, output is ListOutput.WIDE
    more = ("SOURCE",) if is_wide else ()
    listing = Listing(
        [_view(sign_table, name, entry) for name, entry in entries.items()],
        list(entries),
        ("NAME", "CLASS", "ACTION", "WHAT", "SYMPTOM", *more),
        [
            (
                *(name, entry.kind.value, entry.action.value, entry.title, symptom_text(entry)),
                *((entry.source,) if is_wide else ()),
            )
            for name, entry in entries.items()
        ],
    )
    show_list(listing, output)


@app.command("explain")
def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="XID|NAME|LINE",
            help="An XID's number, a fault's name, or a line of the kernel's log in quotes.",
            show_default=False,
        ),
    ],
    table: Table = None,
    output: Form = Output.TEXT,
) -> None:
    """Explain a fault: symptom, action, source.

    Example: `unbroken faults explain 79`
    """
    sign_table = _read(table)
    views = _meant(sign_table, what)
    if output.is_data:
        output.print(views)
        return
    if not views:
        print("this line matches no fault of the table")
    for index, view in enumerate(views):
        _print(view, is_first=index == 0)


def _read(path: Path | None) -> SignTable:
    from unbroken.nodes.tables import read_table

    sign_table = read_table(path)
    for warning in sign_table.warnings:
        note(f"warning: {warning}")
    return sign_table


def _meant(table: SignTable, what: str) -> list[Object]:
    entries = table.table.entries
    name = next((name for name in entries if name.lower() == what.strip().lower()), None)
    if name is not None:
        return [_view(table, name, entries[name])]
    bare = what.strip().lower().removeprefix("xid").strip()
    if (xid := whole_number(bare, 0, INT32_MAX)) is not None:
        return _of_xid(table, xid)
    signs = _of_line(table, what)
    if not signs and " " not in what.strip():
        raise SpecError(
            f"no fault named {what}; give the number of an XID, a line of the kernel's log, or a "
            "name from: unbroken faults list"
        )
    return [_view(table, sign.reason, sign.entry) for sign in signs]


def _of_xid(table: SignTable, number: int) -> list[Object]:
    from unbroken.core.nodes.kernel_log import Xid

    result = [
        _view(table, name, entry)
        for name, entry in table.table.entries.items()
        if number in entry.xid
    ]
    sign = table.of_xid(Xid(number, "", None, None), "")
    return result or [_view(table, sign.reason, sign.entry)]


def _of_line(table: SignTable, line: str) -> list[Sign]:
    from unbroken.core.nodes.kernel_log import read_line

    read = read_line(line.encode())
    return [] if read is None else table.of_line(read)


def _view(table: SignTable, name: str, entry: FaultEntry) -> Object:
    from unbroken.spec.nodes.fault_table import symptom_text
    from unbroken.spec.nodes.values import Action

    is_repaired = entry.action in (Action.RESET_GPU, Action.REBOOT)
    repeats = entry.repeats
    has_node_action = entry.action not in (Action.NONE, Action.RESTART_JOB)
    return {
        "name": name,
        "title": entry.title,
        "class": entry.kind.value,
        "symptom": symptom_text(entry) if name in table.table.entries else "",
        "action": entry.action.value,
        "condition": entry.condition_type() if has_node_action or repeats else None,
        "afterRepair": entry.after_repair.value if is_repaired else None,
        "repeats": repeats
        and {
            "times": repeats.times,
            "withinSeconds": repeats.within_seconds,
            "action": repeats.action.value,
        },
        "beside": [{"xid": beside.xid, "action": beside.action.value} for beside in entry.beside],
        "source": entry.source,
        "table": table.table.origins.get(name),
    }


DONE = {
    "none": "an event only",
    "restart-job": "the job starts again; nothing is done to the node",
    "reset-gpu": "jobs leave the node, then its GPUs are reset",
    "reboot": "jobs leave the node, then it is rebooted",
    "replace": "jobs leave the node, then it is replaced",
}


def _print(view: Object, *, is_first: bool) -> None:
    if not is_first:
        print()
    print(f"{view['name']}: {view['title']}")
    lines = {
        "symptom": view["symptom"],
        "class": view["class"],
        "action": f"{view['action']}: {DONE[view['action']]}",
        "condition": view["condition"],
        "again": view["afterRepair"] and f"after that repair: {view['afterRepair']}",
        "often": view["repeats"]
        and "{times} times in {withinSeconds:g} s: {action}".format(**view["repeats"]),
        "beside": "; ".join(
            f"{'XID ' + ', '.join(map(str, item['xid'])) if item['xid'] else 'any other XID'}: "
            f"{item['action']}"
            for item in view["beside"]
        ),
        "source": view["source"],
        "table": view["table"],
    }
    for key, text in lines.items():
        if text:
            print(f"  {key:<10} {text}")
