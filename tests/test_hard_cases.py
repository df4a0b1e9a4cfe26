"""Cases in which two mechanisms meet: each of them was wrong once."""

from __future__ import annotations

import gc
import threading

import mlx.core as mx
import pytest
from driving import close, cold, forward, fresh, greedy, turn, words
from mlx_lm.models.cache import RotatingKVCache, trim_prompt_cache
from tiny import tiny

import onefold
from onefold.cache.memory.ledger import Purpose


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "mamba2", "lfm2", "jamba", "rwkv7"])
def test_a_row_that_has_not_begun_leaves_the_others_their_states(family):
    model, long, short = tiny(family), words(30), [7]
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        a, b = cache.lease([*long, 5]), cache.lease(short)
        forward(model, a.layers, long, 0)
        logits = cache.batch([a, b]).step(mx.array([5, 7]))
        assert close(logits[:1], fresh(model, [*long, 5]))
        assert close(logits[1:], fresh(model, short))
        cache.check()


@pytest.mark.parametrize("while_in_batch", [False, True])
def test_a_trimmed_row_writes_to_nobody_elses_region(while_in_batch):
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        prompts = [words(200, seed=1), words(200, seed=2)]
        a, b = (cache.lease(p) for p in prompts)
        for lease, prompt in zip((a, b), prompts, strict=True):
            forward(model, lease.layers, prompt, 0)
        batch = cache.batch([a, b], pooled=True)
        said = [list(prompts[0]), list(prompts[1])]
        if while_in_batch:
            mx.eval(batch.step(mx.array([3, 4])))
            said[0].append(3)
            said[1].append(4)
        trim_prompt_cache(b.layers, 20)
        del said[1][-20:]
        for token in (5, 6, 8):
            logits = batch.step(mx.array([token, token]))
            for row in said:
                row.append(token)
            assert close(logits[:1], fresh(model, said[0]))
            assert close(logits[1:], fresh(model, said[1]))
            cache.check()
        a.commit(said[0])
        turn(cache, model, [*said[0], 9])


def bounded_with_draft(target_tokens: int, draft_tokens: int, chunk: int, keep: int) -> None:
    model, draft, prompt = tiny("llama"), tiny("llama", seed=5), words(140)
    n = len(model.layers)
    with onefold.PrefixCache(model, "64MB", draft_model=draft, max_kv_size=64, keep=4) as cache:
        lease = cache.lease(prompt)
        for m, layers, upto in ((model, lease.layers[:n], target_tokens), (draft, lease.layers[n:], draft_tokens)):
            for at in range(0, upto, chunk):
                mx.eval(m(mx.array([prompt[at : min(at + chunk, upto)]]), cache=layers))
        if keep:
            lease.commit(prompt[:keep])
        else:
            lease.cancel()
        cache.check()
        again = [*prompt[: keep or draft_tokens], 3, 4]
        lease = cache.lease(again)
        at = lease.cached
        logits = model(mx.array([again[at:]]), cache=lease.layers[:n])[:, -1]
        ring = [RotatingKVCache(64, 4) for _ in range(n)]
        for start in range(0, at, chunk):
            mx.eval(model(mx.array([again[start : min(start + chunk, at)]]), cache=ring))
        assert close(logits, model(mx.array([again[at:]]), cache=ring)[:, -1])


@pytest.mark.parametrize(
    ("target_tokens", "draft_tokens", "chunk", "keep"),
    [(80, 56, 80, 0), (68, 60, 4, 60), (101, 100, 1, 100), (100, 100, 1, 100)],
)
def test_a_bound_that_target_and_draft_reach_at_different_times(target_tokens, draft_tokens, chunk, keep):
    bounded_with_draft(target_tokens, draft_tokens, chunk, keep)


def test_cancel_after_a_rewind_into_the_prompt_keeps_only_the_prompt():
    model, prompt = tiny("llama"), words(60)
    with onefold.PrefixCache(model, "64MB") as cache:
        with cache.lease(prompt) as lease:
            forward(model, lease.layers, prompt, 0)
            trim_prompt_cache(lease.layers, 40)
            forward(model, lease.layers, [*prompt[:20], *words(40, seed=9)], 20)
        cache.check()
        lease, _ = turn(cache, model, [*prompt, 1])
        assert lease.cached == 20


