"""The echo model: an executor in which every paging, caching or scheduling error changes the output, with no tensor in sight.

A real model's token depends on its whole context only softly: read one wrong block and the text is still text. Here a KV slot
holds the token id that was written to it, and the next token is a *hash of all ids read through the block table*. One slot
too few, one stale block, one draft too many, and the sequence is another from there on. `echo_generate` computes the same
sequence with no cache at all: engine and oracle agree bit for bit, or there is a bug. Labs 05 to 07 are checked with it.

May not know the scheduler: it sees the messages a real worker sees, and raises AssertionError when one makes no sense.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.core.step import FinishReason, SchedulerOutput, StepHandle, StepOutput, TokenLogprobs
from minivllm.sampling_params import SamplingParams

NEVER_WRITTEN = -1


def echo_token(
    token_ids: Sequence[int], num_prompt_tokens: int, params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int
) -> int:
    """The token after `token_ids`: their hash, moved on past the end tokens while fewer than min_tokens are out."""
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % vocab_size
    if len(token_ids) - num_prompt_tokens < params.min_tokens:
        masked = {*params.stop_token_ids, *([] if params.ignore_eos else eos_token_ids)}
        if len(masked) >= vocab_size:
            raise ValueError(f"min_tokens={params.min_tokens} masks all {vocab_size} tokens of the vocabulary.")
        while token in masked:
            token = (token + 1) % vocab_size
    return token


def echo_generate(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_model_len: int,
    eos_token_ids: Sequence[int] = (),
    vocab_size: int = 64,
) -> tuple[list[int], FinishReason, int | None]:
    """What an engine over the echo model must answer: output tokens, finish reason, stop reason."""
    tokens, n = list(prompt_token_ids), len(prompt_token_ids)
    while True:
        token = echo_token(tokens, n, params, eos_token_ids, vocab_size)
        tokens.append(token)
        if token in eos_token_ids and not params.ignore_eos:
            return tokens[n:], FinishReason.STOP, None
        if token in params.stop_token_ids:
            return tokens[n:], FinishReason.STOP, token
        if len(tokens) - n == params.max_tokens or len(tokens) == max_model_len:
            return tokens[n:], FinishReason.LENGTH, None


@dataclass(slots=True)
class _Row:
    """A request in the worker's batch. `token_ids` grows by what is sampled; the scheduler never sends it back."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    block_ids: list[int]
    num_computed_tokens: int


