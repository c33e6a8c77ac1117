"""Patches of `restartable`: it changes what its table names, undoes it, and is off by default."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.watching import PATIENCE_SECONDS
from tests.worker.gangs import Socket
from tests.worker.templates import BOOT
from unbroken.agent.ports import OfferedPorts
from unbroken.spec.keys import IN_PROCESS
from unbroken.wire.ipc import AT_BARRIER, INIT, JOB_FAULT, JOB_START, STUCK_CODE, VARIABLE
from unbroken.wire.warm import IN_PROCESS_VARIABLE
from unbroken.worker.boot.rendezvous import TRIED, refusal
from unbroken.worker.restart.patches import PATCHES

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("patched.py")
UNSEEN = "names of hosts in torch's log"
"""A patch that torch does not show: whether it looks up names of hosts."""
ERROR_HANDLING = "environment variable TORCH_NCCL_ASYNC_ERROR_HANDLING"
ports = OfferedPorts()


@pytest.fixture(scope="module", autouse=True)
def _leave_ports() -> Iterator[None]:
    yield
    ports.close()


@pytest.fixture
def agent() -> Iterator[Socket]:
    made = Socket()
    yield made
    made.close()


def worker(agent: Socket, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start the only rank of a job."""
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(ports.next(None)), "JOB_RESTART_COUNT": "0",
              VARIABLE: agent.path, **variables}  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if name != IN_PROCESS_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", BOOT, "run", "script", str(PROGRAM), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ | {"OMP_NUM_THREADS": "1"} | values,
    )


def changes(agent: Socket, **variables: str) -> tuple[list[str], str]:
    """Return the lines on changed and new names inside and after the function, and the errors."""
    process = worker(agent, **variables)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return out.splitlines(), errors


def introductions(agent: Socket) -> list[bool]:
    """Return `restartable` of each introduction that the worker sent until its connection ended."""
    assert "ended" in agent.told(0, AT_BARRIER).get(timeout=PATIENCE_SECONDS)
    told = agent.told(0, INIT)
    return [told.get()["restartable"] for _ in range(told.qsize())]


@pytest.mark.slow
@pytest.mark.parametrize("handling", [None, "1", "3"])
def test_what_is_changed_is_in_the_table_and_undone(agent: Socket, handling: str | None) -> None:
    targets = {patch.target for patch in PATCHES} - {UNSEEN, ERROR_HANDLING}
    given = {} if handling is None else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": handling}
    lines, errors = changes(agent, **given)
    changed = sorted(targets | ({ERROR_HANDLING} if handling == "1" else set()))
    assert lines == [",".join(changed), "" if handling else ERROR_HANDLING, "", ""]
    assert errors == ""
    assert introductions(agent) == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({IN_PROCESS_VARIABLE: "off"}, None),
        (
            {IN_PROCESS_VARIABLE: "maybe"},
            "UNBROKEN_IN_PROCESS is 'maybe', not on, off or any-torch",
        ),
        ({"PRETENDED_TORCH": "2.99.1+cu130"}, "torch 2.99.1+cu130 was never tried"),
    ],
)
def test_where_it_is_off_nothing_is_changed(
    agent: Socket, variables: dict[str, str], line: str | None
) -> None:
    lines, errors = changes(agent, **variables)
    assert lines == ["", "", "", ""]
    assert len(errors.splitlines()) == (line is not None)
    assert errors.startswith(
        f'unbroken.worker: in-process restart is off reason="{line}' if line else ""
    )
    assert introductions(agent) == [False], "the agent must give it a new process"


GARBAGE = """
import gc, signal, weakref
from unbroken.worker.restart import patches
class Node: pass
def cycle():
    one = Node()
    one.self = one
    return one
def enter():
    with patches.applied(patches.Interrupt(signal.SIGUSR1, lambda *_: None)):
        pass
gc.collect()
gc.freeze()  # as in the template of warm workers
gc.disable()
before = weakref.ref(cycle())
enter()
kept = cycle()
later = weakref.ref(kept)
enter()
del kept
gc.collect()
print(before(), later())
"""


@pytest.mark.slow
def test_nothing_that_is_garbage_at_the_entry_or_after_it_stays_for_ever() -> None:
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("None None\n", "")


@pytest.mark.slow
def test_a_worker_that_waits_for_its_rank_gets_it_and_ends_at_a_fault(agent: Socket) -> None:
    process = worker(agent, "wait", RANK="-1", **{IN_PROCESS_VARIABLE: "off"})
    assert [agent.told(0, INIT).get()["restartable"] for _ in range(2)] == [False, True]
    agent.say(0, JOB_START, worker_envs={"RANK": "0"})
    assert process.stdout is not None
    while process.stdout.readline() != "waits\n":
        pass
    agent.say(0, JOB_FAULT)
    process.communicate()
    assert process.returncode == STUCK_CODE


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", "2.13.0a0+git12", ""])
@pytest.mark.parametrize("switch", ["", "on", "any-torch"])
def test_a_tried_version_may_be_changed(switch: str, version: str) -> None:
    assert refusal(switch, version) is None


def test_an_untried_version_is_changed_only_on_request() -> None:
    for switch in ("", "on"):
        reason = refusal(switch, "2.1.0")
        assert reason is not None
        assert all(build in reason for build in TRIED.values())
        assert "set UNBROKEN_IN_PROCESS=any-torch" in reason
    assert refusal("any-torch", "2.1.0") is None
    assert refusal("off", "") is not None


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/reference/in-process.md").read_text()
    rows = [
        tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|"))
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    for patch in PATCHES:
        since = f"{patch.since} or newer" if patch.since else "any, and none"
        cells = (patch.target, patch.change, patch.why, since, patch.undone)
        assert tuple(cell.replace("`", "") for cell in cells) in rows
    known = {patch.target for patch in PATCHES}
    (start,) = (n for n, row in enumerate(rows) if row[0] == "what")
    assert {row[0] for row in rows[start + 1 : start + 1 + len(PATCHES)]} == known
    tried = re.search(r"tried: (.*?)\.\n\n", page, re.DOTALL)
    assert tried is not None
    assert " ".join(tried[1].split()).split(", ") == [*TRIED.values()]
    assert f'`{IN_PROCESS}: "off"`' in page
    assert f"`{IN_PROCESS_VARIABLE}=off`" in page
