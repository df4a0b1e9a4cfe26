"""The invariants of the design, each by its number, on a real (tiny) model. See docs/architecture.md."""

from __future__ import annotations

import gc
import random
import threading
from typing import NamedTuple

import mlx.core as mx
import pytest
from driving import cold, forward, greedy, in_its_own_process, same, turn
from mlx_lm.generate import generate_step, speculative_generate_step
from tiny import tiny

import onefold
from onefold.cache.memory.device import weight_bytes
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.segment import STEP
from onefold.cache.model.formats.names import NAMES


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


def exact() -> None:
    """No buffers from MLX's pool, which may be larger than what was asked for."""
    mx.set_cache_limit(0)


def active() -> int:
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


@pytest.fixture(scope="module")
def long_model():
    """KV outweighs activations: many layers, narrow."""
    import mlx.nn as nn
    from mlx_lm.models import llama

    args = llama.ModelArgs(
        model_type="llama", hidden_size=32, num_hidden_layers=24, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-5, vocab_size=97,
    )  # fmt: skip
    mx.random.seed(1)
    model: nn.Module = llama.Model(args)
    mx.eval(model.parameters())
    return model


def stored(cache: onefold.PrefixCache, model, tokens: list[int]) -> list[int]:
    with cache.lease(tokens) as lease:
        out = [t for t, _ in generate_step(mx.array(lease.rest), model, max_tokens=2, prompt_cache=lease.layers)]
        lease.commit(tokens + out)
    return tokens + out


def test_1_continuing_allocates_no_second_buffer(long_model):
    with onefold.PrefixCache(long_model, "2GB") as cache:
        known = stored(cache, long_model, words(1000))
        entry = cache.stats().bytes["stored"]
        before = active()
        mx.reset_peak_memory()
        with cache.lease(known + words(20, seed=1)) as lease:
            out = [t for t, _ in generate_step(
                mx.array(lease.rest), long_model, max_tokens=300, prompt_cache=lease.layers)]  # fmt: skip
            lease.commit([*lease.tokens.tolist(), *out])
        growth = 2 * 256 * cache.state.store.token_bytes  # it outgrew its slack and was grown, layer by layer
        layer = cache.state.store.layer_token_bytes * 2000
        assert mx.get_peak_memory() - before < growth + layer + 0.02 * entry
        assert cache.stats().moves == 1


def test_1_growing_in_place_costs_one_layer(long_model):
    with onefold.PrefixCache(long_model, "2GB") as cache:
        known = stored(cache, long_model, words(1000))
        slab = next(iter(cache.state.store.slabs))
        before = active()
        mx.reset_peak_memory()
        slab.rewrite([(0, slab.used)], slab.capacity + 256)
        layer = cache.state.store.layer_token_bytes * slab.capacity
        assert mx.get_peak_memory() - before <= 256 * cache.state.store.token_bytes + 1.1 * layer
        cache.check()
        assert cache.lease([*known, 1]).cached == len(known)


def test_1_a_chunk_shrinks_to_what_the_budget_has_room_for():
    model, prompt = tiny("llama"), words(3000)
    with onefold.PrefixCache(model, "16MB") as cache:
        with cache.lease(prompt) as lease, pytest.raises(onefold.BudgetError):
            model(mx.array([prompt[:2048]]), cache=lease.layers)
        with cache.lease(prompt) as lease:
            sizes = []
            for chunk in lease.chunks(2048):
                mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
                sizes.append(len(chunk))
            assert sum(sizes) == 2999
            assert 16 <= max(sizes) < 2048
            lease.commit(prompt[:-1])
        assert cache.lease(prompt).cached == 2999


def test_2_concurrent_leases_hold_a_prefix_once(long_model):
    with onefold.PrefixCache(long_model, "2GB") as cache:
        prefix = words(800)
        known = stored(cache, long_model, prefix)[:800]
        before = active()
        leases = [cache.lease([*known, i, 1, 2]) for i in range(8)]
        for lease in leases:
            assert lease.cached == 800
            forward(long_model, lease.layers, lease.tokens.tolist(), lease.cached)
        held = active() - before
        assert held / 8 <= 300 * cache.state.store.token_bytes
        for lease in leases:
            lease.cancel()
        cache.check()


