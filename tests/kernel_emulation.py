"""Compiles a kernel's source as C++ and runs it on the CPU. Each of its threads is a thread; warps meet at barriers.
Needs a C++20 compiler."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

COMPILER = shutil.which("g++") or shutil.which("c++")
KINDS = {"float32": "float", "int32": "int", "uint32": "unsigned int", "uint16": "unsigned short"}

PRELUDE = """
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
struct place { unsigned int x, y, z; };
static thread_local int lane_, warp_;
static std::barrier<>* all_threads;
static std::vector<std::unique_ptr<std::barrier<>>> warps_;
static void meet() { warps_[warp_]->arrive_and_wait(); }
static unsigned short to_half(float x) {
  int e;
  std::frexp(x, &e);
  const bool tiny = x == 0 || e < -13;
  const float far = std::abs(x), near = tiny ? std::ldexp(far, 24) : std::ldexp(far, 11 - e) + 1024 * (e + 13);
  return std::min(int(std::nearbyint(near)), 0x7c00) | (x < 0 ? 0x8000 : 0);
}
static float from_half(unsigned short bits) {
  const int e = bits >> 10 & 31, m = bits & 1023;
  const float far = e == 31 ? 1e30f : e ? std::ldexp(float(1024 + m), e - 25) : std::ldexp(float(m), -24);
  return bits & 0x8000 ? -far : far;
}
template <class T> T of_lane(T x, int from) {
  static T kept[8][32];
  kept[warp_][lane_] = x;
  meet();
  const T r = kept[warp_][from];
  meet();
  return r;
}
template <class F> float over_lanes(float x, F f) {
  static float kept[8][32];
  kept[warp_][lane_] = x;
  meet();
  float r = kept[warp_][0];
  for (int i = 1; i < 32; i++) r = f(r, kept[warp_][i]);
  meet();
  return r;
}
"""

LAUNCH = """
extern "C" void launch(int groups_x, int groups_y, int threads, void** given) {
  std::vector<std::thread> running;
  for (int y = 0; y < groups_y; y++)
    for (int x = 0; x < groups_x; x++) {
      std::barrier<> all(threads);
      all_threads = &all;
      warps_.clear();
      for (int w = 0; w < threads / 32; w++) warps_.push_back(std::make_unique<std::barrier<>>(32));
      running.clear();
      for (int t = 0; t < threads; t++)
        running.emplace_back([=] {
          lane_ = t % 32;
          warp_ = t / 32;
          begin(x, y, t, groups_x, groups_y);
          body(given);
        });
      for (auto& thread : running) thread.join();
    }
}
"""


@functools.cache
def _compiled(folder: str, text: str) -> Any:
    path = Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        code = path.with_suffix(".cpp")
        code.write_text(text)
        command = [str(COMPILER), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", "-o", str(path), str(code)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(path)).launch


def run(
    folder: str,
    language: str,
    parts: dict[str, Any],
    inputs: list[Any],
    outputs: list[Any],
    groups: tuple[int, int],
    threads: int,
) -> None:
    """Runs a kernel on arrays of NumPy; the shapes and strides that it names are given too, as MLX does. `language` is
    what its source needs, in C++."""
    given, declared = [], []
    for name, array in zip([*parts["input_names"], *parts["output_names"]], [*inputs, *outputs], strict=True):
        kind = KINDS[array.dtype.name]
        declared.append(f"{kind}* {name} = ({kind}*)given[{len(given)}];")
        given.append(array)
        if f"{name}_strides" in parts["source"]:
            declared.append(f"int64_t* {name}_strides = (int64_t*)given[{len(given)}];")
            given.append(np.array([s // array.itemsize for s in array.strides], np.int64))
        if f"{name}_shape" in parts["source"]:
            declared.append(f"int* {name}_shape = (int*)given[{len(given)}];")
            given.append(np.array(array.shape, np.int32))
    body = f"static void body(void** given) {{\n{chr(10).join(declared)}\n{parts['source']}\n}}"
    text = f"{PRELUDE}\n{language}\n{parts['header']}\n{body}\n{LAUNCH}"
    pointers = (ctypes.c_void_p * len(given))(*(a.ctypes.data for a in given))
    _compiled(folder, text)(*groups, threads, pointers)


def in_other_order(array: Any) -> Any:
    """Returns an array of four axes, which are not in order in memory."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
