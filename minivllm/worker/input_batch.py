"""InputBatch: the worker's memory of the requests it runs, and the arrays one step is made of. Lab 04 builds `slot_mapping`,
Lab 06 the metadata of a mixed batch. NumPy on the host; may not know torch, the model, or why a request was scheduled.

It is *persistent*: a step's message brings only the difference (new requests, new blocks, who left), and the step's arrays are
cut out of what is already here. A request keeps its row from arrival to end. Rows that are not in the step, and the order of
those that are, cost nothing to skip: the step is a list of row numbers, decodes first.

    row   token_ids                    num_tokens  num_computed   block_table     step: row 2 computes 1 token, row 0 computes 3
     0    p p p p p p                      6            3         5 9             rows       [2, 0]         decodes first
     1    (free)                                                                  positions  [4 | 3 4 5]
     2    p p p o o                        5            4         3 7             slots      [7.0 | 5.3 9.0 9.1]   block.offset

No loop here runs over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from minivllm.attention.rows import attention_rows
from minivllm.core.step import NewRequestData, SchedulerOutput, TokenLogprobs
from minivllm.sampling_params import SamplingParams

_MAX_INT = 2**31 - 1
_MAX_TEMPERATURE = 1e30  # float32 ends at 3e38; any logits divided by this are equal
NO_DRAFT = -2  # no token id, nor the sampler's INVALID
_MIN_TOP_P = 1e-30  # the most probable token alone, as for all smaller ones


def slot_mapping(positions: np.ndarray, block_table: np.ndarray, block_size: int) -> np.ndarray:
    """The cache slots [T] of tokens at `positions` [T] of a sequence whose blocks are `block_table` [M], in order."""
    return block_table[positions // block_size] * block_size + positions % block_size


def build_metadata(
    num_computed_tokens: np.ndarray,
    num_scheduled_tokens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    map_slots: Callable[..., Any],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """The shape of a step's batch of B rows and T tokens, decodes and prefill chunks alike: query_start_loc [B + 1],
    seq_lens [B], positions [T], slots [T].

    num_computed_tokens, num_scheduled_tokens [B] int64: of each row, before this step and in it (at least 1).
    block_tables [B, M]: the rows' blocks, 0-padded.   map_slots: `slot_mapping`, which knows one sequence's table.
    """
    num_rows, num_blocks = block_tables.shape
    starts = np.concatenate([[0], num_scheduled_tokens.cumsum()])
    first_position = num_computed_tokens - starts[:-1]  # were the row's first token the batch's first
    positions = np.arange(starts[-1]) + first_position.repeat(num_scheduled_tokens)
    # One call serves the batch: all tables, laid end to end, are the table of one long sequence, in which row i begins behind
    # the slots of the i rows before it.
    behind = np.arange(num_rows) * (num_blocks * block_size)
    slots = map_slots(positions + behind.repeat(num_scheduled_tokens), block_tables.ravel(), block_size)
    return starts, num_computed_tokens + num_scheduled_tokens, positions, slots


@dataclass(slots=True)
class StepInputs:
    """One step of B requests and T tokens as flat arrays: decodes first, then drafts to verify, then prefill chunks.

    Attention sees rows, `num_decodes` of one token and then those of several; see `attention/interface.py` for the layout. A
    row is a request, but one that verifies k drafts is k + 1 rows: decodes of one block table, each a token longer than the
    one before. All keys are written before any row attends, so each sees the drafts before it, and decode kernels (and
    graphs) serve verification as they are.

    sample_rows [S]: which of the B requests reach the end of their tokens, and so yield one.
    logits_indices [N]: the tokens among the T whose hidden states these are sampled from: of each its last, and with drafts
        the one before each of them, too. `sample_row_of`, `ahead`, `draft_ids` [N]: whose they are (an index into sample_rows),
        how many drafts stand before, and which draft was made of the token to be sampled (NO_DRAFT in each request's last).
    """

    req_ids: list[str]
    rows: np.ndarray  # [B] of the InputBatch
    token_starts: np.ndarray  # [B + 1]: where each request's tokens begin
    num_decodes: int
    input_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    query_start_loc: np.ndarray  # [rows + 1] int32
    seq_lens: np.ndarray  # [rows] int32
    block_tables: np.ndarray  # [rows, M] int32, 0-padded
    slot_mapping: np.ndarray  # [T] int64
    sample_rows: np.ndarray
    logits_indices: np.ndarray
    sample_row_of: np.ndarray
    ahead: np.ndarray
    draft_ids: np.ndarray
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of prompts that end here; the runner's


@dataclass(slots=True)
class SamplingInputs:
    """What S rows ask of the sampler, as arrays [S]; the fields of `SamplingMetadata`, before they are tensors."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    num_logprobs: np.ndarray  # -1: none asked for
    removed_rows: list[int] = field(default_factory=list)
    removed_ids: list[int] = field(default_factory=list)
    allowed: list[tuple[int, np.ndarray]] = field(default_factory=list)  # (row, token ids)
    bias: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)  # (row, token ids, values)
    penalties: PenaltyInputs | None = None


