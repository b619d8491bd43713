"""Metrics: what the engine does, in Prometheus' text form, under vLLM's names, so that its dashboards work. Labs: built by
none. May not know HTTP; `AsyncLLM` calls it as its observer.

Times are the front end's: a token counts when it has arrived here. Each server has a registry of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from minivllm.config import EngineConfig
from minivllm.core.step import EngineCoreOutput, EngineCoreRequest
from minivllm.serving.wire import CoreStats

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN_TOKENS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(slots=True)
class _Times:
    """Of one open request of the core."""

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    first_token: float = 0.0
    last_token: float = 0.0


class Metrics:
    """`AsyncLLM`'s observer."""

    content_type = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._open: dict[str, _Times] = {}
        self._num_blocks = 0
        self.stats = CoreStats()  # the newest
        self.num_generated_tokens = 0

        gauge, counter = self._gauge, self._counter
        self._running = gauge("num_requests_running", "Requests in the batch.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for room.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 is all.")
        self._preemptions = counter("num_preemptions", "Preemptions.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that have begun to answer.")
        self._generation_tokens = counter("generation_tokens", "Output tokens.")
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._iteration = self._histogram("iteration_tokens_total", "Tokens computed in a step.", _TOKENS)
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._itl = self._histogram("inter_token_latency_seconds", "From a token to the next.", _BETWEEN_TOKENS)
        self._tpot = self._histogram("request_time_per_output_token_seconds", "A request's mean of these.", _BETWEEN_TOKENS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompt_len = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_len = self._histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._params_n = self._histogram("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS)

    def describe(self, config: EngineConfig, num_blocks: int) -> None:
        """Settings of the KV cache, once they are settled."""
        self._num_blocks = num_blocks - 1  # the null block is nobody's
        labels = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(num_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching is not False),
            "engine": "0",
        }
        info = Gauge("vllm:cache_config_info", "Settings of the KV cache.", list(labels), registry=self._registry)
        info.labels(**labels).set(1)

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)

    # ---------------------------------------------------------------- the observer

    def added(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        self._open[request.request_id] = _Times(request.arrival_time, len(request.prompt_token_ids))
        self._params_n.observe(params.n)
        if params.max_tokens is not None:
            self._params_max_tokens.observe(params.max_tokens)

    def stepped(self, outputs: Sequence[EngineCoreOutput], stats: CoreStats) -> None:
        self.stats = stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(1 - stats.num_free_blocks / self._num_blocks if self._num_blocks else 0)
        self._preemptions.inc(stats.num_preempted)
        self._queries.inc(stats.prefix_queries)
        self._hits.inc(stats.prefix_hits)
        if stats.num_tokens:
            self._iteration.observe(stats.num_tokens)
        now = time.monotonic()
        for news in outputs:
            self._take(news, now)

    def ended(self, core_request_ids: Iterable[str], reason: str) -> None:
        now = time.monotonic()
        for request_id in core_request_ids:
            self._finish(request_id, reason, now)

    # ---------------------------------------------------------------- parts

    def _take(self, news: EngineCoreOutput, now: float) -> None:
        times = self._open.get(news.request_id)
        if times is None:
            return
        if n := len(news.new_token_ids):
            self.num_generated_tokens += n
            self._generation_tokens.inc(n)
            if times.num_output_tokens == 0:
                times.first_token = now
                self._ttft.observe(now - times.arrival)
                self._prompt_tokens.inc(times.num_prompt_tokens)
            else:
                self._itl.observe(now - times.last_token)
            times.num_output_tokens += n
            times.last_token = now
        if news.finish_reason is not None:
            self._finish(news.request_id, news.finish_reason.value, now)

    def _finish(self, request_id: str, reason: str, now: float) -> None:
        times = self._open.pop(request_id, None)
        if times is None:
            return
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._prompt_len.observe(times.num_prompt_tokens)
        self._output_len.observe(times.num_output_tokens)
        self._e2e.observe(now - times.arrival)
        if times.num_output_tokens > 1:
            self._tpot.observe((times.last_token - times.first_token) / (times.num_output_tokens - 1))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, list(self._labels), registry=self._registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, list(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, list(self._labels), buckets=buckets, registry=self._registry)
        return metric.labels(**self._labels)
