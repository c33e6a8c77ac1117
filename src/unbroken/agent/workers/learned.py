"""The cache of learned imports, which makes the next start of the same program warm at once.

One file for each program holds what a template has imported, what it has left out, and why. It lies
in `unbroken/imports` below XDG_CACHE_HOME (`~/.cache`), readable by this user only. Files of other
users and links are refused. A file counts only while every file that the template read is unchanged
in size and time. Otherwise the imports are learned anew.

A file is a hint, never a permission: a template applies all its rules to what it reads here, so a
wrong file costs time at most.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from unbroken.errors import PeerError
from unbroken.log_lines import Log
from unbroken.wire import codec
from unbroken.wire.agent import IMPORTS_MAX
from unbroken.wire.codec import Amount, Text, load

from .environment import Program, python
from .template import NAME_CHARACTERS, WORD_CHARACTERS

log = Log(__name__)

FOLDER = "unbroken/imports"
ENTRY_BYTES_MAX = codec.FRAME_BYTES_MAX
FILES_MAX = 50_000
ENTRIES_MAX = 64
"""Programs of which something is kept; those that were used last stay."""
BYTES_MAX = 32 * 1024 * 1024
"""Bytes of all entries."""
FORM = "2"
"""Version of the form of an entry, its reasons included; an entry of another version has another
name."""
_ENTRY = re.compile(r"[0-9a-f]{32}\.json")
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{8}")
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])[0-9]+(\.[0-9]*)?(e[-+]?[0-9]+)?(?![A-Za-z0-9_])")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Learned:
    """Result of a template for one program."""

    modules: tuple[str, ...] = ()
    """Modules that workers import, in order."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by module that a template must not import."""
    files: Mapping[str, str] = field(default_factory=dict)
    """State of each file that was read; see `state`."""
    seconds: float = 0.0
    """Duration of the imports."""

    def changed_file(self) -> str | None:
        """Return a file that has changed since."""
        return next((file for file, known in self.files.items() if state(file) != known), None)


@dataclass(frozen=True, slots=True)
class _Note:
    name: Text
    text: Text


@dataclass(frozen=True, slots=True)
class _Entry:
    """The contents of a file."""

    modules: Annotated[tuple[Text, ...], Meta(max_length=IMPORTS_MAX)] = ()
    left_out: Annotated[tuple[_Note, ...], Meta(max_length=IMPORTS_MAX)] = ()
    files: Annotated[tuple[_Note, ...], Meta(max_length=FILES_MAX)] = ()
    seconds: Amount = 0.0


def state(file: str) -> str:
    """Return size and time of change of a file in one word; empty: there is none."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return ""
    return f"{status.st_size}:{status.st_mtime_ns}"


def folder() -> str:
    """Return the folder of this user's entries."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return f"{base if base.startswith('/') else os.path.expanduser('~/.cache')}/{FOLDER}"


def entry_of(program: Program) -> str:
    """Return the name of a program's entry.

    Numbers in arguments do not matter (a seed, a learning rate). Every other word may decide what
    the program imports.
    """
    words = [_NUMBER.sub("0", word) for word in program.arguments[1:]]
    interpreter = os.path.abspath(shutil.which(python()) or python())
    directory, path = os.getcwd(), program.environment.get("PYTHONPATH", "")
    whole = [FORM, interpreter, path, directory, program.kind, *program.arguments[:1], *words]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:32] + ".json"


def read(directory: str, entry: str) -> Learned | None:
    """Return the result of an earlier run of a program; None: there is none, or it is no longer
    true."""
    try:
        with _opened(directory) as there:
            found = _decoded(_contents(there, entry))
            changed = found.changed_file()
            if changed is None:
                os.utime(entry, dir_fd=there, follow_symlinks=False)
                return found
    except FileNotFoundError:
        return None
    except (OSError, PeerError) as error:
        log.warning("learned imports are ignored", file=f"{directory}/{entry}", error=error)
        return None
    log.info("imports are learned anew: a file has changed", file=changed)
    return None


def write(directory: str, entry: str, learned: Learned) -> None:
    """Write the entry of a program, and remove those that were used least recently."""
    data = _encoded(learned)
    if len(data) > ENTRY_BYTES_MAX or len(learned.files) > FILES_MAX:
        log.info("learned imports are not kept: there are too many", count=len(learned.files))
        return
    unfinished = f".{entry.removesuffix('.json')}.{os.urandom(4).hex()}"
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        with _opened(directory) as there:
            created = os.O_CREAT | os.O_EXCL | os.O_WRONLY | _FLAGS
            with os.fdopen(os.open(unfinished, created, 0o600, dir_fd=there), "wb") as file:
                file.write(data)
            os.replace(unfinished, entry, src_dir_fd=there, dst_dir_fd=there)
            _prune(there, entry)
    except OSError as error:
        log.info("learned imports are not kept", file=f"{directory}/{entry}", error=error)


def forget(directory: str, entry: str) -> None:
    """Remove the entry of a program, if there is one."""
    with contextlib.suppress(OSError), _opened(directory) as there:
        os.unlink(entry, dir_fd=there)


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int]:
    """Open the folder, which must be this user's alone. Raises OSError."""
    there = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    try:
        _require_own(os.fstat(there), stat.S_IFDIR)
        yield there
    finally:
        os.close(there)


def _contents(there: int, entry: str) -> bytes:
    # Without O_NONBLOCK a pipe would hold the agent up.
    number = os.open(entry, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=there)
    with os.fdopen(number, "rb") as file:
        _require_own(os.fstat(number), stat.S_IFREG)
        return file.read(ENTRY_BYTES_MAX + 1)


def _require_own(status: os.stat_result, kind: int) -> None:
    if stat.S_IFMT(status.st_mode) != kind:
        raise PermissionError("it is no regular file" if kind == stat.S_IFREG else "no folder")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(f"others may use it (mode {mode:o}); remove it, or forbid that")


def _encoded(learned: Learned) -> bytes:
    left_out = tuple(_Note(*each) for each in learned.left_out.items())
    files = tuple(_Note(*each) for each in learned.files.items())
    entry = _Entry(learned.modules, left_out, files, learned.seconds)
    return json.dumps(codec.write(entry), separators=(",", ":")).encode()


def _decoded(data: bytes) -> Learned:
    found = codec.read(_Entry, load(data), "")
    names = [*found.modules, *(each.name for each in found.left_out)]
    reasons = [each.text for each in found.left_out]
    for texts, most in ((names, NAME_CHARACTERS), (reasons, WORD_CHARACTERS)):
        if not all(0 < len(text) <= most for text in texts):
            raise PeerError(f"a name or reason has not 1 to {most} characters")
    if not found.files:
        raise PeerError("it names no files")
    left_out = {each.name: each.text for each in found.left_out}
    files = {each.name: each.text for each in found.files}
    return Learned(found.modules, left_out, files, found.seconds)


def _prune(there: int, newest: str) -> None:
    """Remove the entries that were used least recently, above the bounds, and unfinished files."""
    found = []
    with os.scandir(there) as entries:
        for each in entries:
            if _ENTRY.fullmatch(each.name) or _UNFINISHED.fullmatch(each.name):
                status = each.stat(follow_symlinks=False)
                found.append((each.name != newest, -status.st_mtime_ns, status.st_size, each.name))
    bytes_left, entries_left = BYTES_MAX, ENTRIES_MAX
    for _, _, size, name in sorted(found):
        bytes_left, entries_left = bytes_left - size, entries_left - 1
        if bytes_left < 0 or entries_left < 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=there)
