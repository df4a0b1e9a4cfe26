"""What the fetches and the writer of a remote tier share: the store, names and seals, threads, counts."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from onefold.cache.memory.arrays import addressable
from onefold.cache.memory.shapes import LayerSpec
from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers import host
from onefold.cache.tiers.pace import Pace
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.record import TYPE_CODES, Tensor
from onefold.cache.tiers.remote.grid import addresses, name_of
from onefold.cache.tiers.remote.health import Health
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores.store import Store
from onefold.cache.tiers.remote.values import Sealing, require_finite
from onefold.errors import RecordError

SEEN_MOST = 1 << 17
"""Addresses that are remembered: some 20 MB, and 8 million tokens of 64 a record."""
KNOWN_SECONDS = 600.0
"""How long they are believed to be there without another look, before something that continues them is written; half
the time to live if that is less."""
MISSED_SECONDS = 2.0
"""How long they are believed not to be there: a request that waits is looked at more than once."""


class Seen:
    """Addresses that were seen a while ago at most, in the store or not there: a store changes. Threads share it."""

    def __init__(self, seconds: float, most: int = SEEN_MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._most, self._clock = seconds, most, clock
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, address: bytes) -> None:
        with self._lock:
            self._seen[address] = self._clock()
            self._seen.move_to_end(address)
            while len(self._seen) > self._most:
                self._seen.popitem(last=False)

    def forget(self, addresses: Iterable[bytes]) -> None:
        with self._lock:
            for address in addresses:
                self._seen.pop(address, None)

    def __contains__(self, address: bytes) -> bool:
        with self._lock:
            seen = self._seen.get(address)
        return seen is not None and self._clock() - seen < self._seconds


KV, POINT, PART, ABOUT = "kv", "point", "part", "about"
"""The kinds of values: the KV of a record's tokens; what a checkpoint is made of; a part of its bytes; what a namespace
is, for people."""


@dataclass
class Sharing:
    store: Store
    sealing: Sealing
    health: Health
    """Whether the store is read from."""
    writing: Health
    """Whether it is written to: a full one can still be read."""
    threads: concurrent.futures.ThreadPoolExecutor
    """They wait for the store."""
    n_tokens: int
    """Of a record."""
    specs: Sequence[LayerSpec]
    points: Layout
    """What checkpoints are made of."""
    has_points: bool
    """Requests are resumed at checkpoints: KV alone is of no use."""
    part_bytes: int
    """The most of a part of a checkpoint."""
    deadline: float
    """Seconds that a call of the store may take."""
    layout: str = field(init=False)
    """What a record of KV is made of."""
    direct: bool = field(init=False)
    """The processor can address the device's memory."""
    known: Seen = field(default_factory=lambda: Seen(KNOWN_SECONDS))
    missed: Seen = field(default_factory=lambda: Seen(MISSED_SECONDS, 1024))
    read_pace: Pace = field(default_factory=Pace)
    """Seconds a byte takes to fetch."""
    prefill_pace: Pace = field(default_factory=Pace)
    """Seconds a token takes to compute."""
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._tensors = host.range_tensors(self.specs, self.n_tokens)
        described = json.dumps([[t.name, t.dtype, t.shape] for t in self._tensors]).encode()
        self.layout = hashlib.sha256(described).hexdigest()[:32]
        self.direct = addressable()
        scaled = [a for spec in self.specs for a in spec.arrays if a.scales is not None]
        self._scales: dict[tuple[object, ...], str] = {
            ("U32", a.heads, a.dim): TYPE_CODES[str(a.scales).rpartition(".")[2]] for a in scaled
        }

    @property
    def record_bytes(self) -> int:
        """The KV of a record; 0 for a model that has none by token."""
        return self.n_tokens * sum(spec.token_bytes for spec in self.specs)

    def addresses(self, root: bytes, tokens: Tokens) -> Iterator[bytes]:
        return addresses(root, tokens, self.n_tokens)

    def head(self, kind: str) -> dict[str, Any]:
        """What the head of a value says, and must say."""
        return {"kind": kind} | ({"tokens": self.n_tokens, "layout": self.layout} if kind == KV else {})

    def opened(self, kind: str, address: bytes, value: bytes, n_bytes: int | None = None) -> memoryview:
        """Returns the payload of a value, of so many bytes. Raises RecordError if it is not that value."""
        _, payload = self.sealing.open(address, value, self.head(kind))
        if n_bytes is not None and len(payload) != n_bytes:
            raise RecordError(RemoteReason.OTHER_LAYOUT)
        return payload

    def require_finite(self, found: Iterable[tuple[Tensor, Any]]) -> None:
        """Raises RecordError if one of these tensors, given with their bytes, has a number that is not finite. With a
        secret they are not looked at: who has it is believed."""
        for tensor, data in () if self.sealing.has_secret else found:
            scales = self._scales.get((tensor.dtype, *tensor.shape[-3::2]))  # by its heads and words
            require_finite(scales or tensor.dtype, data, tensor.shape[-1] if scales else 0)

    def tensors_of(self, payload: memoryview) -> Iterator[tuple[Tensor, memoryview]]:
        """Yields the tensors of a record of KV, each with its bytes."""
        at = 0
        for tensor in self._tensors:
            yield tensor, payload[at : (at := at + tensor.nbytes)]

    def sealed(self, kind: str, address: bytes, payload: Sequence[Any], made_by: str) -> bytes:
        """Returns the value of a payload, given as buffers. `made_by` names the device that computed it."""
        return self.sealing.seal(address, {**self.head(kind), "device": made_by}, payload)

    def fetched(self, kind: str, tag: str, address: bytes, n_bytes: int | None = None) -> memoryview:
        """Reads a value from the store, and returns its payload. Raises RecordError, also if it is not there any more,
        and StoreError."""
        value = self.store.get(name_of(tag, address))
        if value is None:
            raise RecordError(RemoteReason.GONE)
        return self.opened(kind, address, value, n_bytes)
