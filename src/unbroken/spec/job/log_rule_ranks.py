"""The ranks that must log so that a log rule does not hang, as a user writes it.

Annotation `unbroken.dev/log-rule-ranks` on the job: `RULE=WORD; RULE=WORD`, RULE `*` for the
others.

- `some`, the default of this operator: the job as a whole must log. A match of any rank of any node
  feeds the rule, and it hangs only when no node has a match any more. So if rank 0 alone logs the
  loss, or the last rank alone as in Megatron, the silent nodes do not hang.
- `node`, the meaning of the HyperPod agent, which reads local rank 0 of each node: some rank of
  each node must log. It applies if no word is given, that is, under another operator.
- `every`: each rank must log.
- `0,8,16`: each of these ranks must log; lines of other ranks do not count.

Values and `faultOnMatch` need no agreement: they count on any watched rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from unbroken.errors import SpecError

RANKS_KEY = "ranks"
"""Key of a rule in a start command."""


class Scope(Enum):
    """The ranks that must log so that a rule does not hang."""

    JOB = "some"
    NODE = "node"
    RANK = "every"


@dataclass(frozen=True, slots=True)
class Watch:
    """The ranks whose lines feed a rule, and which of them must log."""

    scope: Scope = Scope.NODE
    ranks: frozenset[int] | None = None
    """Watched ranks; None: all."""

    def __str__(self) -> str:
        return self.scope.value if self.ranks is None else ",".join(map(str, sorted(self.ranks)))


OF_NODE = Watch()


def read_watch(text: str) -> Watch:
    """Read `some`, `node`, `every`, or ranks with commas. Raises SpecError."""
    word = text.strip()
    if word in {scope.value for scope in Scope}:
        return Watch(Scope(word))
    parts = [part.strip() for part in word.split(",")]
    if all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        return Watch(Scope.RANK, frozenset(map(int, parts)))
    raise SpecError(f"{text!r} is none of some, node, every, or ranks such as 0,8")


def read_watches(annotation: str) -> dict[str, Watch]:
    """Return the watches of the annotation's text by rule name. Raises SpecError."""
    watches = {}
    for part in filter(None, map(str.strip, annotation.split(";"))):
        name, is_pair, word = part.rpartition("=")
        if not is_pair or not name.strip():
            raise SpecError(f"{part!r} is not RULE=RANKS")
        watches[name.strip()] = read_watch(word)
    return watches


def watch_of(name: str, watches: Mapping[str, Watch]) -> Watch:
    """Return the ranks that are watched for the rule, by this operator's default."""
    return watches.get(name) or watches.get("*") or Watch(Scope.JOB)
