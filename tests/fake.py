"""A fake model whose layers hold real tokens, so that wrong reuse shows as wrong tokens.

- A token's keys and values spell out its id, its position and its layer, in small whole numbers: exact in
  fp32. They depend on nothing else, so how a prompt was cut into calls never shows, and quantised ones have
  the same codes in every run.
- A recurrent state is an order-sensitive digest of all tokens so far, their count, and the last few of them.
- Logits mix what every layer can see: a stock run is the oracle for a run on reused state. `held` reads a
  live layer.
- `fault` makes a forward raise at a chosen layer.

Attention is looked up as a global of this module, as in mlx-lm's own models: there the seam is put in.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from onefold import Lease, PrefixCache
from onefold.cache.memory.shapes import ArraySpec
from onefold.cache.model.formats.registry import KvFormat

VOCAB = 64
WINDOW = 16
KEEP = 4
CHUNK = 16
TAIL = 3
KINDS = ("full", "rotating", "rotating_keep", "chunked", "recurrent", "composite", "composite_kv", "outside")
"""`outside` does arithmetic on its keys before attention, as the models that the seam cannot serve."""

_BASE, _MOD, _LONGEST = 31, 32749, 4096
_POWERS = np.ones(_LONGEST, np.int32)
for _i in range(1, _LONGEST):
    _POWERS[_i] = int(_POWERS[_i - 1]) * _BASE % _MOD


class Fault(RuntimeError):
    """What a model raises in the middle of a forward."""


class FaultAt(NamedTuple):
    layer: int
    where: str = "after"
    """"before" the layer's update, "inside" it (between the members of a composite layer), or "after" it."""


