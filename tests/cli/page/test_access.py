"""Links open the page once; cookies are of this cluster."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from unbroken.cli.page.access import (
    COOKIE_SECONDS,
    LINK_SECONDS,
    Access,
    read_page_file,
    write_page_file,
)
from unbroken.errors import WorldError

NOW = 1_800_000_000.5


def test_a_link_opens_once() -> None:
    access = Access("key")
    token = access.link_token(NOW)
    assert access.use_link(token, NOW + 5, NOW - 100)
    assert not access.use_link(token, NOW + 6, NOW - 100)
    assert access.use_link(access.link_token(NOW), NOW + 6, NOW - 100), "another link still does"


def test_a_link_is_good_for_ten_minutes_and_not_over_a_restart() -> None:
    access = Access("key")
    token = access.link_token(NOW)
    assert not access.use_link(token, NOW + LINK_SECONDS + 1, NOW - 100)
    assert not access.use_link(token, NOW + 5, NOW + 4), "a new server does not know what was used"
    assert not access.use_link(access.link_token(NOW + 100), NOW, NOW - 100), "of the future"


@pytest.mark.parametrize(
    "token",
    ["", ".", "..", "a.b.c", "1800000000.aa.bb", "1800000000", "é.é.é", "\udcff.1.2", "9" * 5000],
)
def test_what_the_key_has_not_signed_opens_nothing(token: str) -> None:
    access = Access("key")
    assert not access.use_link(token, NOW, NOW - 100)
    assert not access.is_cookie(token, NOW)


def test_another_key_a_changed_time_and_the_other_use_are_refused() -> None:
    access, stranger = Access("key"), Access("another")
    assert not access.use_link(stranger.link_token(NOW), NOW, NOW - 100)
    assert not access.is_cookie(stranger.cookie(NOW), NOW)
    made, rest = access.cookie(NOW).split(".")
    assert not access.is_cookie(f"{int(made) + 1}.{rest}", NOW)
    assert not access.is_cookie(access.link_token(NOW), NOW), "a link is no cookie"
    assert not access.use_link(access.cookie(NOW), NOW, NOW - 100), "a cookie is no link"


def test_a_cookie_ends_after_thirty_days() -> None:
    access = Access("key")
    cookie = access.cookie(NOW)
    assert access.is_cookie(cookie, NOW + COOKIE_SECONDS - 1)
    assert not access.is_cookie(cookie, NOW + COOKIE_SECONDS)


def test_used_links_take_no_memory_for_ever() -> None:
    access = Access("key")
    for hour in range(5):
        now = NOW + hour * 3600
        assert access.use_link(access.link_token(now), now, NOW - 100)
    assert len(access._used) == 1


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "ui.json"
    assert read_page_file(path) is None
    assert not path.exists(), "only the server makes a key: it would not know another one"
    first = write_page_file(path, 4711)
    assert len(first.key) == 64
    assert first.port == 4711
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert write_page_file(path, 4711) == read_page_file(path) == first


def test_another_port_has_another_key(tmp_path: Path) -> None:
    """Check that a cookie is worth nothing that was sent to a program which took the old port."""
    path = tmp_path / "ui.json"
    cookie = Access(write_page_file(path, 4711).key).cookie(NOW)
    other = Access(write_page_file(path, 4712).key)
    assert not other.is_cookie(cookie, NOW)
    assert read_page_file(path) == write_page_file(path, 4712)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"port":4711}',
        '{"key":"","port":4711}',
        f'{{"key":"{"a" * 64}","port":70000}}',
        f'{{"key":"{"a" * 64}","port":-1}}',
    ],
)
def test_a_broken_file_says_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ui.json"
    path.write_text(text)
    expected = r"ui\.json is not as `unbroken up` writes it .*delete it"
    with pytest.raises(WorldError, match=expected):
        read_page_file(path)
    with pytest.raises(WorldError, match=expected):
        write_page_file(path, 4711)
    assert path.read_text() == text
