"""GGUF to a Hugging Face folder: dequantize once, then everything else reads one format. Knows nothing of caches or downloads.

    model.gguf -> config.json, generation_config.json, tokenizer.json, tokenizer_config.json, model*.safetensors

llama.cpp renames the tensors, and for the "llama" architecture it also reorders the rows of q and k: it rotates neighbouring
dimensions (2i, 2i + 1) where Hugging Face rotates dimension i with i + D/2. `unpermute` undoes that.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from minivllm.models.gguf_header import check_header

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer

T = TypeVar("T")
SERVED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
_HF_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# How text is cut before byte-pair merges: the regular expressions of the models' tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")  # one digit at a time


def convert_gguf(path: str | Path, folder: str | Path, *, max_shard_bytes: int = 2 << 30) -> None:
    """Write the model in the GGUF file `path` as a Hugging Face folder, with a progress bar. `folder` exists and is empty.

    Weights become float32 or float16 where the file's matrices are, bfloat16 otherwise (quantized ones too). At most
    `max_shard_bytes` of them are held at once. Raises ValueError for a damaged file, and for an architecture, a tensor type or
    a tokenizer that is not served, naming it.
    """
    path, folder = Path(path), Path(folder)
    reader = _open(path)
    metadata = _Metadata(path, reader.fields)
    config = hf_config(metadata, reader.tensors)
    planned = _plan_tensors(path, reader.tensors, config)
    _check_shapes(path, planned, config)
    _write_json(folder / "config.json", config)
    generation = {key: config[key] for key in config if key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)
    hf_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata, config))
    _write_weights(folder, planned, config["dtype"], max_shard_bytes)


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError("Reading a GGUF file needs the gguf package: pip install gguf") from error
    if not path.is_file():
        raise ValueError(f"No GGUF file at {path}.")
    check_header(path)
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:  # what its parser trips over
        size = path.stat().st_size
        raise ValueError(f"{path} is damaged or cut short ({size} bytes): {error}. Fetch the file again.") from error


class _Metadata:
    """The key-value pairs of a GGUF file, with errors that name the file and the key. A value is of the kind that is asked for:
    a number, a text, or a list of one of them, whatever a file may hold there."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.path, self._fields = path, fields
        self.architecture = self.text("general.architecture")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """None (or the default) where the file has no such key. Raises ValueError for a value of another kind."""
        if key not in self._fields:
            return default
        value = self._fields[key].contents()
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{self.path}: the metadata key {key!r} must be of type {kind.__name__}, got {value!r:.60}.")
        return value

    def text(self, key: str) -> str:
        return self._required(key, self.get(key, str))

    def texts(self, key: str) -> list[str]:
        return self._list(key, str)

    def numbers(self, key: str) -> list[int]:
        return self._list(key, int)

    def token_id(self, name: str) -> int | None:
        return self.get(f"tokenizer.ggml.{name}_token_id", int)

    def size(self, key: str, default: int | None = None) -> int:
        """A size of the architecture's own, e.g. `block_count` for `llama.block_count`: at least 1."""
        value = self.arch(key, int, default)
        if value < 1:
            raise ValueError(f"{self.path}: the metadata key {self.architecture}.{key}={value} must be at least 1.")
        return value

    def arch(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A key of the architecture's own; required when there is no default."""
        key = f"{self.architecture}.{key}"
        return self._required(key, self.get(key, kind, default))

    def _required(self, key: str, value: T | None) -> T:
        if value is None:
            raise ValueError(f"{self.path} lacks the metadata key {key!r}: it cannot be turned into a model.")
        return value

    def _list(self, key: str, kind: type[T]) -> list[T]:
        values = self._required(key, self.get(key, list))
        if not all(type(value) is kind for value in values):
            raise ValueError(f"{self.path}: the metadata key {key!r} must be a list of {kind.__name__}.")
        return values


def hf_config(meta: _Metadata, tensors: list[ReaderTensor]) -> dict[str, Any]:
    """The config.json of a GGUF file. Raises ValueError for what config.json cannot say or minivllm cannot run."""
    architecture, model_type = _hf_architecture(meta)
    shapes = {t.name: [int(n) for n in reversed(t.shape)] for t in tensors}  # GGUF lists the fastest axis first
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{meta.path} has no tensor 'token_embd.weight': it is not a complete model. Fetch the file again.")
    hidden, heads = meta.size("embedding_length"), meta.size("attention.head_count")
    head_dim = meta.size("attention.key_length", hidden // heads)
    if any(meta.size(key, head_dim) != head_dim for key in ("rope.dimension_count", "attention.value_length")):
        raise ValueError(f"{meta.path} rotates only part of a head, or has keys and values of two sizes: not served.")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": meta.size("feed_forward_length"),
        "num_hidden_layers": meta.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": meta.size("context_length"),
        "rms_norm_eps": _shortest_float(meta.arch("attention.layer_norm_rms_epsilon", float)),
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": _dtype_name(tensors),
        **_rope_config(meta, tensors),
        **_special_token_ids(meta),
    }
    if meta.architecture != "qwen2":  # Qwen2 always has a q, k, v bias, and its config no such key
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if meta.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
    if model_type == "mistral":
        config["sliding_window"] = meta.size("attention.sliding_window")
    return config


def _hf_architecture(meta: _Metadata) -> tuple[str, str]:
    """The Hugging Face class and model_type of the file's architecture."""
    if meta.architecture not in _HF_ARCHITECTURES:
        raise ValueError(
            f"{meta.path} holds a {meta.architecture!r} model, which is not served. From GGUF, minivllm serves:"
            f" {', '.join(_HF_ARCHITECTURES)} (Mistral files call themselves 'llama')."
        )
    if meta.arch("expert_count", int, 0):
        raise ValueError(f"{meta.path} is a mixture of experts, which is not served.")
    if meta.arch("attention.sliding_window", int, 0):
        if meta.architecture == "llama":
            return "MistralForCausalLM", "mistral"
        raise ValueError(f"{meta.path} sets a sliding window but not for which layers ({meta.architecture!r}): not served.")
    return _HF_ARCHITECTURES[meta.architecture]


def _special_token_ids(meta: _Metadata) -> dict[str, Any]:
    """bos, pad and eos. Where the file has an end of chat turn beside the end of text, either ends a generation."""
    ids = {key: meta.token_id(key) for key in ("bos", "padding", "eos", "eot")}
    ends = list(dict.fromkeys(i for i in (ids["eos"], ids["eot"]) if i is not None))
    found = {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"], "eos_token_id": ends[0] if len(ends) == 1 else ends}
    return {key: value for key, value in found.items() if value not in (None, [])}


def _shortest_float(value: float) -> float:
    """The decimal a float32 was written from: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))


def _rope_config(meta: _Metadata, tensors: list[ReaderTensor]) -> dict[str, Any]:
    theta = _shortest_float(meta.arch("rope.freq_base", float, 10000.0))
    scaling = meta.arch("rope.scaling.type", str, "none")
    factor = _shortest_float(meta.arch("rope.scaling.factor", float, 1.0))
    if scaling == "linear" and factor != 1.0:
        return {"rope_parameters": {"rope_type": "linear", "rope_theta": theta, "factor": factor}}
    if scaling not in ("none", "linear"):
        raise ValueError(f"{meta.path} uses rope scaling {scaling!r}, which is not served; minivllm serves linear and llama3.")
    factors = [t for t in tensors if t.name == "rope_freqs.weight"]
    if not factors:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return {"rope_parameters": _llama3_rope(meta.path, theta, np.array(factors[0].data, dtype=np.float32))}


def _llama3_rope(path: Path, theta: float, divisors: np.ndarray) -> dict[str, Any]:
    """Llama 3's rope parameters from the divisor of each frequency, which is all a GGUF file keeps of them. Every Llama 3 so
    far differs in the factor alone, which is the largest divisor; a file whose divisors do not follow from it is refused."""
    from minivllm.models.registry import RopeConfig
    from minivllm.models.rope import inverse_frequencies

    rope = RopeConfig(theta, "llama3", factor=_shortest_float(float(divisors.max())))
    head_dim = 2 * len(divisors)
    expected = inverse_frequencies(RopeConfig(theta), head_dim) / inverse_frequencies(rope, head_dim)
    if not np.allclose(expected.numpy(), divisors, rtol=1e-4):
        raise ValueError(
            f"{path} scales rope frequencies (tensor rope_freqs.weight) in a way other than Llama 3's: not served."
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }


def _dtype_name(tensors: list[ReaderTensor]) -> str:
    """Wide enough for the file's matrices. Vectors do not count: llama.cpp keeps every norm in float32."""
    types = {t.tensor_type.name for t in tensors if len(t.shape) > 1}
    return "float32" if "F32" in types else "float16" if "F16" in types else "bfloat16"


# --- weights ---


@dataclass(frozen=True)
class _Planned:
    """A tensor to convert: its Hugging Face name, where it comes from, and the heads whose rows are to be put back in order."""

    name: str
    source: ReaderTensor
    permuted_heads: int | None

    @property
    def num_elements(self) -> int:
        return int(self.source.n_elements)


def _plan_tensors(path: Path, tensors: list[ReaderTensor], config: dict[str, Any]) -> list[_Planned]:
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    is_llama = config["model_type"] in ("llama", "mistral")
    planned = []
    for tensor in tensors:
        if tensor.tensor_type.name not in SERVED_TYPES:
            raise ValueError(
                f"{path}: tensor {tensor.name!r} is {tensor.tensor_type.name}, which is not served. minivllm reads GGUF files"
                f" of type {', '.join(SERVED_TYPES)}: choose such a file of the same model."
            )
        if tensor.name == "rope_freqs.weight":  # already in the config
            continue
        stem, _, kind = tensor.name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        part = block[2] if block else stem
        target = _LAYER_NAMES.get(part) if block else _GLOBAL_NAMES.get(part)
        if target is None or kind not in ("weight", "bias"):
            raise ValueError(f"{path}: tensor {tensor.name!r} has no place in a {config['architectures'][0]}: not served.")
        name = f"model.layers.{block[1]}.{target}.{kind}" if block else f"{target}.{kind}"
        planned.append(_Planned(name, tensor, permuted.get(part) if is_llama else None))
    return planned


def _check_shapes(path: Path, planned: list[_Planned], config: dict[str, Any]) -> None:
    """The file's tensors are those of its config, so that nothing is converted that could not be loaded."""
    from minivllm.models.registry import ModelConfig
    from minivllm.models.weights import expected_shapes

    try:
        expected = expected_shapes(ModelConfig.from_hf(config))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for p in planned:
        shape, wanted = [int(n) for n in reversed(p.source.shape)], expected.pop(p.name, None)
        if shape != wanted:
            asks = "has no tensor" if wanted is None else f"asks for {wanted}"
            raise ValueError(f"{path}: tensor {p.source.name!r} has shape {shape}, where the file's metadata {asks} there.")
    if expected:
        raise ValueError(f"{path} lacks the tensor of {next(iter(expected))}: it is incomplete.")


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection [num_heads * D, ...], from llama.cpp's order within a head (0, D/2, 1, D/2 + 1, ...) to
    Hugging Face's (0, 1, 2, ...)."""
    in_order: np.ndarray = rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    return in_order


def _dequantized(planned: _Planned, dtype: torch.dtype) -> torch.Tensor:
    import torch
    from gguf.quants import dequantize

    source = planned.source
    values: np.ndarray = dequantize(source.data, source.tensor_type)
    if planned.permuted_heads is not None:
        values = unpermute(values, planned.permuted_heads)
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)  # a copy: never a view of the file


def _write_weights(folder: Path, planned: list[_Planned], dtype_name: str, max_shard_bytes: int) -> None:
    """One file, or shards with their index when the weights are too large to be held at once."""
    import torch
    from tqdm.auto import tqdm

    dtype = getattr(torch, dtype_name)
    shards = list(_shards(planned, dtype.itemsize, max_shard_bytes))
    weight_map: dict[str, str] = {}
    total = sum(p.num_elements for p in planned) * dtype.itemsize
    with tqdm(total=total, unit="B", unit_scale=True, desc="Converting GGUF") as bar:
        for i, shard in enumerate(shards):
            name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            tensors = {}
            for p in shard:
                tensors[p.name] = _dequantized(p, dtype)
                weight_map[p.name] = name
                bar.update(p.num_elements * dtype.itemsize)
            _save(tensors, folder / name)
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps the system's errors
        free = shutil.disk_usage(path.parent).free
        if free < sum(t.nbytes for t in tensors.values()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise OSError(f"Cannot write {path}: {error}") from error


def _shards(planned: list[_Planned], itemsize: int, max_shard_bytes: int) -> Iterator[list[_Planned]]:
    shard: list[_Planned] = []
    size = 0
    for p in planned:
        if shard and size + p.num_elements * itemsize > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(p)
        size += p.num_elements * itemsize
    yield shard


# --- tokenizer ---


def hf_tokenizer(meta: _Metadata) -> Tokenizer:
    """The file's byte-level BPE tokenizer, encoding as the model's own tokenizer.json does. ValueError names other kinds."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    kind, pre = meta.text("tokenizer.ggml.model"), meta.text("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(
            f"{meta.path} has a tokenizer of kind {kind!r}; from GGUF, minivllm builds byte-level BPE ('gpt2') only. Use the"
            " model's Hugging Face folder instead."
        )
    tokens = meta.texts("tokenizer.ggml.tokens")
    types = meta.numbers("tokenizer.ggml.token_type") if meta.get("tokenizer.ggml.token_type", list) else [1] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{meta.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens.")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(meta, vocab)
    # Llama 3 and its kin keep words that are tokens whole, even where the merges would not build them.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(meta.path, pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    return _with_bos(tokenizer, meta, tokens)


def _merges(meta: _Metadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens that become one. A pair that makes no token is named here: the library would say less."""
    merges: list[tuple[str, str]] = []
    for merge in meta.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise ValueError(f"{meta.path}: the merge {merge!r:.80} of tokenizer.ggml.merges is of no two tokens to a third.")
        merges.append((left, right))
    return merges


def _pre_tokenizer(path: Path, pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    split = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}.get(pre)
    if split is None:
        raise ValueError(
            f"{path} cuts text in the way called {pre!r}, which is not served; minivllm knows gpt-2, smollm, llama-bpe and"
            " qwen2. Use the model's Hugging Face folder instead."
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _with_bos(tokenizer: Tokenizer, meta: _Metadata, tokens: list[str]) -> Tokenizer:
    """A tokenizer whose encode() starts with BOS, for files that ask for it."""
    from tokenizers import processors

    default = meta.text("tokenizer.ggml.pre") == "llama-bpe"  # older Llama 3 files have no flag, and llama.cpp adds it there
    if meta.get("tokenizer.ggml.add_bos_token", bool, default) and (bos := meta.token_id("bos")) is not None:
        if not 0 <= bos < len(tokens):
            raise ValueError(f"{meta.path}: tokenizer.ggml.bos_token_id={bos} is no token; there are {len(tokens)}.")
        token = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 {token}:1 $B:1", special_tokens=[(token, bos)]
        )
    return tokenizer


def _tokenizer_config(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    tokens = meta.texts("tokenizer.ggml.tokens")
    out: dict[str, Any] = {
        # the class that takes tokenizer.json as it stands; a model's own class would rebuild its pre-tokenizer
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    names = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
    for name, key in names:
        if (token_id := meta.token_id(key)) is not None and token_id < len(tokens):
            out[name] = tokens[token_id]
    if (template := meta.get("tokenizer.chat_template", str)) is not None:
        out["chat_template"] = template
    return out


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