@pytest.mark.parametrize("family", ["llama", "llama_sliding", "qwen3_next", "falcon_h1", "mamba2", "gemma3"])
def test_3_the_ledger_equals_active_memory_between_steps(family):
    model = tiny(family)
    before = active()
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        exact()

        def compare() -> None:
            ours = sum(cache.stats().bytes[p] for p in ("live", "stored", "checkpoint"))
            real = active() - before
            assert abs(ours - real) <= max(0.01 * real, 1024), (ours, real)

        known = words(40)
        for i in range(4):
            with cache.lease(known) as lease:
                logits = forward(model, lease.layers, known, lease.cached)
                del logits
                compare()
                other = cache.lease([*known[:20], 95])
                forward(model, other.layers, [*known[:20], 95], other.cached)
                compare()
                other.cancel()
                compare()
                lease.commit(known)
            compare()
            known = known + words(30, seed=i)


def test_3_with_mlx_s_pool_the_ledger_is_within_a_hundredth_for_arrays_of_256_kb():
    """The pool may hand out buffers that are larger than asked for, by two pages at most."""
    from mlx_lm.models import llama

    args = llama.ModelArgs(
        model_type="llama", hidden_size=32, num_hidden_layers=1, intermediate_size=32, num_attention_heads=8,
        num_key_value_heads=8, head_dim=1024, rms_norm_eps=1e-5, vocab_size=131,
    )  # fmt: skip
    mx.random.seed(0)
    model = llama.Model(args)
    mx.eval(model.parameters())
    before, rng = active(), random.Random(5)
    with onefold.PrefixCache(model, "80MB") as cache:
        known = [words(48)]
        for i in range(25):
            base = rng.choice(known)  # by 8 tokens, which are 256 kB
            prompt = base[: 8 * rng.randrange(1, len(base) // 8 + 1)] + words(8 * rng.randrange(1, 12), seed=i)
            with cache.lease(prompt) as lease:
                for chunk in lease.chunks(40):
                    mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
                mx.eval(model(mx.array([prompt[-1:]]), cache=lease.layers))
                lease.commit(prompt)
            known = [*known, prompt][-20:]
            stats = cache.stats()
            ours, real = stats.bytes["live"] + stats.bytes["stored"], mx.get_active_memory() - before
            sizes = [a.nbytes for s in cache.state.store.slabs for layer in s.layers if layer for a in layer]
            assert sum(n < 1 << 18 for n in sizes) <= len(sizes) / 4
            assert abs(ours - real) <= 0.01 * real, (ours, real)
        assert stats.evicted_tokens > 0 and mx.get_cache_memory() > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "deepseek_v3", "mixtral", "falcon_h1"])
def test_3_during_a_forward_active_memory_stays_below_the_ledger(family):
    model = tiny(family)
    before = active()
    with onefold.PrefixCache(model, "256MB", min_checkpoint_tokens=1) as cache:
        prompt = words(700)
        with cache.lease(prompt) as lease:
            for start in range(0, 700, 350):
                mx.reset_peak_memory()
                mx.eval(model(mx.array([prompt[start : start + 350]]), cache=lease.layers))
                ledger = cache.stats()
                room = ledger.used_bytes - ledger.bytes["pool"]
                assert mx.get_peak_memory() - before <= room


def test_4_the_ledger_never_exceeds_the_budget_and_growth_is_refused_at_the_first_layer():
    model = tiny("llama")
    with onefold.PrefixCache(model, "1MB") as cache:
        prompt = words(300)
        with cache.lease(prompt) as lease:
            with pytest.raises(onefold.BudgetError) as refused:
                for _ in range(100):
                    model(mx.array([prompt]), cache=lease.layers)
            assert refused.value.needed_bytes > refused.value.available_bytes
            assert lease.hold.uniform
        stats = cache.stats()
        assert stats.peak_bytes <= stats.budget_bytes
        cache.check()


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "lfm2", "gemma3"])
def test_5_a_stored_array_pins_exactly_what_it_reports(family):
    model = tiny(family)
    before = active()
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        exact()
        prompt = words(600)
        with cache.lease(prompt) as lease:
            mx.eval(model(mx.array([prompt]), cache=lease.layers))
            lease.commit(prompt)
        stats = cache.stats()
        reported = stats.bytes["stored"] + stats.bytes["checkpoint"]
        assert abs(active() - before - reported) <= 1024


