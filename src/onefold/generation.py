"""Generation on a `PrefixCache`: mlx-lm's `generate` and `stream_generate`, with a lease around them.

- A call leases the prompt, prefills what is not cached, decodes with mlx-lm's own loop and commits what the layers were
  fed. An iterator that is closed early, or that raises, commits too.
- mlx-lm's loop feeds each token to the model before it yields it, and samples the next one. So the prompt and every
  token that was yielded are committed; the token sampled ahead is neither yielded nor fed. With a draft model a token
  that the target chose itself is yielded before it is fed: if it is the last one, it is not committed.
- Options are mlx-lm's. Those that would give the model another cache than the lease's are refused.

Knows nothing of how KV is stored, and does not decode by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from onefold.cache.memory import device
from onefold.cache.memory.tokens import Tokens, as_tokens
from onefold.cache.prefix_cache import PrefixCache
from onefold.cache.request.lease import Lease
from onefold.engine import stock
from onefold.errors import AddedTo, ConfigError

_ELSEWHERE = {
    "prompt_cache": "the layers are leased from cache=; leave prompt_cache out",
    "max_kv_size": "bound conversations with PrefixCache(max_kv_size=)",
    "kv_bits": "choose the KV format with PrefixCache(kv=)",
    "kv_group_size": "choose the KV format with PrefixCache(kv=)",
    "quantized_kv_start": "choose the KV format with PrefixCache(kv=)",
    "input_embeddings": "KV is found by tokens, and embeddings have none; use mlx_lm.stream_generate without a cache",
}
"""mlx-lm's options that would bypass the cache, and what to do instead."""

_SAMPLING = {
    **dict.fromkeys(
        ("temp", "temperature", "top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold"),
        "sampler=mlx_lm.sample_utils.make_sampler(temp=...)",
    ),
    **dict.fromkeys(
        ("repetition_penalty", "repetition_context_size", "logit_bias"),
        "logits_processors=mlx_lm.sample_utils.make_logits_processors(repetition_penalty=...)",
    ),
}
"""Options of mlx-lm's functions that make what `stream_generate` takes, and what to pass instead."""

_PASSED_ON = ("sampler", "num_draft_tokens")


@dataclasses.dataclass
class Response(stock.GenerationResponse):
    """mlx-lm's GenerationResponse. `prompt_tokens` counts the whole prompt, `prompt_tps` only what was prefilled."""

    cached_tokens: int = 0
    """Tokens of the prompt that were reused."""


@dataclasses.dataclass
class _Request:
    """The arguments of one call, checked. `encode` has to come before a step."""

    model: nn.Module
    draft: nn.Module | None
    tokenizer: Any
    prompt: Any
    cache: PrefixCache
    namespace: Hashable
    checkpoints: tuple[int, ...]
    max_tokens: int
    prefill_step_size: int
    progress: Callable[[int, int], Any]
    stream: Any
    logits_processors: list[Any]
    options: dict[str, Any]
    tokens: Tokens = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))

    def encode(self) -> None:
        """Makes the prompt's tokens, and refuses what their number rules out. Long texts take a while."""
        if not len(self.tokens):
            self.tokens = _encoded(self.tokenizer, self.prompt)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Any,
    verbose: bool = False,
    *,
    cache: PrefixCache,
    **options: Any,
) -> str:
    """Returns the text that the model answers to `prompt`, and keeps its KV in `cache`. Arguments and errors are those
    of `stream_generate`; `verbose` prints the text and some figures, as mlx-lm does."""
    parts: list[str] = []
    if verbose:
        print("=" * 10)
    last: Response | None = None
    for response in stream_generate(model, tokenizer, prompt, cache=cache, **options):
        last = response
        parts.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and last is not None:
        print("\n" + "=" * 10)
        print(f"Prompt: {last.prompt_tokens} tokens, {last.cached_tokens} reused, {last.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {last.peak_memory:.3f} GB")
    return "".join(parts)


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Any,
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    *,
    cache: PrefixCache,
    namespace: Hashable = "",
    checkpoints: Iterable[int] = (),
    **options: Any,
) -> Generator[Response, None, None]:
    """Yields mlx-lm's responses for `prompt` (text or tokens), and keeps what the layers were fed in `cache`.

    The prompt is leased when the first response is asked for, and committed with every token that was yielded when the
    iterator ends: after the last response, when it is closed or dropped early, or when it raises. The token that mlx-lm
    samples ahead of the one it yields has not been fed and is not committed. With a draft model the last token is
    committed only if the draft proposed it. Tokens that the target rejects are taken back, on every kind of layer.

    `namespace` and `checkpoints` are `PrefixCache.lease`'s; the other options are mlx-lm's. A cache that was made with
    a draft model decodes with it. Raises ConfigError (a ValueError) at the call if the cache is another model's or an
    option would bypass it, and BudgetError from the iterator if the budget has no room."""
    request = _request(model, tokenizer, prompt, max_tokens, draft_model, cache, namespace, checkpoints, options)
    request.encode()
    return _responses(request)


