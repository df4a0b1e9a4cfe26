"""The survey of a model: finds out what its cache is made of, when a cache is made.

- It builds, and never evaluates, forwards of 3, 1 and 2 tokens. That costs almost nothing, even for a model that fills
  the machine, and shows every layer's kind, shapes and types.
- It then builds the same forwards with handles. A model that cannot take them, because it does arithmetic on its keys
  before attention, gets one buffer. Only such a model is also run, on a few tokens, to test that it is causal.
- A model with caches that Onefold does not recognise is not cached; `Anatomy.reason` gives the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.segment import Store
from onefold.cache.memory.track import Track
from onefold.cache.model import seam, stock
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.attention import attention
from onefold.cache.model.formats.registry import FORMATS, KvFormat
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.leaf import Leaf
from onefold.cache.model.kinds.registry import bounded_caches, leaves_of
from onefold.cache.model.step_plan import StepPlan
from onefold.errors import Unbounded, Unstorable

_BUILD_ERRORS = (
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    NotImplementedError,
    AssertionError,
)
"""The exceptions that a model's code raises for an input that it does not support."""

_TRIAL = (3, 1, 2)
_BOUND_LEAST = sum(_TRIAL)
"""Of a bounded conversation in another format than 16: the trial must fit into it."""
_FAR = 1024


def survey(model: nn.Module, *, kv: KvFormat | None = None, bound: Bound | None = None) -> Anatomy:
    """Surveys a model, and returns its anatomy. Raises Unbounded if it has a cache class that grows and takes no
    bound."""
    anatomy = _surveyed(model, kv or KvFormat(), bound)
    if anatomy.reason:
        look_uncached(anatomy, model)
    if bound is not None:
        _require_bound(anatomy, bound)
    return anatomy


def look_uncached(anatomy: Anatomy, model: nn.Module) -> None:
    """Measure the initial bytes and the growth of the model's own caches, for a model that runs on them. Evaluates
    nothing."""
    if anatomy.uncached_token_bytes is None:
        _read_uncached(model, anatomy)


def _surveyed(model: nn.Module, kv: KvFormat, bound: Bound | None) -> Anatomy:
    if bound is not None and not kv.plain and bound.max_size < _BOUND_LEAST:
        raise Unstorable(
            f"max_kv_size={bound.max_size} is too small with kv='{kv}': give at least {_BOUND_LEAST}, or leave one out"
        )
    caches = _made(model)
    anatomy = Anatomy(leaves_of(caches), len(caches), bound=bound)
    _measure_weights(model, anatomy)
    anatomy.reason = _unusable([leaf for leaf in anatomy.leaves if not leaf.known])
    if anatomy.reason:
        return _uncached(anatomy, kv)
    try:
        for n in _TRIAL:
            model(mx.zeros((1, n), mx.int32), cache=caches)
            _see(anatomy, caches)
        _read_shapes(anatomy, caches, kv)
        if anatomy.own and not anatomy.reason:
            _read_growth(model, anatomy, caches)
    except Unstorable:
        raise
    except _BUILD_ERRORS as error:
        anatomy.reason = f"the model does not run on its own caches: {type(error).__name__}: {error}"
    if anatomy.reason:
        return _uncached(anatomy, kv)
    if not kv.plain and not anatomy.sliceable:
        raise Unstorable(
            f"kv='{kv}' has nothing to store: no layer of this model keeps the KV of all tokens. Leave kv out"
        )
    _keep_edges(anatomy, kv)
    anatomy.contiguous = not _takes_handles(model, anatomy)
    if anatomy.contiguous and any(leaf.native for leaf in anatomy.leaves):
        anatomy.reason = "it quantises its KV by itself and bypasses the attention seam"
        return _uncached(anatomy, kv)
    if anatomy.contiguous and not kv.plain:
        raise Unstorable(
            f"kv='{kv}' cannot be used: quantised KV is read through the attention seam, which this model "
            "bypasses. Leave kv out"
        )
    try:
        causal = not anatomy.contiguous or _is_causal(model, anatomy)
    except _BUILD_ERRORS as error:
        anatomy.reason = f"the model does not run on its own caches: {type(error).__name__}: {error}"
        return anatomy
    if not causal:
        anatomy.reason = (
            "its tokens see later ones of the same chunk: what is cached would depend on what came after it"
        )
        return anatomy
    if anatomy.recurrent:
        _check_counting(model, anatomy)
    anatomy.ragged = not anatomy.contiguous and not anatomy.reason and _takes_rows(model, anatomy)
    return anatomy


