"""What the page shows: a picture of the engine, its cache and its requests; and what a viewer may do with a node.

Nothing here runs unless somebody looks. A picture takes the cache's lock for about half a millisecond at a time. The
tree is drawn anew after a hundred times as long as drawing took, and no sooner than half a second, so that thousands of
nodes cost the model 1 % of a core at most; for programs that ask for it as it is now, 10 %. Knows no HTTP.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from typing import Any

from onefold import __version__
from onefold.cache.memory.tier import REMOTE, TierStats
from onefold.cache.pins import Pin
from onefold.engine.engine import Engine, EngineStats
from onefold.errors import ConfigError
from onefold.page.changes import Picture
from onefold.page.history import Ended, History, Request
from onefold.page.icicle import boxes

TREE_SHARE = 0.01
"""Of one core, for drawing the tree."""
NOW_SHARE = 0.1
"""The same, for those who ask for the tree as it is now, again and again."""
SOONEST = 0.5
"""Seconds after which it is drawn again."""
RATE_SECONDS = (60.0, 300.0, 900.0)
EXCERPT_TOKENS = 200
"""At the beginning and at the end of a node's text."""
REMOTE_PREFIX = f"{REMOTE}: "
"""Of the reasons of a shared store."""
SHORTEST_INTERVAL = 0.2
"""Seconds between two counts, for a speed."""


