"""Pins: prefixes that are not evicted."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.cache.memory.payloads import Node
from onefold.cache.memory.state import CacheState
from onefold.sizes import show_count


@dataclass(frozen=True, repr=False)
class Pin:
    """A prefix that stays in memory until `release`."""

    pins: Pins
    node: Node
    owner: object
    """Kept alive by the pin: the cache."""

    def __repr__(self) -> str:
        state = "" if self.pins.holds(self) else ", released"
        return f"<Pin of {show_count(self.node.end, 'token')}{state}>"

    def release(self) -> None:
        """Allow the prefix to be evicted again."""
        self.pins.release(self)


class Pins:
    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._held: set[int] = set()

    def pin(self, node: Node, owner: object) -> Pin:
        """Pin the path that ends at `node`. Called with the lock held."""
        for n in node.path():
            n.pins += 1
        pin = Pin(self, node, owner)
        self._held.add(id(pin))
        return pin

    @property
    def count(self) -> int:
        """How many pins there are."""
        return len(self._held)

    def holds(self, pin: Pin) -> bool:
        """Whether the pin is neither released nor cleared."""
        return id(pin) in self._held

    def release(self, pin: Pin) -> None:
        with self._state.lock:
            if id(pin) in self._held:
                self._held.discard(id(pin))
                for n in pin.node.path():
                    n.pins = max(0, n.pins - 1)

    def clear(self) -> None:
        """Release all pins. Called with the lock held."""
        for node in list(self._state.nodes.leaves.busy):
            node.pins = 0
        self._held.clear()
