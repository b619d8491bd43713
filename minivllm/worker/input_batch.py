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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minivllm.core.step import NewRequestData, SchedulerOutput, TokenLogprobs
from minivllm.sampling_params import SamplingParams

_MAX_INT = 2**31 - 1
_MAX_TEMPERATURE = 1e30  # float32 ends at 3e38; any logits divided by this are equal
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
    slots = map_slots(positions + behind.repeat(num_scheduled_tokens), block_tables.reshape(-1), block_size)
    return starts, num_computed_tokens + num_scheduled_tokens, positions, slots


@dataclass(slots=True)
class StepInputs:
    """One step as flat arrays: `num_decodes` rows of one token, then rows of several. B rows, T tokens; see
    `attention/interface.py` for the layout.

    sample_rows [S]: which of the B rows reach the end of their tokens, and so yield one.
    logits_indices [S]: the tokens among the T whose hidden states these rows are sampled from, each row's last.
    """

    req_ids: list[str]
    rows: np.ndarray  # [B] of the InputBatch
    num_decodes: int
    input_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    query_start_loc: np.ndarray  # [B + 1] int32
    seq_lens: np.ndarray  # [B] int32
    block_tables: np.ndarray  # [B, M] int32, 0-padded
    slot_mapping: np.ndarray  # [T] int64
    sample_rows: np.ndarray
    logits_indices: np.ndarray
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

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """One sampled token for each of some distinct rows."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

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

    def build(self, num_scheduled_tokens: dict[str, int]) -> StepInputs:
        """The arrays of a step that computes that many tokens of each request."""
        req_ids = list(num_scheduled_tokens)
        n = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(req_ids))
        order = np.argsort(n != 1, kind="stable")  # a decode is a row of one token; otherwise as the scheduler has them
        n = n[order]
        req_ids = [req_ids[i] for i in order]
        rows = self._rows_of(req_ids)

        computed = self.num_computed_tokens[rows]
        seq_lens = computed + n
        if (seq_lens > self.num_tokens[rows]).any():
            late = req_ids[int(np.argmax(seq_lens > self.num_tokens[rows]))]
            raise ValueError(f"The step computes more tokens than request {late!r} has.")
        block_tables = self.block_table[rows, : -(-int(seq_lens.max()) // self.block_size)]
        starts, _, positions, slots = build_metadata(computed, n, block_tables, self.block_size, self.map_slots)
        yields = (seq_lens == self.num_tokens[rows]).nonzero()[0]
        return StepInputs(
            req_ids=req_ids,
            rows=rows,
            num_decodes=int((n == 1).sum()),
            input_ids=self.token_ids[rows.repeat(n), positions].astype(np.int64),
            positions=positions,
            query_start_loc=starts.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_tables=block_tables,
            slot_mapping=_as_slots(slots, len(positions)),
            sample_rows=yields,
            logits_indices=starts[1:][yields] - 1,
        )

    def sampling_inputs(self, rows: np.ndarray) -> SamplingInputs:
        """What the requests in these rows ask of the sampler for their next token."""
        num_tokens = self.num_tokens[rows]
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
            self._apply_token_rules(rows, inputs)
        if self.has_penalties[rows].any():
            inputs.penalties = self._penalty_inputs(rows)
        return inputs

    def _apply_token_rules(self, rows: np.ndarray, inputs: SamplingInputs) -> None:
        for i, row in enumerate(rows.tolist()):
            if (rules := self._token_rules.get(row)) is None:
                continue
            if len(rules.allowed_ids):
                inputs.allowed.append((i, rules.allowed_ids))
            if len(rules.bias_ids):
                inputs.bias.append((i, rules.bias_ids, rules.bias_values))
            output = self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]
            for *beginning, last in rules.bad_words:
                start = len(output) - len(beginning)
                if start >= 0 and (output[start:] == beginning).all():
                    inputs.removed_rows.append(i)
                    inputs.removed_ids.append(last)

    def _penalty_inputs(self, rows: np.ndarray) -> PenaltyInputs:
        penalized = self.has_penalties[rows].nonzero()[0]
        rows = rows[penalized]
        lengths, prompt_lengths = self.num_tokens[rows, None], self.num_prompt_tokens[rows, None]
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
