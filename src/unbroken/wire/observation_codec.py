"""Evidence as JSON, cut to what a message may hold."""

from __future__ import annotations

from dataclasses import replace

from .codec import FRAME_BYTES_MAX, dump, load, read, write
from .observation import FRAMES_MAX, Evidence, RankEvidence

EVIDENCE = "evidence"
"""Type of the frame."""


def encode_evidence(evidence: Evidence, longest: int = FRAME_BYTES_MAX) -> str:
    """Return the body of `GET /v1/evidence`; with `longest` LINK_BYTES_MAX a frame of the link.

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
    return dump({"type": EVIDENCE, **write(evidence)})


def _shortened(evidence: Evidence, threads_max: int, frames_max: int) -> Evidence:
    def shortened(rank: RankEvidence) -> RankEvidence:
        kept = [*rank.threads[:threads_max]]
        kept += [thread for thread in rank.threads[threads_max:] if thread.holds_gil]
        return replace(
            rank,
            threads=tuple(
                replace(thread_stack, frames=thread_stack.frames[:frames_max])
                for thread_stack in kept
            ),
        )

    return replace(evidence, ranks=tuple(map(shortened, evidence.ranks)))


def decode_evidence(frame: str | bytes) -> Evidence:
    """Read a frame or body of an agent. Raises PeerError."""
    return read(Evidence, load(frame), EVIDENCE)
