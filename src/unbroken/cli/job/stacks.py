"""`unbroken stacks`: the stacks of all ranks of a job now.  It changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unbroken.cli.completion import JobName
from unbroken.cli.connection import Cluster
from unbroken.cli.options import CommonOptions, Output
from unbroken.cli.show import note, paper
from unbroken.errors import SpecError
from unbroken.wire.observation import Evidence, RankEvidence

from .agents import evidence, reports

if TYPE_CHECKING:
    from unbroken.core.diagnosis.stacks import Blame

SECONDS = 5.0
STATES = {
    "R": "runs",
    "S": "waits",
    "D": "waits in the kernel, not to be interrupted",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "has ended",
    "": "has ended",
}


@dataclass(frozen=True, slots=True)
class JobEvidence:
    """Evidence of all ranks of a job."""

    answers: dict[str, Evidence]
    """Evidence of an agent's ranks, by name of the pod."""
    silent: tuple[str, ...]
    """Names of pods whose agents did not answer."""

    def ranks(self) -> list[RankEvidence]:
        """All ranks, in order."""
        every = (one for answer in self.answers.values() for one in answer.ranks)
        return sorted(every, key=lambda one: one.rank)


def command(
    job: JobName,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Show all threads of this rank.", show_default="all ranks"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.5, max=30, help="Seconds to collect evidence, at most.")
    ] = SECONDS,
    *,
    options: CommonOptions,
) -> None:
    """Show the stacks of all ranks now; ranks with the same stack are one group.

    Each process is paused for some milliseconds while its stack is read.

    Example: `unbroken stacks train --rank 3`
    """

    async def read(cluster: Cluster) -> JobEvidence:
        return await collect(cluster, job, seconds)

    found = options.run(read)
    if rank is not None:
        _show_rank(found, rank, options.output)
    elif options.output.is_data:
        options.output.print(value(found))
    else:
        _show(job, found)


async def collect(cluster: Cluster, name: str, seconds: float) -> JobEvidence:
    """Collect evidence from all agents at once; SpecError if no rank runs."""
    if cluster.place.paths is None:
        raise SpecError(
            "stacks are read on a local cluster only; on other clusters, request /v1/evidence "
            "from port 8080 inside a pod, with the job's key"
        )
    await cluster.job(name)
    pods = await cluster.pods(name)
    answers = await evidence(cluster, pods, seconds)
    names = sorted(str(pod["metadata"]["name"]) for pod in pods)
    found = JobEvidence(answers, tuple(one for one in names if one not in answers))
    if not found.ranks():
        others = await reports(cluster, pods)
        if any(one.workers and pod not in answers for pod, one in others.items()):
            raise SpecError(
                f"the agents of job {name} read no stacks, as HyperPod's own agent does not: "
                "start the script with unbrokenrun"
            )
        silent = f"; no answer from {', '.join(found.silent)}" if found.silent else ""
        raise SpecError(f"no rank of job {name} is running{silent}")
    return found


def judged(found: JobEvidence) -> Blame:
    """The ranks in groups by stack, and the ranks that keep others waiting."""
    from unbroken.core.diagnosis.stacks import blame

    now = max(one.at for one in found.answers.values())
    return blame(found.ranks(), now)


def value(found: JobEvidence) -> dict[str, Any]:
    """The whole answer as JSON."""
    blame = judged(found)
    return {
        "attempt": max(one.attempt for one in found.answers.values()),
        "isWorking": blame.is_working,
        "culprits": [] if blame.is_working else list(blame.ranks),
        "why": "" if blame.is_working else blame.why,
        "confidence": "" if blame.is_working else blame.confidence,
        "groups": [_named(asdict(group)) for group in blame.groups],
        "ranks": [_named(asdict(one)) for one in found.ranks()],
        "silentPods": list(found.silent),
    }


def _named(value: Any) -> Any:
    """The value with camel-case keys, as the API's objects have them."""
    if isinstance(value, dict):
        return {_camel(name): _named(one) for name, one in value.items()}
    return [_named(one) for one in value] if isinstance(value, tuple) else value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def _show(job: str, found: JobEvidence) -> None:
    from unbroken.core.wording import counted

    from .story import group_lines  # slow to load

    blame, page = judged(found), paper()
    attempt = max(one.attempt for one in found.answers.values())
    ranks = found.ranks()
    print(f"{job}, attempt {attempt}: {counted(len(ranks), 'rank')} looked at")
    if blame.ranks and not blame.is_working:
        for line in page.wrap(f"{blame.confidence}: {blame.why}", 2, "red"):
            print(line)
    for line in group_lines(blame.groups, page):
        print(line)
    for one in ranks:
        if one.note:
            note(f"rank {one.rank}: {one.note}")
    _note_silent(found)


def _note_silent(found: JobEvidence) -> None:
    for name in found.silent:
        note(f"{name}: its agent did not answer")


def _show_rank(found: JobEvidence, rank: int, output: Output) -> None:
    one = next((each for each in found.ranks() if each.rank == rank), None)
    if one is None:
        _note_silent(found)
        raise SpecError(f"rank {rank} is not running")
    if output.is_data:
        output.print(_named(asdict(one)))
        return
    for line in _facts(one):
        print(line)
    for thread in sorted(one.threads, key=lambda thread: not thread.holds_gil):
        gil = " (holds the GIL)" if thread.holds_gil else ""
        print(f"\n  {thread.name or 'thread'}{gil}")
        for frame in thread.frames:
            print(f"    {frame}")


def _facts(one: RankEvidence) -> Iterator[str]:
    page = paper()
    yield f"rank {one.rank}, pid {one.pid}"
    state = STATES.get(one.state, one.state)
    yield from page.field("state", state + (f" in {one.waits_in}" if one.waits_in else ""))
    used = f"{one.cpu_seconds:.1f} s since its start"
    share = f", {one.cpu_share:.2f} cores now" if one.cpu_share is not None else ""
    yield from page.field("processor", used + share)
    if one.io_bytes is not None:
        yield from page.field("files", f"{one.io_bytes} bytes read and written between two looks")
    if one.phase or one.step is not None:
        step = "" if one.step is None else f"step {one.step}"
        yield from page.field("at", ", ".join(filter(None, (one.phase, step))))
    for collective in one.collectives:
        what = f"{collective.operation} {collective.sequence} in {collective.group}"
        yield from page.field("collective", f"{what}: {collective.state}")
    if one.last_line:
        yield from page.field("last line", f"{_clock(one.last_output_at)}{one.last_line}")
    if one.note:
        yield from page.field("note", one.note)


def _clock(at: float | None) -> str:
    return "" if at is None else f"{datetime.fromtimestamp(at).astimezone():%H:%M:%S}  "