def test_5_a_short_branch_that_is_moved_out_pins_no_more_than_its_tokens():
    """A single head: a range of its tokens is contiguous already, which is no reason to keep the whole buffer."""
    model = tiny("deepseek_v3")
    turn_ = words(40)
    before = active()
    with onefold.PrefixCache(model, "64MB") as cache:
        exact()
        for tail in ([91, 92, 93], [94, 95]):
            with cache.lease(turn_ + tail) as lease:
                mx.eval(forward(model, lease.layers, turn_ + tail, lease.cached))
                lease.commit(turn_ + tail)
        stats = cache.stats()
        assert stats.moves == 1
        assert abs(active() - before - stats.bytes["stored"]) <= 1024


def test_6_a_committed_segment_is_never_written():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        _, known = turn(cache, model, words(50))
        node = cache.state.nodes.tree(cache.parts.key("")).match(cache.lease(known).tokens).path[0]
        span = node.span
        image = [mx.array(a[..., span.lo : span.hi, :]) for a in span.slab.arrays(0)]
        mx.eval(image)
        turn(cache, model, [*known[:30], 91, 92, 93])
        turn(cache, model, [*known, 94])
        with cache.lease([*known, 1, 2]) as lease:
            forward(model, lease.layers, [*known, 1, 2], lease.cached)
            for layer in lease.layers:
                layer.trim(30)  # far below what is committed
            forward(model, lease.layers, [*known[: lease.offset], 5, 5, 5], lease.offset)
        cache.check()
        found = cache.state.nodes.tree(cache.parts.key("")).match(cache.lease(known).tokens).path
        at = 0
        for n in found:
            for a, b in zip(n.span.slab.arrays(0), image, strict=True):
                length = min(n.end, image[0].shape[2]) - n.start
                if length > 0:
                    mine = a[..., n.span.lo : n.span.lo + length, :]
                    assert mx.array_equal(mine, b[..., n.start : n.start + length, :])
                    at += length
        assert at > 0


def test_7_payloads_span_exactly_their_edges():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        _, known = turn(cache, model, words(50))
        for cut in (10, 20, 30):
            turn(cache, model, [*known[:cut], 91, cut])
        for node in cache.state.nodes.nodes():
            assert node.span.hi - node.span.lo == node.end - node.start == len(node.tokens)


# 8, reused equals fresh, is tests/test_models.py


def test_9_reclaiming_frees_bytes_and_spares_leased_and_pinned_nodes():
    model = tiny("llama")
    with onefold.PrefixCache(model, "1MB") as cache:
        _, system = turn(cache, model, words(100))
        pin = cache.pin(system)
        _, mine = turn(cache, model, system + words(60, seed=1))
        lease = cache.lease([*mine, 3])
        assert lease.cached == len(mine)
        for i in range(30):
            turn(cache, model, words(120, seed=100 + i), n=1)
        assert cache.stats().evicted_tokens > 0
        forward(model, lease.layers, [*mine, 3], lease.cached)
        lease.commit([*mine, 3])
        again = cache.lease([*system, 5])
        assert again.cached == len(system)
        again.cancel()
        pin.release()
        cache.check()


@pytest.mark.parametrize("prompt", [100, 400])
def test_9_a_victim_is_ranked_by_what_it_would_really_free(prompt: int):
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        _, known = turn(cache, model, words(prompt))
        lease = cache.lease([*known[:50], 91])
        (leaf,) = [node for node in cache.state.nodes.nodes() if not node.children]
        moved = leaf.end - 50 <= STEP  # out of the slab in which the lease continues
        assert (len(lease.hold.track.pieces) == 1) == moved
        assert (cache.state.reclaiming.frees(leaf) > 0) == moved
        lease.cancel()
        cache.check()


def test_9_reclaiming_allocates_at_most_one_layer(long_model):
    with onefold.PrefixCache(long_model, "2GB") as cache:
        stored(cache, long_model, words(1000))
        slab = next(iter(cache.state.store.slabs))
        layer = cache.state.store.layer_token_bytes * slab.capacity
        before = active()
        mx.reset_peak_memory()
        with cache.state.lock:
            cache.state.reclaiming.make_room(500 * cache.state.store.token_bytes)
        assert mx.get_peak_memory() - before <= 1.1 * layer
        assert active() < before - 400 * cache.state.store.token_bytes
        cache.check()


def test_10_close_returns_active_memory_to_the_weights(long_model):
    before = active()
    cache = onefold.PrefixCache(long_model, "2GB")
    known = stored(cache, long_model, words(500))
    lease = cache.lease([*known, 4])
    forward(long_model, lease.layers, [*known, 4], lease.cached)
    cache.close()
    del lease
    assert active() - before < 4096
    assert weight_bytes(long_model) <= before


