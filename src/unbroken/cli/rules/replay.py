"""Replays logs for `unbroken rules test` and `check`, and measures the cost of patterns.

Recorded logs are files, folders, gzip, or standard input.
"""

from __future__ import annotations

import gzip
import heapq
import os
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from unbroken.cli.show import note
from unbroken.cli.terminal import raw
from unbroken.core.logs.origins import FileOrigin, origin_of
from unbroken.core.logs.recorded import Line, Reading, Recorded, require_times, world_of
from unbroken.core.logs.replay import Replay, check_limits, check_sample
from unbroken.core.logs.rule_config import CompiledRule, read_rules
from unbroken.core.logs.rule_lint import LintFinding
from unbroken.core.logs.rule_sets import RuleSet
from unbroken.core.wording import counted
from unbroken.errors import SpecError
from unbroken.spec.patterns import Pattern
from unbroken.spec.problems import Report

CHUNK_BYTES = 256 * 1024
STDIN = "-"
NO_LOGS = (".json", ".yaml", ".yml", ".py", ".pt", ".pth", ".bin", ".safetensors", ".npy", ".zst")
"""Endings of files in folders that are skipped."""


class Readable(Protocol):
    """A stream that returns available data at once, such as the intact start of a cut gzip."""

    def read1(self, size: int, /) -> bytes:
        """Return at most `size` bytes; empty at the end."""
        ...


def log_files(arguments: list[str]) -> list[str]:
    """The files to read: arguments, and the files below folders.  Raises SpecError."""
    result = []
    for argument in arguments:
        path = Path(argument)
        if argument == STDIN or path.is_file() or path.is_fifo():
            result.append(argument)
        elif path.is_dir():
            inside = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
            logs = sorted(one for one in inside if not one.endswith(NO_LOGS))
            if not logs:
                raise SpecError(f"no logs in folder {argument}")
            result += logs
        else:
            raise SpecError(f"no such file: {argument}")
    if len(set(result)) != len(result):
        raise SpecError("a log is given twice")
    return result