@dataclass(slots=True)
class PenaltyInputs:
    """Of the R rows that have penalties, in `Penalties`' shapes. token_ids [R, N] holds -1 past a row's end."""

    rows: np.ndarray
    token_ids: np.ndarray
    is_output: np.ndarray
    repetition: np.ndarray
    frequency: np.ndarray
    presence: np.ndarray


@dataclass(slots=True)
class TokenRules:
    """What a request says about single tokens: few do, so there is one for those alone."""

    allowed_ids: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    bad_words: list[list[int]]

    @classmethod
    def of(cls, params: SamplingParams) -> TokenRules | None:
        if not (params.allowed_token_ids or params.logit_bias or params.bad_words_token_ids):
            return None
        return cls(
            np.unique(np.array(params.allowed_token_ids, dtype=np.int64)),
            np.array(list(params.logit_bias), dtype=np.int64),
            np.array(list(params.logit_bias.values()), dtype=np.float32),
            params.bad_words_token_ids,
        )


def _as_slots(slots: Any, num_tokens: int) -> np.ndarray:
    """What `map_slots` answered, which may be a replaced part's."""
    slots = np.asarray(slots, dtype=np.int64)
    if slots.shape != (num_tokens,):
        raise ValueError(f"slot_mapping gave {slots.shape} for {num_tokens} positions: it must give one slot for each.")
    return slots


