"""Prometheus metrics: requests as they end, and the engine's own counts, read when the page is fetched.

Each app has a registry of its own. Labels come from fixed sets, never from a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from onefold.engine.engine import EngineStats
from onefold.server.record import Record

FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
BETWEEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats))
        here = self.registry
        self._requests = Counter("onefold_requests", "HTTP requests", ["endpoint", "status"], registry=here)
        self._prompt = Counter("onefold_prompt_tokens", "Tokens of prompts", registry=here)
        self._cached = Counter("onefold_cached_tokens", "Prompt tokens whose KV was reused", registry=here)
        self._generated = Counter("onefold_generated_tokens", "Tokens of answers, partial ones too", registry=here)
        self._first = Histogram(
            "onefold_time_to_first_token_seconds", "Time to the first token", buckets=FIRST_TOKEN_BUCKETS, registry=here
        )
        self._between = Histogram(
            "onefold_inter_token_seconds", "Between pieces of an answer", buckets=BETWEEN_BUCKETS, registry=here
        )

    def between(self, seconds: float) -> None:
        self._between.observe(seconds)

    def ended(self, record: Record, endpoint: str) -> None:
        self._requests.labels(endpoint, str(record.status)).inc()
        hit = record.hit()
        if hit is not None:
            self._prompt.inc(hit.prompt_tokens)
            self._cached.inc(hit.cached)
            self._generated.inc(record.generated)
        if record.time_to_first_token is not None:
            self._first.observe(record.time_to_first_token)

    def page(self) -> bytes:
        """Returns the page. Blocks for a moment: it reads the engine's counts."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> list[Any]:
        return []  # or registering this would read the engine's counts

    def collect(self) -> Iterator[Any]:
        stats = self._stats()
        cache = stats.cache
        for name, what, value in (
            ("onefold_queued_requests", "Requests in the queue", stats.queued),
            ("onefold_prefilling_requests", "Requests whose prompt is being computed", stats.prefilling),
            ("onefold_decoding_requests", "Rows of the batch", stats.decoding),
            ("onefold_budget_bytes", "Memory budget", cache.budget_bytes),
            ("onefold_used_bytes", "Reserved now", cache.used_bytes),
            ("onefold_peak_bytes", "Most bytes reserved so far", cache.peak_bytes),
            ("onefold_stored_tokens", "Tokens whose KV is stored", cache.stored_tokens),
            ("onefold_disk_budget_bytes", "Disk budget", cache.disk.budget_bytes),
            ("onefold_disk_used_bytes", "On disk now", cache.disk.used_bytes),
            ("onefold_disk_written_today_bytes", "Written to disk today", cache.disk.written_today_bytes),
            (
                "onefold_disk_daily_limit_bytes",
                "Limit of bytes written in a day; 0 is no limit",
                cache.disk.daily_limit_bytes,
            ),
            ("onefold_disk_records", "Records on disk", cache.disk.records),
            ("onefold_disk_failed", "1 if nothing is written any more", int(bool(cache.disk.failed))),
            ("onefold_remote_failed", "1 while the shared store is left alone", int(bool(cache.remote.failed))),
        ):
            yield GaugeMetricFamily(name, what, value=value)
        for name, what, value in (
            ("onefold_preemptions", "Requests preempted for want of memory, which continued later", stats.preemptions),
            ("onefold_prefilled_tokens", "Prompt tokens computed", stats.prefilled_tokens),
            ("onefold_sampled_tokens", "Tokens generated", stats.generated_tokens),
            ("onefold_evicted_tokens", "Tokens whose KV was evicted from memory", cache.evicted_tokens),
            ("onefold_discarded_tokens", "Tokens whose KV was evicted and is not on disk", cache.discarded_tokens),
            ("onefold_spilled_tokens", "Tokens whose KV was written to disk", cache.disk.spilled_tokens),
            ("onefold_restored_tokens", "Tokens whose KV was read from disk", cache.disk.restored_tokens),
            ("onefold_restore_skipped_tokens", "On disk, but quicker to compute", cache.disk.skipped_tokens),
            ("onefold_disk_written_bytes", "Written to disk", cache.disk.written_bytes),
            ("onefold_remote_hit_tokens", "Reused tokens from the shared store", cache.tokens_from_remote),
            ("onefold_remote_read_bytes", "Read from the shared store and used", cache.remote.restored_bytes),
            ("onefold_remote_written_bytes", "Written to the shared store", cache.remote.written_bytes),
            ("onefold_remote_skipped_tokens", "In the store, but quicker to compute", cache.remote.skipped_tokens),
            ("onefold_remote_rejected_values", "Values that could not be used", cache.remote.rejected_records),
        ):
            yield CounterMetricFamily(name, what, value=value)
        ledger = GaugeMetricFamily("onefold_ledger_bytes", "Bytes reserved, by purpose", labels=["purpose"])
        for purpose, n_bytes in sorted(cache.bytes.items()):
            ledger.add_metric([purpose], n_bytes)
        yield ledger
        short = CounterMetricFamily("onefold_short_hits", "Requests that could have reused more", labels=["reason"])
        for reason, count in sorted(cache.reasons.items()):
            short.add_metric([reason], count)
        yield short
