"""Who may ask the dashboard: who has its token, from a page of its own, by a name that belongs to this host. Pure.

The token stands in the address that `raydist dashboard` prints; the browser exchanges it for a cookie. Three checks, each of which
stops another attack:

    the cookie               other users of the host, and of the network
    Host                     a foreign name that was made to resolve to this address (DNS rebinding)
    Origin, Sec-Fetch-Site   other pages in the same browser, which send the cookie along

What changes a run (POST) needs an Origin besides, and a server that allows it.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

PARAMETER = "token"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer. Scripts and styles come from the server's own files only; shares of a bar are style attributes."""


@dataclass(frozen=True)
class AccessPolicy:
    """Decides on requests. `host`: the address at which the server listens, as given; `acts`: whether POST is allowed."""

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    acts: bool = False

    @property
    def cookie(self) -> str:
        """The cookie's name: browsers do not tell ports apart, so it contains this one's."""
        return f"raydist-{self.port}"

    def refused(self, method: str, headers: Mapping[str, str]) -> str | None:
        """Why a request is refused whatever its token is; None if it is not."""
        if method not in ("GET", "HEAD") and not (method == "POST" and self.acts):
            return "this server only shows: use GET"
        if headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in headers:
            return "requests to this server have no body"  # what looks like one may be another request
        if not self._ours(headers.get("Host", "")):
            return "the name in the address is not one of this host"
        origin = headers.get("Origin")
        ours = {f"{scheme}://{headers['Host']}" for scheme in ("http", "https")}  # https: a proxy with TLS
        if (origin is not None or method == "POST") and origin not in ours:
            return "the request comes from another site"
        foreign = headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none")
        if foreign and not (
            method != "POST"
            and headers.get("Sec-Fetch-Mode") == "navigate"
            and headers.get("Sec-Fetch-Dest") == "document"
        ):
            return "the request comes from another site"
        return None

    def knows(self, token: str | None) -> bool:
        """Whether this is the token, in a time that does not depend on it."""
        return token is not None and hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    def admits(self, cookies: str) -> bool:
        """Whether the token is among the cookies of that header. Not by http.cookies: some versions take minutes for a long one."""
        pairs = (one.strip().partition("=") for one in cookies.split(";"))
        return any(self.knows(value) for name, _, value in pairs if name == self.cookie)

    def set_cookie(self) -> str:
        """The value of Set-Cookie: for this browser session, out of reach of scripts and of requests from other sites."""
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"

    @property
    def address(self) -> str:
        """Of the server, without the token."""
        shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)
        name = f"[{shown}]" if ":" in shown else shown
        return f"http://{name}:{self.port}"

    def url(self, path: str = "/") -> str:
        """The address for the browser of that page, with the token."""
        return f"{self.address}{path}?{PARAMETER}={self.token}"

    def _ours(self, host: str) -> bool:
        """A number cannot be made to resolve to something else. The port may be that of an SSH tunnel."""
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        name = found[1] or found[2]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in {"localhost", self.host.lower()} or name in names()
        return True


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")


@functools.cache
def names() -> frozenset[str]:
    """This host's; the second one asks the name server, which may take long, and is kept."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})
