"""The operator's master key: in a file, and in a Secret that it may make and not read."""

from __future__ import annotations

import asyncio
import base64
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.operator.conftest import Place
from unbroken.errors import SpecError
from unbroken.operator.key import KeySecret, kept_key, mounted_key, read_key

NAME = "unbroken-operator-key"


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "state/operator.key"
    assert read_key(file) is None
    made = kept_key(file)
    assert len(made) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert kept_key(file) == made
    assert [one.name for one in file.parent.iterdir()] == ["operator.key"]


def test_operators_that_start_together_have_one_key(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(kept_key(tmp_path / "key"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        ("ab" * 31, 0o600, "must hold 64 hexadecimal digits"),
        ("not a key", 0o600, "openssl rand -hex 32"),
        ("ab" * 32, 0o604, "everybody may read"),
    ],
)
def test_what_is_no_key_is_refused(tmp_path: Path, content: str, mode: int, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(SpecError, match=text):
        kept_key(file)


async def test_one_operator_makes_the_secret_and_the_other_waits_for_its_file(
    place: Any, tmp_path: Path
) -> None:
    async def check(here: Place) -> None:
        secret = KeySecret(here.namespace, NAME)
        files = [tmp_path / "0/key", tmp_path / "1/key"]
        first = await mounted_key(here.client, files[0], secret)
        kept = await here.until(f"secrets/{NAME}", bool)
        assert kept["immutable"] is True
        assert base64.b64decode(kept["data"]["key"]) == first.hex().encode()
        second = asyncio.ensure_future(mounted_key(here.client, files[1], secret))
        done, _ = await asyncio.wait([second], timeout=0.2)
        assert not done
        # Mount the Secret as the kubelet does.
        files[1].parent.mkdir()
        draft = files[1].with_name("draft")
        draft.write_bytes(base64.b64decode(kept["data"]["key"]))
        draft.chmod(0o440)
        draft.rename(files[1])
        assert await second == first
        assert await mounted_key(here.client, files[1], secret) == first

    async with place() as here:
        await check(here)
