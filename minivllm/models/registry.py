"""ModelConfig: what the decoder must know of a model, read from a Hugging Face config.json. Lab 01 reads one.

One decoder serves every family listed in FAMILIES. A config is refused, by name, when it asks for anything that would change
the model's answers and is not built here: an ignored setting would be a wrong model. May not know torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `theta` is the base wavelength; `rope_type` says how the frequencies are stretched for long contexts:
    "default" not at all, "linear" all of them by `factor`, "llama3" the slow ones only (Llama 3.1)."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class Family:
    """What sets one architecture apart. None for `qkv_bias` means the config's `attention_bias` decides (and gives o_proj one
    too)."""

    qkv_bias: bool | None = None
    qk_norm: bool = False
    window_key: str | None = None  # the config key that switches the sliding window on; None: the family has none
    head_dim: int | None = None  # when the config does not say; None: hidden_size / num_attention_heads


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, window_key="sliding_window"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window_key="use_sliding_window"),
    "Qwen3ForCausalLM": Family(qk_norm=True, window_key="use_sliding_window", head_dim=128),
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LARGEST_SIZE = 2**31 - 1  # what kernels index with; a larger number in a config is a typing error or an attack
_LARGEST = {"num_hidden_layers": 1 << 12, "head_dim": 1 << 12}  # of these there are lists and tables before any weight is read
_MISTRAL_DEFAULT_WINDOW = 4096  # transformers' default where a Mistral config has no `sliding_window` key

# Settings seen in configs of this kind that change the answers and are not built, with the values that ask for nothing.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "attention_sinks": (None, False),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "is_encoder_decoder": (None, False),
}


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of one decoder. `sliding_window` has an entry for each layer: a query at position p sees positions p - w + 1
    .. p, or all of them for None. `attention_bias` is for q, k and v; `attention_out_bias` for o_proj. `eos_token_ids` joins
    config.json's and generation_config.json's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if not self.sliding_window:  # left out: full attention in every layer
            object.__setattr__(self, "sliding_window", (None,) * self.num_layers)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """From the dicts of config.json and generation_config.json, as transformers 4 or 5 writes them.

        Raises ValueError for an architecture or a setting that is not served, naming it, and for missing or impossible sizes.
        """
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        _refuse_what_is_not_served(config)
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}.")
        if config.get("head_dim") is None and family.head_dim is None and hidden % heads:
            raise ValueError(
                f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and there is no head_dim."
            )
        head_dim = _size(config, "head_dim", family.head_dim or hidden // heads)
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd: rotary embedding turns pairs of dimensions.")
        num_layers = _size(config, "num_hidden_layers")
        has_bias = bool(config.get("attention_bias", False)) and family.qkv_bias is None
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_size(config, "max_position_embeddings"),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope=_rope(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=has_bias or bool(family.qkv_bias),
            attention_out_bias=has_bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",  # the one that reads the key
            qk_norm=family.qk_norm,
            sliding_window=_sliding_window(config, family, num_layers),
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            bos_token_id=_bos_token_id(config),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """From a Hugging Face folder: config.json and, if there, generation_config.json."""
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json: it is not a Hugging Face model folder.")
        generation = folder / "generation_config.json"
        return cls.from_hf(read_json(folder / "config.json"), read_json(generation) if generation.is_file() else None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError names the file that is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or a number of 5,000 digits
        raise ValueError(f"{path} is not valid JSON ({error}). Fetch the model again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    if not isinstance(named, list):
        raise ValueError(f"The model's config needs architectures as a list of class names, got {named!r}.")
    if not named:  # a config saved without a model class names its model_type only
        named = [_MODEL_TYPES.get(str(config.get("model_type")), str(config.get("model_type")))]
    for name in named:
        if isinstance(name, str) and name in FAMILIES:
            return name
    raise ValueError(f"Architecture {', '.join(map(str, named))} is not served. minivllm serves: {', '.join(FAMILIES)}.")


def _refuse_what_is_not_served(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # two names of one function
        raise ValueError(f"hidden_act={activation!r} is not served; minivllm's decoder uses 'silu'.")
    for key, neutral in _NOT_SERVED.items():
        value = config.get(key)
        if value not in neutral:
            shown = value.get("quant_method", "?") if key == "quantization_config" and isinstance(value, dict) else value
            raise ValueError(
                f"The model's config sets {key}={shown!r}, which minivllm does not serve; ignoring it would change the"
                " model's answers. Use a checkpoint without it."
            )


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    largest = _LARGEST.get(key, _LARGEST_SIZE)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise ValueError(f"The model's config needs {key} as an integer from 1 to {largest}, got {value!r:.80}.")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite positive number. A null is no number: a config that says null for one of these is broken."""
    value = config.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"The model's config needs {key} as a positive number, got {value!r}.")
    return float(value)


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """transformers 5 writes one dict, `rope_parameters`; transformers 4 wrote `rope_theta` beside `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"The model's config needs rope_parameters (or rope_scaling) as an object, got {rope!r}.")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    theta = 10000.0 if theta is None else _number({"rope_theta": theta}, "rope_theta")
    rope_type = str(rope.get("rope_type", rope.get("type", "default")))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not served: the decoder rotates whole heads."
        )
    if rope_type == "default" and not any(isinstance(value, dict) for value in rope.values()):
        return RopeConfig(theta)
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(rope_type, ())
    if missing := [key for key in needed if key not in rope]:
        raise ValueError(f"rope_type {rope_type!r} needs {', '.join(missing)} in the config's rope parameters.")
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, factor=_number(rope, "factor"))
    if rope_type == "llama3":
        original = _size(rope, "original_max_position_embeddings", _size(config, "max_position_embeddings"))
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        if not low < high:
            raise ValueError(f"rope_type 'llama3' needs low_freq_factor={low} below high_freq_factor={high}.")
        return RopeConfig(theta, rope_type, _number(rope, "factor"), low, high, original)
    raise ValueError(
        f"Rotary embedding of type {rope_type!r} ({rope}) is not served; minivllm serves 'default', 'linear' and 'llama3'. A"
        " model stretched by YaRN or dynamic scaling works without it up to its original length: delete it from config.json."
    )


def _sliding_window(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """One entry a layer. Qwen gives `layer_types`, or windows only from layer `max_window_layers` on; Mistral windows every
    layer."""
    if family.window_key is None and config.get("sliding_window") is not None:
        raise ValueError(
            f"sliding_window={config['sliding_window']!r} is not served for {_architecture(config)}. For full attention, set it"
            " to null in config.json."
        )
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
            raise ValueError(f"The model's config needs layer_types as a list of names, one a layer, got {layer_types!r:.80}.")
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(layer_types) != num_layers:
            what = ", ".join(sorted(unknown)) or f"{len(layer_types)} entries for {num_layers} layers"
            raise ValueError(f"layer_types with {what} is not served: full_attention or sliding_attention, one a layer.")
    if family.window_key == "sliding_window":
        window = config.get("sliding_window", _MISTRAL_DEFAULT_WINDOW)
        windowed = [window is not None] * num_layers
        if layer_types is not None and [t == "sliding_attention" for t in layer_types] != windowed:
            raise ValueError("layer_types that differ between layers are not served for MistralForCausalLM.")
    else:
        window = config.get("sliding_window", 4096) if family.window_key and config.get(family.window_key) else None
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool):
            raise ValueError(f"The model's config needs max_window_layers as an integer, got {first!r}.")
        windowed = [window is not None and i >= first for i in range(num_layers)]
        if layer_types is not None:
            windowed = [t == "sliding_attention" for t in layer_types]
    if any(windowed) and (not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window={window!r} must be a positive integer: some layers use it.")
    return tuple(window if w else None for w in windowed)


def _eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if bad := [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or i < 0]:
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {bad[0]!r}. Correct the model's config.")
    return tuple(dict.fromkeys(ids))


def _bos_token_id(config: Mapping[str, Any]) -> int | None:
    value = config.get("bos_token_id")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"bos_token_id must be a token id or null, got {value!r}. Correct the model's config.")
    return value


def _known(
    architecture: str, sizes: tuple[int, int, int, int, int, int, int, int], rope: RopeConfig, **more: Any
) -> ModelConfig:
    """sizes: vocab, hidden, intermediate, layers, heads, kv heads, head_dim, positions."""
    return ModelConfig(architecture, *sizes, rope=rope, **more)


_LLAMA_31, _LLAMA_32 = (RopeConfig(500000.0, "llama3", factor=factor) for factor in (8.0, 32.0))
_LLAMA_END: dict[str, Any] = {"rms_norm_eps": 1e-5, "eos_token_ids": (128001, 128008, 128009), "bos_token_id": 128000}
_QWEN_END: dict[str, Any] = {"eos_token_ids": (151645, 151643), "bos_token_id": 151643}

# The sizes of well-known models, so that load_format="dummy" and capacity planning need no download.
KNOWN_CONFIGS: dict[str, ModelConfig] = {
    "smollm2-135m": _known(
        "LlamaForCausalLM",
        (49152, 576, 1536, 30, 9, 3, 64, 8192),
        RopeConfig(100000.0),
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": _known(
        "LlamaForCausalLM", (128256, 2048, 8192, 16, 32, 8, 64, 131072), _LLAMA_32, tie_word_embeddings=True, **_LLAMA_END
    ),
    "meta-llama/Llama-3.1-8B-Instruct": _known(
        "LlamaForCausalLM", (128256, 4096, 14336, 32, 32, 8, 128, 131072), _LLAMA_31, **_LLAMA_END
    ),
    "meta-llama/Llama-3.1-70B-Instruct": _known(
        "LlamaForCausalLM", (128256, 8192, 28672, 80, 64, 8, 128, 131072), _LLAMA_31, **_LLAMA_END
    ),
    "mistralai/Mistral-7B-v0.1": _known(
        "MistralForCausalLM",
        (32000, 4096, 14336, 32, 32, 8, 128, 32768),
        RopeConfig(10000.0),
        rms_norm_eps=1e-5,
        sliding_window=(4096,) * 32,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": _known(
        "Qwen2ForCausalLM",
        (151936, 896, 4864, 24, 14, 2, 64, 32768),
        RopeConfig(1e6),
        tie_word_embeddings=True,
        attention_bias=True,
        **_QWEN_END,
    ),
    "Qwen/Qwen3-0.6B": _known(
        "Qwen3ForCausalLM",
        (151936, 1024, 3072, 28, 16, 8, 128, 40960),
        RopeConfig(1e6),
        tie_word_embeddings=True,
        qk_norm=True,
        **_QWEN_END,
    ),
    "Qwen/Qwen3-8B": _known(
        "Qwen3ForCausalLM", (151936, 4096, 12288, 36, 32, 8, 128, 40960), RopeConfig(1e6), qk_norm=True, **_QWEN_END
    ),
}