def read_off(caches: list[Any]) -> Anatomy:
    anatomy = Anatomy(leaves_of(caches), len(caches), contiguous=True)
    anatomy.reason = _unusable([leaf for leaf in anatomy.leaves if not leaf.known or leaf.of_the_model])
    if anatomy.reason:
        return anatomy
    index = 0
    for leaf in anatomy.leaves:
        cache = _at(caches, leaf.path)
        if leaf.says_offset and cache.offset == 0:
            leaf.used = False
            continue
        index = _read_leaf(leaf, cache, index, KvFormat())
        leaf.packed = leaf.native is not None
    if not any(leaf.used for leaf in anatomy.leaves):
        anatomy.reason = "the layers are empty"
    return anatomy


def _made(model: nn.Module) -> list[Any]:
    """Returns the caches that mlx-lm makes, for inspection only."""
    return stock.make_prompt_cache(model)


def _unusable(leaves: list[Leaf]) -> str:
    names = sorted({leaf.class_name for leaf in leaves})
    return f"cache class {', '.join(names)} offers nothing that could be reused" if names else ""


def _at(caches: list[Any], path: tuple[int, ...]) -> Any:
    found = caches[path[0]]
    for i in path[1:]:
        found = found.caches[i]
    return found


def _read_shapes(anatomy: Anatomy, caches: list[Any], kv: KvFormat) -> None:
    total, index = sum(_TRIAL), 0
    for leaf in anatomy.leaves:
        cache = _at(caches, leaf.path)
        anatomy.reason = leaf.refusal(cache)
        if anatomy.reason:
            return
        index = _read_leaf(leaf, cache, index, kv)
        if leaf.used and leaf.says_offset and cache.offset != total:
            anatomy.reason = (
                f"layer {leaf.path[0]} stands at {cache.offset} after {total} tokens: "
                "a layer that is not updated once per forward cannot be cut by position"
            )
            return


def _see(anatomy: Anatomy, caches: list[Any]) -> None:
    for leaf in anatomy.leaves:
        leaf.see(_at(caches, leaf.path))


def _read_leaf(leaf: Leaf, cache: Any, index: int, kv: KvFormat) -> int:
    """Read the shapes of a leaf from a cache that holds something. Returns the next sliceable leaf's index."""
    leaf.read(cache)
    if not leaf.sliceable or not leaf.used:
        return index
    leaf.index = index
    _set_format(leaf, kv)
    return index + 1


def _read_growth(model: nn.Module, anatomy: Anatomy, caches: list[Any]) -> None:
    """Measure the initial bytes of a cache class of the model's own, and its growth per token. Windows that are no
    longer than one of these forwards are full by the second."""
    sizes: list[list[int]] = []
    for _ in range(2):
        model(mx.zeros((1, _FAR), mx.int32), cache=caches)
        held = [vars(_at(caches, leaf.path)).values() if leaf.of_the_model else () for leaf in anatomy.leaves]
        sizes.append([sum(v.nbytes for v in values if isinstance(v, mx.array)) for values in held])
        _see(anatomy, caches)
    for leaf, first, second in zip(anatomy.leaves, *sizes, strict=True):
        if leaf.of_the_model:
            leaf.state_bytes = first
            leaf.token_bytes = math.ceil((second - first) / _FAR)


