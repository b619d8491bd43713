"""Checkpoints load whole or not at all, and the error names the tensor or the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minivllm.models.registry import KNOWN_CONFIGS
from minivllm.models.weights import load_config, load_model

from .conftest import MakeModel


def edit(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Rewrite the checkpoint with some tensors replaced or added, or removed for None."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["llama, biases", "llama, tied", "qwen3"])
def test_every_tensor_reaches_its_slice(make_model: MakeModel, kind: str) -> None:
    folder, reference = make_model(kind)
    loaded = dict(load_model(folder, dtype=torch.float32).checkpoint_tensors())
    expected = reference.state_dict()
    if reference.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_sharded_checkpoint_loads_as_the_single_file_does(make_model: MakeModel) -> None:
    folder, reference = make_model("llama", max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded = dict(load_model(folder, dtype=torch.float32).checkpoint_tensors())
    assert all(torch.equal(tensor, reference.state_dict()[name]) for name, tensor in loaded.items())


def test_weights_are_rounded_to_the_asked_dtype(make_model: MakeModel) -> None:
    folder, reference = make_model()
    decoder = load_model(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    assert torch.equal(decoder.embed_tokens, reference.model.embed_tokens.weight.bfloat16())


def test_a_missing_tensor_is_named(make_model: MakeModel) -> None:
    folder, _ = make_model()
    edit(folder, {"model.layers.1.self_attn.k_proj.weight": None})
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(folder, dtype=torch.float32)


def test_a_left_over_tensor_is_named(make_model: MakeModel) -> None:
    folder, _ = make_model()
    edit(folder, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn\.q_proj\.bias'.*has no place in a LlamaForCausalLM"):
        load_model(folder, dtype=torch.float32)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(make_model: MakeModel) -> None:
    folder, _ = make_model()
    edit(folder, {"model.norm.weight": torch.ones(63)})
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \[63\], where config\.json asks for \[64\]"):
        load_model(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"hidden_size": 2**30, "head_dim": 16}, "tensor 'lm_head.weight' has shape"),
        ({"vocab_size": 2**31 - 1}, "tensor 'lm_head.weight' has shape"),
        ({"intermediate_size": 2**31 - 1}, "has shape"),
        ({"num_attention_heads": 2**30, "num_key_value_heads": 1, "head_dim": 4096}, "has shape|impossible together"),
        ({"hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1, "head_dim": 16}, "has shape|impossible together"),
        ({"num_hidden_layers": 500}, "lacks model.layers.3"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers as an integer from 1 to 4096"),
        ({"head_dim": 2**30}, "head_dim as an integer from 1 to 4096"),
    ],
    ids=str,
)
def test_sizes_that_the_files_do_not_have_are_named_before_anything_is_allocated(
    make_model: MakeModel, sizes: dict[str, int], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config.json is a stranger's: 2^31 rows of it must not become memory before a tensor is looked at."""
    folder, _ = make_model()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    empty = torch.empty

    def only_outlines(*shape: int, device: object = None, **options: object) -> torch.Tensor:
        assert device == "meta", "memory was asked for"
        return empty(*shape, device="meta", **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", only_outlines)
    with pytest.raises(ValueError, match=named):
        load_model(folder, dtype=torch.float32)


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_header_of_any_kind_is_refused_by_name(make_model: MakeModel, data: st.DataObject) -> None:
    """Types, shapes, offsets and names of a safetensors file, and the length of its header, are a stranger's."""
    folder, _ = make_model()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header, body = json.loads(whole[8:end]), whole[end:]
    entry = header[data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))]
    numbers = st.sampled_from([0, 1, -1, 63, 2**31, 2**40, 2**63, 2**64, 10**30])
    change = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "length", "bytes"]))
    if change == "dtype":
        entry["dtype"] = data.draw(st.sampled_from(["F8_E4M3", "I64", "BOOL", "F64", "U8", "", "F4", "C64", None, 3]))
    elif change in ("shape", "data_offsets"):
        entry[change] = data.draw(st.lists(numbers, max_size=3))
    text = json.dumps(header).encode()
    length = (
        data.draw(numbers).to_bytes(16, "little", signed=True)[:8] if change == "length" else len(text).to_bytes(8, "little")
    )
    content = bytearray(length + text + body)
    if change == "bytes":
        content[data.draw(st.integers(0, len(text) + 7))] = data.draw(st.integers(0, 255))
    if content == whole:
        return
    file.write_bytes(content)
    try:
        with pytest.raises(ValueError, match=r"model\.safetensors|checkpoint in"):
            load_model(folder, dtype=torch.float32)
    except BaseException as error:
        if "DID NOT RAISE" not in str(error):  # a byte of the metadata, or white space: nothing was damaged
            raise
    finally:
        file.write_bytes(whole)


