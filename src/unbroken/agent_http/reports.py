"""Fast reader of a link's frames: an operator of 12,500 agents reads as many each second.

msgspec makes the values of most reports in one pass, from the same classes and limits as
`wire.codec`. A frame beyond them is left to `wire.agent_codec`, which decides what is cut and what
is refused. Only operators use this reader: agents do without msgspec.
"""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from unbroken.wire.agent import AgentReport, Beat
from unbroken.wire.agent_codec import decode_answer
from unbroken.wire.codec import NUMBER_MAX, TEXT_MAX, is_map, resolve
from unbroken.wire.observation import Evidence

_HEAD = b'{"type":"report",'
"""The beginning of each frame that `encode_report` writes."""
_ESCAPE = b"\\"
"""Marks a character that may have to be cleaned."""


def read_answer(frame: bytes, takes_evidence: bool = True) -> AgentReport | Evidence | Beat | None:
    """Return the same values and raise the same errors as `decode_answer`."""
    # No text of a frame that is so short is longer than a text may be.
    is_usual = len(frame) <= TEXT_MAX and frame.startswith(_HEAD)
    if is_usual and frame.isascii() and _ESCAPE not in frame:
        try:
            report = _DECODER.decode(frame)
        except (msgspec.DecodeError, RecursionError):
            return decode_answer(frame, takes_evidence)
        return replace(report, progress={}) if report.progress else report
    return decode_answer(frame, takes_evidence)


def _decoder(record: type[AgentReport]) -> msgspec.json.Decoder[AgentReport]:
    _declare_limits(record)
    return msgspec.json.Decoder(record)


def _declare_limits(record: type[Any]) -> None:
    """Set the limits of a class for msgspec, which reads only its own annotations."""
    hints = get_type_hints(record, include_extras=True)
    record.__annotations__ = {name: _limited(hint) for name, hint in hints.items()}


def _limited(hint: Any) -> Any:
    """Return a type hint of `wire.codec` as one of msgspec that admits no more."""
    bare, limits, is_optional = resolve(hint)
    meta = msgspec.Meta(max_length=limits.most)
    if get_origin(bare) is tuple:
        bare = tuple[_limited(get_args(bare)[0]), ...]  # type: ignore[misc]
    elif isinstance(bare, type) and is_dataclass(bare):
        _declare_limits(bare)
    elif bare in (int, float):
        # A number at the limit may have been greater before it became a float.
        most = NUMBER_MAX if limits.most is None else limits.most
        meta = msgspec.Meta(ge=limits.least or 0, lt=most)
    elif bare is not str and not is_map(bare):
        meta = msgspec.Meta()
    result: Any = Annotated[bare, limits, meta]
    return result | None if is_optional else result


_DECODER = _decoder(AgentReport)
