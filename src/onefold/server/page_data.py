"""Keeps the page's data for the page that this server serves, and for programs.

It is left out of CORS, whatever origins may use the APIs: nobody but the server's own page may read it in a browser, or
pin and forget. A browser says where a request comes from, also one without an `Origin` (`Sec-Fetch-Site`).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onefold.server.errors import Problem
from onefold.server.limits import header, is_page_data
from onefold.server.respond import respond

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
OWN_SITES = frozenset({"", "same-origin", "none"})
"""What `Sec-Fetch-Site` says for the server's own page, for an address that a person has typed, and for a program."""
REFUSED = Problem(403, "Only the page of this server may ask for this in a browser.", "origin_not_allowed")


class PageData:
    def __init__(self, own: ASGIApp, others: ASGIApp) -> None:
        """`own` gets the requests for the page's data, `others` the rest."""
        self._own = own
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_page_data(scope["path"]):
            await self._others(scope, receive, send)
            return

        async def kept(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in HEADERS}
                rest = [(name, value) for name, value in message["headers"] if name.lower() not in names]
                message = {**message, "headers": [*rest, *HEADERS]}
            await send(message)

        if header(scope, b"sec-fetch-site").lower() in OWN_SITES:
            await self._own(scope, receive, kept)
        else:
            await respond(scope, REFUSED)(scope, receive, kept)
