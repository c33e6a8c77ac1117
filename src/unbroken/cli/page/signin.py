"""The entrance of a page that many people share: each signs in with a Kubernetes token.

The form is answered at the address that the person wanted to see, so there is no address in it that
another site could choose.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from urllib.parse import parse_qs

from aiohttp import web

from unbroken.errors import SpecError, UnbrokenError
from unbroken.log_lines import Log

from .accounts import SESSION_SECONDS, Accounts
from .entrance import HOSTS, Source, forged, host_name
from .server import built_files

log = Log(__name__)

FORM_BYTES_MAX = 24 * 1024
"""Bytes of the form: a token, and names of namespaces."""
FIELDS_MAX = 4
SIGN_OUT = "/signout"
PLACES = re.compile(r"/(?:jobs|nodes)(?:/[A-Za-z0-9.-]+)*")
"""Addresses to which an answer leads; others lead to the jobs."""
COOKIE = "unbroken-page"
SECURE_COOKIE = "__Host-unbroken-page"
"""Name that browsers accept only from this very host, by TLS."""
POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
FORM = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Sign in · unbroken</title>
{styles}
</head>
<body>
<main id="main" class="signin">
<h1>Sign in to unbroken</h1>
{problem}
<form method="post" autocomplete="off">
<p><label for="token">Token of your Kubernetes account</label>
<input id="token" name="token" type="password" required autocomplete="off" spellcheck="false"
 aria-describedby="how"></p>
<p><label for="namespaces">Namespaces, if you may not list jobs in all (optional)</label>
<input id="namespaces" name="namespaces" type="text" value="{namespaces}" autocomplete="off"
 autocapitalize="none" spellcheck="false" placeholder="team-a team-b"></p>
<p><button class="main" type="submit">Sign in</button></p>
</form>
<h2>How to get a token</h2>
<div id="how">
<p>Use a token of your own account, such as the one that <code>kubectl</code> sends. For a
ServiceAccount: <code>kubectl create token NAME -n NAMESPACE</code>.</p>
<p>The page shows what <code>kubectl get</code> would show you. It keeps the token in memory until
you sign out, for {hours} hours at most.</p>
</div>
</main>
</body>
</html>
"""


class SignIn:
    """People who sign in with tokens."""

    unknown = "you are not signed in: reload this page"

    def __init__(self, accounts: Accounts, names: Sequence[str]) -> None:
        """`names`: host names of the page besides those of this machine, reached by TLS alone."""
        self._accounts = accounts
        self._names = frozenset(one.lower() for one in names)
        page = built_files()["index.html"].decode()
        self._styles = "".join(re.findall(r'<link rel="stylesheet"[^>]*>', page))

    def is_own_host(self, host: str) -> bool:
        """True for the names that were given, and for those of this machine."""
        return host_name(host) in (*HOSTS, *self._names)

    def locked(self, request: web.Request) -> web.Response:
        """Show the form."""
        return self._form(401)

    def person(self, request: web.Request) -> str:
        """Name the account of a session."""
        found = self._accounts.person(request.cookies.get(self._cookie(request), ""))
        return "" if found is None else found.name

    async def source(self, request: web.Request) -> Source | None:
        """The reads and actions of the person of a session; None: there is no such session."""
        found = self._accounts.person(request.cookies.get(self._cookie(request), ""))
        return None if found is None else found.source

    def refusal_to_act(self, request: web.Request) -> str:
        """Why an order is refused at an address of this machine.

        A browser sends the cookie of such an address to all ports of its machine, where another
        user may listen.
        """
        if self._is_secure(request):
            return ""
        return "at this address the page is for reading: for actions, open it at its own host name"

    async def enter(self, request: web.Request) -> web.StreamResponse | None:
        """Sign a person in or out."""
        if request.method != "POST" or request.path.startswith("/api/"):
            return None
        if problem := forged(request):
            return self._form(403, problem)
        if request.path == SIGN_OUT:
            return self._sign_out(request)
        if request.content_type != "application/x-www-form-urlencoded":
            return self._form(415, "this is not the form of this page")
        body = await _body(request)
        if body is None:
            return self._form(413, f"the form has more than {FORM_BYTES_MAX} bytes")
        return await self._sign_in(request, body)

    async def _sign_in(self, request: web.Request, body: str) -> web.Response:
        try:
            form = parse_qs(body, max_num_fields=FIELDS_MAX)
        except ValueError:
            return self._form(400, "this is not the form of this page")
        token = form.get("token", [""])[0].strip()
        named = form.get("namespaces", [""])[0]
        try:
            cookie = await self._accounts.sign_in(token, named.replace(",", " ").split())
        except SpecError as error:
            return self._form(403, str(error), named)
        except UnbrokenError as error:
            log.warning("sign-in failed", error=error)
            return self._form(503, "the Kubernetes API did not answer as expected: try again")
        path = request.path if PLACES.fullmatch(request.path) else "/"
        answer = web.Response(status=303, headers={"Location": path})
        answer.set_cookie(
            self._cookie(request),
            cookie,
            max_age=int(SESSION_SECONDS),
            path="/",
            httponly=True,
            secure=self._is_secure(request),
            samesite="Lax",  # a link in a chat must find the cookie; an order checks its origin
        )
        return answer

    def _sign_out(self, request: web.Request) -> web.Response:
        self._accounts.sign_out(request.cookies.get(self._cookie(request), ""))
        answer = web.Response(status=204)
        answer.del_cookie(
            self._cookie(request), path="/", secure=self._is_secure(request), httponly=True
        )
        return answer

    def _is_secure(self, request: web.Request) -> bool:
        return host_name(request.headers.get("Host", "")) in self._names

    def _cookie(self, request: web.Request) -> str:
        """Name of the cookie: one of TLS is never taken from a host without."""
        return SECURE_COOKIE if self._is_secure(request) else COOKIE

    def _form(self, status: int, problem: str = "", namespaces: str = "") -> web.Response:
        shown = f'<p class="notice bad" role="alert">{html.escape(problem)}</p>' if problem else ""
        text = FORM.format(
            styles=self._styles,
            problem=shown,
            namespaces=html.escape(namespaces),
            hours=int(SESSION_SECONDS // 3600),
        )
        # Without a referrer policy that names the own origin, browsers send no origin with a form.
        headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "same-origin"}
        return web.Response(status=status, text=text, content_type="text/html", headers=headers)


async def _body(request: web.Request) -> str | None:
    """The body of a form; None: it is too long."""
    found = b""
    async for chunk in request.content.iter_chunked(FORM_BYTES_MAX):
        found += chunk
        if len(found) > FORM_BYTES_MAX:
            return None
    return found.decode(errors="replace")
