"""The decode kernel on CUDA."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from onefold.cache.model.kernels import cuda_source as source
from onefold.cache.model.kernels.decode import DecodeKernel, Judge, Launcher, Partial, Reduction, Shape

MOST_ARRAYS = 240
"""Of slabs in one launch: a kernel has 4 KB of arguments, and each takes 8 bytes of them."""
MOST_QUERIES = 512
"""Queries of one row: the tokens of a chunk of its prompt."""


def _split(value_dim: int) -> int:
    return 1 if value_dim <= 160 else 2


def takes(shape: Shape) -> str:
    """Returns why there is no kernel for a shape; empty if there is one."""
    if shape.dtype not in source.NAMES:
        return "keys and values that are not of 16 bits"
    width = shape.value_dim // _split(shape.value_dim)
    if shape.key_dim % 32 or not 32 <= shape.key_dim <= 256 or width % 32 or width > 160 or shape.value_dim < 32:
        return f"heads of {shape.key_dim} and {shape.value_dim}"
    return "" if shape.format is not None and shape.format.name in source.LOADS else "this format of keys and values"


@functools.cache
def _reduction(name: str, value_dim: int, sinks: str) -> Any:
    """Returns the kernel that weights the chunks, for attention sinks of the type `sinks`, or none."""
    return mx.fast.cuda_kernel(
        name=f"onefold_reduce_{name}_{value_dim}_{sinks.rpartition('.')[2]}",
        input_names=["numbers", "lists", "mixed", "sums", "sinks"],
        output_names=["attended"],
        header=source.shortened(source.HEADER.format(t=name, load="")),
        source=source.shortened(source.REDUCE.format(dv=value_dim)),
        ensure_row_contiguous=False,
    )


class CudaLauncher:
    tile = source.TILE

    def __init__(self, shape: Shape, slabs: int) -> None:
        self._shape, self._slabs = shape, slabs
        name, dk, dv, form = source.NAMES[shape.dtype], shape.key_dim, shape.value_dim, shape.format
        assert form is not None
        load = source.LOADS[form.name].format(t=name, bits=form.bits, group=form.group)
        header = source.HEADER.format(t=name, load=load)
        sides = [[f"{x}{j}" for j in range(form.arrays)] for x in "kv"]
        both = [*sides[0], *sides[1]]
        cases = [" ".join(f"{a} = {a}_{i};" for a in both) for i in range(slabs)]
        self._threads = source.THREADS * _split(dv)
        self._partial: Any = mx.fast.cuda_kernel(
            name=f"onefold_partial_{name}_{dk}_{dv}_{form.name}{form.bits}_{form.group}_{slabs}",
            input_names=["q", "numbers", "work", "lists", "scale", *(f"{a}_{i}" for i in range(slabs) for a in both)],
            output_names=["mixed", "sums"],
            header=source.shortened(header),
            source=source.shortened(
                source.PARTIAL.format(
                    dk=dk,
                    dv=dv,
                    split=_split(dv),
                    pointers="const void " + ", ".join(f"*{a}" for a in both) + f"; {cases[0]}",
                    cases="\n".join(f"case {i}: {cases[i]} break;" for i in range(1, slabs)),
                    k_args=", ".join(sides[0]),
                    v_args=", ".join(sides[1]),
                )
            ),
            ensure_row_contiguous=False,
        )
        self._reduce: Any = _reduction(name, dv, "")

    def partial(self, given: Partial) -> tuple[mx.array, mx.array]:
        arrays = [a for slab in given.arrays for a in slab] + given.arrays[0] * (self._slabs - len(given.arrays))
        _, heads, length, _ = given.q.shape
        mixed, sums = self._partial(
            inputs=[given.q, given.numbers, given.work, given.lists, given.scale, *arrays],
            grid=(given.blocks[0] * self._threads, given.blocks[1], 1),
            threadgroup=(self._threads, 1, 1),
            output_shapes=[(given.partials, heads, length, self._shape.value_dim), (given.partials, heads, length, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        return mixed, sums

    def reduce(self, given: Reduction) -> mx.array:
        rows, heads, length, _ = given.shape
        name, dv = source.NAMES[self._shape.dtype], self._shape.value_dim
        kernel = self._reduce if given.sinks is None else _reduction(name, dv, str(given.sinks.dtype))
        sinks = given.mixed if given.sinks is None else given.sinks
        found = kernel(
            inputs=[given.numbers, given.lists, given.mixed, given.sums, sinks],
            grid=(rows * source.THREADS, heads * length, 1),
            threadgroup=(source.THREADS, 1, 1),
            output_shapes=[given.shape],
            output_dtypes=[given.dtype],
        )
        attended: mx.array = found[0]
        return attended


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
