"""EngineConfig: every setting of the engine, vLLM's names, checked once at start. Pure Python.

Settings that depend on the device (`max_num_seqs=None`, ...) are filled in by `EngineConfig.resolved(device_type)`.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from minivllm.spec_decode.config import SpeculativeConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
POLICIES = ("fcfs", "priority", "longest_prefix")
PREFIX_CACHES = ("hash", "radix")
QUANTIZATIONS = (None, "int4")
ATTENTION_BACKENDS = ("auto", "naive", "reference", "cpu", "triton")
GENERATION_CONFIGS = ("auto", "vllm")

# Names vLLM's LLM() takes that this engine does not serve, with the values that change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "enable_lora": (False,),
    "trust_remote_code": (False,),
    "kv_cache_dtype": ("auto",),
    "cpu_offload_gb": (0,),
    "swap_space": (0,),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "disable_log_stats": (True, None),
    "revision": (None,),
    "tokenizer_revision": (None,),
}


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is built. Frozen; raises ValueError naming the field, its value, the limit and the fix.

    Model
        model: "smollm2-135m", a Hugging Face folder, a .gguf file, or a Hub id.   tokenizer: a folder, None is the model's.
        dtype: "auto" (measured on CPU; bfloat16 or float16 on CUDA), "float32", "bfloat16", "float16".
        load_format: "auto", "safetensors", "gguf", or "dummy" (random weights from the config alone).
        quantization: "int4" for weights of 4 bits, for one or a few sequences on a CPU; None keeps the checkpoint's.
        seed: keys the noise of requests that bring no seed of their own, and dummy weights.
        generation_config: "auto" uses the model's generation_config.json for default sampling, "vllm" does not.
        device: "auto", "cpu" or "cuda".
        attention_backend: "auto" (the fastest here), "triton" (a GPU's), "cpu" (Numba and SDPA), "reference" (plain PyTorch),
        "naive".
    KV cache
        block_size: token slots per block.   enable_prefix_caching: reuse KV of equal prefixes; None is on, unless a replaced
        component cannot (True refuses such a component).
        prefix_cache: how cached prefixes are found: "hash" (a chain of block hashes, vLLM's way) or "radix" (a tree, SGLang's).
        kv_cache_memory_bytes: KV pool size in bytes; None is a share of free RAM on CPU, profiled on CUDA.
        gpu_memory_utilization: share of the GPU's memory for weights, activations and KV together.
        num_gpu_blocks_override: number of blocks, whatever the memory (includes the null block).
    Scheduler
        max_model_len: longest sequence, prompt + output, in tokens; None fits itself to the model and the pool.
        max_num_batched_tokens: token budget of a step.   max_num_seqs: most requests running at once.
        enable_chunked_prefill: a prompt may be computed in several steps; without it the budget must hold
        max_model_len. None is on, unless a replaced scheduler cannot (True refuses such a scheduler).
        long_prefill_token_threshold: most tokens of one prompt per step while others run; 0 is off.
        scheduling_policy: "fcfs", "priority" (lower priority value first), or "longest_prefix" (ours: of those who have waited
        longest, the one with most of its prompt cached first; nobody is passed over for ever).
    Execution
        enforce_eager: run steps operator by operator: no CUDA graphs, and on a CPU not the decoder of `minivllm compile`.
        torch_compile: compile the decode step before it is captured; minutes at start. For CUDA.
        speculative_config: drafts to verify, such as {"method": "ngram", "num_speculative_tokens": 3}; see SpeculativeConfig.
    Observing
        trace: record what every step does, in `llm.trace`; it grows until `llm.trace.clear()`.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    quantization: str | None = None
    generation_config: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool | None = None
    prefix_cache: str = "hash"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    trace: bool = False
    enforce_eager: bool = False
    torch_compile: bool = False
    speculative_config: SpeculativeConfig | None = None

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build from vLLM-style keyword arguments. A vLLM setting that is not served is refused by name unless it asks for
        nothing; an unknown name is refused with the nearest known one."""
        names = [f.name for f in dataclasses.fields(cls)]
        own: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name == "speculative_config" and value is not None and not isinstance(value, SpeculativeConfig):
                own[name] = SpeculativeConfig.from_dict(value)
            elif name in names:
                own[name] = value
            elif name in _UNSUPPORTED:
                if value not in _UNSUPPORTED[name]:
                    raise ValueError(f"{name}={value!r} is not supported by minivllm; leave it at {_UNSUPPORTED[name][0]!r}.")
            else:
                close = difflib.get_close_matches(name, names + list(_UNSUPPORTED), n=1)
                raise ValueError(f"EngineConfig has no setting {name!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        return cls(**own)

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_what_excludes_what()
        if self.max_num_batched_tokens is not None:
            self._check_budget(self.max_num_batched_tokens)

    def _check_choices(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("load_format", LOAD_FORMATS),
            ("generation_config", GENERATION_CONFIGS),
            ("device", ("auto", "cpu", "cuda")),
            ("attention_backend", ATTENTION_BACKENDS),
            ("scheduling_policy", POLICIES),
            ("prefix_cache", PREFIX_CACHES),
            ("quantization", QUANTIZATIONS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}.")
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be a name or a path, got {self.model!r}.")
        for name in ("enable_prefix_caching", "enable_chunked_prefill"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise ValueError(f"{name} must be True, False, or None (on where possible), got {getattr(self, name)!r}.")
        for name in ("trace", "enforce_eager", "torch_compile"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if not isinstance(self.speculative_config, (SpeculativeConfig, type(None))):
            raise ValueError(f"speculative_config must be a SpeculativeConfig or None, got {self.speculative_config!r}.")

    def _check_numbers(self) -> None:
        self._need_int("seed", None)
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit into 64 bits, from -2**63 to 2**63 - 1, got {self.seed}.")
        self._need_int("block_size", 1)
        self._need_int("long_prefill_token_threshold", 0)
        for name, low in (
            ("max_model_len", 2),  # one prompt token and one output token
            ("kv_cache_memory_bytes", 1),
            ("num_gpu_blocks_override", 2),  # the null block and one to use
            ("max_num_batched_tokens", 1),
            ("max_num_seqs", 1),
        ):
            if getattr(self, name) is not None:
                self._need_int(name, low)
        u = self.gpu_memory_utilization
        if not isinstance(u, (int, float)) or isinstance(u, bool) or not 0 < u <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {u!r}.")

    def _check_what_excludes_what(self) -> None:
        if self.enforce_eager and self.torch_compile:
            raise ValueError("torch_compile=True compiles what enforce_eager=True runs as it is. Leave one of them out.")
        for name, value in (("prefix_cache", "radix"), ("scheduling_policy", "longest_prefix")):
            if getattr(self, name) == value and self.enable_prefix_caching is False:
                raise ValueError(
                    f"{name}={value!r} needs a prefix cache, which enable_prefix_caching=False forbids. Leave one of them out."
                )
        if self.enable_chunked_prefill is False and self.long_prefill_token_threshold:
            raise ValueError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} cuts long prompts into chunks, which"
                " enable_chunked_prefill=False forbids. Set the threshold to 0, or allow chunks."
            )

    def _check_budget(self, budget: int) -> None:
        """What one step must hold."""
        if self.speculative_config is not None and self.speculative_config.num_speculative_tokens >= budget:
            raise ValueError(
                f"num_speculative_tokens={self.speculative_config.num_speculative_tokens} drafts and the token before them"
                f" do not fit into a step of max_num_batched_tokens={budget}. Raise max_num_batched_tokens, or draft less."
            )
        if self.max_num_seqs is not None and self.max_num_seqs > budget:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} is larger than max_num_batched_tokens={budget}: a step could not give every"
                " running request its one token. Raise max_num_batched_tokens or lower max_num_seqs."
            )
        if self.long_prefill_token_threshold > budget:
            raise ValueError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} is larger than"
                f" max_num_batched_tokens={budget} and would never apply. Lower it, or set it to 0 (off)."
            )
        if self.enable_chunked_prefill is False and self.max_model_len is not None and self.max_model_len > budget:
            raise ValueError(
                f"max_model_len={self.max_model_len} is larger than max_num_batched_tokens={budget}, and with"
                " enable_chunked_prefill=False a prompt must fit into one step. Raise the budget or lower max_model_len."
            )

    def _need_int(self, name: str, low: int | None) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
            rule = "an integer" if low is None else f"an integer of at least {low}"
            raise ValueError(f"{name} must be {rule}, got {value!r}.")

    def resolved(self, device_type: str) -> EngineConfig:
        """A copy with the device's defaults filled in ("cpu" or "cuda"). `max_model_len` stays None: only the KV pool knows."""
        # On a CPU prompts that come together are prefilled one after the other anyway: in small steps the first of them do not
        # wait for the last. (Eight of 128 tokens: mean TTFT 282 ms; with a budget of 1024, 489 ms. Throughput hardly changes.)
        seqs_default, budget_default = (64, 512) if device_type == "cpu" else (256, 8192)
        seqs, budget = self.max_num_seqs, self.max_num_batched_tokens
        if budget is None:
            budget = max(budget_default, seqs or 0, self.long_prefill_token_threshold)
            if self.enable_chunked_prefill is False and self.max_model_len is not None:
                budget = max(budget, self.max_model_len)
        if seqs is None:
            seqs = min(seqs_default, budget)
        return dataclasses.replace(self, max_num_seqs=seqs, max_num_batched_tokens=budget)

    def fit_max_model_len(self, model_max_len: int, num_blocks: int) -> EngineConfig:
        """A copy whose `max_model_len` is settled, given what the model was trained for and the pool (null block included).

        None becomes the most both allow (and one step, without chunked prefill); an explicit one that does not fit is refused.
        """
        pool = (num_blocks - 1) * self.block_size
        step = self.max_num_batched_tokens or pool
        wanted = self.max_model_len
        if wanted is None:
            limit = min(model_max_len, pool)
            if self.enable_chunked_prefill is False:
                limit = min(limit, step)
            if limit < 2:
                raise ValueError(
                    f"The KV pool of {num_blocks - 1} usable blocks of {self.block_size} holds {pool} tokens: too small for any"
                    " request. Raise kv_cache_memory_bytes or num_gpu_blocks_override."
                )
            return dataclasses.replace(self, max_model_len=limit)
        if wanted > model_max_len:
            raise ValueError(
                f"max_model_len={wanted} is more than the model's max_position_embeddings={model_max_len}. Lower max_model_len."
            )
        if wanted > pool:
            raise ValueError(
                f"max_model_len={wanted} does not fit the KV pool: {num_blocks - 1} usable blocks of {self.block_size} hold"
                f" {pool} tokens. Lower max_model_len to {pool}, or raise kv_cache_memory_bytes"
                " (gpu_memory_utilization on a GPU, or num_gpu_blocks_override if you set it)."
            )
        if self.enable_chunked_prefill is False and wanted > step:
            raise ValueError(
                f"max_model_len={wanted} is larger than max_num_batched_tokens={step}, and with enable_chunked_prefill=False"
                " a prompt must fit into one step. Raise the budget or lower max_model_len."
            )
        return self
