"""What Prometheus scrapes: text of format 0.0.4, names that begin with ``futransformer_``.

Times are seen where a client would see them, in the event loop: they hold the queue, the engine's steps and the way
between threads. Counts of the engine are those of its latest step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from futransformer.engine import EngineStats

# A second line for every one, which format 0.0.4 does not know.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Seconds: a decode step takes 1.5 ms on an H200 and 0.1 s on the CPU reference, a long prompt seconds.
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_TOKENS_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        """Begin at zero, in a registry of its own."""
        self.registry = CollectorRegistry()
        self._responses = Counter(
            "futransformer_http_responses", "HTTP responses", ("path", "status"), registry=self.registry
        )
        self._texts = Counter(
            "futransformer_finished_texts", "Texts, by what ended them", ("reason",), registry=self.registry
        )
        self._first = self._histogram(
            "time_to_first_token", "From a request's arrival to a text's first token", FIRST_TOKEN_BUCKETS
        )
        self._between = self._histogram("time_between_tokens", "Between two tokens of a text", BETWEEN_TOKENS_BUCKETS)
        self._whole = self._histogram(
            "request_duration", "From a request's arrival to a prompt's last token", REQUEST_BUCKETS
        )

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"futransformer_{name}_seconds", what, buckets=buckets, registry=self.registry)

    def watch(self, stats: Callable[[], EngineStats], in_flight: Callable[[], int]) -> None:
        """Report an engine's state and counts, and the sequences that the server has taken."""
        self.registry.register(_EngineCollector(stats, in_flight))

    def response(self, path: str, status: int) -> None:
        """Count a response; ``path`` is one of the server's own."""
        self._responses.labels(path, str(status)).inc()

    def tokens(self, count: int, since_last: float | None, since_arrival: float) -> None:
        """Observe the tokens of a text that came together; seconds since those before, None if these are the first."""
        if since_last is None:
            self._first.observe(since_arrival)
        else:
            for _ in range(count):
                self._between.observe(since_last / count)

    def ended(self, reason: str) -> None:
        """Count a text that is complete, or that nobody waits for any more."""
        self._texts.labels(reason).inc()

    def finished(self, seconds: float) -> None:
        """Observe how long a prompt took, all its texts together."""
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own numbers, read when they are asked for."""

    def __init__(self, stats: Callable[[], EngineStats], in_flight: Callable[[], int]) -> None:
        self._stats = stats
        self._in_flight = in_flight

    def collect(self) -> Iterator[Metric]:
        """Gauges of this moment, counters since the engine was made."""
        stats = self._stats()
        used = stats.num_pages - stats.free_pages
        for name, what, value in (
            ("running_sequences", "Sequences that hold pages of the cache", stats.running),
            ("waiting_sequences", "Sequences that wait for pages: not begun, or evicted", stats.waiting),
            ("in_flight_sequences", "Sequences that the server has taken and not answered", self._in_flight()),
            ("cache_pages", "Pages of the KV cache", stats.num_pages),
            ("cache_usage_ratio", "Pages in use, of all", used / stats.num_pages if stats.num_pages else 0.0),
            ("tokens_per_second", "Generated, over the latest steps", stats.tokens_per_second),
        ):
            yield GaugeMetricFamily(f"futransformer_{name}", what, value=value)
        for name, what, value in (
            ("prompt_tokens", "Tokens of the prompts that were taken", stats.prompt_tokens),
            ("prefilled_tokens", "Tokens that prefill read, again after evictions included", stats.prefilled_tokens),
            ("prefix_hit_tokens", "Tokens of prompts that shared pages spared", stats.prefix_hit_tokens),
            ("generated_tokens", "Tokens that were written", stats.generated_tokens),
            ("evictions", "Sequences that lost their pages to others and were read again", stats.evictions),
            ("steps", "Steps of the engine", stats.steps),
        ):
            yield CounterMetricFamily(f"futransformer_{name}", what, value=value)
