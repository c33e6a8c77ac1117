"""Objects that a program cannot read or handle: logged, counted, reported in an event of the
object.

One object of one tenant must not stop the work on all others, so all of its errors end here.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from lightkube.core.resource import Resource, api_info
from lightkube.models.core_v1 import ObjectReference

from unbroken.log_lines import Log

from .bounds import ObjectBudgets, cut
from .cache import HasMetadata, Key, key_of

log = Log(__name__)

REASON = "ObjectRefused"
"""Reason of the event."""
UNREADABLE, UNHANDLED = "unreadable", "unhandled"
"""Steps at which an object is refused: its decoding, or a handler of its changes."""
REMEMBERED = 1024
"""Refusals that are reported once only."""
FRAMES = 4
"""Innermost calls that are logged."""
TEXT_CHARACTERS, NAME_CHARACTERS = 300, 320
"""Longest error and longest name in a log line."""


NO_KEY = Key("", "")


@dataclass(frozen=True, slots=True)
class ObjectIdentity:
    """The identity of an object whose body may be unreadable; empty strings for unreadable
    parts."""

    key: Key = NO_KEY
    uid: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class RefusedObject:
    """One object that was refused."""

    head: ObjectIdentity
    reason: str
    """Why, as one line of printable text."""
    is_gone: bool = False
    """True if the object is deleted."""


class Refusals:
    """Counts refusals of one kind; reports each object's reason once, and logs a few a minute."""

    def __init__(self, resource: type[Any], budgets: ObjectBudgets) -> None:
        self.counts = {UNREADABLE: 0, UNHANDLED: 0}
        self.unrecorded: list[tuple[ObjectReference, str]] = []
        """Events to record; the first caller that can record takes them."""
        self._resource = resource
        self._budgets = budgets
        self._known: OrderedDict[tuple[Key, str, str, str], None] = OrderedDict()

    def unreadable(self, head: ObjectIdentity, error: Exception) -> RefusedObject:
        """Note an object that cannot be decoded."""
        return self._note(UNREADABLE, head, error)

    def unhandled(self, item: HasMetadata, error: Exception) -> RefusedObject:
        """Note an object whose change a handler cannot take."""
        metadata = item.metadata
        uid, version = (metadata.uid, metadata.resourceVersion) if metadata else ("", "")
        head = ObjectIdentity(key_of(item), uid or "", version or "")
        return self._note(UNHANDLED, head, error)

    def _note(self, step: str, head: ObjectIdentity, error: Exception) -> RefusedObject:
        self.counts[step] += 1
        refusal = RefusedObject(head, _text(f"{type(error).__name__}: {error}", TEXT_CHARACTERS))
        series = (head.key, head.uid, step, refusal.reason)
        if series in self._known:
            return refusal
        self._known[series] = None
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        if self._budgets.may_log(head.key.namespace):
            log.warning(
                "object refused",
                kind=api_info(self._resource).resource.kind,
                object=_text(str(head.key), NAME_CHARACTERS),
                version=_text(head.version, 40),
                problem=step,
                error=refusal.reason,
                place=_place(error),
            )
        if head.key.name and len(self.unrecorded) < REMEMBERED:
            self.unrecorded.append((self._reference(head), f"{step}: {refusal.reason}"))
        return refusal

    def _reference(self, head: ObjectIdentity) -> ObjectReference:
        assert issubclass(self._resource, Resource)
        definition = api_info(self._resource).resource
        return ObjectReference(
            apiVersion=definition.api_version,
            kind=definition.kind,
            name=head.key.name,
            namespace=head.key.namespace or None,
            uid=head.uid,
            resourceVersion=head.version,
        )


class _RefusedMetadata(msgspec.Struct):
    name: object = ""
    namespace: object = ""
    uid: object = ""
    resourceVersion: object = ""


class _Object(msgspec.Struct):
    metadata: _RefusedMetadata


class _Cut(msgspec.Struct):
    metadata: int
    """Number of the metadata among the parts that are cut out."""


def head_of(raw: bytes | msgspec.Raw) -> ObjectIdentity:
    """Return the identity of an object, whatever the rest of it is."""
    try:
        metadata = msgspec.json.decode(raw, type=_Object).metadata
    except (msgspec.DecodeError, RecursionError):
        metadata = _cut_metadata(bytes(raw))
    name, namespace, uid, version = (
        value if isinstance(value, str) else ""
        for value in (metadata.name, metadata.namespace, metadata.uid, metadata.resourceVersion)
    )
    return ObjectIdentity(Key(namespace, name), uid, version)


def _cut_metadata(raw: bytes) -> _RefusedMetadata:
    """Return the metadata of an object that has parts which are nested too deeply: a hundred times
    slower."""
    try:
        body, pieces = cut(raw, 1)
        place = msgspec.json.decode(body, type=_Cut).metadata
        return msgspec.json.decode(cut(pieces[place], 1)[0], type=_RefusedMetadata)
    except (msgspec.DecodeError, RecursionError, IndexError):
        return _RefusedMetadata()


def _place(error: Exception) -> str:
    """Return the innermost functions of an error's traceback; not its text, which is the
    object's."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    return " > ".join(
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames
    )


def _text(text: str, most: int) -> str:
    """Return one line of at most `most` printable characters."""
    cut_text = text if len(text) <= most else f"{text[:most]}..."
    return "".join(
        char if char.isprintable() and char != '"' else ascii(char)[1:-1] for char in cut_text
    )
