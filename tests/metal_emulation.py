"""Runs the Metal kernel's source on the CPU, as C++: each of its threads is a thread, and simdgroups meet at barriers.

So the logic of the kernel is tested where there is no Metal. What this cannot show: that Apple's compiler takes the
source, and how fast it is. Needs a C++20 compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from onefold.cache.model.kernels import metal, metal_source
from onefold.cache.model.kernels.decode import DecodeKernel, Partial, Reduction, Shape

COMPILER = shutil.which("g++") or shutil.which("c++")
TYPES = {mx.float32: "float", mx.int32: "int", mx.uint32: "uint"}

PRELUDE = """
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>
using std::max; using std::min; using std::exp2;
typedef unsigned int uint;
struct uint3_ { uint x, y, z; };
#define device
#define constant
#define threadgroup static
static thread_local uint3_ threadgroup_position_in_grid, threadgroups_per_grid, thread_position_in_threadgroup;
static thread_local uint thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
static std::barrier<>* all_threads;
static std::barrier<>* simds[4];
static float lanes[4][32];
enum mem_flags { mem_threadgroup_ };
static void wait_all() { all_threads->arrive_and_wait(); }
template <class F> float over_lanes(float x, F f) {
  const uint s = simdgroup_index_in_threadgroup;
  lanes[s][thread_index_in_simdgroup] = x;
  simds[s]->arrive_and_wait();
  float r = lanes[s][0];
  for (int i = 1; i < 32; i++) r = f(r, lanes[s][i]);
  simds[s]->arrive_and_wait();
  return r;
}
static float simd_sum(float x) { return over_lanes(x, [](float a, float b) { return a + b; }); }
static float simd_max(float x) { return over_lanes(x, [](float a, float b) { return a > b ? a : b; }); }
#define threadgroup_barrier(x) wait_all()
"""

LAUNCH = """
extern "C" void launch(int groups_x, int groups_y, void** given) {
  std::vector<std::thread> running;
  for (int y = 0; y < groups_y; y++)
    for (int x = 0; x < groups_x; x++) {
      std::barrier<> all(128), a(32), b(32), c(32), d(32);
      all_threads = &all;
      simds[0] = &a; simds[1] = &b; simds[2] = &c; simds[3] = &d;
      running.clear();
      for (int t = 0; t < 128; t++)
        running.emplace_back([=] {
          threadgroup_position_in_grid = {uint(x), uint(y), 0};
          threadgroups_per_grid = {uint(groups_x), uint(groups_y), 1};
          thread_position_in_threadgroup = {uint(t), 0, 0};
          thread_index_in_simdgroup = t % 32;
          simdgroup_index_in_threadgroup = t / 32;
          body(given);
        });
      for (auto& thread : running) thread.join();
    }
}
"""


@functools.cache
def _compiled(folder: str, header: str, source: str, declared: str) -> Any:
    header = "\n".join(line for line in header.splitlines() if not line.startswith(("#include", "using namespace")))
    text = f"{PRELUDE}\n{header}\nstatic void body(void** given) {{\n{declared}\n{source}\n}}\n{LAUNCH}"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = Path(folder) / f"{name}.so"
    if not path.exists():
        code = path.with_suffix(".cpp")
        code.write_text(text.replace("mem_flags::mem_threadgroup", "0"))
        command = [str(COMPILER), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", "-o", str(path), str(code)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(path)).launch


def _run(folder: str, parts: dict[str, Any], inputs: list[Any], outputs: list[Any], groups: tuple[int, int]) -> None:
    """Runs a kernel on arrays of NumPy; `q_strides` are given too, as MLX does."""
    given, declared = [], []
    for name, array in zip([*parts["input_names"], *parts["output_names"]], [*inputs, *outputs], strict=True):
        kind = {"float32": "float", "int32": "int", "uint32": "uint"}[array.dtype.name]
        declared.append(f"{kind}* {name} = ({kind}*)given[{len(given)}];")
        given.append(array)
        if name == "q":
            declared.append(f"int64_t* q_strides = (int64_t*)given[{len(given)}];")
            given.append(np.array([s // array.itemsize for s in array.strides], np.int64))
    pointers = (ctypes.c_void_p * len(given))(*(a.ctypes.data for a in given))
    _compiled(folder, parts["header"], parts["source"], "\n".join(declared))(*groups, pointers)


class Emulated(metal.MetalLauncher):
    """The launcher of Metal, with its kernels run here. For 32 bits only."""

    folder = ""

    def __init__(self, shape: Shape, slabs: int) -> None:
        self.shape, self.slabs = shape, slabs
        self.parts = metal.partial_source(shape, slabs)
        self.tile = metal.tile(shape)

    def partial(self, given: Partial) -> tuple[mx.array, mx.array]:
        arrays = [a for slab in given.arrays for a in slab] + given.arrays[0] * (self.slabs - len(given.arrays))
        heads, length = given.q.shape[1:3]
        q = np.ascontiguousarray(np.array(given.q).transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)  # not in order
        fixed = [np.array(a) for a in (given.numbers, given.work, given.lists, given.scale, *arrays)]
        mixed = np.full((given.partials, heads, length, self.shape.value_dim), np.nan, np.float32)
        sums = np.full((given.partials, heads, length, 2), np.nan, np.float32)
        _run(self.folder, self.parts, [q, *fixed], [mixed, sums], given.blocks)
        return mx.array(mixed), mx.array(sums)

    def reduce(self, given: Reduction) -> mx.array:
        rows, heads, length, value_dim = given.shape
        parts = metal.reduce_source("float", value_dim, "" if given.sinks is None else "float32")
        sinks = given.mixed if given.sinks is None else given.sinks
        inputs = [np.array(a) for a in (given.numbers, given.lists, given.mixed, given.sums, sinks)]
        out = np.full(given.shape, np.nan, np.float32)
        _run(self.folder, parts, inputs, [out], (rows, heads * length))
        return mx.array(out)


def emulated_kernel(folder: Path) -> DecodeKernel:
    cls = type("Emulated", (Emulated,), {"folder": str(folder)})
    return DecodeKernel(cls, metal.takes, metal.MOST_ARRAYS)


assert metal_source.THREADS == 128
