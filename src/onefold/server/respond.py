"""The response to a request that failed, in the shape of the client's API. Middleware and the app's handlers use it, so
an error has that shape also where no route is known yet."""

from __future__ import annotations

import json

from starlette.responses import Response
from starlette.types import Scope

from onefold.server import registry
from onefold.server.api import Api
from onefold.server.errors import BROKEN, Problem


def respond(scope: Scope, problem: Problem) -> Response:
    """Returns the response to a request of this ASGI scope."""
    headers = {}
    if problem.retry_after is not None:
        headers["retry-after"] = str(problem.retry_after)
    if problem.allow:
        headers["allow"] = problem.allow
    if problem is BROKEN:
        headers["connection"] = "close"  # uvicorn closes it after an exception: a client must not try to use it again
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    shape = api_of(scope).error_shape(problem)
    return Response(json.dumps(shape), problem.status, headers, "application/json")


def api_of(scope: Scope) -> Api:
    """Returns the API that the client of this request uses."""
    return registry.spoken(scope["path"], {name for name, _ in scope["headers"]})