def test_integer_weights_are_refused(make_model: MakeModel) -> None:
    folder, _ = make_model()
    edit(folder, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is I8: quantized"):
        load_model(folder, dtype=torch.float32)


def test_what_follows_from_other_values_may_be_in_the_file(make_model: MakeModel) -> None:
    folder, _ = make_model("llama, tied")
    edit(folder, {"lm_head.weight": torch.zeros(101, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_model(folder, dtype=torch.float32)


@pytest.mark.parametrize("keep", [3, 100, 0.5, 0.99])
def test_a_file_cut_short_is_named(make_model: MakeModel, keep: float) -> None:
    file = make_model()[0] / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        load_model(file.parent, dtype=torch.float32)


def test_a_missing_shard_is_named(make_model: MakeModel) -> None:
    folder, _ = make_model("llama", max_shard_size="50KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"names {shard.name}, which is not there"):
        load_model(folder, dtype=torch.float32)


@pytest.mark.parametrize("weight_map", [None, ["a"], {"lm_head.weight": 3}, {"lm_head.weight": "../other/model.safetensors"}])
def test_a_broken_index_is_named(make_model: MakeModel, weight_map: object) -> None:
    folder, _ = make_model()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load_model(folder, dtype=torch.float32)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(make_model: MakeModel) -> None:
    folder, _ = make_model()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"PyTorch \.bin weights only.*save_pretrained"):
        load_model(folder, dtype=torch.float32)


def test_a_folder_without_weights_says_so(make_model: MakeModel) -> None:
    folder, _ = make_model()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no \.safetensors weights.*dummy"):
        load_model(folder, dtype=torch.float32)


def test_dummy_weights_need_a_config_only_and_depend_on_the_seed_only(make_model: MakeModel) -> None:
    folder, _ = make_model("qwen2")
    (folder / "model.safetensors").unlink()
    a, b, c = (load_model(folder, dtype=torch.bfloat16, load_format="dummy", seed=s) for s in (1, 1, 2))
    assert torch.equal(a.layers[0].qkv_proj.weight, b.layers[0].qkv_proj.weight)
    assert not torch.equal(a.layers[0].qkv_proj.weight, c.layers[0].qkv_proj.weight)


def test_dummy_weights_keep_activations_finite_and_logits_spread(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 24, "num_attention_heads": 4}
    config = {"architectures": ["LlamaForCausalLM"], **sizes, "vocab_size": 512, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for dtype in (torch.bfloat16, torch.float16):
        logits = load_model(tmp_path, dtype=dtype, load_format="dummy").full_forward(torch.arange(32)).float()
        assert torch.isfinite(logits).all()
        assert 0.1 < logits.std() < 10


def test_dummy_weights_of_a_well_known_model_need_no_files() -> None:
    assert load_config("Qwen/Qwen3-0.6B", load_format="dummy") == KNOWN_CONFIGS["Qwen/Qwen3-0.6B"]
    with pytest.raises(ValueError, match=r"'no/such-model' has none here.*Qwen/Qwen3-0\.6B"):
        load_config("no/such-model", load_format="dummy")


def test_a_load_format_that_does_not_fit_the_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"load_format='gguf' needs the path of a \.gguf file"):
        load_config(tmp_path, load_format="gguf")
    with pytest.raises(ValueError, match="load_format='safetensors' does not read"):
        load_config("x.gguf", load_format="safetensors")
