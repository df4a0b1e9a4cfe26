"""Measures what a format of stored KV costs in quality, through the cache: perplexity, divergence, agreement, recall.

    python benchmarks/kv_quality.py [--model demo] [--formats 8 k8v4 4 ...] [--windows 16] [--tokens 4096]
                                    [--prompts 200] [--facts 10] [--text FILE ...]

- Windows of text, half of them prose (the language reference that Python carries) and half code (its standard
  library), fed in chunks of 512 with the text's own tokens; the KV of every chunk is stored in the format, and the next
  chunk reads that. No token is exempt: all are stored in the format, and all but the first of a window are predicted.
- Mean KL of the next-token distributions, and perplexity, against the same chunks with KV as the model makes it.
- Agreement: prompts whose greedy answer of 24 tokens the model gave with its own KV; the share of those tokens that is
  the most likely one with the format, given the ones before.
- Recall: a number said at the start of a prompt of 1,500 tokens is asked for at its end.
- Keys with biased channels: random keys of which four channels have a large mean, before and after a rotary embedding;
  mean KL of the attention weights.

`--windows 0`, `--prompts 0` and `--facts 0` leave a part out.
"""

from __future__ import annotations

import argparse
import logging
import pydoc_data.topics
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import numpy as np
from cpu_attention import numpy_softmax

from onefold.cache.memory.shapes import ArraySpec
from onefold.cache.model.formats.names import NAMES
from onefold.cache.model.formats.registry import KvFormat
from onefold.kv_trial import Fed, Quality, compare

ANSWER = 24
FACTS = (7391, 4826, 1057, 9264, 3518, 6803, 2479, 8132, 5940, 1685)
DIM, KEYS, QUERIES = 128, 1024, 64
BIASED = [3, 40, 77, 101]


def prose() -> str:
    return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


def code() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "typing", "inspect", "tarfile", "decimal", "_pydecimal", "doctest", "subprocess", "turtle")
    return "\n".join((folder / f"{n}.py").read_text() for n in names if (folder / f"{n}.py").is_file())


