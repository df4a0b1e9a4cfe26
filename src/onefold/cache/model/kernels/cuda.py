"""The decode kernel on CUDA."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from onefold.cache.model.kernels import cuda_formats, cuda_header
from onefold.cache.model.kernels import cuda_source as source
from onefold.cache.model.kernels.decode import DecodeKernel, Judge, Launcher, Partial, Reduction, Shape

MOST_ARRAYS = 240
"""Of slabs in one launch: a kernel has 4 KB of arguments, and each takes 8 bytes of them."""
MOST_QUERIES = 512
"""Queries of one row: the tokens of a chunk of its prompt."""


def _split(value_dim: int) -> int:
    return 1 if value_dim <= 160 else 2


def is_wide(shape: Shape) -> bool:
    """Whether a warp attends 32 queries: where keys and values are opened, and few enough registers hold its sums."""
    return shape.format is not None and shape.format.value_bits > 0 and _split(shape.value_dim) == 1


def tile(shape: Shape) -> int:
    """Returns how many queries a block attends."""
    return source.WIDE_TILE if is_wide(shape) else source.TILE


def takes(shape: Shape) -> str:
    """Returns why there is no kernel for a shape; empty if there is one."""
    if shape.dtype not in cuda_header.NAMES:
        return "keys and values that are not of 16 bits"
    width = shape.value_dim // _split(shape.value_dim)
    if shape.key_dim % 32 or not 32 <= shape.key_dim <= 256 or width % 32 or width > 160 or shape.value_dim < 32:
        return f"heads of {shape.key_dim} and {shape.value_dim}"
    known = shape.format is not None and shape.format.name in cuda_formats.LOADS
    return "" if known else "this format of keys and values"


@functools.cache
def _reduction(name: str, value_dim: int, sinks: str, turns: bool) -> Any:
    """Returns the kernel that weights the chunks, for attention sinks of the type `sinks`, or none."""
    return mx.fast.cuda_kernel(**reduce_source(name, value_dim, sinks, turns), ensure_row_contiguous=False)


def _maybe(signs: mx.array | None) -> list[mx.array]:
    return [] if signs is None else [signs]


class CudaLauncher:
    def __init__(self, shape: Shape, slabs: int) -> None:
        self._shape, self._slabs, self.tile = shape, slabs, tile(shape)
        self._threads = threads(shape)
        self._partial: Any = mx.fast.cuda_kernel(**partial_source(shape, slabs), ensure_row_contiguous=False)
        turns = shape.format is not None and shape.format.turns
        self._reduce: Any = _reduction(cuda_header.NAMES[shape.dtype], shape.value_dim, "", turns)

    def partial(self, given: Partial) -> tuple[mx.array, mx.array]:
        arrays = [a for slab in given.arrays for a in slab] + given.arrays[0] * (self._slabs - len(given.arrays))
        _, heads, length, _ = given.q.shape
        mixed, sums = self._partial(
            inputs=[given.q, given.numbers, given.work, given.lists, given.scale, *arrays, *_maybe(given.signs)],
            grid=(given.blocks[0] * self._threads, given.blocks[1], 1),
            threadgroup=(self._threads, 1, 1),
            output_shapes=[(given.partials, heads, length, self._shape.value_dim), (given.partials, heads, length, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        return mixed, sums

    def reduce(self, given: Reduction) -> mx.array:
        rows, heads, length, _ = given.shape
        name, dv = cuda_header.NAMES[self._shape.dtype], self._shape.value_dim
        turns = given.signs is not None
        kernel = self._reduce if given.sinks is None else _reduction(name, dv, str(given.sinks.dtype), turns)
        sinks = given.mixed if given.sinks is None else given.sinks
        found = kernel(
            inputs=[given.numbers, given.lists, given.mixed, given.sums, sinks, *_maybe(given.signs)],
            grid=(rows * source.THREADS, heads * length, 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[given.shape],
            output_dtypes=[given.dtype],
        )
        attended: mx.array = found[0]
        return attended


def threads(shape: Shape) -> int:
    """Returns how many threads a block has."""
    return source.THREADS * _split(shape.value_dim)


def partial_source(shape: Shape, slabs: int) -> dict[str, Any]:
    """Returns the name, the arguments, the header and the source of a variant."""
    name, dk, dv, form = cuda_header.NAMES[shape.dtype], shape.key_dim, shape.value_dim, shape.format
    assert form is not None
    both = form.slots
    parameters = {"bits": form.bits, "group": form.group, "row": form.row(dk, dv)}
    cases = [" ".join(f"{a} = {a}_{i};" for a in both) for i in range(slabs)]
    each = 8 if dv // _split(dv) % 64 == 0 else 4
    arguments = {"each": each, "k_args": form.arguments("k", dk), "v_args": form.arguments("v", dk)}
    attend = source.ATTEND.format(tiles=1, **arguments)
    if is_wide(shape):
        attend = f"if (queries > 16) {source.ATTEND.format(tiles=2, **arguments)} else {attend}"
    prepare = f"factor = of_prepare<NK>(to, {'signs, ' if form.turns else ''}c);" if form.value_bits else ""
    body = source.PARTIAL.format(
        dk=dk,
        dv=dv,
        split=_split(dv),
        pointers="const void " + ", ".join(f"*{a}" for a in both) + f"; {cases[0]}",
        cases="\n".join(f"case {i}: {cases[i]} break;" for i in range(1, slabs)),
        **arguments,
        wide="true" if is_wide(shape) else "false",
        tile=tile(shape),
        opened="true" if form.value_bits else "false",
        prepare=prepare,
        seek=cuda_formats.SEEK[form.name].format(**parameters),
    )
    slots = [f"{a}_{i}" for i in range(slabs) for a in both]
    load, products = cuda_formats.LOADS[form.name], "f16" if form.value_bits else ""
    return {
        "name": f"onefold_partial_{name}_{dk}_{dv}_{form.tag}_{slabs}",
        "input_names": ["q", "numbers", "work", "lists", "scale", *slots, *(["signs"] if form.turns else [])],
        "output_names": ["mixed", "sums"],
        "header": cuda_header.header(name, load, products=products, turns=form.turns, **parameters),
        "source": cuda_header.shortened(body + attend),
    }


def reduce_source(name: str, value_dim: int, sinks: str, turns: bool) -> dict[str, Any]:
    """Returns the name, the arguments, the header and the source of the reduction."""
    write = source.WRITE_TURNED if turns else source.WRITE
    return {
        "name": f"onefold_reduce_{name}_{value_dim}_{sinks.rpartition('.')[2]}{'_t' if turns else ''}",
        "input_names": ["numbers", "lists", "mixed", "sums", "sinks", *(["signs"] if turns else [])],
        "output_names": ["attended"],
        "header": cuda_header.header(name),
        "source": cuda_header.shortened((source.REDUCE + write).format(dv=value_dim)),
    }


def make(shape: Shape, slabs: int) -> Launcher:
    return CudaLauncher(shape, slabs)


def kernel(judge: Judge | None = None) -> DecodeKernel:
    return DecodeKernel(
        make,
        takes,
        MOST_ARRAYS,
        judge=judge,
        replaces_stock=True,
        compiles_steps=True,
        most_queries=MOST_QUERIES,
    )
