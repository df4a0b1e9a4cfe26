"""The HTTP APIs of the server, and what is said to clients of other APIs. A new one is a folder and a line here."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from onefold.server.anthropic.api import ANTHROPIC
from onefold.server.api import Api
from onefold.server.errors import Problem
from onefold.server.openai.api import OPENAI
from onefold.server.responses.api import RESPONSES

APIS: tuple[Api, ...] = (OPENAI, RESPONSES, ANTHROPIC)
"""The first one's errors are for clients that do not show which API they use."""

KEEPS = "This server keeps no conversations or answers: send the whole conversation to POST"
RUNS = "This server stores no files and runs no jobs: send each request, with all of its text, to POST"
SPEAKS = "This server does not speak {}'s API: set the client to OpenAI's API, with a base URL that ends in /v1."
WRITES = "This server has no {}, it only writes text (POST /v1/chat/completions): use another server for {}."
INSTEAD = {
    "/api/": SPEAKS.format("Ollama"),
    "/v1beta/": SPEAKS.format("Google"),
    "/v1/messages/": f"{RUNS} /v1/messages.",
    "/v1/chat/completions/": f"{KEEPS} /v1/chat/completions.",
    **{f"/v1/{name}/": f"{KEEPS} /v1/responses." for name in ("responses", "conversations", "assistants", "threads")},
    **{f"/v1/{name}/": f"{RUNS} /v1/chat/completions." for name in ("files", "uploads", "batches", "fine_tuning")},
    **{f"/v1/{n}/": WRITES.format(n, n) for n in ("embeddings", "rerank", "moderations", "audio", "images", "videos")},
}
"""What there is in place of paths that clients expect, by their beginnings."""


def _ollamas(problem: Problem) -> dict[str, Any]:
    return {"error": problem.sentence}


def _googles(problem: Problem) -> dict[str, Any]:
    status = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}.get(problem.status, "UNKNOWN")
    return {"error": {"code": problem.status, "message": problem.sentence, "status": status}}


FOREIGN = (
    Api(name="ollama", endpoints=(), error_shape=_ollamas, error_schema={}, prefixes=("/api/",)),
    Api(name="google", endpoints=(), error_shape=_googles, error_schema={}, prefixes=("/v1beta/",)),
)
"""APIs that the server has only errors of."""


def spoken(path: str, header_names: Set[bytes]) -> Api:
    """Returns the API that a client uses: the one that the path belongs to, else the one whose header was sent, else
    the first."""
    by_path = (api for api in APIS + FOREIGN if f"{path}/".startswith(api.prefixes))
    by_header = (api for api in APIS if api.header in header_names)
    return next(by_path, None) or next(by_header, APIS[0])


def instead(path: str) -> str:
    """Returns what is said of a path that does not exist, with or without its `/v1`: if it is known, what there is in
    its place."""
    asked = (f"{path}/", f"/v1{path}/")
    known = (said for begin, said in INSTEAD.items() if any(a.startswith(begin) for a in asked))
    return next(known, f"There is nothing at {path[:200]!r}.")