def test_12_a_contiguous_copy_is_counted_and_ends_with_the_sharing():
    """A model outside the seam: two readers of one prefix cost one budgeted copy, and only while both are open."""
    model = tiny("deepseek_v3")
    with onefold.PrefixCache(model, "64MB") as cache:
        assert cache.state.model.contiguous
        _, known = turn(cache, model, words(300))
        alone = cache.stats().bytes["stored"]
        first = cache.lease([*known, 1])
        second = cache.lease([*known, 2])
        assert first.cached == second.cached == len(known)
        stats = cache.stats()
        assert stats.bytes["live"] + stats.bytes["stored"] >= 1.8 * alone
        for lease in (first, second):
            forward(model, lease.layers, lease.tokens.tolist(), lease.cached)
            lease.commit(lease.tokens)
        cache.check()
        with cache.state.lock:
            for slab in list(cache.state.store.slabs):
                cache.state.lock.run(cache.state.placement.compacting(slab))
        assert cache.stats().bytes["stored"] <= 1.1 * alone


def test_13_every_shortened_hit_has_a_counted_reason():
    model = tiny("qwen3_next")
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        _, known = turn(cache, model, words(40))
        lease, _ = turn(cache, model, [*known[:20], 91])
        assert (lease.matched, lease.cached, lease.reason) == (20, 0, "no checkpoint")
        assert cache.stats().reasons["no checkpoint"] == 1
        with pytest.raises(onefold.BudgetError):
            cache.lease(words(10_000_000))
        assert cache.stats().reasons["no room"] == 1


# -- the lease under stock generators -----------------------------------------------------------


def test_generate_step_leaves_prompt_plus_yielded_also_after_an_early_break():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        prompt = words(30)
        with cache.lease(prompt) as lease:
            out = []
            for t, _ in generate_step(mx.array(lease.rest), model, max_tokens=20, prompt_cache=lease.layers):
                out.append(t)
                if len(out) == 3:
                    break
            assert lease.offset == 33
            lease.commit(prompt + out)
        assert cache.lease([*prompt, *out, 1]).cached == 33


def test_speculative_decoding_leases_target_and_draft_together():
    model, draft = tiny("llama"), tiny("llama", seed=3)
    plain = [t for t, _ in generate_step(mx.array(words(30)), model, max_tokens=12)]
    with onefold.PrefixCache(model, "64MB", draft_model=draft) as cache:
        known = words(30)
        for i in range(3):
            reference = [t for t, _ in generate_step(mx.array(known), model, max_tokens=12)]
            with cache.lease(known) as lease:
                assert len(lease.layers) == len(model.layers) + len(draft.layers)
                out = [
                    t
                    for t, _, _ in speculative_generate_step(
                        mx.array(lease.rest), model, draft, max_tokens=12, prompt_cache=lease.layers
                    )
                ]
                assert out == reference
                held = lease.hold.watchers[0].position
                lease.commit((known + out)[:held])
            cache.check()
            if i:
                assert lease.cached > 30
            known = known + out + words(3, seed=i + 1)
    assert plain


def test_a_draft_that_is_behind_is_clipped_to_the_shorter():
    model, draft = tiny("llama"), tiny("llama", seed=3)
    with onefold.PrefixCache(model, "64MB", draft_model=draft) as cache:
        prompt = words(30)
        with cache.lease(prompt) as lease:
            n = len(model.layers)
            mx.eval(model(mx.array([prompt]), cache=lease.layers[:n]))
            mx.eval(draft(mx.array([prompt[:20]]), cache=lease.layers[n:]))
            lease.commit(prompt)
        cache.check()
        assert cache.lease([*prompt, 1]).cached == 20


