"""Whether a request fetches something from a shared store, and whether another thread is fetching it already.

Functions are called with the cache's lock held.
"""

from __future__ import annotations

import threading

from onefold.cache.memory.payloads import Tree
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers.remote.asking import wanted_of
from onefold.cache.tiers.remote.fetching import RemoteFetch
from onefold.cache.tiers.remote.sharing import Sharing


def planned(
    state: CacheState, shared: Sharing, tree: Tree, root: bytes, tokens: Tokens, reserve_tokens: int
) -> RemoteFetch | None:
    """Returns a fetch of what the store may have of these tokens; None if nothing is worth asking for."""
    wanted, end = wanted_of(state, shared, tree, root, tokens, reserve_tokens)
    if wanted is None or not shared.health.usable:
        return None
    fetch = RemoteFetch(state, shared, tree, wanted, end)
    for node in [] if end is None else end.path():
        node.pins += 1  # else making room could evict what the records continue
    state.restores.add(fetch)
    return fetch


def is_read_elsewhere(state: CacheState, shared: Sharing, tree: Tree, root: bytes, tokens: Tokens) -> bool:
    """Whether another thread, which does nothing else meanwhile, fetches what these tokens need next."""
    if not any(isinstance(found, RemoteFetch) for found in state.restores):
        return False
    wanted, _ = wanted_of(state, shared, tree, root, tokens, 0)
    return wanted is not None and any(
        isinstance(found, RemoteFetch) and _is_driven_elsewhere(found) and found.begins_like(wanted)
        for found in state.restores
    )


def _is_driven_elsewhere(fetch: RemoteFetch) -> bool:
    """Whether another thread will run all of its steps."""
    driver = fetch.driver
    return not fetch.done and driver is not None and driver is not threading.current_thread() and driver.is_alive()