class EchoExecutor:
    """An Executor over integers.

    num_blocks, block_size: the KV cache, null block included.   vocab_size: sampled ids are below it.
    num_speculative_tokens, draft_accuracy, seed: propose so many drafts after each sampled token, each right with that
        probability, wrong for certain otherwise. The output must be the same as without.
    has_drafter_layer: keep a drafter's layer as EAGLE has it, where a slot holds the *next* token, and check before each
        proposal that it is what the request's tokens say.
    fault(scheduler_output): called before each forward; may raise (the whole step fails, after garbage was written to its
        slots) or return {request id: error} (those fail alone).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 64,
        num_speculative_tokens: int = 0,
        draft_accuracy: float = 0.5,
        seed: int = 0,
        fault: Callable[[SchedulerOutput], Mapping[str, str] | None] | None = None,
        has_drafter_layer: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_accuracy = draft_accuracy
        self.fault = fault
        self.kv_cache = [NEVER_WRITTEN] * (num_blocks * block_size)
        self.drafter_layer = list(self.kv_cache) if has_drafter_layer else None
        self._noise = random.Random(seed)
        self._rows: dict[str, _Row] = {}
        self._submitted: SchedulerOutput | None = None
        self._errors: Mapping[str, str] = {}

    # ---------------------------------------------------------------- the Executor protocol

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        """The forward pass: update the batch, then write *every* row's tokens to its slots before any row reads."""
        step = scheduler_output
        self._update_batch(step)
        try:
            self._errors = (self.fault(step) if self.fault is not None else None) or {}
        except BaseException:
            self._write(step, garbage=True)
            raise
        self._write(step)
        self._submitted = step

    def sample(self, grammar_mask: Any = None) -> StepHandle:
        _refuse(grammar_mask)
        assert self._submitted is not None, "sample() without a submit() before it"
        step, self._submitted = self._submitted, None
        output = StepOutput(errors=dict(self._errors))
        for req_id, n in step.num_scheduled_tokens.items():
            row = self._rows[req_id]
            drafts = step.scheduled_spec_decode_tokens.get(req_id, [])
            seq_len = row.num_computed_tokens + n
            output.sampled_token_ids[req_id] = tokens = self._verify(row, self._read(row, seq_len), drafts)
            if not tokens:
                continue
            known = len(row.token_ids)
            row.token_ids += tokens
            if row.params.logprobs is not None:
                output.logprobs[req_id] = [self._logprobs(token, row.params.logprobs) for token in tokens]
            if row.params.prompt_logprobs is not None and known == row.num_prompt_tokens:
                prompt = row.token_ids[1:known]
                output.prompt_logprobs[req_id] = [self._logprobs(token, row.params.prompt_logprobs) for token in prompt]
        if self.drafter_layer is not None:
            self._write_drafter_layer(step, self.drafter_layer)
        for req_id, tokens in output.sampled_token_ids.items():
            if tokens and self.num_speculative_tokens:
                output.draft_token_ids[req_id] = self._propose(self._rows[req_id])
        return _Ready(output)

    def shutdown(self) -> None:
        self._rows.clear()

    # ---------------------------------------------------------------- its parts

    def _update_batch(self, step: SchedulerOutput) -> None:
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._rows.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self._rows, f"request {new.req_id!r} is new, but the batch holds it"
            self._rows[new.req_id] = _Row(
                list(new.token_ids),
                new.num_prompt_tokens,
                new.sampling_params,
                new.eos_token_ids,
                list(new.block_ids),
                new.num_computed_tokens,
            )
        cached = step.scheduled_cached_reqs
        for req_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            assert req_id in self._rows, f"request {req_id!r} is cached, but the batch does not hold it"
            self._rows[req_id].block_ids += block_ids
            self._rows[req_id].num_computed_tokens = num_computed
        told = [new.req_id for new in step.scheduled_new_reqs] + cached.req_ids
        assert sorted(told) == sorted(step.num_scheduled_tokens), "requests with tokens and requests described differ"
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens > 0, "the token counts do not add up"

    def _write(self, step: SchedulerOutput, garbage: bool = False) -> None:
        for req_id, n in step.num_scheduled_tokens.items():
            row = self._rows[req_id]
            known = row.token_ids + step.scheduled_spec_decode_tokens.get(req_id, [])
            start, end = row.num_computed_tokens, row.num_computed_tokens + n
            assert start < end <= len(known), f"request {req_id!r}: tokens {start} to {end} asked for, {len(known)} are known"
            assert end <= len(row.block_ids) * self.block_size, f"request {req_id!r}: token {end - 1} has no block"
            for position in range(start, end):
                self.kv_cache[self._slot(row, position)] = NEVER_WRITTEN if garbage else known[position]

    def _slot(self, row: _Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        assert 0 < block_id < self.num_blocks, f"block {block_id} is the null block or outside the pool"
        return block_id * self.block_size + position % self.block_size

    def _read(self, row: _Row, seq_len: int) -> list[int]:
        """What attention sees at the last position: the row's slots, whoever wrote them."""
        seen: list[int] = []
        for block_id in row.block_ids[: -(-seq_len // self.block_size)]:
            seen += self.kv_cache[block_id * self.block_size : (block_id + 1) * self.block_size]
        return seen[:seq_len]

    def _verify(self, row: _Row, seen: list[int], drafts: list[int]) -> list[int]:
        """[] for a prefill chunk. Else the token after each accepted draft and one more: a draft is accepted if it is
        the token."""
        known = len(seen) - len(drafts)
        if known < len(row.token_ids):
            return []
        tokens: list[int] = []
        for i in range(len(drafts) + 1):
            tokens.append(self._next_token(row, seen[: known + i]))
            if i < len(drafts) and drafts[i] != tokens[-1]:
                break
        return tokens

    def _write_drafter_layer(self, step: SchedulerOutput, layer: list[int]) -> None:
        """Every position of the step gets the token after it: known, sampled just now, or nothing after a rejected draft."""
        for req_id, n in step.num_scheduled_tokens.items():
            row = self._rows[req_id]
            for position in range(row.num_computed_tokens, row.num_computed_tokens + n):
                known = position + 1 < len(row.token_ids)
                layer[self._slot(row, position)] = row.token_ids[position + 1] if known else NEVER_WRITTEN

    def _propose(self, row: _Row) -> list[int]:
        tokens = list(row.token_ids)
        if self.drafter_layer is not None:
            end = len(tokens) - 1
            read = [self.drafter_layer[self._slot(row, position)] for position in range(end)]
            assert read == tokens[1:], "the drafter's layer was made with other tokens than the request has"
            # drafts go on from here: what they leave must be overwritten, or never read
            for position in range(end, min(end + self.num_speculative_tokens, len(row.block_ids) * self.block_size)):
                self.drafter_layer[self._slot(row, position)] = NEVER_WRITTEN
        for _ in range(self.num_speculative_tokens):
            token = self._next_token(row, tokens)
            if self._noise.random() >= self.draft_accuracy:
                token = (token + self._noise.randrange(1, self.vocab_size)) % self.vocab_size
            tokens.append(token)
        return tokens[len(row.token_ids) :]

    def _next_token(self, row: _Row, token_ids: list[int]) -> int:
        return echo_token(token_ids, row.num_prompt_tokens, row.params, row.eos_token_ids, self.vocab_size)

    def _logprobs(self, token: int, num_logprobs: int) -> TokenLogprobs:
        """A made-up distribution: the sampled token has probability 1/2, the id after it 1/4, and so on."""
        log_half = -0.6931471805599453
        ranks = [1, *range(1, num_logprobs + 1)]
        ids = [(token + rank - 1) % self.vocab_size for rank in ranks]
        return TokenLogprobs(ids, [rank * log_half for rank in ranks], ranks)


def _refuse(grammar_mask: Any) -> None:
    """As the model runner does: none of these executors has structured output."""
    if grammar_mask is not None:
        raise ValueError("grammar_mask is given, and this executor has no structured output.")


class _Ready:
    """The handle of a step that is done."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class DeferredExecutor:
    """Wraps an executor so that nothing runs before its result is asked for, as on a device that lags behind: a step's
    faults show in `result()`, and several steps can be in flight. They run in the order they were submitted."""

    def __init__(self, inner: EchoExecutor) -> None:
        self.inner = inner
        self.num_blocks = inner.num_blocks
        self._queue: list[_Deferred] = []

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        self._queue.append(_Deferred(self, scheduler_output))

    def sample(self, grammar_mask: Any = None) -> StepHandle:
        _refuse(grammar_mask)
        return self._queue[-1]

    def shutdown(self) -> None:
        self._queue.clear()
        self.inner.shutdown()

    def run_until(self, last: _Deferred) -> None:
        while last in self._queue:
            step = self._queue.pop(0)
            try:
                self.inner.submit(step.scheduler_output)
                step.handle = self.inner.sample()
            except Exception as error:
                step.error = error


class _Deferred:
    def __init__(self, executor: DeferredExecutor, scheduler_output: SchedulerOutput) -> None:
        self.executor = executor
        self.scheduler_output = scheduler_output
        self.handle: StepHandle | None = None
        self.error: Exception | None = None

    def result(self) -> StepOutput:
        self.executor.run_until(self)
        if self.error is not None:
            raise self.error
        assert self.handle is not None
        return self.handle.result()
