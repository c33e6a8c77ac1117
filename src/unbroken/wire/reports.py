"""The operator's answer to the live page: a line for each agent of a job that is connected.

A line is the uid of the agent's pod, a space, and a frame as `agent_codec.encode_brief` makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from unbroken.errors import PeerError

from .agent import AgentReport
from .agent_codec import decode_answer

PATH: Final = "/v1/reports"
"""Path of the answer, before the namespace and the name of the job."""
AUDIENCE: Final = "unbroken-reports"
"""Audience of the token of the page: the Kubernetes API does not accept it."""
TOKEN_CHARACTERS = 16 * 1024
"""Longest token."""
UID_CHARACTERS = 64
"""Longest uid of a pod; Kubernetes makes 36 characters."""
END = b"\n"


def encode_line(uid: str, frame: bytes) -> bytes:
    """Return the line of an agent."""
    return b"%s %s\n" % (uid.encode(), frame)


def decode_lines(lines: Iterable[bytes]) -> Mapping[str, AgentReport]:
    """Return the reports by the uid of their pod. Raises PeerError."""
    found = {}
    for line in lines:
        uid, _, frame = line.partition(b" ")
        report = decode_answer(frame, takes_evidence=False)
        if not 0 < len(uid) <= UID_CHARACTERS or not isinstance(report, AgentReport):
            raise PeerError("a line that is no report of an agent")
        found[uid.decode(errors="replace")] = report
    return found