def test_a_rewound_lease_can_commit_what_it_went_on_with():
    model, prompt, other = tiny("llama"), words(60), words(40, seed=9)
    with onefold.PrefixCache(model, "64MB") as cache:
        with cache.lease(prompt) as lease:
            forward(model, lease.layers, prompt, 0)
            trim_prompt_cache(lease.layers, 40)
            forward(model, lease.layers, [*prompt[:20], *other], 20)
            lease.commit([*prompt[:20], *other])
        lease, _ = turn(cache, model, [*prompt[:20], *other, 1])
        assert lease.cached == 60


def test_a_rewind_of_a_lease_that_continues_in_place_leaves_what_the_tree_has():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        _, known = turn(cache, model, words(50))
        with cache.lease([*known, 1, 2]) as lease:
            assert cache.stats().moves == 1  # it may write behind what is stored, in the same buffer
            forward(model, lease.layers, [*known, 1, 2], lease.cached)
            trim_prompt_cache(lease.layers, 20)
            other = [*known[: lease.offset], 5, 5, 5]
            assert close(forward(model, lease.layers, other, lease.offset), fresh(model, other))
        cache.check()
        lease, _ = turn(cache, model, [*known, 7])
        assert lease.cached == len(known)


def test_a_batch_hands_out_no_region_of_a_slab_that_a_lease_has_taken():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB", high_water=1.0, low_water=1.0) as cache:
        said = [words(100, seed=1), words(100, seed=2)]
        rows = [cache.lease(p) for p in said]
        for lease, prompt in zip(rows, said, strict=True):
            forward(model, lease.layers, prompt, 0)
        batch = cache.batch(rows, pooled=True)
        mx.eval(batch.step(mx.array([5, 5])))
        ledger = cache.state.ledger
        short = ledger.open(Purpose.LIVE, ledger.free_bytes - ledger.headroom() - 1000)
        rows[0].commit([*said[0], 5])  # no room to take its tokens out of the common slab
        rows[1].cancel()
        batch.remove(rows[0])
        batch.remove(rows[1])
        short.close()
        taker = cache.lease([*said[0], 5, 1, 2])
        forward(model, taker.layers, [*said[0], 5, 1, 2], taker.cached)
        later = [words(30, seed=6), words(30, seed=7)]
        for prompt in later:
            lease = cache.lease(prompt)
            forward(model, lease.layers, prompt, 0)
            batch.add(lease)
        mx.eval(batch.step(mx.array([8, 8])))
        for _ in range(8):
            mx.eval(model(mx.array([words(50, seed=8)]), cache=taker.layers))
        logits = batch.step(mx.array([9, 9]))
        for row, prompt in enumerate(later):
            assert close(logits[row : row + 1], fresh(model, [*prompt, 8, 9]))
        cache.check()


@pytest.mark.parametrize("pooled", [False, True])
def test_a_step_after_all_rows_were_taken_back_writes_over_nothing_committed(pooled):
    """The rows stand where they stood at the step before, and may no longer write where they wrote then."""
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(20, seed=1), words(30, seed=2)]
        rows = [cache.lease(p) for p in said]
        for lease, prompt in zip(rows, said, strict=True):
            forward(model, lease.layers, prompt, 0)
        batch = cache.batch(rows, pooled=pooled)
        mx.eval(batch.step(mx.array([3, 4])))
        for lease, prompt, token in zip(rows, said, (3, 4), strict=True):
            lease.commit([*prompt, token], close=False)
            trim_prompt_cache(lease.layers, 1)
        logits = batch.step(mx.array([5, 6]))
        for row, prompt in enumerate(said):
            assert close(logits[row : row + 1], fresh(model, [*prompt, (5, 6)[row]]))
        cache.check()
        for prompt, token in zip(said, (3, 4), strict=True):
            lease, _ = turn(cache, model, [*prompt, token, 9])
            assert lease.cached == len(prompt) + 1


