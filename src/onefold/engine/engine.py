"""The engine: one thread that owns MLX, and the methods by which other threads send it requests.

- Only that thread leases, runs forwards and reads tokens. Other threads post to its mailbox.
- Rendering and tokenising happen on the caller's thread.
- If the thread ends, for any reason, every waiting request fails with EngineStopped.
"""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn

from onefold.cache import budget
from onefold.cache.memory import device
from onefold.cache.model.stock import evaluate_kept
from onefold.cache.prefix_cache import PrefixCache
from onefold.cache.stats import Stats
from onefold.engine import wanted, warming
from onefold.engine.config import EngineConfig, EngineOptions
from onefold.engine.context_length import context_length
from onefold.engine.guidance.compiler import Compiler
from onefold.engine.job import Deliver, Job
from onefold.engine.lengths import Lengths
from onefold.engine.limits import Limits
from onefold.engine.loading import model_name
from onefold.engine.prompt import PromptMaker
from onefold.engine.request import Done, Event, Failed, Prompt, Request, Sampling
from onefold.engine.scheduler import Scheduler
from onefold.engine.stock import maybe_set_recommended_wired_limit
from onefold.errors import AddedTo, Busy, ConfigError, DeviceLost, EngineStopped, OnefoldError, PromptError
from onefold.faults import UNEXPECTED
from onefold.options import shown_as
from onefold.sizes import show_size
from onefold.worker import Worker