def _read_uncached(model: nn.Module, anatomy: Anatomy) -> None:
    """Measure the initial bytes and the growth per token of the caches of a model that runs uncached. Evaluates
    nothing."""
    caches = bounded_caches(_made(model), anatomy.bound)
    sizes: list[list[int]] = []
    try:
        for _ in range(2):
            model(mx.zeros((1, _FAR), mx.int32), cache=caches)
            held = [stock.arrays_of(_at(caches, leaf.path)) for leaf in anatomy.leaves]
            sizes.append([sum(a.nbytes for a in arrays) for arrays in held])
    except _BUILD_ERRORS:
        return
    for leaf, first, second in zip(anatomy.leaves, *sizes, strict=True):
        leaf.token_bytes = max(0, math.ceil((second - first) / _FAR))
    anatomy.uncached_token_bytes = sum(leaf.token_bytes for leaf in anatomy.leaves)
    anatomy.uncached_state_bytes = max(0, sum(sizes[0]) - _FAR * anatomy.uncached_token_bytes)


def _require_bound(anatomy: Anatomy, bound: Bound) -> None:
    unseen = bool(anatomy.reason) and anatomy.uncached_token_bytes is None
    strange = [x for x in anatomy.leaves if not x.takes_bound or (anatomy.reason and x.native)]
    names = sorted({leaf.class_name for leaf in strange if leaf.token_bytes or unseen})
    if names:
        raise Unbounded(
            f"max_kv_size={bound.max_size} cannot bound this model: its cache class {', '.join(names)} grows with the "
            "conversation and takes no bound. Leave max_kv_size out; the budget still limits it"
        )


def _uncached(anatomy: Anatomy, kv: KvFormat) -> Anatomy:
    """Returns the anatomy of a model that runs uncached. Raises Unstorable if its KV should be in another format."""
    if not kv.plain:
        raise Unstorable(f"kv='{kv}' cannot be used: this model runs uncached ({anatomy.reason}). Leave kv out")
    return anatomy


def _keep_edges(anatomy: Anatomy, kv: KvFormat) -> None:
    """Give the first and the last layers their own format again. Raises Unstorable if no layer is left."""
    layers = anatomy.sliceable
    if kv.edges and 2 * kv.edges >= len(layers):
        most = (len(layers) - 1) // 2
        able = f"at most {kv.name}+{most} is possible" if most else f"only {kv.name} without + is possible"
        raise Unstorable(
            f"kv='{kv}' leaves no layer in format {kv.name}: this model has {len(layers)} that keep the KV of all "
            f"tokens, so {able}"
        )
    for leaf in [*layers[: kv.edges], *layers[len(layers) - kv.edges :]]:
        _set_format(leaf, KvFormat())


def _set_format(leaf: Leaf, kv: KvFormat) -> None:
    """Raises Unstorable if the format cannot store the layer's heads."""
    assert leaf.plain is not None
    if leaf.native is not None and not kv.plain:
        raise Unstorable(f"kv='{kv}' cannot be used: this model quantises its KV by itself. Leave kv out")
    if leaf.native is None and not kv.takes(*leaf.plain):
        k, v = leaf.plain
        able = [name for name in FORMATS if KvFormat(name).takes(k, v)]
        raise Unstorable(
            f"kv='{kv}' cannot store this model's heads of {k.dim} (keys) and {v.dim} (values): "
            f"use kv={' or '.join(repr(name) for name in able)}"
        )
    leaf.set_codec(kv.codec(*leaf.plain))


def _measure_weights(model: nn.Module, anatomy: Anatomy) -> None:
    """Read from the weights the widths that limit a forward's activations."""
    widest = 0
    weights: Any = tree_flatten(model.parameters())
    for _, p in weights:
        if p.ndim >= 2 and mx.issubdtype(p.dtype, mx.floating):
            anatomy.itemsize = max(2, p.dtype.size)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, mx.array) or weight.ndim < 2:
            continue
        if name.endswith("lm_head") or isinstance(module, nn.Embedding):
            anatomy.vocab = max(anatomy.vocab, weight.shape[0])
            continue
        experts = 8 if weight.ndim == 3 else 1  # a mixture sends a token to a few of its experts
        widest = max(widest, weight.shape[-2] * experts)
        anatomy.heads = max(anatomy.heads, int(getattr(module, "n_heads", 1) or 1))
    for _, module in model.named_modules():
        for name in ("n_heads", "num_heads", "num_attention_heads", "n_q_heads"):
            found = getattr(module, name, None)
            if isinstance(found, int) and not isinstance(found, bool):
                anatomy.heads = max(anatomy.heads, found)
    anatomy.widest = max(widest, 64) * 2


