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
    """`outputs` are (the request's internal id, news for its consumer); `to_abort`, ids of the core's, ended by a stop string,
    which the core does not know."""

    outputs: list[tuple[str, RequestOutput]] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """The core's tokens to text, for all requests that are open. A request of n completions is n requests to the core."""

    def __init__(self, tokenizer: Tokenizer | None, components: Components | None = None) -> None:
        self.tokenizer = tokenizer
        self._detokenizer_class = (components or Components()).pick("detokenizer")
        self._open: dict[str, _Completion] = {}  # by the core's id
        self._requests: dict[str, _Request] = {}  # by internal id
        self.num_tokens = 0  # that came out so far, of all requests

    def add_request(self, request: ProcessedRequest, kind: OutputKind) -> None:
        whole = _Request(request, kind)
        completions = {
            core.request_id: _Completion(i, whole, self._detokenizer(request)) for i, core in enumerate(request.cores)
        }
        self._open.update(completions)
        self._requests[request.request_id] = whole

    def process(self, core_outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """News of one step. A request that is not open (any more) is skipped: it was aborted while its token was under way."""
        processed = ProcessedOutputs()
        now = time.monotonic()
        for news in core_outputs:
            completion = self._open.get(news.request_id)
            if completion is None:
                continue
            request = completion.request
            completion.update(news, now, self.tokenizer)
            self.num_tokens += len(news.new_token_ids)
            if completion.finish_reason is not None:
                del self._open[news.request_id]
                request.num_open -= 1
                if news.finish_reason is None:
                    processed.to_abort.append(news.request_id)
            if request.num_open == 0:
                request.metrics.finished_time = now
                del self._requests[request.request_id]
            if (output := request.output(completion)) is not None:
                processed.outputs.append((request.request_id, output))
        return processed

    def request_id_of(self, core_id: str) -> str:
        """The internal id of the request that one of the core's belongs to."""
        return self._open[core_id].request.request_id if core_id in self._open else core_id

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests: nothing more is said about them. Returns the core's ids of what they still had open."""
        ids: list[str] = []
        for request_id in request_ids:
            if (request := self._requests.pop(request_id, None)) is not None:
                ids += [core.request_id for core in request.processed.cores if self._open.pop(core.request_id, None)]
        return ids

    def _detokenizer(self, request: ProcessedRequest) -> Any:
        if self.tokenizer is None:
            return None
        options: dict[str, Any] = {"prompt_token_ids": request.core.prompt_token_ids}
        if not request.core.sampling_params.skip_special_tokens:
            options["skip_special_tokens"] = False  # said only where asked for: a replaced detokenizer may not know it
        return self._detokenizer_class(self.tokenizer, **options)


class _Request:
    """One open request, and how its consumer is told of its completions."""

    def __init__(self, processed: ProcessedRequest, kind: OutputKind) -> None:
        self.processed = processed
        self.request_id = processed.request_id
        self.params = processed.core.sampling_params
        self.kind = kind
        self.metrics = RequestMetrics(arrival_time=processed.core.arrival_time)
        self.num_open = len(processed.cores)
        self.finished: list[CompletionOutput] = []  # FINAL_ONLY: those that wait for the others
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_cached_tokens = 0
        self.error: str | None = None

    def output(self, completion: _Completion) -> RequestOutput | None:
        """What the consumer is told now, if anything; after a DELTA the next one starts empty."""
        if self.kind is OutputKind.DELTA:
            outputs = [completion.take()] if completion.has_news else []
        else:
            self.finished += [completion.take()] if completion.finish_reason is not None else []
            outputs = self.finished if self.num_open == 0 else []
        if not outputs:
            return None
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return RequestOutput(
            request_id=self.processed.user_id,
            prompt=self.processed.prompt,
            prompt_token_ids=self.processed.core.prompt_token_ids,
            outputs=sorted(outputs, key=lambda output: output.index),
            finished=self.num_open == 0,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            metrics=copy.copy(self.metrics),
            error=self.error,
        )


class _Completion:
    """One of a request's completions: its text so far, and what its consumer has not been told of it yet."""

    def __init__(self, index: int, request: _Request, detokenizer: Any) -> None:
        params = request.params
        self.index = index
        self.request = request
        self.detokenizer = detokenizer
        self.include_stop = params.include_stop_str_in_output
        self.stops = StopStringMatcher(params.stop, self.include_stop)
        self.min_tokens = params.min_tokens
        self.num_tokens = 0  # of the whole output
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def update(self, news: EngineCoreOutput, now: float, tokenizer: Tokenizer | None) -> None:
        """Take in a step's tokens, up to a stop string if one appears."""
        request = self.request
        request.num_cached_tokens = max(request.num_cached_tokens, news.num_cached_tokens)  # news of an error does not know it
        if news.new_token_ids and request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        if news.prompt_logprobs is not None and self.index == 0:
            request.prompt_logprobs = [None, *(_logprob_dict(row, tokenizer) for row in news.prompt_logprobs)]
        # The token that stops a request, a stop token or the model's end token, counts but is not text.
        is_silent = news.finish_reason is FinishReason.STOP and not self.include_stop
        silent = len(news.new_token_ids) - 1 if is_silent else -1
        for i, token_id in enumerate(news.new_token_ids):
            self._append(token_id, news.new_logprobs[i] if news.new_logprobs else None, tokenizer, is_text=i != silent)
            if self.stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self.stops.matched
                return
        if news.finish_reason is not None:
            if self.detokenizer is not None:
                self.text.append(self.stops.push(self.detokenizer.finish()) + self.stops.finish())
            request.error = request.error or news.error
            self.finish_reason, self.stop_reason = news.finish_reason.value, news.stop_reason

    def _append(self, token_id: int, logprobs: TokenLogprobs | None, tokenizer: Tokenizer | None, is_text: bool) -> None:
        self.num_tokens += 1
        self.token_ids.append(token_id)
        if logprobs is not None and self.logprobs is not None and self.cumulative_logprob is not None:
            self.logprobs.append(_logprob_dict(logprobs, tokenizer))
            self.cumulative_logprob += logprobs.logprobs[0]
        if is_text and self.detokenizer is not None:
            piece = self.detokenizer.push(token_id)
            self.text.append(self.stops.push(piece, armed=self.num_tokens > self.min_tokens))

    @property
    def has_news(self) -> bool:
        return bool(self.token_ids) or self.finish_reason is not None

    def take(self) -> CompletionOutput:
        """What is new since the last time."""
        output = CompletionOutput(
            index=self.index,
            text="".join(self.text),
            token_ids=self.token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self.text, self.token_ids = [], []
        self.logprobs = None if self.logprobs is None else []
        return output


def _logprob_dict(row: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    found: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(row.token_ids, row.logprobs, row.ranks, strict=True):
        text = None if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
        found.setdefault(token_id, Logprob(logprob, rank, text))  # the sampled token, first, may come again as a top one
    return found


def refused(user_id: str, prompt: Prompt, error: str) -> RequestOutput:
    """The output of a request that never ran."""
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
    now = time.monotonic()
    metrics = RequestMetrics(arrival_time=now, finished_time=now)
    return RequestOutput(user_id, text, [], [completion], finished=True, metrics=metrics, error=error)