@dataclass(slots=True)
class ReplayProgress:
    """Progress of reading, shown on a terminal."""

    total_bytes: int = 0
    """Total size of the files."""
    read_bytes: int = 0
    shown: int = -1
    is_terminal: bool = False

    def add(self, count: int) -> None:
        """Count bytes; print each new percentage."""
        self.read_bytes += count
        percent = min(99, self.read_bytes * 100 // self.total_bytes) if self.total_bytes else 0
        if self.is_terminal and self.total_bytes > 8 * CHUNK_BYTES and percent != self.shown:
            self.shown = percent
            print(f"\rreading the logs: {percent} %", end="", file=raw(sys.stderr), flush=True)

    def clear(self) -> None:
        """Remove the line of the progress."""
        if self.shown >= 0:
            print("\r\x1b[K", end="", file=raw(sys.stderr), flush=True)
            self.shown = -1


def progress_of(files: list[str]) -> ReplayProgress:
    """The progress of reading these files."""
    sizes = (os.stat(file).st_size for file in files if file != STDIN)
    return ReplayProgress(sum(sizes), is_terminal=sys.stderr.isatty())


def chunks(file: str, progress: ReplayProgress) -> Iterator[bytes]:
    """Read a log.  A damaged gzip ends early, with a note."""
    if file == STDIN:
        yield from iter(lambda: sys.stdin.buffer.read(CHUNK_BYTES), b"")
        return
    try:
        with open(file, "rb") as raw:
            if raw.peek(2)[:2] != b"\x1f\x8b":
                yield from _read(raw, progress, raw)
                return
            with gzip.open(raw) as unpacked:
                yield from _read(unpacked, progress, raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        progress.clear()
        note(f"{file}: the gzip is damaged; only the part before the damage is read ({error})")
    except OSError as error:
        raise SpecError(f"cannot read {file}: {error.strerror or error}") from error


def _read(stream: Readable, progress: ReplayProgress, raw: BinaryIO) -> Iterator[bytes]:
    before = 0
    while chunk := stream.read1(CHUNK_BYTES):
        if raw.seekable():
            at = raw.tell()
            progress.add(at - before)
            before = at
        yield chunk


SAMPLE_LINES, SAMPLE_BYTES = 5_000, 1 << 20
"""Size of the sample of lines on which patterns are measured."""
MEASURE_SECONDS = 0.02
"""CPU time to measure each pattern, at least."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of reading the logs."""

    ranks: dict[str, int] = field(default_factory=dict)
    """Ranks by file, for files whose names do not show it."""
    nproc: int | None = None
    time_format: str = "auto"
    seconds_per_line: float | None = None
    lead_seconds: float = 0.0
    tail_seconds: float = 0.0


@dataclass(slots=True)
class LineSample:
    """A sample of lines: every n-th; n doubles when the sample is full."""

    lines: list[bytes] = field(default_factory=list)
    _bytes: int = 0
    _every: int = 1
    _count: int = 0

    def add(self, line: bytes) -> None:
        """Count a line, and keep one of every so many."""
        self._count += 1
        if self._count % self._every:
            return
        self.lines.append(line)
        self._bytes += len(line)
        if len(self.lines) >= SAMPLE_LINES or self._bytes >= SAMPLE_BYTES:
            self.lines = self.lines[::2]
            self._bytes, self._every = sum(map(len, self.lines)), 2 * self._every


@dataclass(frozen=True, slots=True)
class ReplayedAttempt:
    """A replayed attempt."""

    number: int
    replay: Replay
    ranks: list[int]
    start_at: float
    end_at: float


def replay_logs(
    rules: Sequence[CompiledRule], rule_set: RuleSet, logs: list[str], options: ReplayOptions
) -> tuple[list[ReplayedAttempt], LineSample]:
    """Replay logs through the rules, each attempt by itself."""
    files, sample = log_files(logs), LineSample()
    unknown = set(options.ranks) - set(files)
    if unknown:
        raise SpecError(f"--rank {min(unknown)}: not one of the logs")
    progress = progress_of(files)
    nproc = options.nproc or rule_set.nproc
    by_attempt: dict[int, list[Recorded]] = {}
    for file in files:
        rank = options.ranks.get(file)
        origin = FileOrigin() if file == STDIN else origin_of(file)
        origin = origin if rank is None else replace(origin, rank=rank)
        reading = Reading(file, origin, nproc, options.time_format, options.seconds_per_line)
        one = Recorded(reading, chunks(file, progress))
        by_attempt.setdefault(origin.attempt, []).append(one)
    attempts = []
    try:
        for number, recorded in sorted(by_attempt.items()):
            if attempt := _attempt(rules, rule_set, recorded, options, sample):
                attempts.append(replace(attempt, number=number))
    finally:
        progress.clear()
    if not attempts:
        raise SpecError("the logs are empty")
    return attempts, sample


def check_logs(rule_set: RuleSet, logs: list[str], options: ReplayOptions) -> list[LintFinding]:
    """Problems of rules that logs of a healthy job show."""
    report = Report()
    rules = read_rules(rule_set.entries, report)
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in rule_set.entries]
    attempts, sample = replay_logs(rules, rule_set, logs, options)
    lint_findings: list[LintFinding] = []
    for rule in rules:
        path = f"{rule_set.path}[{names.index(rule.spec.name)}]"
        lint_findings += check_sample(rule, path, sample.lines)
        for attempt in attempts:
            for heard, view in attempt.replay.views():
                if heard.name == rule.spec.name:
                    lint_findings += check_limits(rule, path, heard, view, attempt.start_at)
    return lint_findings


def _attempt(
    rules: Sequence[CompiledRule],
    rule_set: RuleSet,
    files: list[Recorded],
    options: ReplayOptions,
    sample: LineSample,
) -> ReplayedAttempt | None:
    for file in files:
        file.open()
    files = [file for file in files if file.head]
    if not files:
        return None
    require_times(files)
    nproc = options.nproc or rule_set.nproc
    ranks = _ranks(files, rule_set, nproc)
    timed = [file for file in files if file.has_times]
    replay = Replay(rules, ranks, nproc or max(ranks) + 1)
    first = last = min(recorded.head[0].at for recorded in timed)
    replay.start(first - options.lead_seconds)
    for line in heapq.merge(*timed, key=_at):
        sample.add(line.text)
        replay.read(line)
        last = line.at
    for late in (file for file in files if not file.has_times):
        note(f"{late.reading.name}: has no times; its lines count as written at the end")
        for line in late:
            replay.read(replace(line, at=last))
    for file in files:
        if file.was_backward:
            note(f"{file.reading.name}: {file.was_backward} lines with an earlier time than before")
        if file.missing_at:
            place = f"{file.missing_at.file}:{file.missing_at.number}"
            note(
                f"{place}: {counted(file.missing, 'line')} gone from this log; live rules read all"
            )
    if replay.strange:
        note(f"left out: lines of ranks {sorted(replay.strange)}, which the job does not have")
    replay.end(last + options.tail_seconds)
    return ReplayedAttempt(0, replay, ranks, first, last)


def _at(line: Line) -> float:
    return line.at


def _ranks(files: list[Recorded], rule_set: RuleSet, nproc: int | None) -> list[int]:
    """Ranks of the logs: the whole job's if lines have ranks, else those of the files."""
    ranks = {line.rank for file in files for line in file.head}
    ranks |= {file.reading.origin.rank for file in files if file.reading.origin.rank is not None}
    if any(file.has_prefixes for file in files):
        ranks |= set(world_of(rule_set.nnodes or 1, nproc))
    return sorted(ranks)


def cost_ns(pattern: Pattern, lines: Sequence[bytes]) -> float:
    """CPU nanoseconds of a pattern for a line; the agent matches all patterns in one pass."""
    rounds, start = 0, time.process_time_ns()
    while not rounds or time.process_time_ns() - start < MEASURE_SECONDS * 1e9:
        for line in lines:
            pattern.is_match(line)
        rounds += 1
    return (time.process_time_ns() - start) / (rounds * max(1, len(lines)))