def _trial(model: nn.Module, run: Callable[[], None]) -> bool:
    """Run `run` with the seam installed. Returns False if the model's code raises."""
    installed, watched = seam.install(model, attention), seam.watch(model)
    try:
        run()
    except _BUILD_ERRORS:
        return False
    finally:
        seam.uninstall(installed)
        seam.unwatch(watched)
    return True


def _takes_handles(model: nn.Module, anatomy: Anatomy) -> bool:
    def run() -> None:
        track = Track(Store(anatomy.specs, Ledger(1 << 62)))
        layers, leaves = anatomy.make(track, always_handles=True)
        readers = [leaf for leaf in leaves if leaf.sliceable]
        for n in _TRIAL:
            model(mx.zeros((1, n), mx.int32), cache=layers)
            if any(leaf.consumed[0] == 0 for leaf in readers):
                raise ValueError("the model did not pass its keys to attention")

    return _trial(model, run)


_CHUNK = 16


def _is_causal(model: nn.Module, anatomy: Anatomy) -> bool:
    """Whether a token's output does not depend on the tokens after it. Runs the model twice on a few tokens; only
    needed for a model outside the seam."""
    tokens = mx.arange(_CHUNK)[None] % max(2, anatomy.vocab)
    others = mx.concatenate([tokens[:, : _CHUNK // 2], tokens[:, : _CHUNK // 2]], axis=1)
    one, two = (model(x, cache=_made(model))[:, : _CHUNK // 2] for x in (tokens, others))
    scale = mx.abs(mx.where(mx.isfinite(one), one, 0)).max()
    apart = mx.abs(mx.where(mx.isfinite(one), one - two, 0)).max()
    return bool(apart <= 1e-2 * scale)


def _check_counting(model: nn.Module, anatomy: Anatomy) -> None:
    """Find out whether the model reports to its recurrent layers how many tokens passed. Uses layers that return
    arrays, because a model that cannot take handles is tested too."""
    track = Track(Store(anatomy.specs, Ledger(1 << 62)))
    layers, leaves = anatomy.make(track)
    used = [leaf for leaf in anatomy.leaves if leaf.used]
    recurrent = [layer for leaf, layer in zip(used, leaves, strict=True) if not leaf.says_offset]

    def run() -> None:
        for n in _TRIAL:
            model(mx.zeros((1, n), mx.int32), cache=layers)

    if not _trial(model, run):
        anatomy.reason = "the model does not run on layers that are made for it"
        return
    anatomy.hides_offsets = any(leaf.offset != sum(_TRIAL) for leaf in recurrent)
    if anatomy.hides_offsets and any(leaf.offset for leaf in recurrent):
        anatomy.reason = "some of its recurrent layers say how many tokens have passed, and some do not"


def _takes_rows(model: nn.Module, anatomy: Anatomy) -> bool:
    """Whether one forward can carry rows at different positions."""
    made = []
    for _ in range(2):
        track = Track(Store(anatomy.specs, Ledger(1 << 62)))
        made.append(anatomy.make(track))

    def run() -> None:
        for (layers, _), n in zip(made, (3, 2), strict=True):
            model(mx.zeros((1, n), mx.int32), cache=layers)
        plan, per_layer = StepPlan(), zip(*(layers for layers, _ in made), strict=True)
        rows = [same[0].rows(list(same), plan) for same in per_layer]
        out = model(mx.zeros((2, 1), mx.int32), cache=rows)
        if out.shape[0] != 2 or out.shape[1] != 1:
            raise ValueError(f"the output for two rows has the shape {out.shape}")
        if plan.is_read_by_length:
            raise ValueError("the model reads how long the keys are, which is one length for all rows")

    return _trial(model, run)
