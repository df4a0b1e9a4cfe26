"""How uvicorn is told to run the app. Everything about listening that is not the app's is here."""

from __future__ import annotations

import math

import uvicorn
from starlette.types import ASGIApp

from onefold.server.hang_up import Protocol
from onefold.server.settings import Settings

LONGEST_HEADERS = 64 << 10
"""Bytes."""


def uvicorn_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """Logging is the caller's: uvicorn's own loggers are left as they are, and requests have a line of ours."""
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=LONGEST_HEADERS,
        timeout_graceful_shutdown=math.ceil(settings.grace_seconds),
    )
