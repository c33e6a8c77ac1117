"""Sizes that `unbroken checkpoint-memory` takes, as words and from a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unbroken.cli.nodes.checkpoint_memory import memory_bytes, memory_in
from unbroken.errors import SpecError

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("text", "size"), [("64Gi", 64 << 30), ("1000", 1000), ("20%", MACHINE // 5), ("100%", MACHINE)]
)
def test_a_size_or_a_share_of_the_machines_memory(text: str, size: int, tmp_path: Path) -> None:
    assert memory_bytes(text) == size
    file = tmp_path / "size"
    file.write_text(f"{text}\n")
    assert memory_in(file) == size


@pytest.mark.parametrize("text", ["", "0", "-1Gi", "0%", "101%", "2.5%", "much", "\0"])
def test_any_other_content_of_the_file_is_refused_with_its_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "size"
    file.write_text(text)
    with pytest.raises(SpecError, match=f"--memory-file {file}: expected a size"):
        memory_in(file)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for file in (tmp_path, tmp_path / "none", binary):
        with pytest.raises(SpecError, match=f"cannot read {file}: "):
            memory_in(file)
