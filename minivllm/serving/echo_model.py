"""The model named "echo": no weights and no torch, started in half a second. `minivllm serve echo` puts the whole server, HTTP,
processes, scheduler and paged KV cache, in front of `sim.echo`, whose every token is a hash of all that was read through the
block table. So a client can compute what the server must answer (`expected_token_ids`): load tests check every token.

"echo:20" takes 20 ms a step, about what a small model takes. Labs: built by none.
"""

from __future__ import annotations

import time

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from minivllm.config import EngineConfig
from minivllm.core.step import SchedulerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.sim.echo import EchoExecutor, echo_generate
from minivllm.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 4096
NUM_BLOCKS = 2048
_SPECIAL = ("<|bos|>", "<|end|>")
_PRINTABLE = 95  # ASCII from the space to "~": the tokens that the model says
_OF_WEIGHTS = (
    "tokenizer", "dtype", "load_format", "device", "attention_backend", "kv_cache_memory_bytes", "gpu_memory_utilization",
    "speculative_config", "enforce_eager", "torch_compile",
)  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def is_echo(model: str) -> bool:
    return model == "echo" or model.startswith("echo:")


def check(config: EngineConfig) -> None:
    """Raises ValueError for a setting that has nothing to act on, and for a step time that is no number."""
    step_seconds(config.model)
    default = EngineConfig()
    for name in _OF_WEIGHTS:
        if (value := getattr(config, name)) != getattr(default, name):
            raise ValueError(f"{name}={value!r} has no meaning for the echo model, which has no weights; leave it out.")


def step_seconds(model: str) -> float:
    """0.02 for "echo:20"."""
    text = model.partition(":")[2] or "0"
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds < 60_000:
        raise ValueError(f'model={model!r}: the echo model is "echo", or "echo:MS" with the milliseconds of a step.')
    return milliseconds / 1000


def make_tokenizer() -> Tokenizer:
    """A token for each byte. Printable ASCII has the lowest ids, so what the model says is readable, if not sensible."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (c != "Ġ" and not "!" <= c <= "~", c != "Ġ", c))
    vocab = {c: i for i, c in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], cache_capacity=0))  # else it keeps 10,000 prompts
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL))
    return Tokenizer(backend, "echo", {"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1]}, {"default": _TEMPLATE})


def make_executor(config: EngineConfig) -> EchoExecutor:
    seconds = step_seconds(config.model)

    def take_time(step: SchedulerOutput) -> None:
        time.sleep(seconds)

    num_blocks = config.num_gpu_blocks_override or NUM_BLOCKS
    return EchoExecutor(num_blocks, config.block_size, vocab_size=_PRINTABLE, fault=take_time if seconds else None)


def expected_token_ids(prompt_token_ids: list[int], max_tokens: int, max_model_len: int = MAX_MODEL_LEN) -> list[int]:
    """What the server must answer to this prompt."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return echo_generate(prompt_token_ids, params, max_model_len=max_model_len, vocab_size=_PRINTABLE)[0]
