"""The decode kernel on CUDA."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import mlx.core as mx

from onefold.cache.model.kernels import compiled, cuda_formats, cuda_header, cuda_reduce
from onefold.cache.model.kernels import cuda_source as source
from onefold.cache.model.kernels.decode import DecodeKernel, Judge, Launcher, Partial, Reduction, Shape

MOST_ARRAYS = 240
"""Of slabs in one launch: a kernel has 4 KB of arguments, and each takes 8 bytes of them."""
MOST_QUERIES = 512
"""Queries of one row: the tokens of a chunk of its prompt."""


def _split(value_dim: int) -> int:
    return 1 if value_dim <= 160 else 2


MOST_SHARED, USUAL_SHARED = 99 << 10, 48 << 10
"""Bytes of shared memory that a block can have on every GPU with these instructions, and without asking for more."""
MOST_STAGED = 64 << 10
"""Bytes of tiles that a block has on their way: more would keep another block from running beside it."""


class Staging(NamedTuple):
    """How tiles of keys and values go through shared memory."""

    stages: int
    """Tiles of a warp: one that is read, the others on their way."""
    tile_bytes: int
    n_bytes: int
    """What the kernel asks for."""


def splits_keys(shape: Shape) -> bool:
    """Whether the warps of a block split the keys, and each attends all of its queries. Not where the sums of a warp do
    not leave enough registers."""
    return shape.format is not None and shape.format.name != "affine" and _split(shape.value_dim) == 1


def tile(shape: Shape) -> int:
    """Returns how many queries a block attends."""
    return source.WIDE_TILE if splits_keys(shape) else source.TILE


def staging(shape: Shape) -> Staging | None:
    """Returns how tiles are staged; None if a shape is read straight into registers."""
    form = shape.format
    if form is None or form.name not in cuda_formats.TILES or not splits_keys(shape):
        return None
    row = form.row(shape.key_dim, shape.value_dim)
    tile_bytes = cuda_formats.tile_bytes(form.name, shape.key_dim, shape.value_dim, row)
    warps = source.THREADS // 32
    stages = min(4, max(2, MOST_STAGED // (warps * tile_bytes)))
    n_bytes, others = stages * warps * tile_bytes, source.shared_bytes(shape.key_dim, shape.value_dim, tile(shape))
    if n_bytes + others > MOST_SHARED:
        return None
    # MLX asks the driver for more than usual if it is given so much here, without what the source declares
    return Staging(stages, tile_bytes, n_bytes if n_bytes + others <= USUAL_SHARED else max(n_bytes, USUAL_SHARED))


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
    return compiled.kernel(reduce_source(name, value_dim, sinks, turns))


def _maybe(signs: mx.array | None) -> list[mx.array]:
    return [] if signs is None else [signs]


class CudaLauncher:
    def __init__(self, shape: Shape, slabs: int) -> None:
        self._shape, self._slabs, self.tile = shape, slabs, tile(shape)
        self._threads = threads(shape)
        staged = staging(shape)
        self._partial: Any = compiled.kernel(
            partial_source(shape, slabs), shared_memory=0 if staged is None else staged.n_bytes
        )
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
            grid=(rows * cuda_reduce.THREADS, heads * length, 1),
            threadgroup=(cuda_reduce.THREADS, 1, 1),
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
    staged = staging(shape)
    cases = [" ".join(f"{a} = {a}_{i};" for a in both) for i in range(slabs)]
    each = 8 if dv // _split(dv) % 64 == 0 else 4
    arguments = {"each": each, "k_args": form.arguments("k", dk), "v_args": form.arguments("v", dk)}
    grouped = _has_shares(shape)
    shares = {
        "read_shares": source.READ_SHARES if grouped else "",
        "use_shares": source.USE_SHARES.format(groups=form.value_groups(dv)) if grouped else "",
    }
    attend = source.ATTEND.format(tiles=1, **arguments, **shares)
    if splits_keys(shape):
        attend = f"if (queries > 16) {source.ATTEND.format(tiles=2, **arguments, **shares)} else {attend}"
    prepare = f"factor = of_prepare<NK>(to, {'signs, ' if form.turns else ''}c, total);" if form.value_bits else ""
    body = source.PARTIAL.format(
        dk=dk,
        dv=dv,
        split=_split(dv),
        pointers="const void " + ", ".join(f"*{a}" for a in both) + f"; {cases[0]}",
        cases="\n".join(f"case {i}: {cases[i]} break;" for i in range(1, slabs)),
        **arguments,
        wide="true" if splits_keys(shape) else "false",
        tile=tile(shape),
        opened="true" if form.value_bits else "false",
        prepare=prepare,
        seek=cuda_formats.SEEK[form.name].format(**parameters),
        reading=_ahead(shape, arguments) if staged is None else _staged(shape, staged, arguments, parameters),
    )
    slots = [f"{a}_{i}" for i in range(slabs) for a in both]
    load = cuda_formats.LOADS[form.name] + (cuda_formats.SHARES if grouped else "")
    products = "f16" if form.value_bits else ""
    return {
        "name": f"onefold_partial_{name}_{dk}_{dv}_{form.tag}_{slabs}",
        "input_names": ["q", "numbers", "work", "lists", "scale", *slots, *(["signs"] if form.turns else [])],
        "output_names": ["mixed", "sums"],
        "header": cuda_header.header(name, load, products=products, turns=form.turns, **parameters),
        "source": cuda_header.shortened(body + attend),
    }


def _ahead(shape: Shape, arguments: dict[str, Any]) -> str:
    """Returns the source that reads keys and values into registers."""
    return (source.AHEAD + (source.SHARES_AHEAD if _has_shares(shape) else "")).format(**arguments)


def _has_shares(shape: Shape) -> bool:
    return shape.format is not None and shape.format.value_groups(shape.value_dim) > 1


def _staged(shape: Shape, how: Staging, arguments: dict[str, Any], parameters: dict[str, int]) -> str:
    """Returns the source that reads keys and values through shared memory."""
    assert shape.format is not None
    tiles = cuda_formats.TILES[shape.format.name]
    sizes = {"stages": how.stages, "tile_bytes": how.tile_bytes}
    return (source.STAGED + (source.SHARES_STAGED if _has_shares(shape) else "")).format(
        **arguments,
        **sizes,
        origin=tiles.origin.format(**parameters),
        copy=tiles.copy.format(**parameters, **sizes),
        tiles_declared=tiles.declared,
        tiles_set=tiles.set,
        **{side: _in_tile(arguments[args], tiles.tag) for side, args in (("k_tile", "k_args"), ("v_tile", "v_args"))},
    )


def _in_tile(arguments: str, tag: str) -> str:
    """Returns the arguments that read a tile, in place of an array."""
    array, *others = arguments.split(", ", 1)
    return ", ".join([f"{array}_tile{tag}", *others])


def reduce_source(name: str, value_dim: int, sinks: str, turns: bool) -> dict[str, Any]:
    """Returns the name, the arguments, the header and the source of the reduction."""
    write = cuda_reduce.WRITE_TURNED if turns else cuda_reduce.WRITE
    return {
        "name": f"onefold_reduce_{name}_{value_dim}_{sinks.rpartition('.')[2]}{'_t' if turns else ''}",
        "input_names": ["numbers", "lists", "mixed", "sums", "sinks", *(["signs"] if turns else [])],
        "output_names": ["attended"],
        "header": cuda_header.header(name),
        "source": cuda_header.shortened((cuda_reduce.REDUCE + write).format(dv=value_dim)),
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
