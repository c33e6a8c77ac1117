"""Commands that print what comes from outside in each of the ways in which our commands print."""

from __future__ import annotations

import sys

import typer

from unbroken.cli.run.follow import open_screen
from unbroken.cli.show import note, paper, print_json, print_table
from unbroken.cli.terminal import guard, guarded, worker_line

HOSTILE = (
    "a\x1b]0;title\x07b\x1b]52;c;aGk=\x1b\\c\x1b[2Jd\x1b[31mred\x1b[0me\x1b[8mf\x9b31mg\x9dh"
    "\rover\u202egnp\u2066x\x08y\x7fz[red]m[/red][link=http://x]n[/link]\x1bPq#0\x1b\\\x1bc\u009b"
    "\x0e\U000e0041"
)
show = print
app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def printed() -> None:
    """Prints plainly, painted, wrapped, as a table, as a note, as JSON and as an error."""
    show(HOSTILE)
    page = paper()
    show(page.paint(HOSTILE, "green"))
    show("\n".join(page.field(HOSTILE, HOSTILE, "dim")))
    print_table(("NAME", HOSTILE), [(HOSTILE, 1)])
    print_json({"name": HOSTILE})
    note(HOSTILE)
    show(f"error: {HOSTILE}", file=sys.stderr)


@app.command()
def logged() -> None:
    """Prints a worker's line."""
    show(worker_line(HOSTILE, sys.stdout))


@app.command()
def live() -> None:
    """Shows a job that runs."""
    with open_screen(is_data=False) as screen:
        screen.state([HOSTILE, HOSTILE])
        screen.output(HOSTILE)
        screen.note(HOSTILE)


if __name__ == "__main__":
    command = typer.main.get_command(app)
    guard(command)
    with guarded():
        command(standalone_mode=False)
