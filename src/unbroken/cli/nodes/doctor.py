"""`unbroken doctor`: the tests of nodes on this machine, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from unbroken.cli.options import Form, Output
from unbroken.cli.show import Paper, note, paper
from unbroken.errors import WorldError
from unbroken.spec.nodes.kinds import CheckKind, Outcome

from .results import amount_text

DEEP_SECONDS, SHORT_SECONDS = 30.0, 2.0
STYLES = {
    Outcome.PASS.value: "green",
    Outcome.FAIL.value: "red",
    Outcome.UNKNOWN.value: "dim",
    Outcome.SKIPPED.value: "dim",
}
WORDS = {
    Outcome.PASS.value: "ok",
    Outcome.FAIL.value: "FAULT",
    Outcome.UNKNOWN.value: "unknown",
    Outcome.SKIPPED.value: "skipped",
}


def command(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also test processors, memory, disk and GPUs under load.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds of each test under load.", show_default="30"),
    ] = None,
    disk: Annotated[
        Path,
        typer.Option(
            "--disk", metavar="DIR", help="Folder on the disk to test, such as that of checkpoints."
        ),
    ] = Path("/tmp"),
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of GPUs that this machine should have.", show_default=False
        ),
    ] = None,
    output: Form = Output.TEXT,
) -> None:
    """Test this machine before a job: print its faults and what to do about them.

    Exit status 1: a fault was found. A test that cannot run here is `unknown`, which is no fault.
    One whose hardware this machine does not have is `skipped`.

    Example: `unbroken doctor --deep`
    """
    kinds = [CheckKind.BASIC]
    if deep:
        kinds += [CheckKind.STRESS, CheckKind.TRAINING]
    arguments = [kind.value for kind in kinds] + ["--directory", str(disk.absolute())]
    arguments += ["--seconds", str(seconds or (DEEP_SECONDS if deep else SHORT_SECONDS))]
    if gpus is not None:
        arguments += ["--gpus", str(gpus)]
    results = []
    on = paper()
    for result in _results(arguments):
        results.append(result)
        if output is Output.TEXT:
            _print_result(result, on)
    faults = [item for item in results if item["outcome"] == Outcome.FAIL.value]
    if output.is_data:
        output.print({"isWell": not faults, "results": results})
    else:
        _print_summary(results, faults)
    if faults:
        raise typer.Exit(1)


def _results(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run the tests in a process and yield their results; the process ends with this one."""
    process = subprocess.Popen(
        [sys.executable, "-m", "unbroken.nodes.checks", *arguments, "--json"],
        stdout=subprocess.PIPE,
        # Without Ctrl-C of the terminal: each test would print that it was interrupted.
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            result: dict[str, Any] = msgspec.json.decode(line)
            yield result
        if process.wait():
            raise WorldError(
                f"the tests ended with status {process.returncode}; see their output above"
            )
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def _print_result(result: dict[str, Any], on: Paper) -> None:
    outcome = result["outcome"]
    word = on.paint(f"{WORDS[outcome]:<8}", STYLES[outcome])
    line = f"{word} {result['test']:<18} {amount_text(result):<22} {result.get('message', '')}"
    print(line.rstrip(), flush=True)


def _print_summary(results: Sequence[dict[str, Any]], faults: Sequence[dict[str, Any]]) -> None:
    count = Counter(result["outcome"] for result in results)
    text = f"{count[Outcome.PASS.value]} tests passed, {count[Outcome.UNKNOWN.value]} could not run"
    if count[Outcome.SKIPPED.value]:
        text += f", {count[Outcome.SKIPPED.value]} were skipped: no such hardware"
    if not faults:
        note(f"no fault found: {text}")
        return
    names = ", ".join(str(fault["test"]) for fault in faults)
    note(f"this machine has a fault ({names}); {text}. Do not train here before it is repaired")