def test_quantised_segments_are_attended_without_dequantising():
    model = tiny("llama_q")
    reference = cold(model, words(200), 4)
    with onefold.PrefixCache(model, "64MB", kv="8") as cache, onefold.PrefixCache(model, "64MB") as plain:
        for c in (cache, plain):
            with c.lease(words(200)) as lease:
                forward(model, lease.layers, words(200), 0)
                lease.commit(words(200))
        assert cache.stats().bytes["stored"] < 0.6 * plain.stats().bytes["stored"]
        before = active()
        mx.reset_peak_memory()
        leases = [cache.lease([*words(200), i, 2]) for i in range(2)]
        for lease in leases:
            forward(model, lease.layers, lease.tokens.tolist(), lease.cached)
        dequantised = plain.stats().bytes["stored"]
        assert mx.get_peak_memory() - before < dequantised
        for lease in leases:
            lease.cancel()
        with cache.lease([*words(200)[:-1], words(200)[-1]]) as lease:
            logits = forward(model, lease.layers, words(200), lease.cached)
            _, seen = greedy(model, lease.layers, logits, 4)
            assert same(seen, reference[1], tolerance=0.08)
        assert all(k.value == "quantized" for leaf in lease.hold.watchers[0].leaves for k in (leaf.kind,))


def _seam_is_reversible():
    from mlx_lm.models import llama

    stock_function, stock_call = llama.scaled_dot_product_attention, llama.Model.__call__
    one, two = onefold.PrefixCache(tiny("llama"), "8MB"), onefold.PrefixCache(tiny("llama"), "8MB")
    assert llama.scaled_dot_product_attention is not stock_function
    one.close()
    assert llama.scaled_dot_product_attention is not stock_function
    two.close()
    assert llama.scaled_dot_product_attention is stock_function
    assert llama.Model.__call__ is stock_call


def test_the_seam_is_reversible_and_shared_by_caches_of_one_architecture():
    """In a process of its own: another test's cache may still be open in this one."""
    in_its_own_process("test_invariants", "_seam_is_reversible")


def test_one_forward_per_decode_step_for_all_rows(monkeypatch):
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        leases = [cache.lease(words(5 + i, seed=i)) for i in range(4)]
        for lease in leases:
            forward(model, lease.layers, lease.tokens.tolist(), 0)
        batch, calls = cache.batch(leases), []
        inner = type(model).__call__
        monkeypatch.setattr(type(model), "__call__", lambda *a, **k: (calls.append(1), inner(*a, **k))[1])
        mx.eval(batch.step(mx.array([1, 2, 3, 4])))
        assert len(calls) == 1


@pytest.mark.parametrize("others", [(1, True, 1.0), (0, False, 0.0, -0.0), (("a", 1), ("a", True)), ("1", b"1", 1)])
def test_namespaces_that_are_equal_in_python_never_share(others, tmp_path):
    model, tokens = tiny("llama"), words(40)
    for opened in range(2):  # the second time from disk
        with onefold.PrefixCache(model, "64MB", disk=tmp_path, disk_mode="through") as cache:
            for i, namespace in enumerate(others):
                lease, _ = turn(cache, model, tokens + [i + 1] * 3, namespace=namespace)
                assert lease.cached == (42 if opened else 0), f"{namespace!r} of {others}"
                assert cache.inventory.matched([*tokens, 99], namespace=namespace) == 40


class Named(NamedTuple):
    who: object


def test_members_of_namespaces_are_compared_with_their_types_and_large_ones_are_taken():
    model, tokens = tiny("llama"), words(40)
    with onefold.PrefixCache(model, "64MB") as cache:
        sets = frozenset({1, 2.0}), frozenset({1.0, 2})
        for namespace in (*sets, Named(1), Named(True), (1, (2,)), (1, (2.0,)), 10**5000):
            lease, _ = turn(cache, model, tokens, namespace=namespace)
            assert lease.cached == 0, namespace


def test_namespaces_never_share():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        turn(cache, model, words(40), namespace="alice")
        lease, _ = turn(cache, model, words(40), namespace="bob")
        assert lease.matched == 0
        lease, _ = turn(cache, model, words(40), namespace="alice")
        assert lease.cached == 39


def test_fingerprints_tell_weights_adapters_and_formats_apart():
    a, b = tiny("llama_q"), tiny("llama_q", seed=2)
    formats = set()
    for model, options in (
        (a, {}),
        (b, {}),
        (a, {"adapter": "x"}),
        (a, {"max_kv_size": 64}),
        *((a, {"kv": kv}) for kv in NAMES if kv != "16"),
    ):
        with onefold.PrefixCache(model, "8MB", **options) as cache:
            formats.add(cache.parts.form)
    assert len(formats) == 4 + len(NAMES) - 1


