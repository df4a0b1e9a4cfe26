"""A checkpoint in a shared store: a manifest, and its bytes in parts of at most 4 MiB.

    manifest   JSON: position, description of the state, tensors, how many bytes each part has, a nonce
    parts      the bytes of all tensors, one after the other, cut where a value is full

- The parts are written first: a manifest that is there has all of them, unless the store has forgotten some.
- The nonce is random and part of the parts' addresses: two machines that write the same checkpoint at the same time
  write parts of their own, and one manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from onefold.cache.memory.arrays import Bytes
from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.runs import Run
from onefold.cache.memory.state import CacheState
from onefold.cache.tiers import host
from onefold.cache.tiers.points import PointBuilder
from onefold.cache.tiers.records.entry import NO_TOKENS
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.record import ITEM_BYTES, PARTED, VERSION, Content, Tensor, What
from onefold.cache.tiers.remote.grid import VALUE_BYTES
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.errors import RecordError

NONCE_BYTES = 16
PARTS_MOST = 1 << 14
MANIFEST_MOST = 1 << 20
TENSORS_MOST, DIMENSIONS_MOST, LENGTH_MOST = 1 << 14, 8, 1 << 40
"""Of a manifest: bytes, tensors, dimensions of a tensor and their lengths. Sizes are multiplied before the layout is
compared, and products of huge numbers would take minutes."""
_NONSENSE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Manifest(NamedTuple):
    content: Content
    parts: tuple[int, ...]
    """The bytes of each part."""
    nonce: bytes

    @property
    def n_bytes(self) -> int:
        return sum(self.parts)

    def text(self) -> bytes:
        content = self.content
        described = {
            "position": content.start,
            "state": content.state,
            "parted": content.version == PARTED,
            "tensors": [[t.name, t.dtype, t.shape] for t in content.tensors],
            "parts": self.parts,
            "nonce": self.nonce.hex(),
        }
        return json.dumps(described, separators=(",", ":"), allow_nan=False).encode()


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def manifest_of(checkpoint: Checkpoint, position: int, part_bytes: int, nonce: bytes) -> Manifest:
    """Returns the manifest of a checkpoint that is written in parts of so many bytes. Raises TypeError and ValueError
    if its state cannot be described."""
    tensors = tuple(host.tensor(name, array) for name, array in checkpoint.arrays().items())
    version = PARTED if checkpoint.parted(0) else VERSION
    content = Content(What.POINT, "", b"", position, NO_TOKENS, tensors, checkpoint.describe(), version)
    whole, rest = divmod(sum(t.nbytes for t in tensors), part_bytes)
    return Manifest(content, (part_bytes,) * whole + ((rest,) if rest else ()), nonce)


def read_manifest(payload: memoryview, position: int, layout: Layout) -> Manifest:
    """Returns the manifest of the checkpoint at this position. Raises RecordError if it is none, or the model's
    checkpoints are made of something else. Nothing was allocated for it then."""
    if len(payload) > MANIFEST_MOST:
        raise RecordError(RemoteReason.TOO_LARGE)
    try:
        found = json.loads(bytes(payload))
        if len(found["tensors"]) > TENSORS_MOST or any(len(shape) > DIMENSIONS_MOST for *_, shape in found["tensors"]):
            raise RecordError(RemoteReason.OTHER_LAYOUT)
        tensors = tuple(Tensor(str(n), str(d), tuple(int(x) for x in shape)) for n, d, shape in found["tensors"])
        if any(t.dtype not in ITEM_BYTES or not all(0 <= x <= LENGTH_MOST for x in t.shape) for t in tensors):
            raise RecordError(RemoteReason.OTHER_LAYOUT)
        version = PARTED if found["parted"] else VERSION
        content = Content(What.POINT, "", b"", int(found["position"]), NO_TOKENS, tensors, str(found["state"]), version)
        parts, nonce = tuple(int(n) for n in found["parts"]), bytes.fromhex(found["nonce"])
    except _NONSENSE as error:
        raise RecordError(RemoteReason.OTHER_FORMAT) from error
    whole = sum(t.nbytes for t in tensors)
    if content.start != position or len(parts) > PARTS_MOST or len(nonce) != NONCE_BYTES:
        raise RecordError(RemoteReason.OTHER_LAYOUT)
    if any(not 0 < n <= VALUE_BYTES for n in parts) or sum(parts) != whole:
        raise RecordError(RemoteReason.OTHER_LAYOUT)
    layout.require(content)
    return Manifest(content, parts, nonce)


def parts_of(payload: Iterable[Bytes], part_bytes: int, into: Bytes) -> Iterator[Bytes]:
    """Yields the bytes of a payload in parts of so many bytes, each in `into` until the next one is asked for."""
    filled = 0
    for piece in payload:
        at = 0
        flat = piece.reshape(-1)
        while at < flat.size:
            n = min(part_bytes - filled, flat.size - at)
            into[filled : filled + n] = flat[at : at + n]
            at, filled = at + n, filled + n
            if filled == part_bytes:
                yield into[:filled]
                filled = 0
    if filled:
        yield into[:filled]


class PointBuffer:
    """The memory that a checkpoint is read into, counted from the start, and the checkpoint that it becomes."""

    def __init__(self, state: CacheState, layout: Layout, manifest: Manifest, *, direct: bool) -> None:
        """Reserves and allocates. Where the processor cannot address the device's memory, the bytes lie on the host
        first. Raises BudgetError, MemoryError, RuntimeError. Called with the lock held."""
        self._state, self._layout, self._content = state, layout, manifest.content
        size = manifest.n_bytes
        what = "a checkpoint from a shared store"
        account, self._host = state.ledger.open_both(
            (Purpose.CHECKPOINT, size), (Purpose.DISK, 0 if direct else size), what
        )
        self._run = Run(account)
        self._direct, self._made = direct, False
        self._arrays: dict[str, mx.array] = {}
        self._bytes: list[Bytes] = []
        allocated = False
        try:
            for tensor in manifest.content.tensors:
                if direct:
                    self._arrays[tensor.name], data = host.array_in(tensor, _untouched, direct=True)
                else:
                    data = np.empty(tensor.nbytes, np.uint8)
                self._bytes.append(data.reshape(-1))
            allocated = True
        finally:
            if not allocated:
                self.close()

    def places(self, begin: int, n_bytes: int) -> list[Bytes]:
        """Returns where these bytes of the checkpoint belong."""
        found, at = [], 0
        for data in self._bytes:
            lo, hi = max(begin, at) - at, min(begin + n_bytes, at + data.size) - at
            if lo < hi:
                found.append(data[lo:hi])
            at += data.size
        return found

    def tensors(self) -> Iterator[tuple[Tensor, Bytes]]:
        """Yields the tensors of the checkpoint, each with its bytes, when all of them are there."""
        return zip(self._content.tensors, self._bytes, strict=True)

    def checkpoint(self) -> Checkpoint:
        """Returns the checkpoint, when all of its bytes are there. Raises RecordError and RuntimeError."""
        if not self._direct:
            for tensor, data in self.tensors():
                self._arrays[tensor.name] = _moved(tensor, data)
        builder = PointBuilder(self._state, self._layout, self._content.start)
        made = builder.add(self._content, self._arrays, self._run, last=True)
        assert made is not None
        self._made = True
        made.account.resize(made.bytes, force=True)
        if made.account is not self._run.account and not self._run.account.closed:
            self._run.account.resize(self._run.bytes, force=True)
        return made

    def close(self) -> None:
        """Free what no checkpoint has. After all threads that write there have ended."""
        self._arrays, self._bytes = {}, []
        if not self._host.closed:
            self._host.close()
        if not self._made:
            self._run.close()


def _untouched(place: Bytes) -> None:
    """Its bytes come later."""


def _moved(tensor: Tensor, data: Bytes) -> mx.array:
    def fill(place: Bytes) -> None:
        place[:] = data

    return host.array_in(tensor, fill, direct=False)[0]
