"""The decode kernel: its work table, the path of a step through it, and on a GPU the kernel itself."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cuda_emulation import emulated_kernel as emulated_cuda
from driving import close, fresh, words
from driving import forward as feed
from kernel_reference import Reference, reference_kernel
from metal_emulation import COMPILER, emulated_coding, emulated_kernel
from tiny import tiny

import onefold
from onefold.cache.memory import device
from onefold.cache.model.formats.turned import turned_sides
from onefold.cache.model.kernels import coding_comparison, comparison, compiled, cuda, cuda_source, current, trial
from onefold.cache.model.kernels.coded_rows import Coding
from onefold.cache.model.kernels.decode import DecodeKernel, Format, Shape
from onefold.cache.model.kernels.work_table import MOST_QUERIES, PADDING, WorkTable

PLAIN = Format("plain", 2)
AFFINE = [Format("affine", 6, *how) for how in ((8, 64), (4, 64), (4, 32))]
STORED = [Format("rotated", 1, *how) for how in ((5, 0, 4), (8, 0, 4), (8, 0, 8))]
STORED += [Format("turbo", 1, b, 0, b) for b in (4, 3)]
CODED = [form._replace(turns=True) for form in STORED]


FLOAT = Shape(32, 32, mx.float32, PLAIN)


def slab_of(capacity: int, heads: int = 1) -> comparison.Slab:
    return comparison.Slab(capacity, heads, FLOAT)


def random_layout(rng: random.Random, slabs: list[Any], rows: int, length: int) -> list[list[tuple[Any, int, int]]]:
    """Rows that share a prefix or not, each with ranges of its own; the last `length` tokens of each are its own."""
    prefix = _range(rng, rng.choice(slabs[rows:])) if rng.random() < 0.6 else None
    layout = []
    for i in range(rows):
        row = []
        if prefix is not None and rng.random() < 0.8:
            slab, lo, hi = prefix
            row.append((slab, lo, hi if rng.random() < 0.5 else rng.randrange(lo, hi) + 1))
        for slab in rng.sample(slabs[rows:], rng.choice([0, 0, 1, 2])):
            if all(slab is not other for other, _, _ in row):
                row.append(_range(rng, slab))
        lo = rng.randrange(slabs[i].capacity - length + 1)
        row.append((slabs[i], lo, rng.randrange(lo + length, slabs[i].capacity + 1)))
        layout.append(row)
    return layout


def _range(rng: random.Random, slab: Any) -> tuple[Any, int, int]:
    lo = rng.randrange(slab.capacity)
    return slab, lo, rng.randrange(lo, slab.capacity) + 1


def compare(
    kernel: DecodeKernel,
    seed: int,
    dims: tuple[int, int],
    dtype: Any,
    most: float,
    *,
    small: bool = False,
    form: Format = PLAIN,
) -> None:
    rng = random.Random(seed)
    mx.random.seed(seed)
    rows, heads = rng.choice([1, 2, 3] if small else [1, 2, 3, 8, 20]), rng.choice([1, 2] if small else [1, 2, 3, 8])
    repeats, length = rng.choice([1, 2, 4, 5, 8, 16]), rng.choice([1, 1, 1, 2, 3, MOST_QUERIES])
    capacities = [rng.choice([8, 20, 64] if small else [8, 64, 256, 1000, 2048]) for _ in range(rows + 3)]
    shape = Shape(*dims, dtype, form)
    slabs = [comparison.Slab(c, heads, shape) for c in capacities]
    layout = random_layout(rng, slabs, rows, length)
    q = mx.random.normal((rows, length, heads * repeats, dims[0])).astype(dtype).transpose(0, 2, 1, 3)
    sinks = (3 * mx.random.normal((heads * repeats,))).astype(dtype) if rng.random() < 0.3 else None
    scale = dims[0] ** -0.5
    table = kernel.table(layout, length, heads, shape)
    arrays, signs = [slab.arrays for slab in table.slabs], comparison.signs(shape)
    out = kernel.attend(q, arrays, table, shape, heads, scale, sinks, signs)
    want = comparison.attention(q, layout, scale, sinks, shape)
    error = mx.abs(out.astype(mx.float32) - want).max().item()
    assert error <= most * max(1.0, mx.abs(want).max().item()), f"seed {seed}: {error}"


@pytest.mark.parametrize("most_slabs", [4, 12, 120])
@pytest.mark.parametrize("seed", range(20))
def test_a_table_reads_every_token_of_every_row_once(seed, most_slabs):
    with mx.stream(mx.cpu):  # in full 32 bits: products of a GPU may have fewer
        compare(reference_kernel(most_slabs), 100 * most_slabs + seed, (32, 32), mx.float32, 1e-5)


@pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU")
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (256, 256), (96, 96), (192, 128)])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_kernel_computes_what_plain_operations_do(dims, dtype):
    kernel = current.device_kernel()
    assert kernel is not None
    for seed in range(12):
        compare(kernel, seed, dims, dtype, 2e-2)


@pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU")
@pytest.mark.parametrize("form", [PLAIN, *AFFINE, *CODED])
def test_a_trial_on_this_device_passes(form, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEFOLD_CACHE_DIR", str(tmp_path))
    tried = trial.Trial(Shape(128, 128, mx.bfloat16, form), 32, 8)
    assert trial.reason(tried) == ""
    assert list(trial.kept().values()) == [tried]


def test_a_result_holds_for_the_sources_with_which_it_was_found(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEFOLD_CACHE_DIR", str(tmp_path))
    tried = trial.Trial(Shape(128, 128, mx.bfloat16, PLAIN), 32, 8)
    monkeypatch.setattr(trial.subprocess, "run", lambda *given, **options: completed('{"found": "it differs"}'))
    assert trial.repeat(tried) == trial.reason(tried) == "it differs" and list(trial.kept().values()) == [tried]
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"another source")
    trial.sources.cache_clear()
    try:
        assert trial.kept() == {}
    finally:
        trial.sources.cache_clear()


def completed(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 0, stdout=line, stderr="")


def test_kernels_of_one_name_and_different_sources_are_told_apart(monkeypatch):
    """MLX may find what it compiled by the name alone."""
    named = list[str]()
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda name, **parts: named.append(name))
    given = {"name": "one", "input_names": ["x"], "output_names": ["y"], "header": "", "source": "y[0] = x[0];"}
    for changed in ({}, {}, {"source": "y[0] = 2 * x[0];"}, {"header": "#define of_two 2"}):
        compiled.kernel({**given, **changed})
    assert named[0] == named[1] and len(set(named)) == 3 and all(name.startswith("one_") for name in named)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("form", [*CODED, STORED[0]], ids=lambda form: form.tag)
def test_the_source_for_metal_reads_every_format(form, tmp_path_factory):
    kernel = emulated_kernel(tmp_path_factory.mktemp("metal"))
    for seed in range(2):
        with mx.stream(mx.cpu):
            compare(kernel, seed, (64, 128) if form.turns else (64, 96), mx.float32, 1e-4, small=True, form=form)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dims"),
    [
        (PLAIN, (64, 96)),
        (AFFINE[0], (64, 64)),
        (AFFINE[2], (64, 96)),
        (CODED[0], (64, 64)),
        (STORED[0], (32, 96)),
        (CODED[0], (64, 256)),
        (CODED[1], (64, 128)),
        (CODED[1], (32, 256)),
        (STORED[1], (32, 96)),
        (CODED[2], (64, 64)),
        (CODED[3], (64, 64)),
        (STORED[2], (64, 96)),
        (STORED[4], (32, 96)),
    ],
)
def test_the_source_for_cuda_reads_every_format(form, dims, tmp_path):
    kernel = emulated_cuda(tmp_path)
    for seed in range(2):
        with mx.stream(mx.cpu):
            compare(kernel, seed, dims, mx.bfloat16, 2e-2, small=True, form=form)


def test_tiles_leave_every_gpu_room_for_a_block():
    """And the kernel asks for more shared memory than usual wherever its own and that of the tiles are more."""
    for form in (PLAIN, *AFFINE, *STORED):
        for key_dim in range(32, 257, 32):
            for value_dim in range(32, 257, 32):
                shape = Shape(key_dim, value_dim, mx.bfloat16, form)
                staged = cuda.staging(shape)
                if staged is None:
                    assert form in AFFINE or value_dim > 160 or key_dim + value_dim > 256
                    continue
                own = cuda_source.shared_bytes(key_dim, value_dim, cuda.tile(shape))
                tiles = staged.stages * 4 * staged.tile_bytes
                assert 2 <= staged.stages <= 4 and tiles <= staged.n_bytes
                assert tiles + own <= cuda.MOST_SHARED
                assert staged.n_bytes + own <= cuda.USUAL_SHARED or staged.n_bytes >= cuda.USUAL_SHARED


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("form", [CODED[0], *(pytest.param(form, marks=pytest.mark.slow) for form in CODED[1:])])
def test_the_source_that_encodes_computes_what_plain_operations_do(form, tmp_path, monkeypatch):
    monkeypatch.setattr(coding_comparison, "SHAPES", ((1, 1, 1), (2, 2, 1)))  # each of its threads is a thread here
    how = Coding(form.name, 32, 64, form.bits, form.value_bits, mx.float32)
    with mx.stream(mx.cpu):
        assert coding_comparison.compare(how, *emulated_coding(tmp_path)) == ""


@pytest.mark.parametrize("form", CODED, ids=lambda form: form.tag)
def test_a_wrong_encoding_is_found(form):
    how = Coding(form.name, 64, 64, form.bits, form.value_bits, mx.float32)
    codec = turned_sides(how, turns=form.turns)

    def encode(_how: Any, k: mx.array, v: mx.array, *_signs: mx.array, across: bool = False) -> mx.array:
        return (codec.encode_step if across else codec.encode)(k, v)[0]

    def turn(how: Any, x: mx.array, _signs: mx.array) -> mx.array:
        return codec.values.turn_back(x) if how.back else codec.keys.turn(x)

    def decode(_how: Any, rows: mx.array) -> tuple[mx.array, mx.array]:
        return codec.decode([rows], mx.float32)

    def flipped(*given: Any, **options: Any) -> mx.array:
        rows = encode(*given, **options)
        rows[..., 0] ^= 4
        return rows

    def scaled(*given: Any, **options: Any) -> mx.array:
        rows = encode(*given, **options)
        rows[..., -1:] = (rows[..., -1:].view(mx.float16) * 1.1).view(mx.uint32)
        return rows

    def regrouped(*given: Any, **options: Any) -> mx.array:
        rows = encode(*given, **options)
        rows[..., -2] >>= 1
        return rows

    assert coding_comparison.compare(how, encode, turn, decode) == ""
    assert "differ, across" in coding_comparison.compare(how, lambda *given, across=False: encode(*given), turn, decode)
    assert "codes differ" in coding_comparison.compare(how, flipped, turn, decode)
    assert "scales differ" in coding_comparison.compare(how, scaled, turn, decode)
    if how.value_groups > 1:
        assert "values of (1, 1, 1): scales differ" in coding_comparison.compare(how, regrouped, turn, decode)
    wrong = coding_comparison.compare(how, encode, lambda *given: (-1 if given[0].back else 1) * turn(*given), decode)
    assert "turned back" in wrong
    assert "keys, decoded" in coding_comparison.compare(how, encode, turn, lambda *given: (2 * decode(*given)[0],) * 2)
    assert "values, decoded" in coding_comparison.compare(how, encode, turn, lambda *given: (decode(*given)[0],) * 2)


@pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU")
@pytest.mark.parametrize("form", CODED, ids=lambda form: form.tag)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (256, 256), (64, 128)])
def test_a_trial_of_encoding_on_this_device_passes(form, dims, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEFOLD_CACHE_DIR", str(tmp_path))
    tried = trial.CodingTrial(Coding(form.name, *dims, form.bits, form.value_bits, mx.bfloat16))
    assert trial.reason(tried) == ""
    assert list(trial.kept().values()) == [tried]


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dims", [(32, 32), pytest.param((64, 96), marks=pytest.mark.slow)])
def test_the_source_for_metal_computes_what_plain_operations_do(dims, tmp_path_factory):
    kernel = emulated_kernel(tmp_path_factory.mktemp("metal"))
    for seed in range(4):
        with mx.stream(mx.cpu):
            compare(kernel, seed, dims, mx.float32, 1e-4, small=True)


def test_a_prefix_is_read_once_for_all_rows():
    prefix, own = slab_of(1024), [slab_of(64) for _ in range(8)]
    table = WorkTable([[(prefix, 0, 900), (s, 0, 1)] for s in own], 1, 8, 120)
    (launch,) = table.launches()
    entries = np.array(launch.work)
    assert sum(hi - lo for _, lo, hi, *_ in entries.tolist()) == 900 + 8
    assert table.readers == 8


def test_rows_that_leave_a_prefix_at_different_places_read_what_they_share_once():
    prefix, own = slab_of(1024), [slab_of(64) for _ in range(2)]
    table = WorkTable([[(prefix, 0, 900), (own[0], 0, 10)], [(prefix, 0, 600), (own[1], 0, 10)]], 1, 8, 120)
    (launch,) = table.launches()
    assert sum(hi - lo for _, lo, hi, *_ in np.array(launch.work).tolist()) == 900 + 20


def test_a_table_follows_the_rows_while_each_grows_by_one():
    prefix, arena = slab_of(1024), slab_of(1024)

    def layout(n: int) -> Any:
        return [[(prefix, 0, 500), (arena, 256 * i, 256 * i + n + i)] for i in range(3)]

    table = WorkTable(layout(1), 1, 8, 120)
    for n in range(2, 50):
        assert table.follow(layout(n))
        fresh = WorkTable(layout(n), 1, 8, 120)
        assert np.array_equal(np.array(table.launches()[0].work), np.array(fresh.launches()[0].work))
    again = layout(50)
    assert table.follow(again)
    assert table.follow(again)  # for the next layer
    assert not table.follow(layout(50))
    assert not table.follow(layout(52))
    assert not table.follow(layout(51)[:2])
    arena.capacity *= 2  # it has grown: rows of the next heads lie elsewhere
    assert not table.follow(layout(51))


def test_a_row_that_fills_its_last_chunk_needs_another_table():
    slab, other = slab_of(1024), slab_of(64)
    table = WorkTable([[(slab, 0, 254)], [(other, 0, 5)]], 1, 8, 120)
    assert all(table.follow([[(slab, 0, 254 + n)], [(other, 0, 5 + n)]]) for n in (1, 2))
    assert not table.follow([[(slab, 0, 257)], [(other, 0, 8)]])
    work = WorkTable([[(slab, 0, 257)]], 1, 8, 120).launches()[0].work
    assert (work[:, 5] > 0).sum().item() == 2
    assert len(work) % PADDING == 0


def test_very_long_rows_have_longer_chunks():
    slab = slab_of(8)
    slab.capacity = 1 << 20
    table = WorkTable([[(slab, 0, 1 << 20)]], 1, 8, 120)
    assert table.launches()[0].entries <= 128


def test_more_slabs_than_a_launch_has_arguments_for_are_several_launches():
    slabs = [slab_of(64) for _ in range(10)]
    table = WorkTable([[(s, 0, 5) for s in slabs]], 1, 8, 4)
    found = [(x.first, x.stop, x.entries, x.partials) for x in table.launches()]
    assert found == [(0, 4, 4, 4), (4, 8, 4, 4), (8, 10, 2, 2)]


@pytest.mark.parametrize(
    ("length", "mask", "dtype", "why"),
    [
        (9, "causal", mx.float32, "many queries"),
        (2, mx.ones((2, 2)), mx.float32, "a mask of the model's own"),
        (1, mx.ones((1, 2)), mx.float32, "a mask of the model's own"),
        (1, None, mx.float16, "queries of another type than the keys"),
        (1, None, mx.float32, ""),
        (8, "causal", mx.float32, ""),
    ],
)
def test_a_call_that_the_kernel_does_not_take_has_a_reason(length, mask, dtype, why):
    q = mx.zeros((1, 4, length, 32), dtype)
    assert reference_kernel().reason(q, FLOAT, mask) == why


def test_every_variant_is_compiled_once():
    made = []

    def make(shape: Shape, slabs: int) -> Reference:
        made.append(slabs)
        return Reference(shape, slabs)

    kernel = DecodeKernel(make, lambda shape: "", 240)
    for _ in range(2):
        kernel.compile_all(FLOAT, 4, 2, slab_of(8, 2).arrays)
    assert made == list(kernel.buckets(FLOAT))
    assert len(made) <= 8


def test_a_shape_that_cannot_be_compiled_is_not_used(caplog):
    def make(shape: Shape, slabs: int) -> Reference:
        raise RuntimeError("no compiler")

    kernel = DecodeKernel(make, lambda shape: "", 240)
    kernel.compile_all(FLOAT, 4, 2, slab_of(8, 2).arrays)
    assert "no compiler" in caplog.text
    assert kernel.reason(mx.zeros((1, 4, 1, 32)), FLOAT, None) == "the kernel cannot be compiled"


# -- the trial -----------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEFOLD_CACHE_DIR", str(tmp_path / "caches"))
    return tmp_path / "caches" / trial.FILE


TRIED = trial.Trial(FLOAT, 4, 2)


def child_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, code: str) -> None:
    """Has trials run `code` in place of the comparison."""
    (tmp_path / "stand_in_child.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(trial, "CHILD", "stand_in_child")


def test_the_comparison_finds_a_kernel_that_is_wrong():
    class Wrong(Reference):
        def partial(self, given: Any) -> Any:
            mixed, sums = super().partial(given)
            return mixed * 1.2, sums

    class Unnormal(Reference):
        def reduce(self, given: Any) -> Any:
            return super().reduce(given) * mx.array(float("nan"))

    with mx.stream(mx.cpu):
        assert comparison.compare(reference_kernel(4), FLOAT, 4, 2) == ""
        for cls in (Wrong, Unnormal):
            assert "differs by" in comparison.compare(DecodeKernel(cls, lambda shape: "", 8), FLOAT, 4, 2)


def test_a_comparison_has_a_case_for_every_variant_and_for_several_launches():
    for buckets in ((4, 12, 36, 120), (3,), (4, 11)):
        most = [case.rows * case.slabs + bool(case.shared) for case in comparison.cases(buckets, MOST_QUERIES)]
        for low, high in zip((0, *buckets), buckets, strict=False):
            assert any(low < n <= high for n in most), (buckets, high)
        assert max(most) > buckets[-1]


def test_a_comparison_has_cases_for_chunks_of_prompts():
    queries = {case.queries for case in comparison.cases((4, 12), 512)}
    assert max(queries) == 512
    assert len([n for n in queries if n > MOST_QUERIES]) > 1


def test_chunks_of_prompts_are_computed_by_a_kernel_that_takes_them(monkeypatch):
    kernel = DecodeKernel(Reference, lambda shape: "", 240, replaces_stock=True, most_queries=24)
    monkeypatch.setattr(current, "kernel", lambda: kernel)
    model = tiny("llama")
    prompt = words(90, seed=5)
    with onefold.PrefixCache(model, "64MB") as cache:
        for shared in (0, 60):  # one piece, then two
            tokens = [*prompt[:shared], *words(90 - shared, seed=6 + shared)]
            with cache.lease(prompt) as first, cache.lease(tokens) as lease:
                feed(model, first.layers, prompt, first.cached, grid=20)
                first.commit(prompt)
                before = kernel.counts.copy()
                logits = feed(model, lease.layers, tokens, lease.cached, grid=20)
                chunks = len(range(lease.cached, 89, 20)) + 1
                assert kernel.counts[""] - before[""] == chunks * len(model.layers)
                assert close(logits, fresh(model, tokens))
        with cache.lease(words(90, seed=8)) as lease:
            before = kernel.counts.copy()
            feed(model, lease.layers, words(90, seed=8), 0, grid=30)
            assert kernel.counts[""] - before[""] == len(model.layers)  # only the last token


def test_the_result_of_a_trial_is_kept(results, monkeypatch, tmp_path):
    child_that(monkeypatch, tmp_path, 'print(\'{"found": ""}\')')
    assert trial.reason(TRIED) == ""
    assert trial.kept() == {next(iter(trial.kept())): TRIED}
    child_that(monkeypatch, tmp_path, 'print(\'{"found": "it differs"}\')')
    assert trial.reason(TRIED) == ""  # kept
    assert trial.repeat(TRIED) == "it differs"
    assert trial.reason(TRIED) == "it differs"
    assert trial.reason(TRIED._replace(heads=8)) == "it differs"
    assert len(trial.kept()) == 2


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import time; time.sleep(60)", "did not end within 2 seconds"),
        ("import os; os.abort()", "ended with exit code -6"),
        ("raise SystemExit('no such device')", "exit code 1: no such device"),
        ("print('nothing')", "exit code 0"),
    ],
)
def test_a_kernel_that_hangs_or_ends_its_process_does_not_serve(results, monkeypatch, tmp_path, code, why):
    child_that(monkeypatch, tmp_path, code)
    assert why in trial.repeat(TRIED, seconds=2)
    assert why in trial.reason(TRIED)


@pytest.mark.parametrize("content", ["", "[]", "{not json", '{"x": 1, "y": {"trial": {}}}'])
def test_a_file_of_results_that_is_damaged_counts_as_empty(results, monkeypatch, tmp_path, content):
    child_that(monkeypatch, tmp_path, 'print(\'{"found": ""}\')')
    results.parent.mkdir()
    results.write_text(content)
    assert trial.kept() == {}
    assert trial.reason(TRIED) == ""
    assert list(trial.kept().values()) == [TRIED]


def test_a_trial_runs_where_its_result_cannot_be_kept(results, monkeypatch, tmp_path):
    child_that(monkeypatch, tmp_path, 'print(\'{"found": ""}\')')
    results.parent.write_text("a file")
    assert trial.reason(TRIED) == ""
    assert trial.kept() == {}


def test_the_child_says_that_a_cpu_has_no_kernel(results):
    if not device.on_gpu():
        assert trial.reason(TRIED) == "this device has no kernel"


def test_a_shape_serves_only_after_it_was_tried():
    tried = []

    def judge(shape: Shape, heads: int, n_kv: int) -> str:
        tried.append((shape, heads, n_kv))
        return "" if heads == 4 else "it differs"

    kernel = DecodeKernel(Reference, lambda shape: "", 240, judge=judge)
    other = FLOAT._replace(key_dim=64)
    assert kernel.shape_reason(FLOAT) == "not compared yet"
    kernel.compile_all(FLOAT, 5, 2, slab_of(8, 2).arrays)  # heads are a multiple of the keys'
    kernel.compile_all(other, 8, 2, slab_of(8, 2).arrays)
    kernel.compile_all(other, 8, 2, slab_of(8, 2).arrays)
    assert tried == [(FLOAT, 4, 2), (other, 8, 2)]
    assert kernel.shape_reason(FLOAT) == ""
    assert kernel.shape_reason(other) == "its trial failed"


@pytest.mark.parametrize(
    ("value", "off"), [("off", True), ("0", True), ("OFF", True), ("", False), ("on", False), ("of", True)]
)
def test_kernels_can_be_switched_off(monkeypatch, value, off, caplog):
    monkeypatch.setenv("ONEFOLD_KERNELS", value)
    monkeypatch.setattr(current, "device_kernel", reference_kernel)
    assert (current.kernel() is None) == off
    current.kernel()
    said = [r.getMessage() for r in caplog.records if "ONEFOLD_KERNELS=of is not known" in r.getMessage()]
    assert len(said) == (value == "of")
