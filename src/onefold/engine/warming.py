"""Warms the device before the engine is ready: the first use of a kernel takes tens of milliseconds on a GPU.

A few short requests run through a scheduler of their own, on a cache of their own that is closed afterwards. So the
kernels are those of real requests, and nothing remains in the engine's cache, on disk, in a counter or in what the
scheduler has learnt about speed. On CUDA the model's linear layers are run first, with every length of a chunk.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from onefold.cache.memory import device
from onefold.cache.model import linear
from onefold.cache.prefix_cache import PrefixCache, empty_twin
from onefold.engine.job import Job
from onefold.engine.limits import Limits
from onefold.engine.request import Event, Failed, Prompt, Request, Sampling
from onefold.engine.scheduler import Scheduler
from onefold.errors import BudgetError, DeviceError, OnefoldError, TooLong
from onefold.faults import UNEXPECTED

log = logging.getLogger("onefold.engine")

TEXT = "The fox went out on a chilly night, and prayed for the moon to give him light."
LONG_TOKENS = 96
"""Longer than what is prefilled whole, in one forward with its last token."""
SHARED_TOKENS = 80
SHORT_TOKENS = 12
ANSWER_TOKENS = 16
"""More than the steps after which a step is compiled."""
CUDA_TOKENS = 640
"""Long enough for MLX's own attention on CUDA, whose first use takes seconds."""
LEAST_TOKENS = 4 * (LONG_TOKENS + ANSWER_TOKENS)
"""Room for the conversations that run, and for one that is stored."""


def warm(
    cache: PrefixCache, limits: Limits, tokenizer: Any, vocab: int, sampling: Sampling, most_tokens: int | None = None
) -> None:
    """Runs short requests for this cache's model, first one row and then two. A failure is logged, and nothing is
    raised. Does nothing if the budget is too small, or if a conversation may not have that many tokens (`most_tokens`).
    """
    begun = time.perf_counter()
    try:
        room = min(cache.inventory.most_tokens(), math.inf if most_tokens is None else most_tokens)
        if room < LEAST_TOKENS:
            log.debug("not warmed: there is room for %d tokens, and %d are needed", room, LEAST_TOKENS)
            return
        if device.on_cuda() and cache.model is not None:
            log.info("warming the device: this takes a minute or two on a machine where this model has never run")
            linear.warm(cache.model)
        with empty_twin(cache) as twin:
            _run(twin, limits, tokenizer, vocab, sampling, room)
    except (BudgetError, TooLong) as error:
        log.debug("not warmed: %s", error)
    except DeviceError as error:
        log.warning("the device failed while the engine was warmed: %s", error)
    except (OnefoldError, OSError, RuntimeError, MemoryError, *UNEXPECTED) as error:  # broad on purpose: see there
        log.warning("the engine could not be warmed; its first requests take longer", exc_info=error)
    else:
        log.info("warmed in %.1f s", time.perf_counter() - begun)


def _run(
    cache: PrefixCache, limits: Limits, tokenizer: Any, vocab: int, sampling: Sampling, most_tokens: float
) -> None:
    """Answers one prompt, then two at once, of which one shares a prefix with the first. Raises what a request failed
    with."""
    model = cache.model
    scheduler = Scheduler(model, cache, dataclasses.replace(limits, queue_timeout_seconds=math.inf))
    words = [token % vocab for token in tokenizer.encode(TEXT, add_special_tokens=False)] or [0]
    long = list(itertools.islice(itertools.cycle(words), LONG_TOKENS))
    branch = long[:SHARED_TOKENS] + long[: LONG_TOKENS - SHARED_TOKENS]
    failed: list[OnefoldError] = []

    def note(events: Sequence[Event]) -> None:
        failed.extend(event.error for event in events if isinstance(event, Failed))

    numbers = itertools.count(1)
    rounds = [[long], [branch, long[1 : 1 + SHORT_TOKENS]]]
    if device.on_cuda() and most_tokens >= 2 * CUDA_TOKENS:
        rounds.append([list(itertools.islice(itertools.cycle(words), CUDA_TOKENS))])
    for prompts in rounds:
        for tokens in prompts:
            request = Request(
                prompt=Prompt(np.array(tokens, np.int32)), max_tokens=ANSWER_TOKENS, sampling=sampling, plain=True
            )
            scheduler.jobs.waiting.append(Job(next(numbers), request, note, tokenizer, vocab))
        while scheduler.jobs.busy:
            scheduler.tick()
    if failed:
        raise failed[0]
