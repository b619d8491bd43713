"""What the engine gives back: vLLM's RequestOutput and its parts. Labs: built by none. May not know torch or the engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One candidate token at one output position. `logprob` is of the raw logits (before temperature and filters), natural log;
    `rank` is 1 for the most likely token of the vocabulary; `decoded_token` is its text, when there is a tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion. `finish_reason` is None while running, then "stop" (end token, stop token, stop string), "length"
    (max_tokens or max_model_len), "abort", or "error". `stop_reason` is the stop string or stop token id that matched, None
    for the model's own end token. `logprobs` has one {token id: Logprob} per output token, when asked for."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, later: CompletionOutput) -> None:
        """Take in the next delta of the same completion."""
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *later.logprobs]
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, seconds on `time.monotonic()`'s clock. TTFT is `first_token_time - arrival_time`."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request as its user sees it. `num_cached_tokens` counts the prompt tokens found in the prefix cache at
    first admission. `prompt_logprobs`, when asked for, has one entry per prompt token, None for the first; in a stream it comes
    with the first output. `error` says what failed when finish_reason is "error"."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None

    def add(self, later: RequestOutput) -> None:
        """Take in the next deltas of the same stream, as if all had come at once."""
        mine = {output.index: output for output in self.outputs}
        for delta in later.outputs:
            if delta.index in mine:
                mine[delta.index].add(delta)
            else:
                self.outputs.append(delta)
        self.finished = later.finished
        self.num_cached_tokens = later.num_cached_tokens
        self.prompt_logprobs = later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs
        self.metrics = later.metrics
        self.error = self.error or later.error
