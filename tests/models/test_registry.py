"""ModelConfig reads what transformers writes, and refuses by name what the decoder would get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.models.registry import KNOWN_CONFIGS, ModelConfig, RopeConfig

from .conftest import FAMILIES, tiny_model

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**BASE, **changes})


@pytest.mark.parametrize("value", ["abc", -1, 2.5, True, [[2]], {"a": 1}])
def test_end_tokens_that_are_no_ids_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="eos_token_id must be a token id or a list of them"):
        ModelConfig.from_hf(BASE, {"eos_token_id": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", None),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", 0),
        ("rope_theta", "abc"),
        ("rope_theta", 0),
        ("rope_theta", -1e4),
        ("rope_theta", float("inf")),
        ("rope_parameters", ["default"]),
        ("architectures", 3),
        ("architectures", "LlamaForCausalLM"),
        ("vocab_size", 10**13),
        ("hidden_size", "64"),
        ("bos_token_id", "<s>"),
        ("layer_types", 3),
        ("layer_types", [["full_attention"]] * 3),
    ],
)
def test_a_value_of_the_wrong_kind_or_size_is_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key}.*got "):
        config(**{key: value})


@pytest.mark.parametrize("change", [{"factor": 0}, {"factor": None}, {"low_freq_factor": "1"}, {"low_freq_factor": 4.0}])
def test_broken_llama3_scaling_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        config(rope_parameters={**LLAMA3, **change})


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_s_config_as_transformers_saves_it_is_read(tmp_path: Path, kind: str) -> None:
    model = tiny_model(kind)
    model.config.save_pretrained(tmp_path)  # knows no class: the architecture comes from model_type
    ours = ModelConfig.from_folder(tmp_path)
    assert ours.architecture == type(model).__name__
    attention = model.model.layers[0].self_attn
    assert ours.attention_bias == (attention.q_proj.bias is not None)
    assert ours.attention_out_bias == (attention.o_proj.bias is not None)
    assert ours.qk_norm == hasattr(attention, "q_norm")
    assert ours.head_dim == attention.head_dim


def test_rope_is_read_as_transformers_4_wrote_it() -> None:
    assert config(rope_theta=5e5).rope == RopeConfig(5e5)
    assert config(rope_theta=1e6, rope_scaling=None).rope == RopeConfig(1e6)
    assert config(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0}).rope == RopeConfig(1e4, "linear", 2.0)
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    assert config(rope_theta=5e5, rope_scaling=scaling).rope == RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)


def test_rope_is_read_as_transformers_5_writes_it() -> None:
    assert config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope == RopeConfig(5e5)
    assert config(rope_parameters={**LLAMA3, "rope_theta": 5e5}).rope == RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 128)


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic", "longrope", "su"])
def test_other_rope_types_are_refused_by_name(rope_type: str) -> None:
    with pytest.raises(ValueError, match=f"type '{rope_type}'.*serves 'default', 'linear' and 'llama3'"):
        config(rope_scaling={"rope_type": rope_type, "factor": 4.0})


def test_incomplete_rope_scaling_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="'llama3' needs low_freq_factor, high_freq_factor"):
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0})
    with pytest.raises(ValueError, match="'linear' needs factor"):
        config(rope_scaling={"type": "linear"})


def test_rope_that_differs_between_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="Rotary embedding of type"):
        config(rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}})


def test_mistral_windows_every_layer() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert config(**mistral, sliding_window=8).sliding_window == (8, 8, 8)
    assert config(**mistral, sliding_window=None).sliding_window == (None, None, None)
    assert config(**mistral).sliding_window == (4096, 4096, 4096)  # transformers' default


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows_the_layers_it_says(architecture: str) -> None:
    qwen = {"architectures": [architecture], "sliding_window": 8}
    assert config(**qwen, use_sliding_window=False).sliding_window == (None, None, None)
    assert config(**qwen, use_sliding_window=True, max_window_layers=2).sliding_window == (None, None, 8)
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert config(**qwen, use_sliding_window=True, layer_types=types).sliding_window == (8, None, None)


def test_llama_with_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window=8 is not served for LlamaForCausalLM"):
        config(sliding_window=8)


def test_layer_types_that_are_not_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="layer_types with linear_attention is not served"):
        config(architectures=["Qwen3ForCausalLM"], layer_types=["linear_attention"] * 3)
    with pytest.raises(ValueError, match="2 entries for 3 layers"):
        config(architectures=["Qwen3ForCausalLM"], layer_types=["full_attention"] * 2)


def test_an_unknown_architecture_is_refused_with_the_list_of_what_is_served() -> None:
    with pytest.raises(ValueError, match=r"GemmaForCausalLM is not served.*LlamaForCausalLM, MistralForCausalLM, Qwen2.*Qwen3"):
        config(architectures=["GemmaForCausalLM"])
    with pytest.raises(ValueError, match="Architecture gpt_oss is not served"):
        config(architectures=None, model_type="gpt_oss")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}),
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention_sinks", True),
        ("num_experts", 8),
        ("residual_multiplier", 0.22),
    ],
)
def test_a_setting_that_would_change_the_answers_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        config(**{key: value})


def test_partial_rotation_inside_rope_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.25"):
        config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25})


def test_settings_that_ask_for_nothing_pass() -> None:
    assert config(quantization_config=None, partial_rotary_factor=1.0, num_experts=None, hidden_act="silu") == config()


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_a_missing_or_impossible_size_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} as an integer from 1 to [0-9]+, got None"):
        ModelConfig.from_hf({k: v for k, v in BASE.items() if k != key})
    with pytest.raises(ValueError, match=f"{key} as an integer from 1 to [0-9]+, got -1"):
        config(**{key: -1})


def test_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="num_attention_heads=4 is not a multiple of num_key_value_heads=3"):
        config(num_key_value_heads=3)
    with pytest.raises(ValueError, match="hidden_size=66 is not a multiple of num_attention_heads=4"):
        config(hidden_size=66)


def test_end_tokens_of_both_config_files_count() -> None:
    assert ModelConfig.from_hf({**BASE, "eos_token_id": 7}, {"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert ModelConfig.from_hf({**BASE, "eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert config().eos_token_ids == ()


def test_a_folder_without_config_or_with_a_broken_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_folder(tmp_path)


def test_the_known_smollm2_is_the_real_one(smollm2: Path) -> None:
    assert ModelConfig.from_folder(smollm2) == KNOWN_CONFIGS["smollm2-135m"]


def test_known_configs_have_a_window_entry_for_each_layer() -> None:
    for known in KNOWN_CONFIGS.values():
        assert len(known.sliding_window) == known.num_layers
