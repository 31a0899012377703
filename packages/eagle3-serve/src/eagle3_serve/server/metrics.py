"""Prometheus metrics: the engine's counters as they stand when asked, and requests' latencies."""

from collections.abc import AsyncIterator, Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle3_serve.engine import Engine, TokenOutput
from eagle3_serve.server.worker import Submission

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class ServerMetrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        """`engine`'s counters are read at every scrape."""
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(engine))
        self._requests = Counter(
            "eagle3_requests", "Requests that ended", ["finish_reason"], registry=registry
        )
        self._first = Histogram(
            "eagle3_time_to_first_token_seconds",
            "From arrival to the first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._per_token = Histogram(
            "eagle3_time_per_output_token_seconds",
            "Mean time between a request's tokens",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._whole = Histogram(
            "eagle3_request_seconds",
            "From arrival to the last token",
            buckets=_SECONDS,
            registry=registry,
        )

    def exposition(self) -> tuple[bytes, str]:
        """The text format, and its content type."""
        return exposition.generate_latest(self._registry), exposition.CONTENT_TYPE_LATEST

    async def watched(self, submission: Submission) -> AsyncIterator[tuple[int, TokenOutput]]:
        """The submission's outputs, measured as they pass."""
        arrival = perf_counter()
        first: dict[int, float] = {}
        left = set(range(len(submission.ids)))
        try:
            async for index, output in submission.outputs():
                now = perf_counter()
                if output.token_ids and index not in first:
                    first[index] = now
                    self._first.observe(now - arrival)
                if output.finish_reason is not None:
                    left.remove(index)
                    self._requests.labels(output.finish_reason).inc()
                    self._whole.observe(now - arrival)
                    if output.num_output_tokens > 1:
                        between = (now - first[index]) / (output.num_output_tokens - 1)
                        self._per_token.observe(between)
                yield index, output
        finally:
            # Failed by the engine, given up at shutdown, or left by their client.
            self._requests.labels("abort").inc(len(left))


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        for name, text, value in (
            ("requests_running", "Requests in the batch", engine.num_running),
            ("requests_waiting", "Requests in the queue", engine.num_waiting),
            ("kv_pages_total", "Pages of keys and values", engine.num_pages),
            ("kv_pages_used", "Of them, held", engine.num_pages - engine.num_free_pages),
            ("accept_length", "Tokens emitted per round, since the start", stats.accept_length),
        ):
            yield GaugeMetricFamily(f"eagle3_{name}", text, value=value)
        for name, text, value in (
            ("rounds", "Verifications of a request's drafts", stats.num_rounds),
            ("round_tokens", "Tokens emitted by rounds", stats.num_round_tokens),
            ("drafted_tokens", "Tokens drafted", stats.num_drafted_tokens),
            ("accepted_tokens", "Drafted tokens that were kept", stats.num_accepted_tokens),
            ("prompt_tokens", "Tokens of prompts", stats.num_prompt_tokens),
            ("cached_tokens", "Of them, found in the prefix cache", stats.num_cached_tokens),
            ("output_tokens", "Tokens of outputs", stats.num_output_tokens),
            ("preemptions", "Requests that gave their pages up", engine.num_preemptions),
        ):
            yield CounterMetricFamily(f"eagle3_{name}", text, value=value)
        for name, text, counts in (
            ("drafted_tokens_per_position", "Drafts, by depth", stats.drafted_per_position),
            (
                "accepted_tokens_per_position",
                "Drafts that were kept, by depth",
                stats.num_accepted_per_position,
            ),
        ):
            family = CounterMetricFamily(f"eagle3_{name}", text, labels=["position"])
            for position, count in enumerate(list(counts)):
                family.add_metric([str(position)], count)
            yield family
        phases = CounterMetricFamily(
            "eagle3_phase_seconds", "Time in each phase of the rounds", labels=["phase"]
        )
        for phase, seconds in list(stats.seconds.items()):
            phases.add_metric([phase], seconds)
        yield phases
