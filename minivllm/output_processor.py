"""OutputProcessor: the core's token ids as text, and as the RequestOutputs their users see. Here text begins again.

    RequestOutput <- OutputProcessor (detokenize, stop strings) <- EngineCoreOutput <- EngineCore

Shared by `LLM` and a server. Labs: built by none (its detokenizer in Lab 11). May not know torch or the core's insides; the
core in turn knows no text, so a stop string is found here and its request aborted there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from minivllm.components import Components
from minivllm.core.step import EngineCoreOutput, FinishReason, TokenLogprobs
from minivllm.input_processor import ProcessedRequest, Prompt
from minivllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minivllm.text.detokenizer import StopStringMatcher
from minivllm.text.tokenizer import Tokenizer


class OutputKind(Enum):
    """What a consumer is told: everything once at the end, or only what is new each time."""

    FINAL_ONLY = "final_only"
    DELTA = "delta"


@dataclass(slots=True)
class ProcessedOutputs:
    """`outputs` are (internal request id, news for its consumer); `to_abort` ended by a stop string, unknown to the core."""

    outputs: list[tuple[str, RequestOutput]] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """The core's tokens to text, for all requests that are open."""

    def __init__(self, tokenizer: Tokenizer | None, components: Components | None = None) -> None:
        self.tokenizer = tokenizer
        self._detokenizer_class = (components or Components()).pick("detokenizer")
        self._open: dict[str, _RequestState] = {}
        self.num_tokens = 0  # that came out so far, of all requests

    def add_request(self, request: ProcessedRequest, kind: OutputKind) -> None:
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = self._detokenizer_class(self.tokenizer, prompt_token_ids=request.core.prompt_token_ids)
        self._open[request.core.request_id] = _RequestState(request, kind, self.tokenizer, detokenizer)

    def process(self, core_outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """News of one step. A request that is not open (any more) is skipped: it was aborted while its token was under way."""
        processed = ProcessedOutputs()
        now = time.monotonic()
        for news in core_outputs:
            state = self._open.get(news.request_id)
            if state is None:
                continue
            state.update(news, now)
            self.num_tokens += len(news.new_token_ids)
            if state.finish_reason is not None:
                del self._open[news.request_id]
                if news.finish_reason is None:
                    processed.to_abort.append(news.request_id)
            if (output := state.output()) is not None:
                processed.outputs.append((news.request_id, output))
        return processed

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests: nothing more is said about them."""
        for request_id in request_ids:
            self._open.pop(request_id, None)


class _RequestState:
    """One open request: its text so far, and what its consumer has been told of it."""

    def __init__(self, request: ProcessedRequest, kind: OutputKind, tokenizer: Tokenizer | None, detokenizer: Any) -> None:
        params = request.core.sampling_params
        self.request = request
        self.kind = kind
        self.tokenizer = tokenizer
        self.detokenizer = detokenizer
        self.stops = StopStringMatcher(params.stop)
        self.min_tokens = params.min_tokens
        self.metrics = RequestMetrics(arrival_time=request.core.arrival_time)
        self.num_tokens = 0  # of the whole output; the lists below hold what the consumer has not been told yet
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

    def update(self, news: EngineCoreOutput, now: float) -> None:
        """Take in a step's tokens, up to a stop string if one appears."""
        self.num_cached_tokens = max(self.num_cached_tokens, news.num_cached_tokens)  # news of an error does not know it
        if news.new_token_ids and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        # The token that stops a request, a stop token or the model's end token, counts but is not text.
        silent = len(news.new_token_ids) - 1 if news.finish_reason is FinishReason.STOP else -1
        for i, token_id in enumerate(news.new_token_ids):
            self._append(token_id, news.new_logprobs[i] if news.new_logprobs else None, is_text=i != silent)
            if self.stops.matched is not None:
                self._finish("stop", self.stops.matched, now)
                return
        if news.finish_reason is not None:
            if self.detokenizer is not None:
                self.text.append(self.stops.push(self.detokenizer.finish()) + self.stops.finish())
            self.error = news.error
            self._finish(news.finish_reason.value, news.stop_reason, now)

    def _append(self, token_id: int, logprobs: TokenLogprobs | None, is_text: bool) -> None:
        self.num_tokens += 1
        self.token_ids.append(token_id)
        if logprobs is not None and self.logprobs is not None and self.cumulative_logprob is not None:
            self.logprobs.append(self._logprob_dict(logprobs))
            self.cumulative_logprob += logprobs.logprobs[0]
        if is_text and self.detokenizer is not None:
            piece = self.detokenizer.push(token_id)
            self.text.append(self.stops.push(piece, armed=self.num_tokens > self.min_tokens))

    def _logprob_dict(self, row: TokenLogprobs) -> dict[int, Logprob]:
        found: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(row.token_ids, row.logprobs, row.ranks, strict=True):
            text = None if self.tokenizer is None else self.tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
            found.setdefault(token_id, Logprob(logprob, rank, text))  # the sampled token, first, may come again as a top one
        return found

    def _finish(self, reason: str, stop_reason: int | str | None, now: float) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.metrics.finished_time = now

    def output(self) -> RequestOutput | None:
        """What the consumer is told now, if anything; after a DELTA the next one starts empty."""
        if self.kind is OutputKind.FINAL_ONLY and self.finish_reason is None:
            return None
        if not self.token_ids and self.finish_reason is None:
            return None
        completion = CompletionOutput(
            index=0,
            text="".join(self.text),
            token_ids=self.token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self.text, self.token_ids = [], []
        self.logprobs = None if self.logprobs is None else []
        return RequestOutput(
            request_id=self.request.user_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.core.prompt_token_ids,
            outputs=[completion],
            finished=self.finish_reason is not None,
            num_cached_tokens=self.num_cached_tokens,
            metrics=copy.copy(self.metrics),
            error=self.error,
        )


def refused(user_id: str, prompt: Prompt, error: str) -> RequestOutput:
    """The output of a request that never ran."""
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
    now = time.monotonic()
    metrics = RequestMetrics(arrival_time=now, finished_time=now)
    return RequestOutput(user_id, text, [], [completion], finished=True, metrics=metrics, error=error)