def windows(texts: list[list[int]], n: int, length: int) -> list[list[int]]:
    """Returns `n` windows, from each text as many, spread over it."""
    found = []
    for text in texts:
        each = n // len(texts)
        step = max(length, (len(text) - length) // max(1, each - 1))
        found += [text[i * step : i * step + length] for i in range(each)]
    return [w for w in found if len(w) == length]


def measure_windows(model: Any, caches: dict[str, onefold.PrefixCache], parts: list[list[int]]) -> dict[str, Quality]:
    found = {name: Quality(cache.state.store.token_bytes) for name, cache in caches.items()}
    for number, part in enumerate(parts):
        compare(model, caches, part, found)
        so_far = ", ".join(f"{name} {q.loss(found['16']):+.2%} {q.mean_divergence:.4f}" for name, q in found.items())
        print(f"  window {number + 1} of {len(parts)}: {so_far}", file=sys.stderr, flush=True)
    return found


def answer(model: Any, cache: onefold.PrefixCache, prompt: list[int], n: int) -> list[int]:
    """Returns the greedy answer."""
    fed = Fed(cache, model, prompt)
    said: list[int] = []
    found = fed.feed(prompt)
    for _ in range(n):
        said.append(int(found[-1].argmax()))
        found = fed.feed(said[-1:])
    fed.close()
    return said


def agreement(model: Any, caches: dict[str, onefold.PrefixCache], prompts: list[list[int]]) -> dict[str, float]:
    agreed = dict.fromkeys(caches, 0)
    for number, prompt in enumerate(prompts):
        told = answer(model, caches["16"], prompt, ANSWER)
        for name, cache in caches.items():
            fed = Fed(cache, model, prompt)
            last = fed.feed(prompt)[-1:]
            found = mx.concatenate([last, fed.feed(told[:-1])]).argmax(axis=-1)
            agreed[name] += int((found == mx.array(told)).sum())
            fed.close()
        if number % 20 == 19:
            so_far = ", ".join(f"{name} {n / (number + 1) / ANSWER:.2%}" for name, n in agreed.items())
            print(f"  prompt {number + 1} of {len(prompts)}: {so_far}", file=sys.stderr, flush=True)
    return {name: n / max(1, len(prompts) * ANSWER) for name, n in agreed.items()}


def recall(
    model: Any, tokenizer: Any, caches: dict[str, onefold.PrefixCache], filler: list[int], facts: Sequence[int]
) -> dict[str, int]:
    found = dict.fromkeys(caches, 0)
    for i, fact in enumerate(facts):
        begin = tokenizer.encode(f"Remember this: the code of the door is {fact}. The code is {fact}.\n\n")
        end = tokenizer.encode("\n\nRemember: the code of the door is")
        prompt = [*begin, *filler[i * 900 : i * 900 + 1500], *end]
        for name, cache in caches.items():
            found[name] += str(fact) in tokenizer.decode(answer(model, cache, prompt, 8))
    return found


def biased(name: str, base: float | None) -> float:
    """Returns the mean KL of attention weights on keys with biased channels."""
    drawn = np.random.default_rng(0)
    keys = drawn.standard_normal((KEYS, DIM)).astype(np.float32)
    keys[:, BIASED] = (keys[:, BIASED] + np.array([8, -10, 6, 12])) * 1.5
    k = mx.array(keys)[None, None]
    if base is not None:
        k = mx.fast.rope(k, DIM, traditional=False, base=base, scale=1.0, offset=0)
    q = mx.array(drawn.standard_normal((1, 1, QUERIES, DIM)).astype(np.float32))
    spec = ArraySpec(1, DIM, mx.float32)
    codec = KvFormat(name).codec(spec, spec)
    scores = [q @ k.swapaxes(-1, -2), codec.scores(codec.turn(q), list(codec.encode(k, k)), 0, KEYS)]
    exact, found = (s * DIM**-0.5 - mx.logsumexp(s * DIM**-0.5, axis=-1, keepdims=True) for s in scores)
    return float((mx.exp(exact) * (exact - found)).sum(axis=-1).mean().item())


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--formats", nargs="+", default=[n for n in NAMES if n != "16"])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--facts", type=int, default=len(FACTS))
    parser.add_argument("--text", nargs="+", help="files, in place of Python's reference and library")
    options = parser.parse_args(given)
    begun = time.monotonic()
    model, tokenizer = onefold.load(options.model)
    given_texts = [Path(name).read_text() for name in options.text] if options.text else [prose(), code()]
    logging.getLogger("transformers").setLevel(logging.ERROR)  # texts are longer than a context, and windows are not
    texts = [list(tokenizer.encode(text)) for text in given_texts]
    with ExitStack() as stack:
        stack.enter_context(numpy_softmax())
        caches = {
            name: stack.enter_context(onefold.PrefixCache(model, "2GB", kv=name)) for name in ["16", *options.formats]
        }
        parts = windows(texts, options.windows, options.tokens)
        quality = measure_windows(model, caches, parts)
        prompts = windows(texts, options.prompts, 200)
        agreed = agreement(model, caches, prompts)
        facts = FACTS[: options.facts]
        recalled = recall(model, tokenizer, caches, texts[0], facts)
        made = [a for leaf in caches["16"].parts.models.anatomies[0].sliceable for a in leaf.plain or ()]
        dims, itemsize = {a.dim for a in made}, made[0].dtype.size
    exact = quality["16"]
    plain = exact.token_bytes * 2 / itemsize
    print(f"{options.model}, heads of {sorted(dims)}; {len(parts)} windows of {options.tokens} tokens,")
    took = time.monotonic() - begun
    print(f"{len(prompts)} prompts; perplexity with KV as the model makes it {exact.perplexity:.3f}; {took:.0f} s")
    print("| format | bytes against 16 bits | perplexity | mean KL | agreement | recall | biased keys | and rotary |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in caches:
        q = quality[name]
        row = [f"{q.token_bytes / plain:.3f}"]
        row += [f"{q.loss(exact):+.2%}", f"{q.mean_divergence:.5f}"] if parts else ["", ""]
        row.append(f"{agreed[name]:.1%}" if prompts else "")
        row.append(f"{recalled[name]} of {len(facts)}" if facts else "")
        row += [f"{biased(name, None):.4f}", f"{biased(name, 1e4):.4f}"]
        print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
