"""The cache of learned imports: its contents, when they count, and files that are refused."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.agent.workers import learned
from unbroken.agent.workers.environment import Program
from unbroken.agent.workers.learned import BYTES_MAX, ENTRIES_MAX, ENTRY_BYTES_MAX, Learned, state

PROGRAM = Program(0, (), {}, "", b"", kind="script", arguments=("train.py", "--lr", "0.1"))
ENTRY = learned.entry_of(PROGRAM)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "imports"


def sample(tmp_path: Path) -> Learned:
    """Return what was learned from two files."""
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    for file in files:
        file.write_text("1")
    left_out = {"trainer": "RANK is read while it is imported"}
    return Learned(("one", "two"), left_out, {str(each): state(str(each)) for each in files}, 2.5)


def kept(folder: Path, tmp_path: Path) -> Learned:
    known = sample(tmp_path)
    learned.write(str(folder), ENTRY, known)
    return known


def read(folder: Path) -> Learned | None:
    return learned.read(str(folder), ENTRY)


def test_what_was_written_is_read_and_belongs_to_this_user_alone(
    folder: Path, tmp_path: Path
) -> None:
    assert read(folder) is None
    known = kept(folder, tmp_path)
    assert read(folder) == known
    assert os.listdir(folder) == [ENTRY]
    assert (folder.stat().st_mode & 0o777, (folder / ENTRY).stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    learned.forget(str(folder), ENTRY)
    assert read(folder) is None
    learned.forget(str(folder), ENTRY)


def write_again(file: Path) -> None:
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


@pytest.mark.parametrize(
    "change", [write_again, Path.unlink, lambda file: file.write_text("longer")]
)
@pytest.mark.parametrize("name", ["one.py", "two.py"])
def test_any_changed_file_means_to_learn_anew(
    folder: Path, tmp_path: Path, name: str, change: Callable[[Path], object]
) -> None:
    kept(folder, tmp_path)
    change(tmp_path / name)
    assert read(folder) is None


def test_a_large_program_is_kept(folder: Path, tmp_path: Path) -> None:
    # transformers.Trainer: 3,000 files and 43 modules that are left out.
    files = {str(tmp_path / f"{'x' * 100}{number}.py"): "" for number in range(5000)}
    modules = tuple(f"package.of.some.length.{number}" for number in range(5000))
    known = Learned(modules, dict.fromkeys(modules[:1000], "a" * 200), files, 1.0)
    learned.write(str(folder), ENTRY, known)
    assert read(folder) == known


@pytest.mark.parametrize(
    ("words", "is_same"),
    [
        (("train.py", "--lr", "0.2"), True),
        (("train.py", "--lr", "3e-4"), True),
        (("train.py", "--lr=1"), False),
        (("train.py", "--lr", "0.1", "--seed", "1"), False),
        (("train.py", "--model", "gpt2"), False),
        (("other.py", "--lr", "0.1"), False),
    ],
)
def test_numbers_in_arguments_do_not_matter(words: tuple[str, ...], is_same: bool) -> None:
    assert (learned.entry_of(replace(PROGRAM, arguments=words)) == ENTRY) is is_same


def test_names_with_digits_are_no_numbers() -> None:
    models = [replace(PROGRAM, arguments=("t.py", f"gpt{number}")) for number in (2, 3)]
    assert len({learned.entry_of(each) for each in models}) == 2


def test_an_entry_is_of_one_interpreter_path_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {ENTRY, learned.entry_of(replace(PROGRAM, kind="module"))}
    found.add(learned.entry_of(replace(PROGRAM, environment={"PYTHONPATH": "/lib"})))
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    found.add(learned.entry_of(PROGRAM))
    monkeypatch.chdir(tmp_path)
    found.add(learned.entry_of(PROGRAM))
    assert len(found) == 5


@pytest.mark.parametrize(
    ("base", "expected"),
    [("/data", "/data"), ("relative", "/home/me/.cache"), ("", "/home/me/.cache")],
)
def test_the_folder_follows_xdg_cache_home(
    base: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert learned.folder() == f"{expected}/unbroken/imports"


FILE = b'{"name":"/","text":"%s"}' % state("/").encode()
HOSTILE = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[1]",
    "deep": b'{"modules":' + b"[" * 100_000,
    "no text": b"\xff\xfe\x00",
    "modules are no list": b'{"modules":{"a":1}}',
    "modules are no names": b'{"modules":[1]}',
    "reasons are no texts": b'{"left_out":[{"name":"a","text":[]}],"files":[%s]}' % FILE,
    "reasons are no notes": b'{"left_out":{"a":"b"},"files":[%s]}' % FILE,
    "names without end": b'{"modules":["%s"],"files":[%s]}' % (b"a" * 301, FILE),
    "no files": b'{"modules":["os"]}',
    "files are no states": b'{"files":["/etc/passwd"]}',
    "a file that cannot be": json.dumps(
        {"files": [{"name": "a\0b\ud800", "text": "1:1"}]}
    ).encode(),
    "a number too long": b'{"seconds":' + b"9" * 5000 + b"}",
    "seconds below zero": b'{"seconds":-1}',
    "too long": b'{"modules":["' + b"a" * ENTRY_BYTES_MAX + b'"]}',
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_contents_are_ignored_with_one_line(
    folder: Path, tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    known = kept(folder, tmp_path)
    (folder / ENTRY).write_bytes(data)
    assert read(folder) is None
    assert len(caplog.messages) == 1
    learned.write(str(folder), ENTRY, known)
    assert read(folder) == known


def linked(folder: Path) -> None:
    """Replace the entry by a link to a whole one."""
    (folder / ENTRY).rename(folder.parent / "elsewhere")
    (folder / ENTRY).symlink_to(folder.parent / "elsewhere")


def linked_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def piped(folder: Path) -> None:
    (folder / ENTRY).unlink()
    os.mkfifo(folder / ENTRY, 0o600)


def made_folder(folder: Path) -> None:
    (folder / ENTRY).unlink()
    (folder / ENTRY).mkdir()


PLACES: dict[str, Callable[[Path], object]] = {
    "a link": linked,
    "a link to a folder": linked_folder,
    "a pipe": piped,
    "a folder": made_folder,
    "an entry that others may write": lambda folder: (folder / ENTRY).chmod(0o622),
    "an entry that others may read": lambda folder: (folder / ENTRY).chmod(0o640),
    "a folder that others may enter": lambda folder: folder.chmod(0o755),
}


@pytest.mark.parametrize("change", PLACES.values(), ids=PLACES)
def test_what_may_be_of_others_is_refused_with_one_line(
    folder: Path,
    tmp_path: Path,
    change: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept(folder, tmp_path)
    change(folder)
    assert read(folder) is None
    assert len(caplog.messages) == 1
    assert str(folder) in caplog.messages[0]


def test_files_of_another_user_are_never_read_nor_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = kept(folder, tmp_path)
    before = (folder / ENTRY).read_bytes()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read(folder) is None
    learned.write(str(folder), ENTRY, replace(known, modules=()))
    assert (folder / ENTRY).read_bytes() == before


def test_without_a_place_nothing_is_kept(tmp_path: Path) -> None:
    learned.write("/dev/null/imports", ENTRY, sample(tmp_path))
    assert learned.read("/dev/null/imports", ENTRY) is None


def test_entries_are_bounded_and_the_ones_used_last_stay(folder: Path, tmp_path: Path) -> None:
    known = kept(folder, tmp_path)
    os.utime(folder / ENTRY, ns=(0, 0))
    others = [f"{number:032x}.json" for number in range(ENTRIES_MAX + 5)]
    for number, name in enumerate(others):
        learned.write(str(folder), name, known)
        os.utime(folder / name, ns=(0, number + 1))
    assert read(folder) is None
    assert len(os.listdir(folder)) == ENTRIES_MAX
    (folder / "notes.txt").write_text("of the user")
    assert learned.read(str(folder), others[5]) == known  # It becomes the newest.
    learned.write(str(folder), ENTRY, known)
    assert {others[5], ENTRY, "notes.txt"} <= {*os.listdir(folder)}
    assert others[6] not in os.listdir(folder)


def test_bytes_are_bounded(folder: Path, tmp_path: Path) -> None:
    long = replace(sample(tmp_path), left_out={f"m{number}": "a" * 9000 for number in range(400)})
    for number in range(12):
        learned.write(str(folder), f"{number:032x}.json", long)
        os.utime(folder / f"{number:032x}.json", ns=(0, number))
    sizes = [each.stat().st_size for each in folder.iterdir()]
    assert BYTES_MAX - max(sizes) < sum(sizes) <= BYTES_MAX


def test_what_is_too_large_is_not_kept(folder: Path, tmp_path: Path) -> None:
    long = {f"m{number}": "a" * 9000 for number in range(ENTRY_BYTES_MAX // 9000 + 1)}
    learned.write(str(folder), ENTRY, replace(sample(tmp_path), left_out=long))
    assert read(folder) is None


def test_two_agents_that_write_at_once_leave_one_whole_entry(folder: Path, tmp_path: Path) -> None:
    one = kept(folder, tmp_path)
    two = replace(one, left_out={}, seconds=1.0)

    def write(known: Learned) -> None:
        for _ in range(50):
            learned.write(str(folder), ENTRY, known)

    with ThreadPoolExecutor() as threads:
        writers = [threads.submit(write, known) for known in (one, two)]
        while not all(writer.done() for writer in writers):
            assert read(folder) in (one, two)
        for writer in writers:
            writer.result()
    assert os.listdir(folder) == [ENTRY]