log = logging.getLogger("onefold.engine")


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine. Counts are totals since it started."""

    queued: int
    prefilling: int
    decoding: int
    finished: int
    cancelled: int
    failed: int
    preemptions: int
    steps: int
    prefilled_tokens: int
    generated_tokens: int
    cache: Stats


LEAST_TOKENS = 16
"""The length of a conversation that a budget must have room for."""

COUNTED = (
    "finished",
    "cancelled",
    "failed",
    "preemptions",
    "steps",
    "prefilled_tokens",
    "generated_tokens",
)


class Engine:
    """Answers requests, on a thread of its own that owns MLX. Its methods may be called from any thread.

    A request is answered through `deliver`, which is called on the engine's thread with the events of one step, in
    order, and must return at once and not raise.
    """

    @shown_as(EngineConfig.signature())
    def __init__(self, model: nn.Module, tokenizer: Any, **options: Unpack[EngineOptions]) -> None:
        """Takes the keywords of `EngineConfig`. Raises ConfigError if they, or the model, cannot be used."""
        config = EngineConfig.of(options)
        self.model_id = model_name(config.model_id)
        """What clients see; `config.model_id`, as it was given, is the label of what lies on disk."""
        self.tokenizer = tokenizer
        self.defaults = config.defaults or Sampling()
        """How tokens are chosen if a request does not say."""
        self.max_queue = config.max_queue
        self.context_length = None if config.ignore_context_length else context_length(model, tokenizer)
        """Tokens of prompt and answer together; None: the model names no length, or it is to be ignored."""
        self.vocab = _vocab(model, tokenizer)
        self._compiler = Compiler(tokenizer, self.vocab)
        self._numbers = itertools.count(1)
        self._mailbox: queue.SimpleQueue[Callable[[Scheduler], None] | None] = queue.SimpleQueue()
        self._posting = threading.Lock()
        self._posted = 0
        """Requests in the mailbox."""
        self._ended = False
        self.lost: DeviceLost | None = None
        """Why the engine ended by itself: the device does not recover, and only a new process can use it."""
        self.cache: PrefixCache
        self._scheduler: Scheduler
        evaluate_kept(model)  # the engine's thread could not
        # Weights and KV stay resident on a Mac. Applies to the process, as in mlx-lm's server; never in mid-evaluation.
        maybe_set_recommended_wired_limit()
        self._start(functools.partial(self._begin, model, config))
        self._check_budget()
        self._lengths = Lengths(self.cache, self.most_tokens, self.context_length)
        self._prompts = PromptMaker(
            tokenizer,
            vocab=self.vocab,
            checkpoints=not self.cache.inventory.resumes_anywhere,
            between=self._check_running,
        )

    def _begin(self, model: nn.Module, config: EngineConfig) -> None:
        """Makes the cache and the scheduler, and warms the device. Runs on the engine's thread."""
        limits = config.limits or Limits()
        self.cache = config.cache(model, self.tokenizer)
        self._scheduler = Scheduler(model, self.cache, limits)
        if device.on_gpu() if config.warm is None else config.warm:
            warming.warm(self.cache, limits, self.tokenizer, self.vocab, self.defaults, self.context_length)

    def _start(self, begin: Callable[[], None]) -> None:
        """Starts the thread, and waits until `begin` has run on it. Raises the OnefoldError that `begin` raised, and
        EngineStopped if it failed otherwise; then Python has printed the error of the thread."""
        refused: list[OnefoldError] = []
        ready = threading.Event()
        self._thread = Worker(functools.partial(self._run, begin, refused, ready), "onefold-engine")
        self._thread.start()
        # or what MLX leaves of the thread aborts Python's exit
        weakref.finalize(self, _end_thread, self._mailbox, self._thread)
        ready.wait()
        if refused:
            self._thread.wait()
            raise refused[0]
        if not hasattr(self, "_scheduler"):
            self._thread.wait()
            raise EngineStopped("the engine could not start: see the error of its thread")

    def _check_budget(self) -> None:
        held = show_size(self.cache.inventory.budget_bytes)
        if self.most_tokens < LEAST_TOKENS:
            self.stop()
            inventory = self.cache.inventory
            each = show_size(inventory.token_bytes)
            raise ConfigError(
                f"a budget of {held} is too small: a token takes {each} of KV, and a forward its working memory; "
                f"there is room for a conversation of {self.most_tokens} tokens. Give at least "
                f"{show_size(inventory.need(2 * LEAST_TOKENS))}"
            )
        if self.most_tokens < min(budget.LEAST_TOKENS, self.context_length or budget.LEAST_TOKENS):
            more = f"give {show_size(self.cache.budget.least_bytes())} for {budget.LEAST_TOKENS:,}"
            told = "the budget of %s has room for a conversation of %s tokens, prompt and answer together: %s"
            log.warning(told, held, f"{self.most_tokens:,}", more)
        if self.cache.inventory.budget_bytes > (there := device.memory_bytes()):
            log.warning("the budget of %s is more than the %s of this machine: give less", held, show_size(there))

    # -- prompts -------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        of_any_length: bool = False,
    ) -> Prompt:
        """Renders a conversation (in OpenAI's format; content is text) and tokenises it. Blocks: do not call it on an
        event loop. Raises PromptError; TooLong where it is so long that it is not tokenised to its end, unless
        `of_any_length`; EngineStopped."""
        most = None if of_any_length else self._lengths.most_tokenised
        with self._lengths.named():
            return self._prompts.chat(messages, tools=tools, options=template_options, most_tokens=most)

    def text(self, prompt: str | Sequence[int]) -> Prompt:
        """Tokenises plain text, or takes tokens as they are. Raises PromptError, TooLong, EngineStopped."""
        with self._lengths.named():
            return self._prompts.text(prompt, most_tokens=self._lengths.most_tokenised)

    def _check_running(self) -> None:
        if self._ended:
            raise EngineStopped("the engine has stopped")
        wanted.check()

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queues a request and returns its number, for `cancel`. Blocks while the grammar of a constraint is compiled.
        Raises Busy, TooLong, PromptError or EngineStopped."""
        if len(request.prompt) == 0:
            raise PromptError("the prompt is empty; it needs at least one token")
        self._lengths.check(len(request.prompt))
        request = self._lengths.within_context(request)
        for token in request.sampling.logit_bias:
            if not 0 <= token < self.vocab:
                raise PromptError(f"logit_bias has token id {token}; ids of this model are from 0 to {self.vocab - 1}")
        guided = None if request.constraint is None else self._compiler.guided(request)
        job = Job(next(self._numbers), request, deliver, self.tokenizer, self.vocab, guided)
        with self._posting:
            if self._ended:
                raise EngineStopped("the engine has stopped")
            queued = len(self._scheduler.jobs.waiting) + self._posted
            if queued >= self.max_queue:
                wait = self._scheduler.jobs.expected_wait_seconds()
                raise Busy(f"the queue is full with {queued} requests; try again in {wait} s", retry_after=wait)
            self._posted += 1
            self._mailbox.put(lambda scheduler: self._add(scheduler, job))
        return job.number

    def _add(self, scheduler: Scheduler, job: Job) -> None:
        self._posted -= 1
        scheduler.jobs.waiting.append(job)

    def cancel(self, number: int) -> None:
        """Ends a request at the next step. Its KV is kept. Does nothing if the request has ended."""
        self._mailbox.put(lambda scheduler: scheduler.jobs.cancel(number))

    def ask(self, request: Request) -> Generator[Event, None, None]:
        """Yields the events of one request, and waits for each. Leaving the loop cancels the request."""
        events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        number = self.submit(request, events.put)
        try:
            while True:
                for event in events.get():
                    yield event
                    if isinstance(event, Done | Failed):
                        return
        finally:
            self.cancel(number)

    # -- looking -------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        jobs = self._scheduler.jobs
        counts = {name: jobs.counts[name] for name in COUNTED}
        return EngineStats(
            queued=len(jobs.waiting) + self._posted,
            prefilling=len(jobs.prefilling),
            decoding=len(jobs.decoding),
            cache=self.cache.stats(),
            **counts,
        )

    @property
    def alive(self) -> bool:
        return self._thread.working and not self._ended

    @property
    def most_tokens(self) -> int:
        """The longest conversation that the budget has room for."""
        return self._scheduler.most_tokens

    def clear(self) -> tuple[int, int]:
        """Drops all KV that no running request uses, in every namespace. Returns bytes freed in memory and on disk."""
        before, on_disk = self.cache.inventory.held_bytes, self.cache.stats().disk.used_bytes
        self._do(self.cache.clear)
        return max(0, before - self.cache.inventory.held_bytes), max(0, on_disk - self.cache.stats().disk.used_bytes)

    def forget(self, number: int) -> int:
        """Drops a node of the tree and what is below it, except what a request or a pin holds (`PrefixCache.view`).
        Returns how many tokens were dropped. Raises UnknownNode and EngineStopped."""
        dropped: list[int] = []
        self._do(lambda: dropped.append(self.cache.view.forget(number)))
        return dropped[0]

    def check(self) -> None:
        """Recounts everything that the cache holds. Raises IntegrityError."""
        self._do(self.cache.check)

    def _do(self, work: Callable[[], None]) -> None:
        """Runs `work` on the engine's thread between two steps, waits for it, and raises what it raises."""
        done = threading.Event()
        failed: list[Exception] = []

        def run(_: Scheduler) -> None:
            try:
                work()
            except (OnefoldError, OSError, RuntimeError, MemoryError, *UNEXPECTED) as error:
                failed.append(error)
            finally:
                done.set()

        self._mailbox.put(run)
        while not done.wait(0.2):
            if not self._thread.working:
                raise EngineStopped("the engine has stopped")
        if failed:
            raise failed[0]

    # -- the thread ----------------------------------------------------------------------------

    def stop(self, timeout_seconds: float | None = None) -> None:
        """Ends the thread. Running requests fail, and their KV is freed. With a disk this waits until all dirty data is
        written."""
        if timeout_seconds is None:
            timeout_seconds = 30.0 if not hasattr(self, "cache") else 30.0 + self.cache.ending.seconds
        _end_thread(self._mailbox, self._thread, timeout_seconds)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with AddedTo(error):
            self.stop()

    def _run(self, begin: Callable[[], None], refused: list[OnefoldError], ready: threading.Event) -> None:
        try:
            try:
                begin()
            except OnefoldError as error:
                refused.append(error)
                return
            finally:
                ready.set()
            while self._take_in(self._scheduler):
                self._scheduler.look_at_memory()
                self._scheduler.tick()
        except DeviceLost as error:
            log.critical("the engine ends: %s", error)
            self.lost = error
            self.cache.ending.hurry()  # what is dirty is lost with the process, rather than wait for the device
        finally:
            self._end()
            mx.clear_streams()  # what MLX leaves of a thread's streams can abort the process when it exits

    def _end(self) -> None:
        with self._posting:
            self._ended = True
        if hasattr(self, "_scheduler"):
            self._drain(self._scheduler)
            self._scheduler.jobs.fail_all(EngineStopped("the engine has stopped"))
        self._compiler.close()
        if hasattr(self, "_scheduler"):
            self.cache.close()

    def _take_in(self, scheduler: Scheduler) -> bool:
        """Runs what was posted since the last turn; waits if there is no work, and looks at the machine's memory
        meanwhile. False: the thread must end."""
        wait = not scheduler.jobs.busy
        while wait or not self._mailbox.empty():
            try:
                letter = self._mailbox.get(timeout=self.cache.budget.look_seconds)
            except queue.Empty:
                scheduler.look_at_memory()
                continue
            if letter is None:
                return False
            letter(scheduler)
            wait = not scheduler.jobs.busy and self._mailbox.empty()
        return True

    def _drain(self, scheduler: Scheduler) -> None:
        while not self._mailbox.empty():
            letter = self._mailbox.get()
            if letter is not None:
                letter(scheduler)


def _end_thread(mailbox: queue.SimpleQueue[Any], thread: Worker, timeout_seconds: float = 10.0) -> None:
    mailbox.put(None)
    if not thread.is_this_thread:
        thread.wait(timeout_seconds)


def _vocab(model: nn.Module, tokenizer: Any) -> int:
    """Returns the number of ids that the model has an embedding for."""
    sizes = [getattr(getattr(model, name, None), "vocab_size", None) for name in ("args", "config")]
    return next((int(n) for n in sizes if isinstance(n, int)), len(tokenizer))
