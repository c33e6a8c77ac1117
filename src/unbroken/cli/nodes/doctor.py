"""`unbroken doctor`: the tests of a node on this machine, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from unbroken.cli.options import Form, Output
from unbroken.cli.show import Paper, note, paper, print_json
from unbroken.errors import WorldError
from unbroken.spec.nodes.check import CheckKind, Outcome

from .check_views import amount_text

DEEP_SECONDS, SHORT_SECONDS = 30.0, 2.0
STYLES = {Outcome.PASS.value: "green", Outcome.FAIL.value: "red", Outcome.UNKNOWN.value: "dim"}
WORDS = {Outcome.PASS.value: "ok", Outcome.FAIL.value: "FAULT", Outcome.UNKNOWN.value: "unknown"}


def command(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also load processors, memory, disk and GPUs.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="Of each test under load.", show_default="30"),
    ] = None,
    disk: Annotated[
        Path, typer.Option("--disk", help="A folder on the disk to test: where checkpoints go.")
    ] = Path("/tmp"),
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs that should be here.", show_default=False)
    ] = None,
    output: Form = Output.TEXT,
) -> None:
    """Test this machine before a job: what is wrong, and what to do about it.

    Ends with 1 if a fault was found. What cannot be tested here is `unknown`, which is no fault.
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
            _tell(result, on)
    faults = [one for one in results if one["outcome"] == Outcome.FAIL.value]
    if output is Output.JSON:
        print_json({"isWell": not faults, "results": results})
    else:
        _sum_up(results, faults)
    if faults:
        raise typer.Exit(1)


def _results(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Results of the tests as they come; the tests end with us."""
    process = subprocess.Popen(
        [sys.executable, "-m", "unbroken.nodes.checks", *arguments, "--json"],
        stdout=subprocess.PIPE,
        # Ctrl-C is ours to pass on: they would each say that they were interrupted.
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found: dict[str, Any] = msgspec.json.decode(line)
            yield found
        if process.wait():
            raise WorldError(f"the tests ended with {process.returncode}; see above")
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def _tell(result: dict[str, Any], on: Paper) -> None:
    outcome = result["outcome"]
    word = on.paint(f"{WORDS[outcome]:<8}", STYLES[outcome])
    line = f"{word} {result['test']:<18} {amount_text(result):<22} {result.get('message', '')}"
    print(line.rstrip(), flush=True)


def _sum_up(results: Sequence[dict[str, Any]], faults: Sequence[dict[str, Any]]) -> None:
    open_ = sum(one["outcome"] == Outcome.UNKNOWN.value for one in results)
    text = f"{len(results) - open_ - len(faults)} tests passed, {open_} could not be made"
    if not faults:
        note(f"no fault found: {text}")
        return
    names = ", ".join(str(one["test"]) for one in faults)
    note(f"this machine has a fault ({names}); {text}. Do not train here before it is mended")