class Page:
    """Thread safe."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        *,
        show_text: bool,
        may_change: bool,
        has_several_keys: bool = False,
        has_spaces_of_keys: bool = False,
    ) -> None:
        """`show_text`: prompts may be shown. With several keys one holder does not see what another one calls its
        conversations; with namespaces that are made of keys, nothing that is made of a key is shown."""
        self.id = uuid.uuid4().hex
        """Another one in each server: numbers of nodes begin anew."""
        self._has_several_keys = has_several_keys
        self._has_spaces_of_keys = has_spaces_of_keys
        self._space_numbers: dict[str, int] = {}
        self._engine = engine
        self._history = history
        self._show_text = show_text
        self.may_change = may_change
        """Viewers may pin and forget."""
        self._since = time.time()
        self._drawing = threading.Lock()
        self._tree: dict[str, Any] = {}
        self._spaces: list[str] = []
        self._drawn_at, self._draw_seconds = -1e9, 0.0
        self._counted: tuple[float, EngineStats] | None = None
        self._speeds: tuple[float | None, float | None] = (None, None)
        self._pins: dict[int, Pin] = {}
        self._changing = threading.Lock()

    # -- the picture -------------------------------------------------------------------------------

    def picture(self, *, now: bool = False) -> Picture:
        """Returns everything that the page shows. Blocks for some milliseconds. `now`: with the tree as it is now, or
        was ten times as long ago as drawing it takes."""
        with self._drawing:
            stats = self._engine.stats()
            soonest = self._draw_seconds / NOW_SHARE if now else max(SOONEST, self._draw_seconds / TREE_SHARE)
            if time.monotonic() - self._drawn_at >= soonest:
                self._draw()
            tree, spaces = self._tree, self._spaces
            self._measure(stats)
        tiers = self._engine.cache.view.tiers()
        is_remote = tiers.mode == REMOTE
        disk, remote = (TierStats(), tiers) if is_remote else (tiers, tiers.below or TierStats())
        return {
            "server": self._server(),
            "now": self._now(stats),
            "tree": tree,
            "spaces": {str(i): name for i, name in enumerate(spaces)},
            "requests": self._requests(),
            "disk": _tier(disk) | {"hits": self._history.from_disk},
            "remote": _tier(remote) | {"hits": self._history.from_remote, "reasons": _of_remote(stats)},
        }

    def _server(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "id": self.id,
            "model": engine.model_id,
            "version": __version__,
            "since": round(self._since),
            "kv": engine.cache.kv,
            "may_change": self.may_change,
            "show_text": self._show_text,
            "uncached": engine.cache.uncached_reason,
        }

    def _now(self, stats: EngineStats) -> dict[str, Any]:
        held = self._engine.cache.view.purposes()
        first, length = self._history.typical()
        each = max(1, held.token_bytes)
        free = max(0, held.budget_bytes - held.used_bytes + held.by_purpose.get("pool", 0))
        rates = zip(("hits_1", "hits_5", "hits_15"), self._history.rates(*RATE_SECONDS), strict=True)
        return {
            "time": round(time.time(), 1),
            "budget": held.budget_bytes,
            "used": held.used_bytes,
            "peak": held.peak_bytes,
            "weights": held.weight_bytes,
            "room": held.room_bytes,
            **{f"purpose_{name}": n for name, n in held.by_purpose.items()},
            "pinned": held.pinned_bytes,
            "token_bytes": held.token_bytes,
            "stored_tokens": held.stored_tokens,
            "free_tokens": free // each,
            "evictable_tokens": (free + held.evictable_bytes) // each,
            "conversation_tokens": length,
            "queued": stats.queued,
            "prefilling": stats.prefilling,
            "decoding": stats.decoding,
            "finished": stats.finished,
            "cancelled": stats.cancelled,
            "failed": stats.failed,
            "preemptions": stats.preemptions,
            "refused": self._history.refused,
            "first_token": first,
            **{name: None if share is None else round(share, 4) for name, share in rates},
            "tokens_per_second": self._speeds[0],
            "prefilled_per_second": self._speeds[1],
            "nodes": stats.cache.nodes,
            "checkpoints": stats.cache.checkpoints,
            "evicted_tokens": stats.cache.evicted_tokens,
        }

    def _measure(self, stats: EngineStats) -> None:
        """Measure speeds since the last picture."""
        now = time.monotonic()
        if self._counted is not None and (seconds := now - self._counted[0]) < SHORTEST_INTERVAL:
            return
        if self._counted is not None:
            before = self._counted[1]
            generated, prefilled = (
                round((after - was) / seconds, 1)
                for after, was in (
                    (stats.generated_tokens, before.generated_tokens),
                    (stats.prefilled_tokens, before.prefilled_tokens),
                )
            )
            self._speeds = (generated, prefilled)
        self._counted = now, stats

    def _draw(self) -> None:
        """Draw the tree."""
        began, cpu = time.monotonic(), time.thread_time()
        view = self._engine.cache.view
        outline = view.outline()
        self._tree = boxes(outline, self._engine.cache.inventory.token_bytes, view.sharing(outline))
        self._spaces = [self._space(name) for name in outline.spaces]
        self._drawn_at, self._draw_seconds = began, time.thread_time() - cpu

    def _space(self, name: str) -> str:
        """Returns what a namespace is called on the page."""
        if not name or not self._has_spaces_of_keys:
            return name
        return f"namespace {self._space_numbers.setdefault(name, len(self._space_numbers) + 1)}"

    def rest(self) -> None:
        """Forget what pictures are compared with: nobody looks any more. Does nothing while a picture is drawn for a
        program: it is called on the event loop, which must not wait."""
        if not self._drawing.acquire(blocking=False):
            return
        try:
            self._tree, self._spaces, self._drawn_at, self._counted = {}, [], -1e9, None
            self._speeds = (None, None)
        finally:
            self._drawing.release()

    def _requests(self) -> dict[str, Any]:
        live, ended = self._history.known()
        found = {r.id: self._row(r, None) for r in live}
        return found | {e.request.id: self._row(e.request, e) for e in ended}

    def _row(self, request: Request, ended: Ended | None) -> dict[str, Any]:
        hit = request.hit()
        row: dict[str, Any] = {
            "path": request.path,
            "began": round(request.began, 3),
            "conversation": "" if self._has_several_keys else request.conversation,
            "live": ended is None,
            "status": None if ended is None else request.status,
            "error": request.error,
            "finish": request.finishes,
            "generated": request.generated,
            "first_token": _rounded(request.time_to_first_token),
            "speed": _rounded(request.tokens_per_second, 1),
            "seconds": None if ended is None else round(ended.seconds, 3),
        }
        if hit is not None:
            row |= {
                "prompt": hit.prompt_tokens,
                "matched": hit.matched,
                "cached": hit.cached,
                "restored": hit.restored,
                "remote": hit.remote,
                "computed": hit.prompt_tokens - hit.cached,
                "reason": hit.reason,
                "diverged": request.excerpt if self._show_text else _place_alone(hit.diverged),
            }
        return row

    # -- one node ----------------------------------------------------------------------------------

    def node(self, number: int) -> dict[str, Any]:
        """Returns what is known of a node. Raises UnknownNode."""
        view = self._engine.cache.view
        path = view.path(number)
        live, ended = self._history.known()
        known = [*live, *(e.request for e in reversed(ended))]
        through = view.through(number, [r.place for r in known])
        made: dict[str, Any] = {
            "tokens": path.end - path.start,
            "path_tokens": path.end,
            "space": self._space(path.space),
            "shared_tokens": max(0, min(path.end, path.shared_tokens) - path.start),
            "pinned_here": self._pinned_here(number),
            "requests": [
                {"id": r.id, "did": _did(r, path.start, path.end)}
                for r, is_on in zip(known, through, strict=True)
                if is_on
            ],
        }
        if self._show_text:
            tokens = path.tokens[path.start :]
            decode = self._engine.tokenizer.decode
            cut = len(tokens) > 2 * EXCERPT_TOKENS
            made["text"] = decode(tokens[:EXCERPT_TOKENS].tolist() if cut else tokens.tolist())
            made["text_end"] = decode(tokens[-EXCERPT_TOKENS:].tolist()) if cut else ""
        return made

    def _pinned_here(self, number: int) -> bool:
        pin = self._pins.get(number)
        return pin is not None and pin.pins.holds(pin)

    def pin(self, number: int) -> dict[str, Any]:
        """Pin a node with what is above it. Raises UnknownNode and ConfigError."""
        with self._changing:
            if not self._pinned_here(number):
                self._pins[number] = self._engine.cache.view.pin(number, self._engine.cache)
            return {"pinned_here": True}

    def unpin(self, number: int) -> dict[str, Any]:
        """Release the page's own pin of a node. Raises ConfigError if there is none."""
        with self._changing:
            if not self._pinned_here(number):
                raise ConfigError("the page has no pin on this prefix: only what was pinned here can be unpinned here")
            self._pins.pop(number).release()
            return {"pinned_here": False}

    def forget(self, number: int) -> dict[str, Any]:
        """Drop a node and what is below it. Raises UnknownNode and ConfigError."""
        return {"forgotten_tokens": self._engine.forget(number)}


def _did(request: Request, start: int, end: int) -> str:
    """Returns what a request did with the tokens [start, end) of its path."""
    hit = request.hit()
    cached = 0 if hit is None else hit.cached
    return "computed" if cached <= start else "reused" if cached >= end else "reused and computed"


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _place_alone(diverged: str) -> str:
    """Returns where a prompt diverged, without what it said there."""
    return diverged.partition(": known ")[0]


def _of_remote(stats: EngineStats) -> dict[str, int]:
    """Returns why a shared store was not read or not written, with counts."""
    reasons = stats.cache.reasons.items()
    return {name.removeprefix(REMOTE_PREFIX): n for name, n in reasons if name.startswith(REMOTE_PREFIX)}


def _tier(stats: TierStats) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(stats).items() if name != "below"}