def async_stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Any,
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    *,
    cache: PrefixCache,
    namespace: Hashable = "",
    checkpoints: Iterable[int] = (),
    **options: Any,
) -> AsyncIterator[Response]:
    """Like `stream_generate`, for `async for`. The prompt is encoded, and each chunk and each token is computed, on a
    thread of this call's own, so the event loop is never blocked. A task that is cancelled, and an iterator that is
    closed (`contextlib.aclosing`), commits what was fed once the step that is running has ended. A loop that is left by
    `break` drops the iterator: the event loop then closes it in a task of its own, and `aclosing` is for a caller that
    has to wait for the commit."""
    request = _request(model, tokenizer, prompt, max_tokens, draft_model, cache, namespace, checkpoints, options)
    return _driven(request)


# -- the arguments ----------------------------------------------------------------------------


def _request(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int,
    draft_model: nn.Module | None,
    cache: PrefixCache,
    namespace: Hashable,
    checkpoints: Iterable[int],
    options: dict[str, Any],
) -> _Request:
    if not isinstance(cache, PrefixCache):
        raise ConfigError(f"cache must be an onefold.PrefixCache, got {type(cache).__name__}")
    if cache.model is not model:
        raise ConfigError("this cache was made for another model: make one with onefold.PrefixCache(model)")
    if draft_model is not None and cache.draft_model is not draft_model:
        raise ConfigError("this cache was made without this draft model: make one with PrefixCache(draft_model=)")
    if not isinstance(max_tokens, int) or max_tokens == 0:
        raise ConfigError(f"max_tokens must be a number of tokens, or -1 for no limit, got {max_tokens!r}")
    for name, instead in _ELSEWHERE.items():
        if options.pop(name, None) is not None:
            raise ConfigError(f"{name}= would bypass the cache: {instead}")
    if not isinstance(tokenizer, stock.TokenizerWrapper):
        tokenizer = stock.TokenizerWrapper(tokenizer)
    request = _Request(
        model=model,
        draft=cache.draft_model,
        tokenizer=tokenizer,
        prompt=prompt,
        cache=cache,
        namespace=namespace,
        checkpoints=tuple(checkpoints),
        max_tokens=sys.maxsize if max_tokens < 0 and cache.draft_model is not None else max_tokens,
        prefill_step_size=options.pop("prefill_step_size", None) or 2048,
        progress=options.pop("prompt_progress_callback", None) or (lambda *_: None),
        stream=options.pop("stream", None) or stock.generation_stream,
        logits_processors=list(options.pop("logits_processors", None) or ()),
        options={name: options.pop(name) for name in _PASSED_ON if options.get(name) is not None},
    )
    unknown = sorted(name for name, value in options.items() if value is not None or name not in _PASSED_ON)
    if unknown:
        made = sorted({_SAMPLING[name] for name in unknown if name in _SAMPLING})
        hint = f": sampling is set with {' and '.join(made)}" if made else ""
        raise TypeError(f"stream_generate() got unknown options: {', '.join(unknown)}{hint}")
    return request


def _encoded(tokenizer: Any, prompt: Any) -> Tokens:
    """The prompt's tokens. Text is encoded as mlx-lm does, which adds special tokens unless it begins with one."""
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    return as_tokens(prompt).copy()


# -- the steps --------------------------------------------------------------------------------


