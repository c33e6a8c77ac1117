"""What agents see of their ranks, as JSON: the watch in a report, and evidence with its request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from .json_fields import FRAME_BYTES_MAX, Taker, dump, load, plain
from .observation import (
    FRAME_CHARACTERS,
    FRAMES_MAX,
    THREADS_MAX,
    Alarm,
    CollectCommand,
    Collective,
    Evidence,
    RankEvidence,
    RankWatch,
    ThreadStack,
)

ALARMS_MAX = 16
RANKS_MAX = 1024
COLLECTIVES_MAX = 64
COLLECT_SECONDS_MAX = 60.0
SAMPLES_PER_SECOND_MAX = 10
EVIDENCE = "evidence"
"""Type of its frame."""


def watch_from(item: Taker) -> RankWatch:
    """One rank of a report's watch."""
    return RankWatch(
        rank=item.number("rank"),
        phase=item.optional_text("phase") or "",
        step=item.count("step"),
        first_step=item.count("first_step"),
        step_at=item.time("step_at"),
        step_seconds=item.time("step_seconds"),
        sign_at=item.time("sign_at"),
        allowed_seconds=item.time("allowed_seconds"),
        checkpoint_step=item.count("checkpoint_step"),
        metrics=item.floats("metrics"),
        alarms=tuple(_alarm(each) for each in item.items("alarms", ALARMS_MAX)),
        bound=item.optional_text("bound") or "",
        look_seconds=item.time("look_seconds"),
        act_seconds=item.time("act_seconds"),
        late_since=item.time("late_since"),
    )


def _alarm(item: Taker) -> Alarm:
    return Alarm(
        detector=item.text("detector"),
        since=item.time("since") or 0.0,
        at=item.time("at") or 0.0,
        why=item.optional_text("why") or "",
        step=item.count("step"),
    )


def collect_from(value: Mapping[str, Any]) -> CollectCommand:
    """The command in a frame; PeerError."""
    take = Taker(value, "collect")
    seconds = take.time("seconds")
    if seconds is None or seconds < 0:
        raise take.wrong("seconds", "not a length of time")
    return CollectCommand(
        take.number("request"),
        take.number("attempt"),
        min(seconds, COLLECT_SECONDS_MAX),
        min(take.count("samples_per_second") or 0, SAMPLES_PER_SECOND_MAX),
    )


def encode_evidence(evidence: Evidence, longest: int = FRAME_BYTES_MAX) -> str:
    """The body of `GET /v1/evidence`; with `longest` LINK_BYTES_MAX a frame of the link.

    Evidence that is too long loses first all threads but the main one and the one that holds the
    GIL, then outer frames.
    """
    frame, frames_max = _frame(evidence), FRAMES_MAX
    if len(frame) > longest:
        frame = _frame(_shortened(evidence, 1, frames_max))
    while len(frame) > longest and frames_max:
        frames_max //= 2
        frame = _frame(_shortened(evidence, 1, frames_max))
    return frame


def _frame(evidence: Evidence) -> str:
    return dump({"type": EVIDENCE, **plain(asdict(evidence))})


def _shortened(evidence: Evidence, threads_max: int, frames_max: int) -> Evidence:
    def shortened(rank: RankEvidence) -> RankEvidence:
        kept = [*rank.threads[:threads_max]]
        kept += [one for one in rank.threads[threads_max:] if one.holds_gil]
        return replace(
            rank, threads=tuple(replace(one, frames=one.frames[:frames_max]) for one in kept)
        )

    return replace(evidence, ranks=tuple(map(shortened, evidence.ranks)))


def decode_evidence(frame: str | bytes) -> Evidence:
    """Read a frame or body of an agent; PeerError."""
    return evidence_from(load(frame))


def evidence_from(value: Mapping[str, Any]) -> Evidence:
    """The evidence in a decoded JSON object; PeerError."""
    take = Taker(value, EVIDENCE)
    return Evidence(
        request=take.number("request"),
        attempt=take.number("attempt"),
        agent_id=take.text("agent_id"),
        at=take.time("at") or 0.0,
        ranks=tuple(_rank(item) for item in take.items("ranks", RANKS_MAX)),
    )


def _rank(item: Taker) -> RankEvidence:
    return RankEvidence(
        rank=item.number("rank"),
        pid=item.number("pid"),
        state=item.optional_text("state") or "",
        waits_in=item.optional_text("waits_in") or "",
        cpu_seconds=item.time("cpu_seconds") or 0.0,
        cpu_share=item.time("cpu_share"),
        waited_share=item.time("waited_share"),
        io_bytes=item.count("io_bytes"),
        is_same=item.flag("is_same"),
        last_output_at=item.time("last_output_at"),
        last_line=item.optional_text("last_line") or "",
        phase=item.optional_text("phase") or "",
        step=item.count("step"),
        step_at=item.time("step_at"),
        threads=tuple(_thread(each) for each in item.items("threads", THREADS_MAX)),
        collectives=tuple(_collective(each) for each in item.items("collectives", COLLECTIVES_MAX)),
        note=item.optional_text("note") or "",
        samples=item.count("samples") or 0,
        waiting=item.count("waiting") or 0,
    )


def _thread(item: Taker) -> ThreadStack:
    return ThreadStack(
        name=item.optional_text("name") or "",
        is_main=item.flag("is_main") or False,
        frames=item.texts("frames", FRAMES_MAX, FRAME_CHARACTERS),
        holds_gil=item.flag("holds_gil") or False,
    )


def _collective(item: Taker) -> Collective:
    return Collective(
        group=item.optional_text("group") or "",
        sequence=item.count("sequence") or 0,
        operation=item.optional_text("operation") or "",
        state=item.optional_text("state") or "",
    )
