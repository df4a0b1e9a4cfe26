"""The decode kernel on Metal."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from onefold.cache.model.kernels import compiled
from onefold.cache.model.kernels import metal_source as source
from onefold.cache.model.kernels.decode import DecodeKernel, Judge, Launcher, Partial, Reduction, Shape

MOST_ARRAYS = 22
"""Of slabs in one launch: Metal has 31 buffers, of which the other arguments take 8."""
_NAMES = {mx.bfloat16: "bfloat16_t", mx.float16: "half", mx.float32: "float"}


def tile(shape: Shape) -> int:
    """Returns how many queries a threadgroup attends: each takes registers, and memory of the threadgroup."""
    return 8 if max(shape.key_dim, shape.value_dim) <= 128 else 4


def takes(shape: Shape) -> str:
    """Returns why there is no kernel for a shape; empty if there is one."""
    if shape.dtype not in _NAMES:
        return "keys and values of a type that Metal does not compute with"
    if shape.key_dim % 32 or shape.value_dim % 32 or not 32 <= min(shape[:2]) <= max(shape[:2]) <= 256:
        return f"heads of {shape.key_dim} and {shape.value_dim}"
    return "" if shape.format is not None and shape.format.name in source.LOADS else "this format of keys and values"


@functools.cache
def _reduction(name: str, value_dim: int, sinks: str, turns: bool) -> Any:
    """Returns the kernel that weights the chunks, for attention sinks of the type `sinks`, or none."""
    return compiled.kernel(reduce_source(name, value_dim, sinks, turns), metal=True)


def _maybe(signs: mx.array | None) -> list[mx.array]:
    return [] if signs is None else [signs]


class MetalLauncher:
    def __init__(self, shape: Shape, slabs: int) -> None:
        self._shape, self._slabs, self.tile = shape, slabs, tile(shape)
        self._partial: Any = compiled.kernel(partial_source(shape, slabs), metal=True)

    def partial(self, given: Partial) -> tuple[mx.array, mx.array]:
        arrays = [a for slab in given.arrays for a in slab] + given.arrays[0] * (self._slabs - len(given.arrays))
        _, heads, length, _ = given.q.shape
        mixed, sums = self._partial(
            inputs=[given.q, given.numbers, given.work, given.lists, given.scale, *arrays, *_maybe(given.signs)],
            grid=(given.blocks[0] * source.THREADS, given.blocks[1], 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[(given.partials, heads, length, self._shape.value_dim), (given.partials, heads, length, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        return mixed, sums

    def reduce(self, given: Reduction) -> mx.array:
        rows, heads, length, value_dim = given.shape
        sinks = given.mixed if given.sinks is None else given.sinks
        of_sinks = "" if given.sinks is None else str(given.sinks.dtype)
        kernel = _reduction(_NAMES[given.dtype], value_dim, of_sinks, given.signs is not None)
        found = kernel(
            inputs=[given.numbers, given.lists, given.mixed, given.sums, sinks, *_maybe(given.signs)],
            grid=(rows * source.THREADS, heads * length, 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[given.shape],
            output_dtypes=[given.dtype],
        )
        attended: mx.array = found[0]
        return attended


def partial_source(shape: Shape, slabs: int) -> dict[str, Any]:
    """Returns the name, the arguments, the header and the source of a variant."""
    name, form = _NAMES[shape.dtype], shape.format
    assert form is not None
    both = form.slots
    types = [t.format(t=name) for t in source.TYPES[form.name]]
    declared = [f"const device {t}* {a} = {a}_0;" for t, a in zip(types, both, strict=True)]
    cases = [f"case {i}: {' '.join(f'{a} = {a}_{i};' for a in both)} break;" for i in range(1, slabs)]
    row = form.row(shape.key_dim, shape.value_dim)
    scale = source.SCALES.get(name, source.SCALE)
    layout = {"bits": form.bits, "group": form.group, "row": row, "groups": form.value_groups(shape.value_dim)}
    load = source.LOADS[form.name].format(t=name, scale=scale, **layout)
    sizes = {"dk": shape.key_dim, "dv": shape.value_dim, "tile": tile(shape)}
    reading = {f"{side}_args": form.arguments(side, shape.key_dim) for side in "kv"}
    reading["turn"] = source.TURN_QUERY.format() if form.turns else ""
    body = source.PARTIAL.format(pointers="\n".join(declared), cases="\n".join(cases), **sizes, **reading)
    slots = [f"{a}_{i}" for i in range(slabs) for a in both]
    return {
        "name": f"onefold_partial_{name}_{shape.key_dim}_{shape.value_dim}_{form.tag}_{slabs}",
        "input_names": ["q", "numbers", "work", "lists", "scale", *slots, *(["signs"] if form.turns else [])],
        "output_names": ["mixed", "sums"],
        "header": source.HEADER.format(load=load),
        "source": body,
    }


def reduce_source(name: str, value_dim: int, sinks: str, turns: bool) -> dict[str, Any]:
    """Returns the name, the arguments, the header and the source of the reduction to the type `name`."""
    write = source.WRITE_TURNED if turns else source.WRITE
    return {
        "name": f"onefold_reduce_{name}_{value_dim}_{sinks.rpartition('.')[2]}{'_t' if turns else ''}",
        "input_names": ["numbers", "lists", "mixed", "sums", "sinks", *(["signs"] if turns else [])],
        "output_names": ["attended"],
        "header": source.HEADER.format(load=""),
        "source": (source.REDUCE + write).format(dv=value_dim, t=name),
    }


def make(shape: Shape, slabs: int) -> Launcher:
    return MetalLauncher(shape, slabs)


def kernel(judge: Judge | None = None) -> DecodeKernel:
    return DecodeKernel(make, takes, MOST_ARRAYS, judge=judge)
