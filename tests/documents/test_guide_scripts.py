"""Every script of the guide runs as it is written, with two ranks of a real agent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.agent.running import linked, program, running, start
from unbroken.wire.agent import AgentState

GUIDE = Path(__file__).parents[2] / "docs/guide"
ENDS = {AgentState.COMPLETED, AgentState.FAULTED}
ELSEWHERE = ("trackers",)
"""Pages whose scripts need more than torch: `tests/e2e/test_trackers.py` runs them."""


HYBRID = re.compile(r"```python\n(shape, .*?)```", re.DOTALL)
"""Lines of the page on state that take the place of those of its script with the same names."""


def hybrid() -> str:
    """Return the script of FSDP2 with the page's lines for hybrid sharding."""
    page = (GUIDE / "state.md").read_text()
    (lines,) = HYBRID.findall(page)
    *mesh, snapshot = lines.splitlines()
    (script,) = (text for _, text in scripts() if "fully_shard(" in text)
    script, meshes = re.subn(r"^fully_shard\(.*$", "\n".join(mesh), script, flags=re.MULTILINE)
    script, snapshots = re.subn(r"^snapshot = .*$", snapshot, script, flags=re.MULTILINE)
    assert (meshes, snapshots) == (1, 1)
    return script


def scripts() -> list[tuple[str, str]]:
    """Page and number of each, and its text; what is no whole script begins without an import."""
    return [
        (f"{page.stem}-{number}", text)
        for page in sorted(GUIDE.glob("*.md"))
        if page.stem not in ELSEWHERE
        for number, text in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
        if text.startswith("import ")
    ]


def test_the_guide_has_scripts() -> None:
    assert len(scripts()) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), scripts(), ids=[name for name, _ in scripts()])
async def test_a_script_of_the_guide_runs_to_its_end(tmp_path: Path, name: str, text: str) -> None:
    await runs_to_its_end(tmp_path, name, text)


@pytest.mark.slow
async def test_the_lines_for_hybrid_sharding_run_in_the_script_above_them(tmp_path: Path) -> None:
    await runs_to_its_end(tmp_path, "hybrid", hybrid())


async def runs_to_its_end(tmp_path: Path, name: str, text: str) -> None:
    """Run a script with two ranks of a real agent. Raises AssertionError if it fails."""
    pytest.importorskip("torch")
    (tmp_path / "checkpoints").mkdir()

    async def scenario() -> AgentState:
        async with linked(agent) as operator:
            ready = await operator.state(AgentState.READY)
            operator.send(start(master_port=ready.offered_port))
            return (await operator.report(lambda report: report.state in ENDS)).state

    with running(tmp_path, program(tmp_path, text)) as agent:
        state = await scenario()
        errors = agent.attempt_file(0, 0, "stderr.log").read_text()
    assert (state, "Error" in errors) == (AgentState.COMPLETED, False), f"{name}: {errors}"
