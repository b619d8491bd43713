"""ModelRunner: the executor that runs a real model. It owns the weights, the KV pool, the batch and the sampler, and turns a
SchedulerOutput into sampled tokens. May not know the scheduler, blocks' owners, or text.

    submit(step)    InputBatch takes in the difference -> flat arrays -> decoder over the paged cache -> hidden states
    sample()        hidden states of the rows that yield a token -> logits -> Sampler; nothing waits for the device here
    result()        the step's one wait; the tokens join the batch, ready to be the next step's input
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from inspect import isfunction
from typing import Any

import numpy as np
import torch

from minivllm.attention import get_backend, replace_parts
from minivllm.attention.interface import AttentionMetadata
from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.step import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    StepHandle,
    StepOutput,
    TokenLogprobs,
)
from minivllm.models.compile_cache import load_compiled
from minivllm.models.compiled import CompiledDecoder
from minivllm.models.decoder import Decoder
from minivllm.models.int4 import quantize_decoder
from minivllm.models.registry import ModelConfig
from minivllm.models.weights import load_config, load_model
from minivllm.sampling.rejection import is_answer
from minivllm.sampling.sampler import INVALID, Penalties, Sampler, SamplerOutput, SamplingMetadata
from minivllm.sampling_params import SamplingParams
from minivllm.worker.device import available_memory, choose_device, choose_dtype, device_errors, limit_threads
from minivllm.worker.gpu_memory import GRAPHS, costliest_sampling, free_for_kv_cache, largest_step, needs_memory
from minivllm.worker.graphs import MOST_RECORDED_ROWS, GraphRunner, compiled, decode_step
from minivllm.worker.input_batch import InputBatch, PenaltyInputs, StepInputs
from minivllm.worker.kv_cache import allocate_kv_caches, num_kv_blocks
from minivllm.worker.prompt_logprobs import PromptLogprobs
from minivllm.worker.speculation import Speculation
from minivllm.worker.transfer import to_device

logger = logging.getLogger("minivllm")

_INSIDE_THE_DECODER = {"write_kv", "attention.decode", "attention.prefill", "graph_runner"}  # components
_WARM_UP_ID = "warm-up"
_WARM_UP_TOKENS = 32


class ModelRunner:
    """Loads the model and sizes the KV pool at construction. Raises ValueError for settings the machine, the model or a
    replaced part cannot serve.

    num_blocks: of the pool, null block included.   max_model_len: what the model was trained for.   vocab_size, model_config.
    device, device_type, dtype, dtype_name: where and in what it computes.   config: resolved for the device.
    """

    def __init__(self, config: EngineConfig, components: Components | None = None) -> None:
        components = components or Components()
        self._process = os.getpid()
        self.device = choose_device(config.device)
        self.device_type = self.device.type
        self.config = config = config.resolved(self.device_type)
        if self.device_type == "cpu":
            limit_threads()
        self.dtype = choose_dtype(config.dtype, self.device)
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.model = self._load_model(components)
        self.model_config: ModelConfig = self.model.config
        self.vocab_size = self.model_config.vocab_size
        self.max_model_len = self.model_config.max_position_embeddings
        sampler = components.pick("sampler")
        self.sampler = sampler() if isinstance(sampler, type) else sampler

        self.graphs: GraphRunner | None = None  # recorded in warm_up(); until then, and without them, every step is eager
        self._uses_graphs = self._can_use_graphs(components)
        self.speculation = self._make_speculation(components)
        drafter = None if self.speculation is None else self.speculation.kv_config
        gpu_memory = None if self.device_type == "cpu" else self._gpu_memory_for_kv()
        self.num_blocks = num_kv_blocks(config, self.model_config, self.dtype, gpu_memory, drafter)
        self.kv_caches = allocate_kv_caches(self.num_blocks, config.block_size, self.model_config, self.dtype, self.device)
        if self.speculation is not None and drafter is not None:
            caches = allocate_kv_caches(self.num_blocks, config.block_size, drafter, self.dtype, self.device)
            self.speculation.set_kv_caches(caches)
        assert config.max_num_seqs is not None
        longest = config.max_model_len or min(self.max_model_len, (self.num_blocks - 1) * config.block_size)
        self.batch = InputBatch(config.max_num_seqs, longest, config.block_size, components.pick("slot_mapping"))
        if self._uses_graphs:
            step = partial(decode_step, self.model, self.kv_caches)
            step = compiled(step) if config.torch_compile else step
            most_rows = config.max_num_seqs * (1 + (0 if self.speculation is None else self.speculation.k))
            if self.device_type == "cpu":
                most_rows = min(most_rows, MOST_RECORDED_ROWS)
            self.graphs = components.pick("graph_runner")(step, most_rows, self.batch.max_blocks, self.device)
        self._prompt_logprobs = PromptLogprobs(self.model.logits)
        self._submitted: tuple[StepInputs, torch.Tensor] | None = None  # hidden states of the tokens to sample from
        self._step: tuple[torch.Tensor, float] | None = None  # hidden states of all its tokens, and when it was submitted
        self._in_flight: _StepInFlight | None = None
        logger.info("%s", self.describe())

    def _load_model(self, components: Components) -> Decoder | CompiledDecoder:
        """The compiled decoder, where there is one and no replaced part would have to work inside it; else the eager one."""
        config = self.config
        compilable = self.device_type == "cpu" and config.attention_backend in ("auto", "cpu") and config.load_format != "dummy"
        if compilable and not config.enforce_eager and not _INSIDE_THE_DECODER & components.keys():
            load_config(config.model, load_format=config.load_format)  # raises what load_model would
            backend = get_backend("cpu", "cpu", self.dtype)
            if (model := load_compiled(config.model, self.dtype, backend, config.quantization)) is not None:
                return model
        fix = "Take a smaller model or a narrower dtype, or end other programs on this GPU."
        with needs_memory(self.device, f"The model {config.model} in {self.dtype_name}", fix):
            decoder = load_model(
                config.model, dtype=self.dtype, device=self.device, load_format=config.load_format, seed=config.seed
            )
        backend = get_backend(config.attention_backend, self.device_type, self.dtype)
        decoder.attention_backend = replace_parts(backend, components, decoder.config, self.device_type, self.dtype)
        if config.quantization == "int4":
            size = sum(parameter.nbytes for parameter in decoder.parameters())
            quantize_decoder(decoder, keep_unpacked=available_memory() > 4 * size)
        return decoder

    def _make_speculation(self, components: Components) -> Speculation | None:
        if self.config.speculative_config is None:
            return None
        model = self.model
        weights = self.model_config, model.embed_tokens, model.logits
        where = model.attention_backend, self.dtype, self.device
        with torch.inference_mode():
            return Speculation(self.config, components, *weights, *where, is_compiled=isinstance(model, CompiledDecoder))

    def _can_use_graphs(self, components: Components) -> bool:
        """On a GPU unless told otherwise. On a CPU only to try a graph_runner component: nothing is gained there."""
        config, backend = self.config, self.model.attention_backend
        if config.enforce_eager and "graph_runner" in components:
            raise ValueError("enforce_eager=True runs without graphs, and a graph_runner component is given. Leave one out.")
        if config.torch_compile and self.device_type == "cpu":
            raise ValueError("torch_compile=True is for CUDA. On a CPU leave it out, and see `minivllm compile --help`.")
        if config.enforce_eager:
            return False
        if self.device_type == "cpu":
            return "graph_runner" in components and _can_be_recorded(components)
        if not backend.is_capturable:
            logger.info("CUDA graphs are off: attention %s cannot be captured.", backend.name)
        return backend.is_capturable

    def describe(self) -> str:
        """The choices made here, in one line."""
        tokens = (self.num_blocks - 1) * self.config.block_size
        size = sum(cache.numel() * cache.element_size() for cache in self.kv_caches)
        way = "compiled" if isinstance(self.model, CompiledDecoder) else "eager" if self.graphs is None else "graphed"
        return (
            f"{self.config.model} on {self.device_type} in {self.dtype_name}, {way},"
            f" attention {self.model.attention_backend.name},"
            f" KV cache of {self.num_blocks} blocks of {self.config.block_size} ({tokens} tokens, {size / 2**20:.0f} MiB)"
        )

    # ---------------------------------------------------------------- a step

    @device_errors()
    @torch.inference_mode()
    def submit(self, scheduler_output: SchedulerOutput) -> None:
        """Run the forward pass of a step. The tokens of the step before, if it is still in flight, are this one's input: it is
        waited for first."""
        if os.getpid() != self._process:  # its threads are not here, and kernels would wait for them for ever
            raise RuntimeError("The LLM was made before this process was forked: make one here, or start processes by spawn.")
        if self._in_flight is not None:
            self._in_flight.collect()
        self._submitted = None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if drafts and self.speculation is None:
            raise ValueError(f"The step verifies drafts of {', '.join(drafts)}: this executor has no speculative decoding.")
        started = time.perf_counter()
        self.batch.update(scheduler_output)
        inputs = self.batch.build(scheduler_output.num_scheduled_tokens, drafts)
        hidden = self._forward(inputs)
        self._prompt_logprobs.forget(scheduler_output.finished_req_ids)
        if (self.batch.num_prompt_logprobs[inputs.rows] >= 0).any():
            inputs.prompt_logprobs = self._prompt_logprobs.add(inputs, self.batch, hidden)
        self._submitted = inputs, hidden[self._to_device(inputs.logits_indices)]
        self._step = hidden, started

    @device_errors()
    @torch.inference_mode()
    def sample(self, grammar_mask: Any = None) -> StepHandle:
        """Sample the step submitted last."""
        if grammar_mask is not None:
            raise ValueError("grammar_mask is given, and this executor has no structured output.")
        if self._submitted is None:
            raise RuntimeError("sample() needs a step that was submitted, and its forward pass to have succeeded.")
        (inputs, hidden), self._submitted = self._submitted, None
        output = None
        if len(inputs.sample_rows):
            logits = self.model.logits(hidden)
            if not isinstance(self.sampler, Sampler):  # ours widens a few rows at a time
                logits = logits.float()
            metadata = self._sampling_metadata(inputs)
            if self.speculation is None:
                output = self.sampler(logits, metadata)
            else:
                output = self.speculation.sample(logits, metadata, self.sampler, inputs)
            self._check_sampled(output, len(inputs.ahead), metadata)
        self._in_flight = _StepInFlight(self, inputs, output)
        return self._in_flight

    def synchronize(self) -> None:
        """Wait for the device. A recorder asks for it, to time the forward pass by itself; nothing else does."""
        if self.device_type == "cuda":
            torch.cuda.synchronize(self.device)

    def shutdown(self) -> None:
        """Let go of the weights and the KV cache. The runner cannot be used afterwards."""
        self._submitted = self._in_flight = self._step = None
        self.kv_caches = []
        self.graphs = self.speculation = None
        del self.model, self._prompt_logprobs
        if self.device_type == "cuda":
            torch.cuda.empty_cache()

    def warm_up(self) -> None:
        """One prefill and one decode of a made-up request: kernels are compiled, libraries loaded and workspaces allocated
        before the first request comes. It must be called before any request, while all blocks are free."""
        longest = self.batch.token_ids.shape[1]
        n = min(_WARM_UP_TOKENS, longest - 2, self.config.max_num_batched_tokens or 1)  # each step adds a token
        if n < 1:
            return
        blocks = list(range(1, 1 + -(-(n + 1) // self.config.block_size)))
        params = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9)
        prompt = NewRequestData(_WARM_UP_ID, [0] * n, n, params, 0, (), blocks, 0)
        decode = CachedRequestData([_WARM_UP_ID], [[]], [n])
        for step in (
            SchedulerOutput(
                0, scheduled_new_reqs=[prompt], num_scheduled_tokens={_WARM_UP_ID: n}, total_num_scheduled_tokens=n
            ),
            SchedulerOutput(
                0, scheduled_cached_reqs=decode, num_scheduled_tokens={_WARM_UP_ID: 1}, total_num_scheduled_tokens=1
            ),
        ):
            self.submit(step)
            if self.sample().result().errors:  # nothing to continue with; a request will be told
                break
        self.batch.update(SchedulerOutput(0, finished_req_ids=[_WARM_UP_ID]))
        for cache in self.kv_caches:
            cache[:, : len(blocks) + 1] = 0
        if self.speculation is not None:
            self.speculation.stats.reset()
        if self.graphs is not None:
            fix = "Lower gpu_memory_utilization or max_num_seqs, or set enforce_eager=True."
            with needs_memory(self.device, "The recording of CUDA graphs", fix):
                self.graphs.capture()

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states [T, hidden_size] of a step, to be used before the next one."""
        if self.graphs is not None and (replayed := self.graphs.run(inputs)) is not None:
            return replayed
        input_ids, positions, meta = self._to_model(inputs)
        hidden = self.model(input_ids, positions, self.kv_caches, meta)
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def _to_model(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """A step's token ids, positions and shape on the device."""
        arrays = (inputs.input_ids, inputs.positions, inputs.query_start_loc, inputs.seq_lens)
        input_ids, positions, query_start_loc, seq_lens, block_tables, slot_mapping = to_device(
            [*arrays, inputs.block_tables, inputs.slot_mapping], self.device
        )
        return (
            input_ids,
            positions,
            AttentionMetadata(
                num_decodes=inputs.num_decodes,
                num_tokens=len(inputs.input_ids),
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_tables=block_tables,
                slot_mapping=slot_mapping,
            ),
        )

    def _sampling_metadata(self, inputs: StepInputs) -> SamplingMetadata:
        asked = self.batch.sampling_inputs(inputs.rows[inputs.sample_rows[inputs.sample_row_of]], inputs.ahead)
        put = self._to_device
        wants_logprobs = (asked.num_logprobs >= 0).nonzero()[0]
        temperature, seeds, positions, sampled_rows = to_device(
            [asked.temperature, asked.seeds, asked.positions, asked.temperature.nonzero()[0]], self.device
        )
        return SamplingMetadata(
            temperature=temperature,
            seeds=seeds,
            positions=positions,
            sampled_rows=sampled_rows,
            min_p=put(asked.min_p) if asked.min_p.any() else None,
            top_k=put(asked.top_k) if (asked.top_k > 0).any() else None,
            top_p=put(asked.top_p) if (asked.top_p < 1).any() else None,
            allowed=self._flat(asked.allowed) if asked.allowed else None,
            removed=(put(np.array(asked.removed_rows)), put(np.array(asked.removed_ids))) if asked.removed_ids else None,
            bias=self._flat(asked.bias) if asked.bias else None,
            penalties=None if asked.penalties is None else self._penalties(asked.penalties),
            logprobs_rows=put(wants_logprobs) if len(wants_logprobs) else None,
            num_logprobs=max(0, int(asked.num_logprobs.max())),
        )

    def _flat(self, entries: list[Any]) -> Any:
        """(row, array, ...) of some rows, as one (rows, array, ...) with an entry for each of the arrays' numbers."""
        rows, *columns = zip(*entries, strict=True)
        lengths = [len(ids) for ids in columns[0]]
        return tuple(self._to_device(array) for array in (np.repeat(rows, lengths), *map(np.concatenate, columns)))

    def _penalties(self, asked: PenaltyInputs) -> Penalties:
        put = self._to_device
        padded = np.where(asked.token_ids < 0, self.vocab_size, asked.token_ids)
        return Penalties(
            rows=put(asked.rows),
            token_ids=put(padded),
            is_output=put(asked.is_output),
            repetition=put(asked.repetition),
            frequency=put(asked.frequency),
            presence=put(asked.presence),
        )

    def _check_sampled(self, output: Any, num_rows: int, metadata: SamplingMetadata) -> None:
        """A replaced sampler's answer, before its numbers are used as indices. Raises ValueError naming it."""
        token_ids = getattr(output, "token_ids", None)
        if not isinstance(token_ids, torch.Tensor) or token_ids.shape != (num_rows,) or token_ids.is_floating_point():
            is_tensor = isinstance(token_ids, torch.Tensor)
            got = f"token_ids {list(token_ids.shape)} of {token_ids.dtype}" if is_tensor else f"{output!r:.80}"
        elif metadata.logprobs_rows is not None and output.logprobs is None:
            got = "no logprobs, which were asked for,"
        else:
            return
        part = self.sampler if isfunction(self.sampler) else type(self.sampler)
        raise ValueError(
            f"The sampler {part.__module__}.{part.__qualname__} gave {got} for {num_rows} rows of logits; it must give a"
            f" SamplerOutput with token_ids [{num_rows}], integers, and logprobs for the rows that ask."
        )

    @device_errors()
    def _collect(self, inputs: StepInputs, output: SamplerOutput | None) -> StepOutput:
        """Wait for a step's tokens, put them into the batch, and say what came out."""
        result = StepOutput(sampled_token_ids={req_id: [] for req_id in inputs.req_ids})
        if output is not None:
            result.prompt_logprobs = inputs.prompt_logprobs
            token_ids, logprobs = self._to_host(output)
            answers = is_answer(token_ids, inputs.draft_ids, inputs.ahead)
            usable = answers & (token_ids >= 0) & (token_ids < self.vocab_size)
            for n in (answers > usable).nonzero()[0]:
                if inputs.ahead[n] == 0:  # else it has tokens before this one, and the next step will say the same
                    req_id, position = inputs.req_ids[inputs.sample_rows[inputs.sample_row_of[n]]], inputs.positions
                    token_index = inputs.logits_indices[n]
                    result.errors[req_id] = self._what_went_wrong(int(token_ids[n]), int(position[token_index]) + 1)
            rows = inputs.rows[inputs.sample_rows[inputs.sample_row_of]]
            self.batch.append_tokens(rows[usable], token_ids[usable], inputs.ahead[usable])
            for n in usable.nonzero()[0]:
                result.sampled_token_ids[inputs.req_ids[inputs.sample_rows[inputs.sample_row_of[n]]]].append(int(token_ids[n]))
            if logprobs is not None:
                self._add_logprobs(result, inputs, rows, usable, logprobs)
        else:
            usable = np.zeros(0, dtype=bool)
        if self.speculation is not None:
            self._draft(result, inputs, usable)
        self._step = None
        return result

    def _add_logprobs(
        self, result: StepOutput, inputs: StepInputs, rows: np.ndarray, usable: np.ndarray, logprobs: list[np.ndarray]
    ) -> None:
        """One entry for each answered token of the requests that ask."""
        num_logprobs = self.batch.num_logprobs[rows]
        entry_of = (num_logprobs >= 0).cumsum() - 1
        for n in (usable & (num_logprobs >= 0)).nonzero()[0]:
            req_id = inputs.req_ids[inputs.sample_rows[inputs.sample_row_of[n]]]
            last = 1 + int(num_logprobs[n])
            entry = [values[entry_of[n]][:last].tolist() for values in logprobs]
            result.logprobs.setdefault(req_id, []).append(TokenLogprobs(*entry))

    def _draft(self, result: StepOutput, inputs: StepInputs, usable: np.ndarray) -> None:
        """Count what became of the step's drafts, and make the next ones. `usable` [N]: the rows that yielded a token."""
        assert self.speculation is not None and self._step is not None
        hidden, started = self._step
        counts = np.bincount(inputs.sample_row_of[usable], minlength=len(inputs.sample_rows))
        if (inputs.ahead > 0).any():
            self.speculation.count(inputs, counts, time.perf_counter() - started)
        gained = counts.nonzero()[0]
        last = np.searchsorted(inputs.sample_row_of, gained) + counts[gained] - 1
        meta = self._to_model(inputs)[-1] if self.speculation.needs_hidden else None
        drafts = self.speculation.draft(self.batch, inputs, hidden, meta, inputs.sample_rows[gained], last)
        result.draft_token_ids = drafts

    def _to_host(self, output: SamplerOutput) -> tuple[np.ndarray, list[np.ndarray] | None]:
        """All copies are queued, then waited for once."""
        tensors = [output.token_ids]
        if output.logprobs is not None:
            tensors += [output.logprobs.token_ids, output.logprobs.logprobs, output.logprobs.ranks]
        if self.device_type == "cuda":
            tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            torch.cuda.current_stream(self.device).synchronize()
        token_ids, *logprobs = [tensor.numpy() for tensor in tensors]
        return token_ids, logprobs or None

    def _what_went_wrong(self, token_id: int, position: int) -> str:
        if token_id == INVALID:
            return (
                f"The model's logits for token {position} are NaN or infinite, or every token was removed. With"
                f" dtype={self.dtype_name!r} try a wider dtype; with a replaced component, check that it."
            )
        return f"The sampler gave token id {token_id} for token {position}; the vocabulary ends at {self.vocab_size - 1}."

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device([array], self.device)[0]

    # ---------------------------------------------------------------- GPU memory

    @torch.inference_mode()
    def _gpu_memory_for_kv(self) -> int:
        """Bytes left for the KV cache when the largest step has run: the most tokens, then the most rows of logits, sampled in
        the costliest way."""
        config = self.config
        assert config.max_num_seqs is not None
        num_rows = config.max_num_seqs * (1 if self.speculation is None else 1 + self.speculation.k)

        def run() -> None:
            self.kv_caches = allocate_kv_caches(2, config.block_size, self.model_config, self.dtype, self.device)
            hidden = self._forward(largest_step(config, self.max_model_len))
            logits = self.model.logits(hidden[:1].expand(num_rows, -1))
            del hidden
            self.sampler(logits.float(), costliest_sampling(num_rows, self.device))

        try:
            free = free_for_kv_cache(self.device, config, run)
        finally:
            self.kv_caches = []
        return free - (GRAPHS if self._uses_graphs else 0)


def _can_be_recorded(components: Components) -> bool:
    """Whether the parts that run inside a step say that a recording repeats them. One that loops over rows in Python would be
    repeated with the lengths and the slots it was recorded with."""
    for seam in ("write_kv", "attention.decode"):
        if seam in components and not components.require(seam, "graphs", None):
            return False
    return True


class _StepInFlight:
    """The handle `sample()` gives out. Collected once, by whoever needs the tokens first: its owner, or the next step."""

    def __init__(self, runner: ModelRunner, inputs: StepInputs, output: SamplerOutput | None) -> None:
        self._runner = runner
        self._inputs = inputs
        self._output = output
        self._result: StepOutput | Exception | None = None

    def collect(self) -> None:
        if self._result is None:
            self._runner._in_flight = None
            try:
                self._result = self._runner._collect(self._inputs, self._output)
            except Exception as error:
                self._result = error
            self._output = None  # its tensors may be large

    def result(self) -> StepOutput:
        self.collect()
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result