def _logits_rows(input_ids: np.ndarray, ends: np.ndarray, num_drafts: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of logits of requests that yield [S], whose tokens end before `ends` and whose last num_drafts are drafts."""
    counts = num_drafts + 1
    ahead = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
    indices = (ends - counts).repeat(counts) + ahead
    draft_ids = np.full(len(ahead), NO_DRAFT)
    has_draft = ahead < num_drafts.repeat(counts)
    draft_ids[has_draft] = input_ids[indices[has_draft] + 1]
    return {
        "logits_indices": indices,
        "sample_row_of": np.arange(len(ends)).repeat(counts),
        "ahead": ahead,
        "draft_ids": draft_ids,
    }


class InputBatch:
    """Rows for at most `max_num_seqs` requests of at most `max_model_len` tokens.

    `map_slots` is the `slot_mapping` component: it is shown NumPy arrays, and may answer with anything that becomes one.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        map_slots: Callable[..., Any] = slot_mapping,
    ) -> None:
        n = max_num_seqs
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.map_slots = map_slots
        self.rows: dict[str, int] = {}
        self._free_rows = list(range(n - 1, -1, -1))

        self.token_ids = np.zeros((n, max_model_len), dtype=np.int32)  # the operating system gives memory when it is used
        self.block_table = np.zeros((n, self.max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(n, dtype=np.int32)
        self.num_tokens = np.zeros(n, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(n, dtype=np.int64)
        self.num_computed_tokens = np.zeros(n, dtype=np.int64)
        self.num_drafter_tokens = np.zeros(n, dtype=np.int64)  # leading tokens that a draft model's own cache holds

        self.temperature = np.zeros(n, dtype=np.float32)
        self.top_k = np.zeros(n, dtype=np.int64)
        self.top_p = np.ones(n, dtype=np.float32)
        self.min_p = np.zeros(n, dtype=np.float32)
        self.seed = np.zeros(n, dtype=np.int64)
        self.num_logprobs = np.full(n, -1, dtype=np.int64)
        self.min_tokens = np.zeros(n, dtype=np.int64)
        self.presence_penalty = np.zeros(n, dtype=np.float32)
        self.frequency_penalty = np.zeros(n, dtype=np.float32)
        self.repetition_penalty = np.ones(n, dtype=np.float32)
        self.has_penalties = np.zeros(n, dtype=bool)
        self.num_prompt_logprobs = np.full(n, -1, dtype=np.int64)  # -1: none asked for, or given already
        self._token_rules: dict[int, TokenRules] = {}  # of the rows that have any
        self._end_ids: list[list[int]] = [[] for _ in range(n)]  # masked until min_tokens

    # ---------------------------------------------------------------- the difference

    def update(self, step: SchedulerOutput) -> None:
        """Take in what changed since the last step. Ids that are not here may leave; unknown ids must not be continued."""
        for req_id in step.finished_req_ids:
            self._remove(req_id)
        for req_id in step.preempted_req_ids:
            self._remove(req_id)
        cached = step.scheduled_cached_reqs
        if unknown := [req_id for req_id in cached.req_ids if req_id not in self.rows]:
            raise ValueError(f"The step continues request {unknown[0]!r}, which the worker does not have.")
        for new in step.scheduled_new_reqs:
            self._add(new)
        rows = self._rows_of(cached.req_ids)
        self.num_computed_tokens[rows] = cached.num_computed_tokens
        for row, block_ids in zip(rows, cached.new_block_ids, strict=True):
            if block_ids:
                self._append_blocks(row, block_ids)

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray, ahead: np.ndarray | int = 0) -> None:
        """Sampled tokens for some rows; one that gets several is named for each, with `ahead` 0, 1, 2, ..."""
        self.token_ids[rows, self.num_tokens[rows] + ahead] = token_ids
        np.add.at(self.num_tokens, rows, 1)

    def _rows_of(self, req_ids: list[str]) -> np.ndarray:
        return np.fromiter((self.rows[req_id] for req_id in req_ids), dtype=np.int64, count=len(req_ids))

    def _remove(self, req_id: str) -> None:
        row = self.rows.pop(req_id, None)
        if row is not None:
            self._free_rows.append(row)
            self._token_rules.pop(row, None)

    def _add(self, new: NewRequestData) -> None:
        self._remove(new.req_id)  # known from a step that failed before it could be told
        if not self._free_rows:
            raise ValueError(f"All {len(self.num_tokens)} rows of the batch are taken: no room for request {new.req_id!r}.")
        row = self._free_rows.pop()
        self.rows[new.req_id] = row
        n = len(new.token_ids)
        self.token_ids[row, :n] = new.token_ids
        self.num_tokens[row] = n
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.num_drafter_tokens[row] = new.num_computed_tokens  # cached blocks hold the drafter's keys, too
        self.block_table[row] = 0
        self.num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)

        params = new.sampling_params
        # What Python's numbers can say and the arrays' cannot is cut to the nearest that means the same.
        self.temperature[row] = min(params.temperature, _MAX_TEMPERATURE)
        self.top_k[row] = min(params.top_k, _MAX_INT)
        self.top_p[row] = max(params.top_p, _MIN_TOP_P)  # rounded to 0 it would remove every token
        self.min_p[row] = params.min_p
        self.seed[row] = (new.seed + 2**63) % 2**64 - 2**63  # any 64 bits, as a signed number
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.min_tokens[row] = min(params.min_tokens, _MAX_INT)
        self._end_ids[row] = sorted({*new.eos_token_ids, *params.stop_token_ids})
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.repetition_penalty[row] = params.repetition_penalty
        self.has_penalties[row] = params.has_penalties
        told = n > new.num_prompt_tokens  # back after a preemption: its first token, and these with it, are out
        self.num_prompt_logprobs[row] = -1 if params.prompt_logprobs is None or told else params.prompt_logprobs
        if (rules := TokenRules.of(params)) is not None:
            self._token_rules[row] = rules

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        if min(block_ids, default=1) < 1:
            raise ValueError(f"A request was given block {min(block_ids)}; block 0 is the null block, which is nobody's.")
        start = self.num_blocks[row]
        stop = start + len(block_ids)
        if stop > self.max_blocks:
            raise ValueError(f"A request was given {stop} blocks; max_model_len fills {self.max_blocks}.")
        self.block_table[row, start:stop] = block_ids
        self.num_blocks[row] = stop

    # ---------------------------------------------------------------- one step

    def build(
        self, num_scheduled_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]] = MappingProxyType({})
    ) -> StepInputs:
        """The arrays of a step that computes that many tokens of each request, the last of them drafts where there are some."""
        req_ids = list(num_scheduled_tokens)
        n = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(req_ids))
        num_drafts = np.fromiter((len(drafts.get(req_id, ())) for req_id in req_ids), dtype=np.int64, count=len(req_ids))
        is_chunk = (n != 1) & (num_drafts == 0)
        order = np.argsort(np.where(n == 1, 0, 1 + is_chunk), kind="stable")  # otherwise as the scheduler has them
        req_ids, n, num_drafts = [req_ids[i] for i in order], n[order], num_drafts[order]
        rows = self._rows_of(req_ids)
        for req_id in drafts:  # beyond the known tokens, where answers will overwrite them
            row = self.rows[req_id]
            self.token_ids[row, self.num_tokens[row] : self.num_tokens[row] + len(drafts[req_id])] = drafts[req_id]

        computed = self.num_computed_tokens[rows]
        seq_lens, known = computed + n, self.num_tokens[rows] + num_drafts
        if (seq_lens > known).any():
            late = req_ids[int(np.argmax(seq_lens > known))]
            raise ValueError(f"The step computes more tokens than request {late!r} has.")
        block_tables = self.block_table[rows, : -(-int(seq_lens.max()) // self.block_size)]
        starts, _, positions, slots = build_metadata(computed, n, block_tables, self.block_size, self.map_slots)
        input_ids = self.token_ids[rows.repeat(n), positions].astype(np.int64)
        yields = (seq_lens == known).nonzero()[0]
        num_single = len(n) - int(is_chunk.sum())  # requests whose tokens are all decodes
        shape = attention_rows(n, num_single, starts, positions, seq_lens, block_tables)
        return StepInputs(
            req_ids=req_ids,
            rows=rows,
            token_starts=starts,
            num_decodes=int(starts[num_single]),
            input_ids=input_ids,
            positions=positions,
            slot_mapping=_as_slots(slots, len(positions)),
            sample_rows=yields,
            **shape,
            **_logits_rows(input_ids, starts[1:][yields], num_drafts[yields]),
        )

    def sampling_inputs(self, rows: np.ndarray, ahead: np.ndarray | int = 0) -> SamplingInputs:
        """What the requests in these rows ask of the sampler for the token after their known ones and `ahead` drafts."""
        num_tokens = self.num_tokens[rows] + ahead
        inputs = SamplingInputs(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seeds=self.seed[rows],
            positions=num_tokens,
            num_logprobs=self.num_logprobs[rows],
        )
        too_short = num_tokens - self.num_prompt_tokens[rows] < self.min_tokens[rows]
        for i in too_short.nonzero()[0]:
            end_ids = self._end_ids[rows[i]]
            inputs.removed_ids += end_ids
            inputs.removed_rows += [int(i)] * len(end_ids)
        if self._token_rules:
            self._apply_token_rules(rows, num_tokens, inputs)
        if self.has_penalties[rows].any():
            inputs.penalties = self._penalty_inputs(rows, num_tokens)
        return inputs

    def _apply_token_rules(self, rows: np.ndarray, num_tokens: np.ndarray, inputs: SamplingInputs) -> None:
        for i, row in enumerate(rows.tolist()):
            if (rules := self._token_rules.get(row)) is None:
                continue
            if len(rules.allowed_ids):
                inputs.allowed.append((i, rules.allowed_ids))
            if len(rules.bias_ids):
                inputs.bias.append((i, rules.bias_ids, rules.bias_values))
            output = self.token_ids[row, self.num_prompt_tokens[row] : num_tokens[i]]
            for *beginning, last in rules.bad_words:
                start = len(output) - len(beginning)
                if start >= 0 and (output[start:] == beginning).all():
                    inputs.removed_rows.append(i)
                    inputs.removed_ids.append(last)

    def _penalty_inputs(self, rows: np.ndarray, num_tokens: np.ndarray) -> PenaltyInputs:
        penalized = self.has_penalties[rows].nonzero()[0]
        rows = rows[penalized]
        lengths, prompt_lengths = num_tokens[penalized, None], self.num_prompt_tokens[rows, None]
        columns = np.arange(lengths.max())
        known = columns < lengths
        return PenaltyInputs(
            rows=penalized,
            token_ids=np.where(known, self.token_ids[rows, : len(columns)], -1).astype(np.int64),
            is_output=known & (columns >= prompt_lengths),
            repetition=self.repetition_penalty[rows],
            frequency=self.frequency_penalty[rows],
            presence=self.presence_penalty[rows],
        )