class FakeAttention(nn.Module):
    def __init__(self, index: int, dim: int, *, outside: bool = False) -> None:
        super().__init__()
        self.index = index
        self.dim = dim
        self.n_heads = 4
        self.n_kv_heads = 2
        self.outside = outside

    def __call__(self, tokens: mx.array, mask: Any, cache: Any) -> mx.array:
        rows, length = tokens.shape
        offset = cache.offset
        start = offset[:, None] if isinstance(offset, mx.array) else offset
        positions = mx.broadcast_to(start + mx.arange(length)[None], tokens.shape)
        own = [self._spell(tokens, positions, self.n_kv_heads, salt) for salt in (0, 1)]
        keys, values = cache.update_and_fetch(*own)
        if self.outside:
            keys = keys + 0.0
        queries = self._spell(tokens, positions, self.n_heads, 2) / VOCAB
        out = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=1 / (32 * self.dim), mask=mask)
        return out.transpose(0, 2, 1, 3).reshape(rows, length, -1)

    def _spell(self, tokens: mx.array, positions: mx.array, heads: int, salt: int) -> mx.array:
        """[rows, heads, tokens, dim]: id, position in two digits, layer, then digests of all of them."""
        known = [tokens, positions % 32, positions // 32, mx.full(tokens.shape, self.index, mx.int32)]
        d = mx.arange(len(known), self.dim)
        mixed = tokens[..., None] * (7 + d) + positions[..., None] * (3 + 2 * d)
        plain = mx.concatenate([mx.stack(known, axis=-1), (mixed + 11 * self.index + salt) % 61], axis=-1)
        turned = mx.arange(heads)[:, None, None] * mx.arange(self.dim)
        return ((plain[:, None] + turned) % VOCAB).astype(mx.float32)


class FakeRecurrence(nn.Module):
    def __init__(self, *, advances: bool) -> None:
        super().__init__()
        self.advances = advances

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        rows, length = tokens.shape
        state, tail = cache[0], cache[1]
        if state is None:
            state, tail = mx.zeros((rows, 2), mx.int32), mx.full((rows, TAIL), -1, mx.int32)
        powers = mx.array(_POWERS[: length + 1])
        apart = np.subtract.outer(np.arange(length), np.arange(length))
        kernel = mx.array(np.where(apart >= 0, _POWERS[np.maximum(apart, 0)], 0).astype(np.int32))
        added = ((tokens + 1)[:, None, :] * kernel % _MOD).sum(axis=-1)
        digests = (state[:, :1] * powers[1:] % _MOD + added) % _MOD
        counts = state[:, 1:] + mx.arange(1, length + 1)
        cache[1] = mx.concatenate([tail, tokens], axis=1)[:, -TAIL:]
        cache[0] = mx.stack([digests[:, -1], counts[:, -1]], axis=-1)
        if self.advances:
            cache.advance(length)
        seen = [digests / _MOD, digests * 7 % 101 / 101, counts % 10 / 10]
        return mx.stack(seen, axis=-1).astype(mx.float32)


class FakeLayer(nn.Module):
    def __init__(self, kind: str, index: int, dim: int, *, advances: bool) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("recurrent", "composite"):
            self.mixer = FakeRecurrence(advances=advances)
        if kind != "recurrent":
            self.attention = FakeAttention(index, dim, outside=kind == "outside")
        if kind == "composite_kv":
            self.second = FakeAttention(index + 16, dim)

    @property
    def width(self) -> int:
        attended = {"recurrent": 0, "composite_kv": 2}.get(self.kind, 1)
        heads = self.attention.n_heads * self.attention.dim if attended else 0
        return attended * heads + (3 if self.kind in ("recurrent", "composite") else 0)

    def make_cache(self) -> Any:
        return {
            "rotating": lambda: RotatingKVCache(WINDOW),
            "rotating_keep": lambda: RotatingKVCache(WINDOW, KEEP),
            "chunked": lambda: ChunkedKVCache(CHUNK),
            "recurrent": lambda: ArraysCache(2),
            "composite": lambda: CacheList(ArraysCache(2), KVCache()),
            "composite_kv": lambda: CacheList(KVCache(), KVCache()),
        }.get(self.kind, KVCache)()

    def __call__(self, tokens: mx.array, cache: Any, trip: Any) -> mx.array:
        length = tokens.shape[1]
        if self.kind == "recurrent":
            return self.mixer(tokens, cache)
        if self.kind == "composite":
            mixed = self.mixer(tokens, cache[0])
            trip("inside")
            attended = self.attention(tokens, create_attention_mask(tokens, cache[1]), cache[1])
            return mx.concatenate([mixed, attended], axis=-1)
        if self.kind == "composite_kv":
            first = self.attention(tokens, create_attention_mask(tokens, cache[0]), cache[0])
            trip("inside")
            second = self.second(tokens, create_attention_mask(tokens, cache[1]), cache[1])
            return mx.concatenate([first, second], axis=-1)
        mask = _chunk_mask(length, cache) if self.kind == "chunked" else create_attention_mask(tokens, cache)
        return self.attention(tokens, mask, cache)


def _chunk_mask(length: int, cache: Any) -> mx.array:
    """As llama4 builds it: a query sees its own chunk."""
    cache.maybe_trim_front()
    end = cache.offset + length
    seen, asking = mx.arange(cache.start_position, end), mx.arange(cache.offset, end)[:, None]
    return (seen // CHUNK == asking // CHUNK) & (seen <= asking)


class FakeModel(nn.Module):
    def __init__(self, kinds: Sequence[str], *, dim: int = 8, advances: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.kinds = tuple(kinds)
        self.layers = [FakeLayer(kind, i, dim, advances=advances) for i, kind in enumerate(kinds)]
        width = sum(layer.width for layer in self.layers)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        weight = np.random.default_rng(seed).normal(size=(VOCAB, width))
        self.lm_head.weight = mx.array(weight.astype(np.float32))
        self.fault: FaultAt | None = None

    def make_cache(self) -> list[Any]:
        return [layer.make_cache() for layer in self.layers]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        cache = self.make_cache() if cache is None else cache
        seen = []
        for i, (layer, c) in enumerate(zip(self.layers, cache, strict=True)):

            def trip(where: str, i: int = i) -> None:
                if self.fault == (i, where):
                    raise Fault(f"layer {i} fails, {where} its update")

            trip("before")
            seen.append(layer(inputs, c, trip))
            trip("after")
        return self.lm_head(mx.concatenate(seen, axis=-1))


# -- what a live layer holds -----------------------------------------------------------------------


class Held(NamedTuple):
    """What one layer holds. For a recurrent layer these are the last few tokens, and the digest of all."""

    tokens: list[int]
    positions: list[int]
    layer: int = -1
    digest: int = 0


def leaves_of(layers: Sequence[Any]) -> list[Any]:
    """The layers that hold state, flat."""
    return [leaf for x in layers for leaf in (leaves_of(x.caches) if hasattr(x, "caches") else [x])]


def held(leaf: Any) -> Held:
    """Read a layer of ours through its snapshot."""
    snapshot = leaf.snapshot(0)
    if snapshot is None:
        arrays = list(getattr(leaf, "cache", []))
    else:
        arrays = list(snapshot.arrays)
        snapshot.close()
    if not arrays or arrays[0] is None:
        return Held([], [])
    if len(arrays) == 2 and arrays[0].ndim == 2:
        digest, count = arrays[0][0].tolist()
        last = [t for t in arrays[1][0].tolist() if t >= 0]
        return Held(last, list(range(count - len(last), count)), digest=digest)
    spelled = [np.rint(np.array(a[0, 0, :, :4])).astype(int) for a in arrays]
    keys, values = spelled
    assert (keys == values).all(), "keys and values are of different tokens"
    assert len(set(keys[:, 3])) == 1, "one layer holds another layer's tokens"
    return Held(keys[:, 0].tolist(), (keys[:, 1] + 32 * keys[:, 2]).tolist(), int(keys[0, 3]))


def held_tokens(leaf: Any) -> list[int]:
    return held(leaf).tokens


def _digest(tokens: Sequence[int]) -> int:
    found = 0
    for token in tokens:
        found = (found * _BASE + token + 1) % _MOD
    return found


def assert_holds(
    model: FakeModel, layers: Sequence[Any], tokens: Sequence[int], bound: tuple[int, int] | None = None
) -> None:
    """Every layer holds exactly what it should after these tokens; `bound` is max_kv_size and keep."""
    tokens = [int(t) for t in tokens]
    count = len(tokens)
    for index, (layer, kind) in enumerate(zip(layers, model.kinds, strict=True)):
        for leaf in leaves_of([layer]):
            if leaf.kind == "quantized":
                _assert_codes(model.layers[index].attention, leaf, tokens, _visible(count, bound))
                continue
            found = held(leaf)
            recurrent = kind == "recurrent" or (kind == "composite" and leaf is layer.caches[0])
            wanted = [tokens[p] if p < count else None for p in found.positions]
            assert found.tokens == wanted, (kind, index, found, tokens)
            if recurrent:
                assert found.digest == _digest(tokens), (kind, index)
                assert found.positions == list(range(max(0, count - TAIL), count)), (kind, index)
                continue
            assert not count or found.layer % 16 == index, (kind, index, found)
            if kind == "chunked":
                assert found.positions == list(range(count - len(found.positions), count))
                assert len(found.positions) >= count - count // CHUNK * CHUNK
                continue
            window = {"rotating": (WINDOW, 0), "rotating_keep": (WINDOW, KEEP)}.get(kind, bound)
            assert found.positions == _visible(count, window), (kind, index)


def _assert_codes(attention: FakeAttention, leaf: Any, tokens: list[int], positions: list[int]) -> None:
    """A quantised layer holds the codes of these positions, bit by bit."""
    snapshot = leaf.snapshot(0)
    if snapshot is None:
        assert not positions
        return
    given = mx.array([[tokens[p] for p in positions]]), mx.array([positions])
    wanted = leaf.codec.encode(*(attention._spell(*given, attention.n_kv_heads, salt) for salt in (0, 1)))
    for a, b in zip(snapshot.arrays, wanted, strict=True):
        assert a.shape == b.shape and mx.array_equal(a, b).item(), "a layer holds the codes of other tokens"
    snapshot.close()


def _visible(count: int, window: tuple[int, int] | None) -> list[int]:
    if window is None or count <= window[0]:
        return list(range(count))
    size, keep = window
    return [*range(keep), *range(count - (size - keep), count)]


# -- one request, with the stock run beside it -------------------------------------------------------


def rounded(kv: str | int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Keys and values as they are after they were stored in a format."""
    codec = KvFormat.parse(kv).codec(*(ArraySpec(a.shape[1], a.shape[3], a.dtype) for a in (keys, values)))
    return codec.as_made(list(codec.encode(keys, values)), keys.dtype)


class RoundedCache(KVCache):
    """mlx-lm's cache of entries that were encoded and decoded before they went in."""

    def __init__(self, kv: str | int) -> None:
        super().__init__()
        self.format = kv
        self.round = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(*(rounded(self.format, keys, values) if self.round else (keys, values)))


class RoundedRing(RotatingKVCache):
    """mlx-lm's ring of such entries."""

    def __init__(self, max_size: int, keep: int, kv: str | int) -> None:
        super().__init__(max_size, keep)
        self.format = kv
        self.round = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(*(rounded(self.format, keys, values) if self.round else (keys, values)))


def stock_caches(model: FakeModel, bound: tuple[int, int] | None = None, kv: str | int = "16") -> list[Any]:
    """mlx-lm's own caches for this model; bounded or rounded where they can be."""
    made = model.make_cache()
    if bound is not None:
        ring = RotatingKVCache if str(kv) == "16" else functools.partial(RoundedRing, kv=kv)
        made = [ring(*bound) if type(c) is KVCache else c for c in made]
    if str(kv) != "16":
        made = [RoundedCache(kv) if type(c) is KVCache else c for c in made]
    return made


def logits_of(model: FakeModel, tokens: Sequence[int], layers: Any) -> np.ndarray:
    """[tokens, vocab]"""
    return np.array(model(mx.array(np.asarray(tokens, np.int32))[None], cache=layers)[0])


def assert_close(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-4) -> None:
    error = np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max())
    assert error < tolerance, f"logits differ by {error:.2e} of their scale"


class Session:
    """A lease, and a stock run that is fed the same calls: logits and the layers' tokens are compared."""

    def __init__(
        self,
        model: FakeModel,
        cache: PrefixCache,
        prompt: Sequence[int],
        *,
        namespace: str = "",
        checkpoints: Sequence[int] = (),
        bound: tuple[int, int] | None = None,
        kv: str | int = "16",
    ) -> None:
        self.model = model
        self.cache = cache
        self.prompt = [int(t) for t in prompt]
        self.bound = bound
        self.tolerance = 1e-4 if str(kv) == "16" else 2e-3
        self.stops = sorted(checkpoints)
        self.lease: Lease = cache.lease(self.prompt, namespace=namespace, checkpoints=checkpoints)
        self.matched, self.cached = self.lease.matched, self.lease.cached
        assert self.cached <= self.matched <= len(self.prompt)
        assert self.cached < len(self.prompt)
        self.tokens = self.prompt[: self.cached]
        self.stock = stock_caches(model, bound, kv)
        self.next = 0
        if self.tokens:
            self.next = int(logits_of(model, self.tokens, self.stock)[-1].argmax())
        self.holds()

    def holds(self) -> None:
        assert_holds(self.model, self.lease.layers, self.tokens, self.bound)

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """One call, on the lease and on the stock caches. One that the lease refuses never happened."""
        given = mx.array(np.asarray(tokens, np.int32))[None]
        both = [self.model(given, cache=layers)[0] for layers in (self.lease.layers, self.stock)]
        mx.eval(both)  # together: each wait is for another thread
        found, wanted = map(np.array, both)
        self.tokens += [int(t) for t in tokens]
        self.next = int(wanted[-1].argmax())
        assert_close(found, wanted, self.tolerance)
        return found

    def prefill(self, chunk: int = 7, *, upto: int | None = None) -> Session:
        """In chunks that end where checkpoints are wanted; the last token alone."""
        end = len(self.prompt) if upto is None else upto
        while (at := len(self.tokens)) < end:
            stops = [s for s in (*self.stops, len(self.prompt) - 1) if s > at]
            stop = min([at + chunk, end, *stops])
            self.feed(self.prompt[at:stop])
        self.holds()
        return self

    def decode(self, n: int) -> Session:
        """Greedily; the layers hold every token that was fed."""
        for _ in range(n):
            self.feed([self.next])
        self.holds()
        return self

    def fail(self, tokens: Sequence[int], at: FaultAt) -> None:
        """A forward that raises."""
        self.model.fault = at
        try:
            logits_of(self.model, tokens, self.lease.layers)
        except Fault:
            return
        finally:
            self.model.fault = None
        raise AssertionError("the model did not fail")

    def commit(self, *, close: bool = True) -> list[int]:
        self.lease.commit(self.tokens, close=close)
        if not close:
            self.holds()
        settled(self.cache)
        return list(self.tokens)

    def cancel(self) -> None:
        self.lease.cancel()
        settled(self.cache)


def settled(cache: PrefixCache) -> None:
    """Nothing is broken, and the budget holds."""
    cache.check()
    stats = cache.stats()
    assert sum(stats.bytes.values()) == stats.used_bytes <= stats.budget_bytes


def text(n: int, seed: int = 0) -> list[int]:
    """Some tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()
