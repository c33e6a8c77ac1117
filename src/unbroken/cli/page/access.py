"""Access to the page of a local cluster: one-time links, and the cookie that a link is exchanged
for.

Both are signed with a key in the directory of the cluster, which only its user can read. So
`unbroken ui` makes links without asking the server, and a cookie outlives a restart of the cluster.
The loopback address is open to every user of the machine: an address alone shows nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

import msgspec

from unbroken.errors import WorldError
from unbroken.foreign_numbers import whole_number
from unbroken.local.apiserver.access import write_private

LINK_SECONDS = 600
"""Seconds in which a link can be opened."""
COOKIE_SECONDS = 30 * 86400
"""Seconds after which a browser needs a new link."""
KEY_BYTES, NONCE_BYTES = 32, 16


class Kept(msgspec.Struct, frozen=True):
    """The contents of DIR/ui.json."""

    key: str
    """Signs links and cookies; hexadecimal digits."""
    port: int = 0
    """Port of the last time, so that open pages find the cluster again after a restart."""


def kept(path: Path) -> Kept:
    """Read the file; it is made, with a new key, if there is none.  Raises WorldError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Kept)
    except FileNotFoundError:
        made = Kept(secrets.token_hex(KEY_BYTES))
        write_private(path, msgspec.json.encode(made))
        return made
    except msgspec.MsgspecError as error:
        text = f"{path} is not as `unbroken up` writes it ({error}): delete it, then run: unbroken"
        raise WorldError(f"{text} down; unbroken up") from error


def kept_for(path: Path, port: int) -> Kept:
    """Keep the port for the next start, and return what is kept.

    With another port the key is another one, too: somebody who has taken the old port may have been
    sent a cookie there.
    """
    before = kept(path)
    if before.port == port:
        return before
    key = secrets.token_hex(KEY_BYTES) if before.port else before.key
    made = Kept(key, port)
    write_private(path, msgspec.json.encode(made))
    return made


class Access:
    """Makes and checks links and cookies."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._used: dict[str, int] = {}
        """Nonces of links that were opened, with the time from which they are refused anyway."""

    def link_token(self, now: float) -> str:
        """Make a token that can be used once."""
        return self._signed("link", f"{int(now)}.{secrets.token_hex(NONCE_BYTES)}")

    def use_link(self, token: str, now: float, since: float) -> bool:
        """True if the token is valid, and was not used before.

        `since`: start of this server, which remembers no use of an older token.
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
        right = self._signature(use, text)
        return hmac.compare_digest(signature.encode(errors="replace"), right.encode())

    def _signature(self, use: str, text: str) -> str:
        said = f"{use}.{text}".encode(errors="replace")
        return hmac.new(self._key, said, hashlib.sha256).hexdigest()
