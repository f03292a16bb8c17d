"""Guard: who may ask the server, and how; and what a browser may do with its answers.

Knows no run.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motley.dashboard.answers import Refused

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
# A report has styles of its own, and pictures inside it; no script of it ever runs.
REPORT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
TOKEN = "token"


class Json(Response):
    """A struct, or structs, as JSON that nobody keeps."""

    media_type = "application/json"

    def __init__(self, answer: object, status_code: int = 200) -> None:
        super().__init__(msgspec.json.encode(answer), status_code)
        self.headers["Cache-Control"] = "no-store"


def refused(status_code: int, words: str) -> Json:
    return Json(Refused(error=words), status_code)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask. `hosts`: names the page is asked by; none: any, which takes a token."""

    hosts: tuple[str, ...] = LOOPBACK
    token: str = ""  # none: whoever reaches the server may

    def __post_init__(self) -> None:
        assert self.hosts or self.token, "a page that goes by any name needs a token"

    @property
    def cookie(self) -> str:
        """Its name: another page on this machine has another."""
        return f"motley-{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"

    def knows(self, host: str) -> bool:
        """Whether a Host header names us: a stranger's name that leads here does not."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return not self.hosts or name.lower() in self.hosts

    def admits(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())


class Guard:
    """Around the app: refuses who may not ask, and puts headers on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing here speaks anything else
        headers = Headers(scope=scope)
        in_query = parse_qs(scope["query_string"].decode("latin-1")).get(TOKEN, [""])[-1]

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._mark(MutableHeaders(scope=message), in_query)
            await send(message)

        answer = self._refusal(scope["method"], headers, in_query) or self._app
        await answer(scope, receive, guarded)

    def _refusal(self, method: str, headers: Headers, in_query: str) -> Response | None:
        access, host = self._access, headers.get("host", "")
        if not access.knows(host):
            names = ", ".join(access.hosts)
            return refused(403, f"this page is not called {host[:80]!r}; open it as one of {names}")
        if access.token and not any(map(access.admits, self._tokens(headers, in_query))):
            words = "this page needs its token; open the address that motley watch printed"
            return refused(403, words)
        if method not in ("GET", "HEAD"):
            answer = refused(405, f"{method[:20]} is not known here: a page can only read; use GET")
            answer.headers["Allow"] = "GET, HEAD"
            return answer
        return None

    def _tokens(self, headers: Headers, in_query: str) -> list[str]:
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            cookies.clear()
        kept = cookies.get(self._access.cookie)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        return [in_query, bearer, kept.value if kept else ""]

    def _mark(self, headers: MutableHeaders, in_query: str) -> None:
        for name, value in HEADERS.items():
            headers[name] = value
        headers.setdefault("Content-Security-Policy", PAGE_POLICY)
        access = self._access
        if access.token and in_query and access.admits(in_query):
            kept = f"{access.cookie}={access.token}; Path=/; HttpOnly; SameSite=Strict"
            headers.append("Set-Cookie", kept)