def test_a_refused_step_leaves_no_row_ahead():
    model = tiny("gemma2")
    with onefold.PrefixCache(model, "40MB") as cache:
        said = [words(255, seed=1), words(256, seed=2)]
        rows = [cache.lease(p) for p in said]
        for lease, prompt in zip(rows, said, strict=True):
            forward(model, lease.layers, prompt, 0)
        batch, ledger = cache.batch(rows), cache.state.ledger
        assert not batch.ragged
        left = ledger.free_bytes + ledger.spare() - ledger.headroom()  # MLX's pool gives way before anybody is refused
        short = ledger.open(Purpose.LIVE, left - 3000)
        with pytest.raises(onefold.BudgetError):
            batch.step(mx.array([5, 5]))
        assert [lease.offset for lease in rows] == [255, 256]
        short.close()
        logits = batch.step(mx.array([5, 5]))
        for row, prompt in enumerate(said):
            assert close(logits[row : row + 1], fresh(model, [*prompt, 5]))


@pytest.mark.parametrize(("target_to", "draft_to"), [(52, 56), (56, 52)])
def test_a_model_outside_the_seam_rewinds_below_a_commit_with_its_draft_ahead(target_to, draft_to):
    model, draft, prompt = tiny("deepseek_v3"), tiny("deepseek_v3", seed=3), words(80)
    n = len(model.layers)
    with onefold.PrefixCache(model, "64MB", draft_model=draft) as cache:
        lease = cache.lease(prompt[:56])
        for start, stop in ((0, 50), (50, 56)):
            chunk = mx.array([prompt[start:stop]])
            mx.eval(model(chunk, cache=lease.layers[:n]), draft(chunk, cache=lease.layers[n:]))
            lease.commit(prompt[:stop], close=False)
        for layer in lease.layers[:n]:
            layer.trim(56 - target_to)
        for layer in lease.layers[n:]:
            layer.trim(56 - draft_to)
        logits = model(mx.array([[7]]), cache=lease.layers[:n])[:, -1]
        assert close(logits, fresh(model, [*prompt[:target_to], 7]))
        logits = draft(mx.array([prompt[draft_to : draft_to + 1]]), cache=lease.layers[n:])[:, -1]
        assert close(logits, fresh(draft, prompt[: draft_to + 1]))
        cache.check()


def test_a_conversation_that_rotated_does_not_spoil_its_prefix_for_others():
    model, shared = tiny("llama"), words(40)
    with onefold.PrefixCache(model, "64MB", max_kv_size=64) as cache:
        with cache.lease([*shared, 1, 2]) as lease:
            forward(model, lease.layers, [*shared, 1, 2], 0)
            for token in range(40):
                mx.eval(model(mx.array([[token]]), cache=lease.layers))
            lease.commit([*shared, 1, 2, *range(40)])
        with cache.lease([*shared, 9]) as lease:
            forward(model, lease.layers, [*shared, 9], lease.cached)
            lease.commit([*shared, 9])
        lease = cache.lease([*shared, 9, 10])
        assert lease.cached == 41
        assert close(forward(model, lease.layers, [*shared, 9, 10], 41), cold(model, [*shared, 9, 10], 1)[1][0])
        cache.check()


def test_a_closed_lease_left_in_a_batch_is_refused_and_leaks_nothing():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        rows = [cache.lease(words(20, seed=i)) for i in range(2)]
        for lease in rows:
            forward(model, lease.layers, lease.tokens.tolist(), 0)
        batch = cache.batch(rows, pooled=True)
        rows[0].commit(rows[0].tokens)
        with pytest.raises(onefold.LeaseClosed):
            batch.step(mx.array([1, 2]))
        rows[1].cancel()
        cache.clear()
        cache.check()
        assert cache.stats().bytes["live"] == cache.stats().bytes["stored"] == 0


@pytest.mark.parametrize("pooled", [False, True])
def test_a_batch_stays_within_the_scratch_that_it_reserved(pooled):
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        rows = [cache.lease(words(30 + i, seed=i)) for i in range(4)]
        for lease in rows:
            forward(model, lease.layers, lease.tokens.tolist(), 0)
        batch = cache.batch(rows, pooled=pooled)
        mx.eval(batch.step(mx.array([1, 2, 3, 4])))
        before = mx.get_active_memory()
        all_rows = sum(lease.hold.watchers[0].scratch_bytes(1) for lease in rows)
        mx.reset_peak_memory()
        mx.eval(batch.step(mx.array([1, 2, 3, 4])))
        assert mx.get_peak_memory() - before <= cache.stats().bytes["scratch"]
        assert cache.stats().bytes["scratch"] >= all_rows


