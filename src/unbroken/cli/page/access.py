"""Access to the page of a local cluster: one-time links, each exchanged for a cookie.

Both are signed with a key in the directory of the cluster, which only its user can read. So
`unbroken ui` makes links without asking the server, and a cookie outlives a restart of the cluster.
The loopback address is open to every user of the machine: an address alone shows nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Annotated

import msgspec

from unbroken.errors import WorldError
from unbroken.foreign_numbers import PORT_MAX, whole_number
from unbroken.local.apiserver.access import write_private

LINK_SECONDS = 600
"""Seconds for which a link can be opened."""
COOKIE_SECONDS = 30 * 86400
"""Seconds after which a browser needs a new link."""
KEY_BYTES, NONCE_BYTES = 32, 16


class PageFile(msgspec.Struct, frozen=True):
    """Contents of DIR/ui.json: the key of the page, and its port."""

    key: Annotated[str, msgspec.Meta(min_length=KEY_BYTES * 2)]
    """Signs links and cookies; hexadecimal digits."""
    port: Annotated[int, msgspec.Meta(ge=1, le=PORT_MAX)]
    """Port of the last time, so that open pages find the cluster again after a restart."""


def read_page_file(path: Path) -> PageFile | None:
    """Read the file; None if it is missing.  Raises WorldError if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PageFile)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise WorldError(
            f"{path} is not as `unbroken up` writes it ({error}): delete it, then restart the "
            "cluster (unbroken down; unbroken up)"
        ) from error


def write_page_file(path: Path, port: int) -> PageFile:
    """Write the port of this start, and return the contents of the file.

    The key is new if the port has changed: another program that took the old port may have received
    a cookie there.
    """
    before = read_page_file(path)
    if before is not None and before.port == port:
        return before
    made = PageFile(secrets.token_hex(KEY_BYTES), port)
    write_private(path, msgspec.json.encode(made))
    return made


class Access:
    """Makes and checks links and cookies."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._used: dict[str, int] = {}
        """Nonces of opened links, each with the time at which its link expires."""

    def link_token(self, now: float) -> str:
        """Make a token that can be used once."""
        return self._signed("link", f"{int(now)}.{secrets.token_hex(NONCE_BYTES)}")

    def use_link(self, token: str, now: float, since: float) -> bool:
        """Use up a token; return True if it was valid and unused.

        `since`: start of this server. It refuses older tokens, because it does not know their uses.
        """
        made, _, rest = token.partition(".")
        issued = whole_number(made)
        nonce = rest.partition(".")[0]
        if issued is None or not self._is_signed("link", token):
            return False
        self._used = {one: until for one, until in self._used.items() if until > now}
        if nonce in self._used or not max(now - LINK_SECONDS, int(since)) <= issued <= now + 1:
            return False
        self._used[nonce] = issued + LINK_SECONDS + 1
        return True

    def cookie(self, now: float) -> str:
        """Make the value of a cookie."""
        return self._signed("cookie", str(int(now) + COOKIE_SECONDS))

    def is_cookie(self, value: str, now: float) -> bool:
        """True if the value is that of a cookie that is still valid."""
        until = whole_number(value.partition(".")[0])
        return until is not None and until > now and self._is_signed("cookie", value)

    def _signed(self, use: str, text: str) -> str:
        return f"{text}.{self._signature(use, text)}"

    def _is_signed(self, use: str, value: str) -> bool:
        text, _, signature = value.rpartition(".")
        expected = self._signature(use, text)
        return hmac.compare_digest(signature.encode(errors="replace"), expected.encode())

    def _signature(self, use: str, text: str) -> str:
        message = f"{use}.{text}".encode(errors="replace")
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()
