"""Writes a small transformers model as a GGUF file, the way llama.cpp's converter lays it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import quantize
from tokenizers import pre_tokenizers

GLOBAL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "l l"]
TOKENS = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [m.replace(" ", "") for m in MERGES] + ["<think>"]
VOCAB_SIZE = len(TOKENS)


def permute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's order of a head's rows: the two dimensions of a plane side by side."""
    return rows.view(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    *,
    tensor_type: str = "F32",
    metadata: dict[str, Any] | None = None,
    pre: str = "smollm",
    tokenizer_model: str = "gpt2",
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """`metadata` adds keys, or replaces those written here. Vectors stay float32, as llama.cpp keeps them."""
    config = model.config
    arch = "llama" if config.model_type in ("llama", "mistral") else config.model_type
    writer = gguf.GGUFWriter(path, arch)
    keys: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": model.model.layers[0].self_attn.head_dim,
        f"{arch}.attention.value_length": model.model.layers[0].self_attn.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{arch}.vocab_size": config.vocab_size,
        "general.name": "tiny",
        "tokenizer.ggml.model": tokenizer_model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
        **(metadata or {}),
    }
    for key, value in keys.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        if value is not None:
            add[type(value)](key, value)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4])
    writer.add_token_merges(MERGES)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and ".q_proj" in name:
            tensor = permute(tensor, config.num_attention_heads)
        if arch == "llama" and ".k_proj" in name:
            tensor = permute(tensor, config.num_key_value_heads)
        kind = gguf.GGMLQuantizationType[tensor_type if tensor.dim() == 2 else "F32"]
        values = tensor.float().numpy()
        if kind.name in ("F32", "F16"):
            writer.add_tensor(gguf_name(name), values.astype(np.float16 if kind.name == "F16" else np.float32))
        else:
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