def test_a_hundred_short_requests_on_a_hybrid_model_leave_memory_flat():
    model = tiny("qwen3_next")
    with onefold.PrefixCache(model, "64MB") as cache:
        sizes = []
        for i in range(100):
            prompt = words(20, seed=i)
            with cache.lease(prompt) as lease:
                forward(model, lease.layers, prompt, lease.cached)
                lease.commit(prompt)
            if i in (10, 99):
                sizes.append(active())
        assert sizes[1] - sizes[0] <= 4096
        cache.check()


@pytest.mark.parametrize(("budget", "all_stay"), [("64MB", True), ("1500kB", False)])
def test_checkpoints_are_bounded_by_their_bytes_and_not_by_a_count(budget, all_stay):
    model = tiny("qwen3_next")
    with onefold.PrefixCache(model, budget, min_checkpoint_tokens=1) as cache:
        known = words(20)
        for i in range(24):
            _, known = turn(cache, model, known + words(4, seed=i), n=1)
            stats = cache.stats()
            assert stats.bytes["checkpoint"] <= stats.budget_bytes // 4
        assert (stats.checkpoints == 48) == all_stay
        assert stats.stored_tokens == len(known)


def test_several_threads_may_lease_commit_and_read_statistics():
    model = tiny("llama")
    prompts = [words(40, seed=0) + words(5, seed=i) for i in range(4)]
    references = [cold(model, p, 4)[1] for p in prompts]
    failures: list[object] = []
    with onefold.PrefixCache(model, "64MB") as cache:

        def run(i: int) -> None:
            try:
                for _ in range(4):
                    with mx.stream(mx.new_stream(mx.cpu)), cache.lease(prompts[i]) as lease:
                        logits = forward(model, lease.layers, prompts[i], lease.cached)
                        out, seen = greedy(model, lease.layers, logits, 4)
                        if not same(seen, references[i]):
                            failures.append((i, "wrong"))
                        lease.commit(prompts[i] + out)
                    cache.stats()
                    cache.check()
            except Exception as error:
                failures.append((i, repr(error)))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        cache.check()
        assert cache.stats().bytes["scratch"] == 0
        assert cache.state.ledger.by_purpose()[Purpose.LIVE.value] == 0


def test_a_model_that_quantises_its_kv_by_itself_is_reused(monkeypatch):
    from mlx_lm.models.cache import QuantizedKVCache

    model = tiny("llama_q")
    quantised = lambda self: [QuantizedKVCache(group_size=64, bits=8) for _ in self.layers]  # noqa: E731
    monkeypatch.setattr(type(model), "make_cache", quantised)
    with onefold.PrefixCache(model, "64MB") as cache:
        _, known = turn(cache, model, words(40))
        lease, _ = turn(cache, model, [*known, 1])
        assert lease.cached == len(known)
        assert cache.parts.models.anatomies[0].kinds == {"quantized": 2}


def test_other_tokens_than_were_leased_are_refused_before_they_are_stored():
    model, prompt = tiny("llama"), words(30)
    with onefold.PrefixCache(model, "64MB") as cache:
        _, known = turn(cache, model, prompt)
        refused = pytest.raises(onefold.LeaseError, match=f"position {len(known)} .*rest")
        with cache.lease([*known, 1, 2]) as lease, refused:
            for _ in generate_step(mx.array([*known, 1, 2]), model, max_tokens=2, prompt_cache=lease.layers):
                pass  # the whole prompt, not lease.rest
        cache.check()
        lease, _ = turn(cache, model, [*known, 1, 2])
        assert lease.cached == len(known)


def test_another_model_is_refused_on_a_lease():
    model, other = tiny("llama"), tiny("llama", seed=2)
    with onefold.PrefixCache(model, "64MB") as cache, onefold.PrefixCache(other, "64MB") as second:
        with cache.lease(words(20)) as lease, pytest.raises(onefold.LeaseError, match="another model"):
            other(mx.array([words(20)]), cache=lease.layers)
        row = second.lease(words(20))
        with pytest.raises(onefold.LeaseError, match="another cache"):
            cache.batch([row])
        mine = cache.lease(words(20))
        with pytest.raises(onefold.LeaseError, match="already"):
            cache.batch([mine, mine])
        with pytest.raises(onefold.LeaseError, match="2 tokens for 1"):
            cache.batch([mine]).step([1, 2])
        cache.check()


@pytest.mark.parametrize("model", [None, "mlx-community/some-model", (1, 2)])
def test_a_model_is_an_mlx_module(model):
    with pytest.raises(onefold.ConfigError, match="mlx module"):
        onefold.PrefixCache(model, "8MB")
