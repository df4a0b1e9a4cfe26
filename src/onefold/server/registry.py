"""The HTTP APIs of the server. A new one is a folder and a line here."""

from __future__ import annotations

from collections.abc import Set

from onefold.server.anthropic.api import ANTHROPIC
from onefold.server.api import Api
from onefold.server.openai.api import OPENAI
from onefold.server.responses.api import RESPONSES

APIS: tuple[Api, ...] = (OPENAI, RESPONSES, ANTHROPIC)
"""The first one's errors are for clients that do not show which API they use."""


def spoken(path: str, header_names: Set[bytes]) -> Api:
    """Returns the API that a client uses: the one that the path belongs to, else the one whose header was sent, else
    the first."""
    by_path = (api for api in APIS if path.startswith(api.prefixes))
    by_header = (api for api in APIS if api.header in header_names)
    return next(by_path, None) or next(by_header, APIS[0])