def test_after_the_budget_was_lowered_a_small_request_evicts_little():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB", high_water=1.0, low_water=1.0) as cache:
        turn(cache, model, words(3000), n=1, grid=150)
        stats = cache.stats()
        cache.set_budget(int((stats.used_bytes - stats.bytes["pool"]) * 1.1))
        held = cache.stats().stored_tokens
        with cache.lease(words(50, seed=3)) as lease:
            forward(model, lease.layers, words(50, seed=3), 0)
        assert cache.stats().stored_tokens >= held - 1200
        cache.check()


def test_threads_share_a_prefix_that_none_of_them_wrote():
    """Whoever came first would otherwise take the buffer to write in it, and the others could not read it."""
    model = tiny("llama")
    mx.eval(model.parameters())
    system = words(200)
    expected = {who: cold(model, [*system, who], 4)[0] for who in range(3)}
    met, found = threading.Barrier(3, timeout=60), dict[int, tuple[int, list[int]]]()
    with onefold.PrefixCache(model, "256MB") as cache:
        turn(cache, model, [*system, 50])

        def ask(who: int) -> None:
            tokens = [*system, who]
            with cache.lease(tokens) as lease:
                met.wait()  # all of them hold it now
                out, _ = greedy(model, lease.layers, forward(model, lease.layers, tokens, lease.cached), 4)
                found[who] = (lease.cached, out)
                met.wait()
                lease.commit(tokens + out)
            mx.clear_streams()

        threads = [threading.Thread(target=ask, args=(who,)) for who in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cache.check()
        assert found == {who: (200, expected[who]) for who in range(3)}
        assert cache.stats().stored_tokens == 200 + 5 + 3 * 5


def test_a_dropped_lease_is_settled_at_the_next_call():
    model, prompt = tiny("llama"), words(40)
    with onefold.PrefixCache(model, "64MB") as cache:
        lease = cache.lease(prompt)
        forward(model, lease.layers, prompt[:24], 0)
        del lease
        gc.collect()
        assert cache.stats().open_leases == 0 and cache.stats().reasons["dropped"] == 1
        cache.check()
        lease, _ = turn(cache, model, prompt)
        assert lease.cached == 24
        layers = cache.lease([*prompt, 1]).layers  # the layers keep it
        gc.collect()
        forward(model, layers, [*prompt, 1], 40)
        assert cache.stats().open_leases == 1


def test_recurrent_layers_that_nobody_counts_for_on_a_model_outside_the_seam():
    """Whether they are told how many tokens passed was found out on handles, which such a model cannot take."""
    model = tiny("longcat_flash_ngram")
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        _, known = turn(cache, model, words(40))
        lease, _ = turn(cache, model, [*known, 5, 6])
        assert lease.cached == lease.matched == len(known)


def test_a_forward_that_failed_on_caches_of_the_models_own_can_be_tried_again(monkeypatch):
    """Such a cache hears of forwards from the watch alone."""
    model, prompt = tiny("deepseek_v41"), words(40)
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        with cache.lease(prompt) as lease:
            forward(model, lease.layers, prompt[:24], 0)
            with monkeypatch.context() as patch:
                patch.setattr(type(model.layers[-1]), "__call__", _broken_after(2, type(model.layers[-1]).__call__))
                with pytest.raises(RuntimeError, match="broken"):
                    model(mx.array([prompt[24:32]]), cache=lease.layers)
            assert {layer.offset for layer in lease.layers} == {24}
            assert close(forward(model, lease.layers, prompt, 24), fresh(model, prompt))
        lease, _ = turn(cache, model, prompt)
        assert lease.cached == 39


def _broken_after(n: int, call):
    left = iter(range(n))

    def layer(*args, **options):
        if next(left, None) is None:
            raise RuntimeError("broken")
        return call(*args, **options)

    return layer