class _Kept:
    """Commits what a lease's layers were fed when the block is left, by an error too."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            device.note_raised(error)
        with AddedTo(error), self._lease:
            self._lease.commit()


def _responses(request: _Request) -> Generator[Response, None, None]:
    with contextlib.closing(_steps(request)) as steps:
        for response in steps:
            if response is not None:
                yield response


def _steps(request: _Request) -> Generator[Response | None, None, None]:
    """Yields None after each chunk of the prompt, then the responses."""
    request.encode()
    began = time.perf_counter()
    lease = request.cache.lease(request.tokens, namespace=request.namespace, checkpoints=request.checkpoints)
    with _Kept(lease):
        for _ in _prefill(request, lease):
            yield None
        prompt_seconds = 0.0
        with contextlib.closing(_decode(request, lease)) as responses:
            for response in responses:
                prompt_seconds = prompt_seconds or time.perf_counter() - began
                values = {f.name: getattr(response, f.name) for f in dataclasses.fields(response)}
                values["prompt_tokens"] = len(request.tokens)
                values["prompt_tps"] = len(lease.rest) / prompt_seconds
                yield Response(**values, cached_tokens=lease.cached)


def _prefill(request: _Request, lease: Lease) -> Iterator[None]:
    """Feeds the rest of the prompt but for its last token, in chunks that fit and that end where checkpoints belong."""
    total, done = len(request.tokens), lease.cached
    request.progress(done, total)
    for chunk in lease.chunks(request.prefill_step_size):
        with mx.stream(request.stream), stock.wired_limit(request.model, [request.stream]):
            tokens = mx.array(chunk)[None]
            for model, layers in _models(request, lease):
                model(tokens, cache=layers)
                device.evaluate([layer.state for layer in layers])
        device.clear_pool()
        done += len(chunk)
        request.progress(done, total)
        yield


def _models(request: _Request, lease: Lease) -> list[tuple[nn.Module, list[Any]]]:
    """Returns each model with its layers: the draft's follow the target's."""
    if request.draft is None:
        return [(request.model, lease.layers)]
    n = len(request.model.layers)
    return [(request.model, lease.layers[:n]), (request.draft, lease.layers[n:])]


def _decode(request: _Request, lease: Lease) -> Any:
    processors = request.logits_processors
    if request.draft is None:
        processors = [_seeing(request.tokens[:-1], p) for p in processors]
    responses: Any = stock.stream_generate(
        request.model,
        request.tokenizer,
        mx.array(request.tokens[-1:]),
        max_tokens=request.max_tokens,
        draft_model=request.draft,
        stream=request.stream,
        prompt_cache=lease.layers,
        prompt_progress_callback=lambda *_: None,
        logits_processors=processors or None,
        **request.options,
    )
    return _told(request, responses)


def _told(request: _Request, responses: Any) -> Iterator[Any]:
    """Yields the responses; calls the progress callback when the prompt is done."""
    with contextlib.closing(responses):
        for n, response in enumerate(responses):
            if n == 0:
                request.progress(len(request.tokens), len(request.tokens))
            yield response


def _seeing(before: Tokens, processor: Any) -> Any:
    """A logits processor that is shown the whole prompt, as it would be without a cache."""
    prefix = mx.array(before)

    def process(tokens: mx.array, logits: mx.array) -> Any:
        return processor(mx.concatenate([prefix, tokens]), logits)

    return process if len(before) else processor


# -- asyncio ----------------------------------------------------------------------------------

_END = object()


async def _driven(request: _Request) -> AsyncIterator[Response]:
    """Runs every step on one thread of its own: the event loop is never blocked."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onefold-generate")
    steps = _steps(request)
    try:
        while (response := await loop.run_in_executor(thread, _next, steps)) is not _END:
            if response is not None:
                yield response
    finally:
        try:
            # a step that is running ends first; a second cancellation does not stop the commit
            with AddedTo(sys.exception()):
                await asyncio.shield(loop.run_in_executor(thread, _finish, steps))
        finally:
            thread.shutdown(wait=False)


def _next(steps: Generator[Response | None, None, None]) -> Any:
    response = next(steps, _END)
    if isinstance(response, Response):
        device.evaluate(response.logprobs)  # lazy arrays cannot be evaluated on another thread
    return response


def _finish(steps: Generator[Response | None, None, None]) -> None:
    try:
        steps.close()
    finally:
        mx.clear_streams()  # streams that a thread leaves behind can abort the process when it exits
